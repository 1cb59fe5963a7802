"""Charts as SVG, drawn here: no script, no style attribute, and a title for every bar."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .stats import Minute

WIDTH, HEIGHT = 720, 120


class Bar(NamedTuple):
    """What a chart shows of a span of time."""

    start: datetime
    allowed: int
    refused: int
    shadowed: int

    @property
    def total(self) -> int:
        return self.allowed + self.refused + self.shadowed


def bars(minutes: Sequence[Minute], per_bar: int) -> list[Bar]:
    """Minutes, so many to a bar."""
    found = []
    for at in range(0, len(minutes), per_bar):
        span = minutes[at : at + per_bar]
        start = datetime.fromtimestamp(span[0].start, tz=timezone.get_current_timezone())
        allowed = sum(minute.allowed for minute in span)
        found.append(Bar(start, allowed, sum(m.refused for m in span), sum(m.shadowed for m in span)))
    return found


def chart(shown: Sequence[Bar], label: str) -> SafeString:
    """Stacked bars: what was allowed below, what was refused above it."""
    most = max((bar.total for bar in shown), default=0) or 1
    width = WIDTH / max(1, len(shown))
    parts = format_html_join("", "{}", ((_bar(bar, i * width, width, most),) for i, bar in enumerate(shown)))
    return format_html(
        '<svg class="rlaas-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}</svg>',
        WIDTH,
        HEIGHT,
        label,
        parts,
    )


def _bar(bar: Bar, x: float, width: float, most: int) -> SafeString:
    title = _("%(time)s: %(allowed)d allowed, %(refused)d refused, %(shadowed)d would have been refused") % {
        "time": date_format(bar.start, "H:i"),
        "allowed": bar.allowed,
        "refused": bar.refused,
        "shadowed": bar.shadowed,
    }
    parts, y = [], float(HEIGHT)
    for kind, number in (("allowed", bar.allowed), ("shadowed", bar.shadowed), ("refused", bar.refused)):
        if number:
            height = max(1.0, HEIGHT * number / most)
            y -= height
            parts.append((kind, f"{x + width * 0.1:.2f}", f"{max(0.0, y):.2f}", f"{width * 0.8:.2f}", f"{height:.2f}"))
    rects = format_html_join("", '<rect class="rlaas-{}" x="{}" y="{}" width="{}" height="{}"></rect>', parts)
    return format_html("<g><title>{}</title>{}</g>", title, rects)
