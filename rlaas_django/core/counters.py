"""Counting in memory: per algorithm a class that decides as its Lua file does.

Times are in ms. A check changes nothing; state is judged by its stamps, so a clock that
steps back admits nothing extra and loses nothing.
"""

from __future__ import annotations

import collections
import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .policy import ScriptArguments


NOT_KNOWN = -1


class Usage(NamedTuple):
    """What a counter says before a charge."""

    units: int
    # Until a cost within the capacity fits. Where it fits now, until more than now can
    # be used; NOT_KNOWN: until nothing is counted, at the latest.
    wait: int
    reset_after: int  # until nothing is counted


class Counter:
    """What is counted under one key. The store sets the attributes."""

    # Of a log: a larger limit is counted in such parts of the window.
    max_entries: float = math.inf
    expires_at = 0  # when it can be dropped
    is_charged = False  # since it was reset
    reset_at = 0  # what was charged before is gone

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
        self._units: collections.Counter[int] = collections.Counter()  # by its index

    def check(
        self,
        arguments: ScriptArguments,
        now: int,
        cost: int,  # noqa: ARG002
    ) -> Usage:
        window = arguments.window
        index = self._index(window, now)
        units = self._units[index]
        left = (index + 1) * window - now
        reset_after = 0
        if units:
            reset_after = left
        return Usage(units, left, reset_after)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        window = arguments.window
        index = self._index(window, now)
        if not self._units[index]:
            self._drop_old(now // window)
        self._units[index] += cost
        return max(index * window, now)

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        window = arguments.window
        oldest = self._oldest(window, now)
        indexes = [now // window, oldest]
        if charged_at is not None:
            indexes = [charged_at // window]

        refunded = 0
        for index in indexes:
            if index >= oldest and index in self._units:
                taken = min(cost - refunded, self._units[index])
                self._units[index] -= taken
                refunded += taken
        return refunded

    def _index(self, window: int, now: int) -> int:
        """Return which window counts now.

        The next one where that has begun already: the clock stepped back.
        """
        index = now // window
        if index + 1 in self._units:
            return index + 1
        return index

    def _oldest(self, window: int, now: int) -> int:
        """Return the oldest window that counts now, or counts in part."""
        return now // window

    def _drop_old(self, present: int) -> None:
        """Drop the windows before the previous one."""
        for index in list(self._units):
            if index < present - 1:
                del self._units[index]


class SlidingWindowCounter(FixedWindow):
    """The units of a window and of the one before, as sliding_window_counter.lua."""

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        limit = arguments.limit
        window = arguments.window
        index = self._index(window, now)
        current = self._units[index]
        previous = self._units[index - 1]
        end = (index + 1) * window

        units = current
        reset_after = 0
        if previous:
            units += _ceil(previous * min(window, end - now), window)
            reset_after = end - now
        if current:
            reset_after = end + window - now

        wait = 0
        if units + cost > limit:
            # What was counted before a window takes no more than `spare` units once
            # that part of the window has passed.
            spare = limit - current - cost
            if spare >= 0:
                wait = end - spare * window // previous - now
            else:
                passed = (limit - cost) * window // current
                wait = end + max(0, window - passed) - now
        elif previous:
            wait = end - (units - current - 1) * window // previous - now
        elif current:
            wait = end + _ceil(window, current) - now
        return Usage(units, wait, reset_after)

    def _index(self, window: int, now: int) -> int:
        """Return which window counts now: the latest, also after a step back."""
        return max([now // window, *self._units])

    def _oldest(self, window: int, now: int) -> int:
        return self._index(window, now) - 1


class SlidingLog(Counter):
    """When units were charged, as sliding_window.lua."""

    least_excess = 0  # units whose end is the wait where a cost fits

    def __init__(self) -> None:
        self._stamps: list[int] = []  # the oldest first
        self._units: list[int] = []  # of each stamp

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        window = arguments.window
        oldest = bisect_right(self._stamps, now - window)
        if oldest == len(self._stamps):
            return Usage(0, NOT_KNOWN, 0)

        units = sum(self._units[oldest:])
        excess = max(self.least_excess, units + cost - arguments.limit)
        wait = NOT_KNOWN
        while excess > 0:
            wait = self._stamps[oldest] + window - now
            excess -= self._units[oldest]
            oldest += 1
        return Usage(units, wait, self._stamps[-1] + window - now)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        dead = bisect_right(self._stamps, now - arguments.window)
        del self._stamps[:dead]
        del self._units[:dead]

        stamp = self._rounded(arguments, now)
        index = bisect_left(self._stamps, stamp)
        if stamp not in self._stamps[index : index + 1]:
            self._stamps.insert(index, stamp)
            self._units.insert(index, 0)
        self._units[index] += cost
        return stamp

    def refund(
        self, arguments: ScriptArguments, now: int, cost: int, charged_at: int | None
    ) -> int:
        start = bisect_right(self._stamps, now - arguments.window)
        end = len(self._stamps)
        if charged_at is not None:
            start = max(start, bisect_left(self._stamps, charged_at))
            end = bisect_right(self._stamps, charged_at)

        refunded = 0
        for index in reversed(range(start, end)):
            taken = min(cost - refunded, self._units[index])
            refunded += taken
            self._units[index] -= taken
            if not self._units[index]:
                del self._stamps[index]
                del self._units[index]
        return refunded

    def _rounded(self, arguments: ScriptArguments, now: int) -> int:
        """Round up, so that units count for longer rather than shorter."""
        if arguments.limit <= self.max_entries:
            return now
        step = max(1, arguments.window // int(self.max_entries))
        return _ceil(now, step) * step


class CompactLog(SlidingLog):
    """As sliding_window_compact.lua, which has read the oldest unit in any case."""

    least_excess = 1


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
        self._refunds: collections.deque[tuple[int, int]] = collections.deque(maxlen=16)

    def check(self, arguments: ScriptArguments, now: int, cost: int) -> Usage:
        window = arguments.window
        used = self._used_at(arguments, now)

        # The clock stepped back, and refills nothing until it is there again.
        ahead = max(0, self._stamp - now)
        missing = used - (arguments.capacity - cost) * window
        if missing <= 0:
            missing = (used - 1) % window + 1  # of the unit that is being refilled
        wait = ahead + _ceil(missing, arguments.limit)
        reset_after = 0
        if used:
            reset_after = ahead + _ceil(used, arguments.limit)
        return Usage(_ceil(used, window), wait, reset_after)

    def charge(self, arguments: ScriptArguments, now: int, cost: int) -> int:
        used = self._used_at(arguments, now)
        if not used:
            self._refunds.clear()  # every charge so far has been refilled
        self._used = used + cost * arguments.window
        self._stamp = max(now, self._stamp)
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
        used = self._used_at(arguments, now)
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
        self._stamp = max(now, self._stamp)
        return _ceil(refunded, window)

    def _used_at(self, arguments: ScriptArguments, now: int) -> int:
        """Return what is missing after the refills since the stamp."""
        passed = max(0, now - self._stamp)
        return max(0, self._used - passed * arguments.limit)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
