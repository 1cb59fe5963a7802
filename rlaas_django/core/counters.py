"""Counting in memory: per algorithm a class that decides as its Lua file does.

Times are in ms. A check changes nothing; state is judged by its stamps, so a clock that
steps back admits nothing extra and loses nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .policy import ScriptArguments


class Usage(NamedTuple):
    """What a counter says before a charge."""

    units: int
    wait: int  # until a cost fits that does not fit yet, but is within the capacity
    reset_after: int  # until nothing is counted


class Counter:
    """What is counted under one key. The store sets the attributes."""

    # Of a log: a larger limit is counted in such parts of the window. None: exactly.
    max_entries: int | None = None
    expires_at = 0  # when nothing is counted any more, so that it can be dropped

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        raise NotImplementedError

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        """Charge, and return the number by which `refund` finds the charge."""
        raise NotImplementedError

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        """Take units of a charge back, of the newest ones where it is None.

        Return how many, which are never more than are still counted.
        """
        raise NotImplementedError


class FixedWindow(Counter):
    """The units of each window, as fixed_window.lua."""

    def __init__(self) -> None:
        self._units: dict[tuple[int, int], int] = {}  # by window and its start

    def check(
        self,
        arguments: ScriptArguments,
        now: int,
        cost: int,  # noqa: ARG002
    ) -> Usage:
        start = self._start(arguments.window, now)
        units = self._units.get((arguments.window, start), 0)
        left = start + arguments.window - now
        reset_after = 0
        if units:
            reset_after = left
        return Usage(units, left, reset_after)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        start = self._start(arguments.window, now)
        key = arguments.window, start
        if key not in self._units:
            self._drop_old(now)
        self._units[key] = self._units.get(key, 0) + cost
        return start

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        if charged_at is None:
            charged_at = now
        if charged_at + arguments.window <= now:
            return 0

        key = arguments.window, charged_at - charged_at % arguments.window
        refunded = min(cost, self._units.get(key, 0))
        if refunded:
            self._units[key] -= refunded
        return refunded

    def _start(self, window: int, now: int) -> int:
        """Return the start of the window that counts now.

        The next one where that has begun already: the clock stepped back.
        """
        start = now - now % window
        if (window, start + window) in self._units:
            return start + window
        return start

    def _drop_old(self, now: int) -> None:
        for window, start in list(self._units):
            if start + 2 * window <= now:
                del self._units[window, start]


class SlidingLog(Counter):
    """When units were charged, as sliding_window.lua and sliding_window_compact.lua."""

    def __init__(self) -> None:
        self._stamps: list[int] = []  # the oldest first
        # The units up to each stamp, with those that were dropped.
        self._totals: list[int] = []
        self._dropped = 0

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        stamps = self._stamps
        window = arguments.window
        dead = bisect_right(stamps, now - window)
        if dead == len(stamps):
            return Usage(0, 0, 0)

        dead_units = self._units_before(dead)
        units = self._totals[-1] - dead_units
        excess = units + cost - arguments.limit
        wait = 0
        if 0 < excess <= units:
            last_to_leave = bisect_left(self._totals, dead_units + excess)
            wait = stamps[last_to_leave] + window - now
        return Usage(units, wait, stamps[-1] + window - now)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        self._drop_dead(now - arguments.window)

        stamp = self._rounded(arguments, now)
        index = bisect_left(self._stamps, stamp)
        if index == len(self._stamps) or self._stamps[index] != stamp:
            total = self._units_before(index)
            self._stamps.insert(index, stamp)
            self._totals.insert(index, total)
        self._add(index, cost)
        return stamp

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        dead = now - arguments.window
        if charged_at is None:
            return self._refund_newest(dead, cost)
        if charged_at <= dead:
            return 0

        index = bisect_left(self._stamps, charged_at)
        if index == len(self._stamps) or self._stamps[index] != charged_at:
            return 0
        return self._take(index, cost)

    def _refund_newest(self, dead: int, cost: int) -> int:
        refunded = 0
        while refunded < cost and self._stamps and self._stamps[-1] > dead:
            refunded += self._take(len(self._stamps) - 1, cost - refunded)
        return refunded

    def _rounded(self, arguments: ScriptArguments, now: int) -> int:
        """Round up, so that units count for longer rather than shorter."""
        if self.max_entries is None or arguments.limit <= self.max_entries:
            return now
        step = max(1, arguments.window // self.max_entries)
        return _ceil(now, step) * step

    def _take(self, index: int, cost: int) -> int:
        """Take units of one stamp back, and return how many there were."""
        units = self._totals[index] - self._units_before(index)
        taken = min(cost, units)
        self._add(index, -taken)
        if taken == units:
            del self._stamps[index]
            del self._totals[index]
        return taken

    def _add(self, index: int, units: int) -> None:
        """Add units to a stamp; mostly it is the newest."""
        for position in range(index, len(self._totals)):
            self._totals[position] += units

    def _units_before(self, index: int) -> int:
        return self._totals[index - 1] if index else self._dropped

    def _drop_dead(self, dead: int) -> None:
        count = bisect_right(self._stamps, dead)
        if count:
            self._dropped = self._totals[count - 1]
            del self._stamps[:count]
            del self._totals[:count]


class SlidingWindowCounter(Counter):
    """The units of a window and of the one before, as sliding_window_counter.lua."""

    def __init__(self) -> None:
        self._index = -1  # of the window that was charged last
        self._previous = 0
        self._current = 0

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        limit = arguments.limit
        window = arguments.window
        index, previous, current = self._at(now // window)
        start = index * window

        units = current
        reset_after = 0
        if previous:
            elapsed = max(0, now - start)
            units += _ceil(previous * (window - elapsed), window)
            reset_after = start + window - now
        if current:
            reset_after = start + 2 * window - now

        wait = 0
        if units + cost > limit and cost <= limit:
            # What was counted before a window takes no more than `spare` units once
            # that part of the window has passed.
            spare = limit - current - cost
            if spare >= 0:
                wait = start + window - spare * window // previous - now
            else:
                passed = (limit - cost) * window // current
                wait = start + window + max(0, window - passed) - now
        return Usage(units, wait, reset_after)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        index, previous, current = self._at(now // arguments.window)
        self._set(index, previous, current + cost)
        return index * arguments.window

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        is_newest = charged_at is None
        if charged_at is None:
            charged_at = now
        index, previous, current = self._at(now // arguments.window)
        behind = index - charged_at // arguments.window

        of_current = 0
        if behind == 0:
            of_current = min(cost, current)
        of_previous = 0
        if behind == 1 or is_newest:
            of_previous = min(cost - of_current, previous)

        refunded = of_current + of_previous
        if refunded:
            self._set(index, previous - of_previous, current - of_current)
        return refunded

    def _at(self, index: int) -> tuple[int, int, int]:
        """Return the state as of a window: its index, and the previous and its units.

        That of a later window where the clock stepped back.
        """
        if self._index >= index:
            return self._index, self._previous, self._current
        if self._index == index - 1:
            return index, self._current, 0
        return index, 0, 0

    def _set(self, index: int, previous: int, current: int) -> None:
        self._index = index
        self._previous = previous
        self._current = current


class TokenBucket(Counter):
    """What is missing from the full bucket at a stamp, as token_bucket.lua.

    It is scaled by the window, so that one ms refills exactly `limit`.
    """

    def __init__(self) -> None:
        self._used = 0
        self._stamp = 0
        # Units charged; it starts by the clock, above that of a dropped bucket.
        self._total = 0
        # What was refunded of charges that were not the newest, by their total.
        self._refunds: deque[tuple[int, int]] = deque(maxlen=16)

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        limit = arguments.limit
        window = arguments.window
        used, stamp = self._at(arguments, now)
        if not used:
            return Usage(0, 0, 0)

        # The clock stepped back, and refills nothing until it is there again.
        ahead = stamp - now
        wait = 0
        excess = used - (arguments.capacity - cost) * window
        if excess > 0:
            wait = ahead + _ceil(excess, limit)
        return Usage(_ceil(used, window), wait, ahead + _ceil(used, limit))

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        used, self._stamp = self._at(arguments, now)
        if not used:
            self._refunds.clear()  # every charge so far has been refilled
        self._used = used + cost * arguments.window
        self._total = (self._total or now * 100) + cost
        return self._total

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        is_newest = charged_at is None
        if charged_at is None:
            charged_at = self._total
        if charged_at > self._total:
            return 0  # charged to a bucket that is gone

        # A refill goes to the oldest charge.
        window = arguments.window
        used, stamp = self._at(arguments, now)
        left = used - (self._total - charged_at) * window
        left += sum(part for later, part in self._refunds if later > charged_at)
        refunded = min(cost * window, left, used)
        if refunded <= 0:
            return 0

        if charged_at < self._total:
            self._refunds.append((charged_at, refunded))
        elif not is_newest and refunded == cost * window:
            self._total -= cost  # as if it had not been charged
        self._used = used - refunded
        self._stamp = stamp
        return _ceil(refunded, window)

    def _at(self, arguments: ScriptArguments, now: int) -> tuple[int, int]:
        """Return what is missing, and the stamp of that."""
        if now <= self._stamp:
            return self._used, self._stamp
        refilled = (now - self._stamp) * arguments.limit
        return max(0, self._used - refilled), now


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
