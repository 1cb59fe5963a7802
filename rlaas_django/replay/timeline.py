"""Requests and refusals over time, in a bounded number of steps."""

from __future__ import annotations

from collections.abc import Iterator

STEPS = 240  # at most
# In seconds; each is a multiple of the one before.
_WIDTHS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)


class Timeline:
    """Counts per step of time; the steps get wider when there are too many."""

    def __init__(self, columns: int) -> None:
        self.columns, self.width = columns, 1000 * _WIDTHS[0]  # ms
        self._steps: dict[int, list[int]] = {}

    def add(self, now: int, column: int, times: int = 1) -> None:
        """Count one or several in a column."""
        step = self._steps.get(now // self.width)
        if step is None:
            step = self._add_step(now)
        step[column] += times

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the start in ms and the counts of every step, the empty ones too."""
        if self._steps:
            for index in range(min(self._steps), max(self._steps) + 1):
                yield index * self.width, self._steps.get(index) or [0] * self.columns

    def _add_step(self, now: int) -> list[int]:
        first, last = (
            min(self._steps, default=now // self.width),
            max(self._steps, default=now // self.width),
        )
        first, last = (
            min(first, now // self.width) * self.width,
            max(last, now // self.width) * self.width,
        )
        while last // self.width - first // self.width >= STEPS:
            self._widen()
        return self._steps.setdefault(now // self.width, [0] * self.columns)

    def _widen(self) -> None:
        before, wider = (
            self.width,
            [1000 * each for each in _WIDTHS if 1000 * each > self.width],
        )
        self.width = wider[0] if wider else 2 * self.width
        steps, self._steps = self._steps, {}
        for index, counts in steps.items():
            merged = self._steps.setdefault(
                index * before // self.width, [0] * self.columns
            )
            for i, count in enumerate(counts):
                merged[i] += count
