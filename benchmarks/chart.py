"""Horizontal bars as an SVG file, readable on light and on dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .contender import BESIDE, OURS, PEER
from .measure import Spread, figure

WIDTH, LABELS, VALUES = 960, 370, 110
ROW, TOP, FOOT = 26, 64, 34
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 12px; fill: #57606a }
  .ours { fill: #1a7f5a } .peer { fill: #8c959f } .beside { fill: #c4a24a }
  .spread { stroke: #24292f; stroke-width: 1.5 } .line { stroke: #57606a; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .ours { fill: #3fb68b } .peer { fill: #6e7681 } .beside { fill: #b08f3a }
    .spread { stroke: #e6edf3 } .line { stroke: #9198a1 }
  }
"""
KINDS = {OURS: "rlaas_django", PEER: "peers", BESIDE: "for comparison"}


class Bar(NamedTuple):
    label: str
    kind: str
    value: Spread


class Chart(NamedTuple):
    name: str
    title: str
    caption: str
    bars: Sequence[Bar]
    line: float | None = None  # drawn through all, for what the values are compared with
    line_label: str = ""
    more_is_better: bool = False

    def svg(self) -> str:
        bars = sorted(self.bars, key=lambda bar: bar.value.median, reverse=self.more_is_better)
        height = TOP + ROW * len(bars) + FOOT
        most = max(self.line or 0, *(bar.value.high for bar in bars))
        scale = (WIDTH - LABELS - VALUES) / most
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(self.title)}">',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="12" y="26">{escape(self.title)}</text>',
            f'<text class="small" x="12" y="46">{escape(self.caption)}</text>',
            *(self._bar(bar, TOP + ROW * i, scale) for i, bar in enumerate(bars)),
            *self._line(scale, height),
            self._legend(height),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _bar(self, bar: Bar, y: int, scale: float) -> str:
        middle = y + ROW / 2
        median, low, high = (LABELS + value * scale for value in bar.value)
        return (
            f'<text x="{LABELS - 10}" y="{middle + 4}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect class="{bar.kind}" x="{LABELS}" y="{y + 4}" width="{median - LABELS:.1f}" height="{ROW - 8}"/>'
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
            f'<text x="{max(median, high) + 8:.1f}" y="{middle + 4}">{figure(bar.value.median)}</text>'
        )

    def _line(self, scale: float, height: int) -> list[str]:
        if self.line is None:
            return []
        x = LABELS + self.line * scale
        return [
            f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - FOOT}"/>',
            f'<text class="small" x="{x:.1f}" y="{height - FOOT + 14}" text-anchor="middle">'
            f"{escape(self.line_label)}</text>",
        ]

    def _legend(self, height: int) -> str:
        parts, x = [], 12
        for kind in dict.fromkeys(bar.kind for bar in self.bars):
            parts.append(
                f'<rect class="{kind}" x="{x}" y="{height - 18}" width="10" height="10"/>'
                f'<text class="small" x="{x + 15}" y="{height - 9}">{KINDS[kind]}</text>'
            )
            x += 32 + 7 * len(KINDS[kind])
        return "".join(parts)
