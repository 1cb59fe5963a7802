"""Counters in this process' memory, for `on_failure="local"`.

An approximation: each process counts by itself, by a sliding log whatever the policy's
algorithm is, or by a token bucket where a burst is set.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime import process

# Of one log; under a larger limit, units are counted in hundredths of the window.
MAX_ENTRIES = 100


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


class Usage(NamedTuple):
    """What a counter says before a charge."""

    units: int
    wait: int  # ms until a cost that does not fit yet will fit
    reset_after: int  # ms until nothing counts


class SlidingLog:
    """When units were charged, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[list[int]] = deque()  # ms, units
        self._count = 0

    def peek(self, limit: LocalLimit, now: int, cost: int) -> Usage:
        entries = self._entries
        dead = now - limit.window
        while entries and entries[0][0] <= dead:
            self._count -= entries.popleft()[1]
        if not entries:
            return Usage(0, 0, 0)

        wait = 0
        excess = self._count + cost - limit.limit
        for stamp, units in entries:
            if excess <= 0:
                break
            wait = stamp - dead
            excess -= units
        return Usage(self._count, wait, entries[-1][0] - dead)

    def charge(self, limit: LocalLimit, now: int, cost: int) -> int:
        """Charge, and return the stamp by which `refund` finds the units."""
        step = 1
        if limit.limit > MAX_ENTRIES:
            step = max(1, limit.window // MAX_ENTRIES)
        # Rounded up, so that units count for a hundredth longer rather than shorter.
        stamp = _ceil(now, step) * step
        if not self._entries or self._entries[-1][0] < stamp:
            self._entries.append([stamp, 0])

        newest = self._entries[-1]  # also where the clock stepped back
        newest[1] += cost
        self._count += cost
        return newest[0]

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Take units of a stamp back.

        Return how many there were.
        """
        if charged_at <= now - limit.window:
            return 0
        for entry in self._entries:
            if entry[0] == charged_at:
                refunded = min(cost, entry[1])
                entry[1] -= refunded
                self._count -= refunded
                if not entry[1]:
                    self._entries.remove(entry)  # or it would still be waited for
                return refunded
        return 0


class TokenBucket:
    """Deficit of the bucket at a stamp.

    It is scaled by the window, so that one ms refills exactly `limit`.
    """

    def __init__(self) -> None:
        self._used = 0
        self._stamp = 0
        # Units charged; it starts by the clock, above that of a dropped bucket.
        self._total = 0
        self._refunds: deque[tuple[int, int]] = deque(maxlen=16)  # as in the Lua file

    def peek(self, limit: LocalLimit, now: int, cost: int) -> Usage:
        self._refill(limit, now)
        if not self._used:
            return Usage(0, 0, 0)

        # The clock stepped back, and refills nothing until it is there again.
        ahead = self._stamp - now
        wait = 0
        excess = self._used - (limit.capacity - cost) * limit.window
        if excess > 0:
            wait = ahead + _ceil(excess, limit.limit)
        reset_after = ahead + _ceil(self._used, limit.limit)
        return Usage(_ceil(self._used, limit.window), wait, reset_after)

    def charge(self, limit: LocalLimit, now: int, cost: int) -> int:
        """Charge, and return the total of units with this charge.

        By it, `refund` knows what was charged since.
        """
        self._refill(limit, now)
        if not self._used:
            self._refunds.clear()  # every charge so far has been refilled
        self._used += cost * limit.window
        self._total = (self._total or now * 100) + cost
        return self._total

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Take back what no refill has restored.

        Return how many units. Refills go to the oldest charge, as in token_bucket.lua.
        """
        self._refill(limit, now)
        charged = cost * limit.window
        left = self._used - (self._total - charged_at) * limit.window
        left += sum(part for later, part in self._refunds if later > charged_at)
        refunded = min(charged, left, self._used)
        if charged_at > self._total or refunded <= 0:
            return 0

        if charged_at < self._total:
            self._refunds.append((charged_at, refunded))
        elif refunded == charged:
            self._total -= cost  # as if it had not been charged
        self._used -= refunded
        return _ceil(refunded, limit.window)

    def _refill(self, limit: LocalLimit, now: int) -> None:
        if now > self._stamp:
            refilled = (now - self._stamp) * limit.limit
            self._used = max(0, self._used - refilled)
            self._stamp = now


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
        """Decide all policies or none.

        Without `charge`, count nothing.
        """
        with self._lock:
            usages = [self._state(limit).peek(limit, now, cost) for limit in limits]
            replies = [
                _reply(limit, usage, cost)
                for limit, usage in zip(limits, usages, strict=True)
            ]
            passes = all(
                reply.allowed or limit.shadow
                for limit, reply in zip(limits, replies, strict=True)
            )
            if charge and cost > 0 and passes:
                replies = [
                    self._charge(limit, reply, now, cost)
                    for limit, reply in zip(limits, replies, strict=True)
                ]
            while len(self._states) > max_identities:
                self._states.popitem(last=False)
        return replies

    def _charge(
        self, limit: LocalLimit, reply: LocalReply, now: int, cost: int
    ) -> LocalReply:
        if not reply.allowed:
            return reply
        state = self._states.setdefault(limit.key, self._state(limit))
        return reply._replace(
            charged_at=state.charge(limit, now, cost),
            remaining=reply.remaining - cost,
            reset_after=state.peek(limit, now, 0).reset_after,
        )

    def refund(self, limit: LocalLimit, now: int, cost: int, charged_at: int) -> int:
        """Refund what was charged, never more than is still counted.

        Return the units refunded.
        """
        with self._lock:
            state = self._states.get(limit.key)
            if state is None:
                return 0
            return state.refund(limit, now, cost, charged_at)

    def __len__(self) -> int:
        return len(self._states)

    def _state(self, limit: LocalLimit) -> SlidingLog | TokenBucket:
        """Return the state of an identity, or a new one that is not kept yet."""
        state = self._states.get(limit.key)
        if state is not None:
            self._states.move_to_end(limit.key)  # also a refusal is use
            return state
        if limit.burst is None:
            return SlidingLog()
        return TokenBucket()


def _reply(limit: LocalLimit, usage: Usage, cost: int) -> LocalReply:
    """Return the reply before a charge."""
    remaining = limit.capacity - usage.units
    retry_after = 0
    if cost > limit.capacity:
        retry_after = -1
    elif cost > remaining:
        retry_after = usage.wait
    return LocalReply(
        cost <= remaining,
        usage.units,
        max(0, remaining),
        retry_after,
        usage.reset_after,
        charged_at=-1,
    )


local_limiter = LocalLimiter()
process.on_fork(local_limiter.reset)
