"""What the templates of the panel need besides Django's own tags.

Django imports this module on every site, also without its admin: so it imports nothing of the panel.
"""

from __future__ import annotations

import re
from datetime import datetime

from django import template
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

_PARTS = re.compile(r"[._/-]*[^._/-]+[._/-]*|[._/-]+")


@register.filter
def breakable(name: object) -> SafeString:
    """Let a long name be broken after its dots, underscores and slashes: `shop.<wbr>views.<wbr>pay`."""
    return format_html_join(
        mark_safe("<wbr>"), "{}", ((part,) for part in _PARTS.findall(str(name)))
    )


def with_zone(at: datetime) -> str:
    """Return a time with its zone, such as `10:31:09 CET`; with its date if that is not today."""
    zone = timezone.get_current_timezone()
    at = (
        at.astimezone(zone) if timezone.is_aware(at) else at.replace(tzinfo=zone)
    )  # naive: a site without USE_TZ
    if at.date() == datetime.now(zone).date():
        return date_format(at, "H:i:s T")
    return f"{date_format(at, 'SHORT_DATE_FORMAT')} {date_format(at, 'H:i T')}"


@register.simple_tag
def moment(at: datetime) -> SafeString:
    """Show a time with its zone, and with its date if that is not today."""
    return format_html(
        '<time datetime="{}">{}</time>', at.isoformat(timespec="seconds"), with_zone(at)
    )
