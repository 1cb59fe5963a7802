"""What the templates of the panel need besides Django's own tags.

Django imports this module on every site, also without its admin: so it imports
nothing of the panel.
"""

from __future__ import annotations

import re
from datetime import datetime

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from ..operators.formatting import duration, time_with_zone

register = template.Library()
register.filter("duration", duration)

_PARTS = re.compile(r"[._/-]*[^._/-]+[._/-]*|[._/-]+")


@register.filter
def breakable(name: object) -> SafeString:
    """Let a long name be broken after its dots, underscores and slashes.

    >>> breakable("shop.views.pay")
    'shop.<wbr>views.<wbr>pay'
    """
    parts = _PARTS.findall(str(name))
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in parts))


@register.simple_tag
def moment(at: datetime) -> SafeString:
    """Show a time with its zone, and with its date unless that is today."""
    return format_html(
        '<time datetime="{}">{}</time>',
        at.isoformat(timespec="seconds"),
        time_with_zone(at),
    )
