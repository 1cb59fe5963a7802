"""Charts as inline SVG, without scripts or style attributes, so that a strict content security policy allows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..stats.reader import Counts
from .text import grouped, local_time

WIDTH, HEIGHT = 720, 100
MIN_HEIGHT = 2.0  # of a segment, so that one refusal among thousands can be seen
KINDS = ("allowed", "shadowed", "refused")  # from the bottom up


class Bar(NamedTuple):
    """The decisions in a span of time."""

    time: str  # the start as `HH:MM`
    allowed: int
    shadowed: int
    refused: int

    @property
    def total(self) -> int:
        """The number of requests."""
        return self.allowed + self.refused + self.shadowed


def bars(minutes: Sequence[Counts], per_bar: int) -> list[Bar]:
    """Add minutes up to bars of `per_bar` minutes each."""
    spans = [minutes[i : i + per_bar] for i in range(0, len(minutes), per_bar)]
    return [
        # An f-string rather than date_format, which takes ten times as long: a page has hundreds.
        Bar(
            f"{local_time(span[0].start):%H:%M}",
            sum(minute.allowed for minute in span),
            sum(minute.over for minute in span),
            sum(minute.refused for minute in span),
        )
        for span in spans
    ]


def chart(shown: Sequence[Bar], label: str) -> SafeString:
    """Draw stacked bars, allowed requests at the bottom; the highest bar fills the chart. The axis has three times."""
    peak = max(1, *(bar.total for bar in shown))
    width = WIDTH / len(shown)
    return format_html(
        '<svg class="rlaas-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}{}</svg>'
        '<div class="rlaas-axis" aria-hidden="true">{}</div>',
        WIDTH,
        HEIGHT,
        label,
        format_html_join("", '<path class="rlaas-{}" d="{}"/>', _paths(shown, width, peak)),
        # Transparent and of full height, so that the tooltip appears above a low bar, too.
        format_html_join(
            "",
            '<rect class="rlaas-span" x="{}" width="{}" height="{}"><title>{}</title></rect>',
            ((_number(i * width), _number(width), HEIGHT, _title(bar)) for i, bar in enumerate(shown) if bar.total),
        ),
        format_html_join("", "<span>{}</span>", ((shown[i].time,) for i in (0, len(shown) // 2, -1))),
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
