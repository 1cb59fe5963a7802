"""Counters in this process' memory, for `on_failure="local"` while Redis is unavailable.

An approximation: each process counts by itself, by a sliding log whatever the policy's algorithm is, or by a token
bucket where a burst is set.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime import process

MAX_ENTRIES = 100  # of one log; under a larger limit, units are counted in hundredths of the window


class LocalLimit(NamedTuple):
    """One policy's part of a check."""

    policy: str
    identity: str
    limit: int
    window: int  # ms
    burst: int | None
    shadow: bool

    @property
    def capacity(self) -> int:
        return self.burst or self.limit

    @property
    def key(self) -> tuple[str, str, int, bool]:
        # Without the limit, so that raising it keeps the usage.
        return self.policy, self.identity, self.window, self.burst is not None


class LocalReply(NamedTuple):
    """What a script would reply for one policy."""

    allowed: bool
    current_count: int
    remaining: int
    retry_after: int  # ms; 0 when allowed, -1 never
    reset_after: int  # ms
    charged_at: int  # by which `refund` finds the charge; -1: not charged


class SlidingLog:
    """When units were charged, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[list[int]] = deque()  # ms, units
        self._count = 0

    def peek(self, limit: LocalLimit, now: int, cost: int) -> tuple[int, int, int]:
        """Return the units counted, the ms until a cost that does not fit yet will fit, and until nothing counts."""
        entries, dead = self._entries, now - limit.window
        while entries and entries[0][0] <= dead:
            self._count -= entries.popleft()[1]
        if not entries:
            return 0, 0, 0
        wait, over = 0, self._count + cost - limit.limit
        for stamp, units in entries:
            if over <= 0:
                break
            wait, over = stamp - dead, over - units
        return self._count, wait, entries[-1][0] - dead

    def charge(self, limit: LocalLimit, now: int, cost: int) -> int:
        """Charge, and return the stamp by which `refund` finds the units."""
        # Rounded up, so that units count for a hundredth longer rather than shorter.
        step = 1 if limit.limit <= MAX_ENTRIES else max(1, limit.window // MAX_ENTRIES)
        stamp = _ceil(now, step) * step
        if not self._entries or self._entries[-1][0] < stamp:
            self._entries.append([stamp, 0])
        newest = self._entries[-1]  # also where the clock stepped back
        newest[1] += cost
        self._count += cost
        return newest[0]

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Take units of a stamp back; return how many there were."""
        for entry in self._entries:
            if entry[0] == charged_at > now - limit.window:
                refunded = min(cost, entry[1])
                entry[1] -= refunded
                self._count -= refunded
                if not entry[1]:
                    self._entries.remove(entry)  # or it would still be waited for
                return refunded
        return 0


class TokenBucket:
    """Deficit of the bucket at a stamp, scaled by the window, so one ms refills exactly `limit`."""

    def __init__(self) -> None:
        self._used, self._stamp = 0, 0
        self._total = 0  # units charged; it starts by the clock, above that of a bucket that was dropped
        self._refunds: deque[tuple[int, int]] = deque(
            maxlen=16
        )  # as in token_bucket.lua

    def peek(self, limit: LocalLimit, now: int, cost: int) -> tuple[int, int, int]:
        self._refill(limit, now)
        over = self._used - (limit.capacity - cost) * limit.window
        ahead = (
            self._stamp - now
        )  # the clock stepped back, and refills nothing until it is there again
        wait = ahead + _ceil(over, limit.limit) if over > 0 else 0
        return (
            _ceil(self._used, limit.window),
            wait,
            ahead + _ceil(self._used, limit.limit) if self._used else 0,
        )

    def charge(self, limit: LocalLimit, now: int, cost: int) -> int:
        """Charge, and return the total of units with this charge, by which `refund` knows what was charged since."""
        self._refill(limit, now)
        if not self._used:
            self._refunds.clear()  # every charge so far has been refilled
        self._used += cost * limit.window
        self._total = (self._total or now * 100) + cost
        return self._total

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Take back what no refill has restored; refills go to the oldest charge, as in token_bucket.lua."""
        self._refill(limit, now)
        left = self._used - (self._total - charged_at) * limit.window
        left += sum(part for later, part in self._refunds if later > charged_at)
        part = min(cost * limit.window, left, self._used)
        if charged_at > self._total or part <= 0:
            return 0
        if charged_at < self._total:
            self._refunds.append((charged_at, part))
        elif part == cost * limit.window:
            self._total -= cost  # as if it had not been charged
        self._used -= part
        return _ceil(part, limit.window)

    def _refill(self, limit: LocalLimit, now: int) -> None:
        if now > self._stamp:
            self._used, self._stamp = (
                max(0, self._used - (now - self._stamp) * limit.limit),
                now,
            )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


class LocalLimiter:
    """The counters of the identities that were seen last."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[
            tuple[str, str, int, bool], SlidingLog | TokenBucket
        ] = OrderedDict()

    def check(
        self,
        limits: Sequence[LocalLimit],
        now: int,
        cost: int,
        *,
        charge: bool,
        max_identities: int,
    ) -> list[LocalReply]:
        """Decide all policies or none; without `charge`, count nothing."""
        charge = charge and cost > 0
        with self._lock:
            peeked = [
                (limit, *self._state(limit).peek(limit, now, cost)) for limit in limits
            ]
            passes = all(
                count + cost <= limit.capacity or limit.shadow
                for limit, count, _, _ in peeked
            )
            replies = []
            for limit, count, wait, reset_after in peeked:
                remaining, charged_at = max(0, limit.capacity - count), -1
                allowed = count + cost <= limit.capacity
                if charge and passes and allowed:
                    state = self._states.setdefault(limit.key, self._state(limit))
                    charged_at = state.charge(limit, now, cost)
                    _, _, reset_after = state.peek(limit, now, 0)
                    remaining -= cost
                retry_after = 0 if allowed else -1 if cost > limit.capacity else wait
                replies.append(
                    LocalReply(
                        allowed, count, remaining, retry_after, reset_after, charged_at
                    )
                )
            while len(self._states) > max_identities:
                self._states.popitem(last=False)
        return replies

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Refund what was charged, never more than is still counted; return the units refunded."""
        with self._lock:
            state = self._states.get(limit.key)
            return 0 if state is None else state.refund(limit, now, cost, charged_at)

    def __len__(self) -> int:
        return len(self._states)

    def _state(self, limit: LocalLimit) -> SlidingLog | TokenBucket:
        """Return the state of an identity, or a new one that is not kept yet."""
        if (state := self._states.get(limit.key)) is None:
            return SlidingLog() if limit.burst is None else TokenBucket()
        self._states.move_to_end(limit.key)  # a refusal is use, too
        return state


local_limiter = LocalLimiter()
process.on_fork(local_limiter.reset)
