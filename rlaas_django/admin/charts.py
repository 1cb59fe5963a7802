"""Charts as inline SVG, without scripts or style attributes, so that a strict content security policy allows them.

`static/rlaas_django/charts.js` lets them be read by pointer, touch and keyboard; without it, by tooltip and as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..stats.reader import Counts, total
from .text import grouped, local_time

WIDTH, HEIGHT = 720, 120
SPARKLINE_WIDTH, SPARKLINE_HEIGHT = 100, 24
MIN_HEIGHT = 1.2  # of a segment, so that one refusal among thousands can be seen
KINDS = ("allowed", "degraded", "other", "over", "refused")  # from the bottom up
TIMES = 4  # on the axis, at equal distances, and the end


class Bar(NamedTuple):
    """The decisions in a span of time."""

    time: str  # the start, for people
    counts: Counts

    @property
    def title(self) -> str:
        """What the bar shows, in words."""
        counts = self.counts
        words = {
            _("%(number)s allowed"): counts.allowed,
            _("%(number)s refused"): counts.refused,
            _("%(number)s refused by another policy"): counts.other,
            _("%(number)s over the limit, not refused"): counts.over,
            _("%(number)s decided without Redis"): counts.degraded,
        }
        parts = [
            text % {"number": _count(number)}
            for text, number in words.items()
            if number
        ]
        shown = ", ".join(parts) if parts else _("no requests")
        return f"{self.time}: {shown}"


def add_up(series: Sequence[Counts], per_bar: int) -> list[Counts]:
    """Add minutes or hours up, so many at a time; the first may be fewer, so that the last are complete."""
    first = len(series) % per_bar
    spans = [series[:first]] if first else []
    spans += [series[i : i + per_bar] for i in range(first, len(series), per_bar)]
    return [total(span) for span in spans]


def bars(series: Sequence[Counts], time_format: str) -> list[Bar]:
    """Return a bar for each part of a series; the format of its time is one of Django's."""
    return [
        Bar(date_format(local_time(counts.start), time_format), counts)
        for counts in series
    ]


def chart(shown: Sequence[Bar], label: str) -> SafeString:
    """Draw stacked bars with both axes, allowed requests at the bottom, and what the latest bar shows in words."""
    step, top = _scale(max(_height(bar.counts) for bar in shown))
    ticks = range(0, top + 1, step)
    width = WIDTH / len(shown)
    at = [round(i * (len(shown) - 1) / TIMES) for i in range(TIMES + 1)]
    return format_html(
        '<div class="rlaas-plot"><div class="rlaas-y" aria-hidden="true">{}</div>'
        '<svg class="rlaas-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
        '<path class="rlaas-grid" d="{}"/>{}{}</svg><div class="rlaas-reader" data-live-keep hidden></div>'
        '<div class="rlaas-x" aria-hidden="true">{}</div><p class="rlaas-readout">{}</p></div>',
        format_html_join(
            "", "<span>{}</span>", ((grouped(tick),) for tick in reversed(ticks))
        ),
        WIDTH,
        HEIGHT,
        label,
        "".join(
            f"M0 {_number(HEIGHT - HEIGHT * tick / top)}h{WIDTH}" for tick in ticks
        ),
        _paths([bar.counts for bar in shown], WIDTH, HEIGHT, top),
        # Transparent and of full height, so that a low bar is found, too.
        format_html_join(
            "",
            '<rect class="rlaas-span" x="{}" width="{}" height="{}"><title>{}</title></rect>',
            (
                (_number(i * width), _number(width), HEIGHT, bar.title)
                for i, bar in enumerate(shown)
            ),
        ),
        format_html_join("", "<span>{}</span>", ((shown[i].time,) for i in at)),
        shown[-1].title,
    )


def sparkline(series: Sequence[Counts]) -> SafeString:
    """Draw a small chart without axes, for a table that has the numbers beside it."""
    top = max(1, *map(_height, series))
    return format_html(
        '<svg class="rlaas-sparkline" viewBox="0 0 {} {}" aria-hidden="true" preserveAspectRatio="none">{}</svg>',
        SPARKLINE_WIDTH,
        SPARKLINE_HEIGHT,
        _paths(series, SPARKLINE_WIDTH, SPARKLINE_HEIGHT, top),
    )


def _height(counts: Counts) -> int:
    return sum(getattr(counts, kind) for kind in KINDS)


def _scale(peak: int) -> tuple[int, int]:
    """Return the distance of the lines of a chart, 1, 2 or 5 times a power of ten, and the highest; at most 5 lines."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if 4 * factor * step >= peak:
                return factor * step, max(
                    1, -(-peak // (factor * step))
                ) * factor * step
        step *= 10


def _paths(
    series: Sequence[Counts], width: float, height: float, top: int
) -> SafeString:
    """Return one path per kind, a tenth of the markup of one rectangle per bar and kind."""
    drawn: dict[str, list[str]] = {kind: [] for kind in KINDS}
    each = width / len(series)
    for i, counts in enumerate(series):
        heights = {
            kind: max(MIN_HEIGHT, height * number / top)
            for kind in KINDS
            if (number := getattr(counts, kind))
        }
        if (excess := sum(heights.values()) - height) > 0:
            heights[max(heights, key=lambda kind: heights[kind])] -= excess
        x, wide, bottom = _number(i * each + each * 0.12), _number(each * 0.76), height
        for kind, tall in heights.items():
            drawn[kind].append(
                f"M{x} {_number(bottom)}v-{_number(tall)}h{wide}v{_number(tall)}z"
            )
            bottom -= tall
    return format_html_join(
        "",
        '<path class="rlaas-{}" d="{}"/>',
        ((kind, "".join(parts)) for kind, parts in drawn.items() if parts),
    )


def _number(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _count(number: int) -> str:
    return (
        grouped(number) if number >= 1000 else str(number)
    )  # grouping is slow, and most counts are small
