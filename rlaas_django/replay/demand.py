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
from dataclasses import dataclass, field

# The measures of demand, by index.
FIXED, SLIDING, COUNTER = range(3)
MEASURE = {"fixed": FIXED, "sliding": SLIDING, "counter": COUNTER}  # of an Algorithm


def add_to_window(times: array[int], now: int, length: int) -> int:
    """Add a request to the times of earlier ones, and drop those before the window.

    Return how many are in the window that ends with it.
    """
    times.append(now)
    del times[: bisect_right(times, now - length)]
    return len(times)


@dataclass(slots=True, eq=False)
class Demand:
    """The demand of one client under one length of window, by each measure."""

    times: array[int] = field(default_factory=lambda: array("q"))
    index: int = 0  # of the latest fixed window since the epoch
    previous: int = 0  # requests in the fixed window before it
    current: int = 0  # requests in it
    peaks: tuple[int, int, int] = (0, 0, 0)

    def add(self, now: int, length: int) -> tuple[int, int, int]:
        """Add a request, and return its demand by each measure."""
        index = now // length
        if index == self.index + 1:
            self.previous = self.current
        elif index > self.index:
            self.previous = 0

        # A line that is out of order counts to the window that has begun.
        if index > self.index:
            self.index = index
            self.current = 0
        self.current += 1

        left = min(length, (self.index + 1) * length - now)
        weighted = -(-self.previous * left // length)
        demand = (
            self.current,
            add_to_window(self.times, now, length),
            self.current + weighted,
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
