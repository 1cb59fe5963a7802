"""Charts as inline SVG.

They have no scripts or style attributes, so that a strict content security policy
allows them. `static/rlaas_django/charts.js` lets them be read by pointer, touch and
keyboard; without it, by tooltip and as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from django.template.loader import render_to_string
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..operators.formatting import grouped, local_time
from ..stats.reader import Counts, total

HEIGHT = 120
SPARKLINE_HEIGHT = 24
GAP = 0.125  # on each side of a bar
BAR_WIDTH = 0.75
MIN_HEIGHT = 1.2  # of a segment, so that one refusal among thousands can be seen
KINDS = ("allowed", "degraded", "other", "over", "refused")  # from the bottom up
MAX_LINES = 4  # of the scale, above zero
TIMES = 4  # on the axis, at equal distances, and the end


class Bar(NamedTuple):
    """The decisions in a span of time."""

    time: str  # the start, as text
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
            text % {"number": grouped(number)}
            for text, number in words.items()
            if number
        ]

        return f"{self.time}: {', '.join(parts) or _('no requests')}"


def add_up(series: Sequence[Counts], per_bar: int) -> list[Counts]:
    """Add minutes or hours up, so many at a time."""
    starts = range(0, len(series), per_bar)
    return [total(series[start : start + per_bar]) for start in starts]


def bars(series: Sequence[Counts], time_format: str) -> list[Bar]:
    """Return a bar for each part of a series; the time has one of Django's formats."""
    return [
        Bar(date_format(local_time(counts.start), time_format), counts)
        for counts in series
    ]


def chart(shown: Sequence[Bar], label: str) -> SafeString:
    """Draw stacked bars with both axes, and the latest bar in words."""
    series = [bar.counts for bar in shown]
    step, top = _scale(max(counts.total for counts in series))
    ticks = range(top, -1, -step)
    last = len(shown) - 1

    context = {
        "label": label,
        "bars": shown,
        "height": HEIGHT,
        "segments": _paths(series, HEIGHT, top),
        "ticks": ticks,
        "lines": [f"{HEIGHT - HEIGHT * tick / top:.5g}" for tick in ticks],
        "times": [shown[round(i * last / TIMES)].time for i in range(TIMES + 1)],
        "latest": shown[-1],
    }

    return render_to_string("rlaas_django/admin/_plot.html", context)


def sparkline(series: Sequence[Counts]) -> SafeString:
    """Draw a small chart without axes, for a table that has the numbers beside it."""
    top = max(1, *(counts.total for counts in series))
    return format_html(
        '<svg class="rlaas-sparkline" viewBox="0 0 {} {}" aria-hidden="true" '
        'preserveAspectRatio="none">{}</svg>',
        len(series),
        SPARKLINE_HEIGHT,
        _paths(series, SPARKLINE_HEIGHT, top),
    )


def _scale(peak: int) -> tuple[int, int]:
    """Return the distance of the lines of a chart, and the highest of them.

    The distance is 1, 2 or 5 times a power of ten.
    """
    power = 1
    while True:
        for factor in (1, 2, 5):
            step = factor * power
            if MAX_LINES * step >= peak:
                lines = max(1, math.ceil(peak / step))
                return step, lines * step

        power *= 10


def _paths(series: Sequence[Counts], height: float, top: int) -> SafeString:
    """Return one path per kind, in which a bar is one unit wide.

    A rectangle per bar and kind would be ten times as much markup.
    """
    paths = dict.fromkeys(KINDS, "")
    for index, counts in enumerate(series):
        bottom = height
        for kind, segment in _segments(counts, height, top).items():
            start = f"M{index + GAP} {bottom:.5g}"
            sides = f"v-{segment:.5g}h{BAR_WIDTH}v{segment:.5g}"
            paths[kind] += f"{start}{sides}z"
            bottom -= segment

    drawn = [(kind, path) for kind, path in paths.items() if path]

    return format_html_join("", '<path class="rlaas-{}" d="{}"/>', drawn)


def _segments(counts: Counts, height: float, top: int) -> dict[str, float]:
    """Return the height of each segment of a bar; the tallest yields to small ones."""
    segments = {}
    for kind in KINDS:
        number = getattr(counts, kind)
        if number:
            segments[kind] = max(MIN_HEIGHT, height * number / top)

    excess = sum(segments.values()) - height
    if excess > 0:
        tallest = max(segments, key=lambda kind: segments[kind])
        segments[tallest] -= excess

    return segments
