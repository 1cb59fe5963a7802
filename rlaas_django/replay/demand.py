"""How much clients ask for, counted beside the scripts: the demand.

The demand of a request is the smallest limit that would admit it if all requests
before it had been admitted. Under a limit, fewer of those were admitted; so a request
that a limit refuses has a demand above the limit. The number of requests with a demand
above a limit is therefore the most that the limit refuses: exactly that many under a
fixed window, and fewer under the other algorithms.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter

from ..core.policy import (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)

# The measures of demand, by index.
FIXED, SLIDING, COUNTER = range(3)
MEASURE = {
    FIXED_WINDOW: FIXED,
    SLIDING_WINDOW: SLIDING,
    SLIDING_WINDOW_COMPACT: SLIDING,
    SLIDING_WINDOW_COUNTER: COUNTER,
    # It refuses only what a sliding window of the same limit refuses.
    TOKEN_BUCKET: SLIDING,
}


class Window:
    """The times of the requests in the last window."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times = array("q")

    def add(self, now: int, length: int) -> int:
        """Add a request; return how many are in the window that ends with it."""
        times = self._times
        times.append(now)
        del times[: bisect_right(times, now - length)]
        return len(times)


class Demand:
    """The demand of one client under one length of window, by each measure."""

    __slots__ = ("_current", "_index", "_previous", "_window", "peaks")

    def __init__(self) -> None:
        self._window = Window()
        self._index = 0  # of the latest fixed window since the epoch
        self._previous = 0  # requests in the fixed window before it
        self._current = 0  # requests in it
        self.peaks = (0, 0, 0)

    def add(self, now: int, length: int) -> tuple[int, int, int]:
        """Add a request, and return its demand by each measure."""
        index = now // length
        if index == self._index + 1:
            self._previous = self._current
        elif index > self._index:
            self._previous = 0

        # A line that is out of order counts to the window that has begun.
        if index > self._index:
            self._index = index
            self._current = 0
        self._current += 1

        left = min(length, (self._index + 1) * length - now)
        weighted = -(-self._previous * left // length)
        demand = (
            self._current,
            self._window.add(now, length),
            self._current + weighted,
        )
        fixed, sliding, counter = map(max, self.peaks, demand)
        self.peaks = (fixed, sliding, counter)
        return demand


def smallest_limit(demand: Counter[int], share: float) -> int:
    """Return the smallest limit that at most this share of the numbers exceed."""
    above = demand.total()
    allowed = share * above
    for limit in sorted(demand):
        above -= demand[limit]
        if above <= allowed:
            return limit
    return 0
