"""Charts as SVG, drawn here: no script, no style attribute, and a title for every bar."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .stats import Minute

WIDTH, HEIGHT = 720, 100
KINDS = ("allowed", "shadowed", "refused")  # from the ground up


class Bar(NamedTuple):
    """What a chart shows of a span of time."""

    start: datetime
    allowed: int
    refused: int
    shadowed: int

    @property
    def total(self) -> int:
        return self.allowed + self.refused + self.shadowed

    @property
    def time(self) -> str:
        return f"{self.start:%H:%M}"  # hundreds on a page: date_format is ten times as slow


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
    """Stacked bars: what was allowed below, what was refused above it; the highest is as high as the chart."""
    most = max((bar.total for bar in shown), default=0)
    width = WIDTH / max(1, len(shown))
    return format_html(
        '<svg class="rlaas-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}{}</svg>',
        WIDTH,
        HEIGHT,
        label,
        format_html_join("", '<path class="rlaas-{}" d="{}"/>', _paths(shown, width, most or 1)),
        # Beyond what is painted: the whole height of a bar tells what it is.
        format_html_join(
            "",
            '<rect class="rlaas-span" x="{}" width="{}" height="{}"><title>{}</title></rect>',
            ((_short(i * width), _short(width), HEIGHT, _title(bar)) for i, bar in enumerate(shown) if bar.total),
        ),
    )


def axis(shown: Sequence[Bar]) -> SafeString:
    """The times below a chart: its beginning, its middle and its end."""
    if not shown:
        return SafeString()
    times = (shown[0].time, shown[len(shown) // 2].time, shown[-1].time)
    return format_html(
        '<div class="rlaas-axis" aria-hidden="true">{}</div>',
        format_html_join("", "<span>{}</span>", ((time,) for time in times)),
    )


def _paths(shown: Sequence[Bar], width: float, most: int) -> list[tuple[str, str]]:
    """One path per kind, which is a tenth of the text that a rectangle per bar would be."""
    drawn: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for i, bar in enumerate(shown):
        # One refusal among thousands is seen too, at the cost of what is highest.
        heights = {kind: max(2.0, HEIGHT * number / most) for kind in KINDS if (number := getattr(bar, kind))}
        if (beyond := sum(heights.values()) - HEIGHT) > 0:
            heights[max(heights, key=lambda kind: heights[kind])] -= beyond
        x, wide, ground = _short(i * width + width * 0.12), _short(width * 0.76), float(HEIGHT)
        for kind, height in heights.items():
            drawn[kind].append(f"M{x} {_short(ground)}v-{_short(height)}h{wide}v{_short(height)}z")
            ground -= height
    return [(kind, "".join(parts)) for kind, parts in drawn.items() if parts]


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _title(bar: Bar) -> str:
    told = [_("%(number)s allowed") % {"number": _number(bar.allowed)}]
    if bar.refused:
        told.append(_("%(number)s refused") % {"number": _number(bar.refused)})
    if bar.shadowed:
        told.append(_("%(number)s would have been refused") % {"number": _number(bar.shadowed)})
    return f"{bar.time}: {', '.join(told)}"


def _number(number: int) -> str:
    return number_format(number, force_grouping=True) if number >= 1000 else str(number)
