"""How much clients ask for, counted beside the scripts: the demand, which no limit caps.

The demand of a request is the smallest limit that would admit it if all requests before it had been admitted. Under a
limit, fewer of those were admitted; so a request that a limit refuses has a demand above the limit, and the number of
requests with a demand above a limit is the most that the limit refuses: exactly that many under a fixed window, and
fewer under the other algorithms.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from ..core.algorithms import ALGORITHMS

FIXED, SLIDING, COUNTER = range(3)  # the measures of demand, by index
DEMANDS = ("fixed", "sliding", "counter")
MEASURE = {
    name: DEMANDS.index(algorithm.demand) for name, algorithm in ALGORITHMS.items()
}


class Window:
    """The times of the requests in the last window."""

    __slots__ = ("_first", "_times")

    def __init__(self, times: Iterable[int] = ()) -> None:
        self._times, self._first = array("q", times), 0

    def add(self, now: int, length: int) -> int:
        """Add a request, and return how many there are in the window that ends with it."""
        times, first, oldest = self._times, self._first, now - length
        times.append(now)
        while times[first] <= oldest:
            first += 1
        if first > 32 and 2 * first > len(times):
            del times[:first]
            first = 0
        self._first = first
        return len(times) - first

    def without_last(self) -> Window:
        """Return a copy from before the last request."""
        return Window(self._times[self._first : -1])

    def __len__(self) -> int:
        return len(self._times) - self._first


class Demand:
    """The demand of one client under one window length, by each measure."""

    __slots__ = ("current", "index", "peaks", "previous", "window")

    def __init__(self) -> None:
        self.window = Window()
        self.index = self.previous = self.current = (
            0  # the window since the epoch, the requests before and in it
        )
        self.peaks = [0, 0, 0]

    def add(self, now: int, length: int) -> tuple[int, int, int]:
        """Add a request, and return its demand by each measure."""
        index = now // length
        if index == self.index:
            self.current += 1
        elif (
            index > self.index
        ):  # else the line is out of order: it counts to the window that has begun
            self.previous = self.current if index == self.index + 1 else 0
            self.current, self.index = 1, index
        else:
            self.current += 1
        fixed = counter = self.current
        if self.previous:
            left = min(length, (self.index + 1) * length - now)
            counter -= -self.previous * left // length
        sliding, peaks = self.window.add(now, length), self.peaks
        if fixed > peaks[FIXED]:
            peaks[FIXED] = fixed
        if sliding > peaks[SLIDING]:
            peaks[SLIDING] = sliding
        if counter > peaks[COUNTER]:
            peaks[COUNTER] = counter
        return fixed, sliding, counter


class Histogram:
    """Numbers and how often they occur, in bounded memory: large ones are rounded up to three digits."""

    EXACT = 1000

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.total = 0

    def add(self, number: int, times: int = 1) -> None:
        """Count a number."""
        self.total += times
        self.counts[number if number <= self.EXACT else rounded_up(number)] += times

    def add_all(self, numbers: Sequence[int]) -> None:
        """Count many numbers, in a fifth of the time of counting each."""
        self.total += len(numbers)
        if max(numbers) > self.EXACT:
            numbers = [
                number if number <= self.EXACT else rounded_up(number)
                for number in numbers
            ]
        self.counts.update(numbers)

    def quantile(self, share: float) -> int:
        """Return the smallest number that at least this share of the numbers do not exceed; 0 if there is none."""
        wanted, seen = share * self.total, 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= wanted:
                return number
        return 0

    def smallest_limit(self, share: float) -> int:
        """Return the smallest number that at most this share of the numbers exceed; at least 1."""
        allowed, above = share * self.total, self.total
        for number in sorted(self.counts):
            above -= self.counts[number]
            if above <= allowed:
                return number
        return 1

    def above(self, limit: int) -> int:
        """Return how many numbers exceed a limit."""
        return sum(count for number, count in self.counts.items() if number > limit)


def rounded_up(number: int) -> int:
    """Return a number with three digits and zeros, at least as large."""
    unit: int = 10 ** (len(str(number)) - 3)
    return -(-number // unit) * unit
