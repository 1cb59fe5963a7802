"""Charts as inline SVG, without scripts or style attributes, so that a strict content security policy allows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..stats.reader import Minute
from .formats import grouped, local_time

WIDTH, HEIGHT = 720, 100
MIN_HEIGHT = 2.0  # of a segment, so that one refusal among thousands can be seen
KINDS = ("allowed", "shadowed", "refused")  # from the bottom up


class Bar(NamedTuple):
    """The decisions in a span of time."""

    start: datetime
    allowed: int
    refused: int
    shadowed: int

    @property
    def total(self) -> int:
        """The number of requests."""
        return self.allowed + self.refused + self.shadowed

    @property
    def time(self) -> str:
        """The start as `HH:MM`; date_format takes ten times as long, and a page has hundreds."""
        return f"{self.start:%H:%M}"


def bars(minutes: Sequence[Minute], per_bar: int) -> list[Bar]:
    """Add minutes up to bars of `per_bar` minutes each."""
    found = []
    for index in range(0, len(minutes), per_bar):
        span = minutes[index : index + per_bar]
        allowed = sum(minute.allowed for minute in span)
        refused = sum(minute.refused for minute in span)
        found.append(Bar(local_time(span[0].start), allowed, refused, sum(minute.shadowed for minute in span)))
    return found


def chart(shown: Sequence[Bar], label: str) -> SafeString:
    """Draw stacked bars, allowed requests at the bottom; the highest bar fills the chart."""
    peak = max((bar.total for bar in shown), default=0)
    width = WIDTH / max(1, len(shown))
    return format_html(
        '<svg class="rlaas-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}{}</svg>',
        WIDTH,
        HEIGHT,
        label,
        format_html_join("", '<path class="rlaas-{}" d="{}"/>', _paths(shown, width, peak or 1)),
        # Transparent and of full height, so that the tooltip appears above a low bar, too.
        format_html_join(
            "",
            '<rect class="rlaas-span" x="{}" width="{}" height="{}"><title>{}</title></rect>',
            ((_number(i * width), _number(width), HEIGHT, _title(bar)) for i, bar in enumerate(shown) if bar.total),
        ),
    )


def axis(shown: Sequence[Bar]) -> SafeString:
    """Return the times at the start, the middle and the end of a chart."""
    if not shown:
        return SafeString()
    times = (shown[0].time, shown[len(shown) // 2].time, shown[-1].time)
    return format_html(
        '<div class="rlaas-axis" aria-hidden="true">{}</div>',
        format_html_join("", "<span>{}</span>", ((time,) for time in times)),
    )


def _paths(shown: Sequence[Bar], width: float, peak: int) -> list[tuple[str, str]]:
    """Return one path per kind, a tenth of the markup of one rectangle per bar and kind."""
    drawn: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for i, bar in enumerate(shown):
        heights = {kind: max(MIN_HEIGHT, HEIGHT * number / peak) for kind in KINDS if (number := getattr(bar, kind))}
        if (excess := sum(heights.values()) - HEIGHT) > 0:
            heights[max(heights, key=lambda kind: heights[kind])] -= excess
        x, wide, bottom = _number(i * width + width * 0.12), _number(width * 0.76), float(HEIGHT)
        for kind, height in heights.items():
            drawn[kind].append(f"M{x} {_number(bottom)}v-{_number(height)}h{wide}v{_number(height)}z")
            bottom -= height
    return [(kind, "".join(parts)) for kind, parts in drawn.items() if parts]


def _number(number: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _title(bar: Bar) -> str:
    parts = [_("%(number)s allowed") % {"number": _count(bar.allowed)}]
    if bar.refused:
        parts.append(_("%(number)s refused") % {"number": _count(bar.refused)})
    if bar.shadowed:
        parts.append(_("%(number)s would have been refused") % {"number": _count(bar.shadowed)})
    return f"{bar.time}: {', '.join(parts)}"


def _count(number: int) -> str:
    return grouped(number) if number >= 1000 else str(number)  # grouping is slow, and most counts are small
