"""Counting in this process, where the cache is not on Redis.

A store decides as lua/driver.lua does; a `ProcessServer` stands before it where a
`Server` stands before Redis.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from time import monotonic
from typing import Any, ClassVar, NamedTuple

import hiredis

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.counters import Counter, Usage
from ..core.policy import ScriptArguments
from ..runtime import log, process
from ..runtime.clock import local_time_ms
from .circuit_breaker import CircuitBreaker
from .commands import Call
from .errors import NoRedisError, not_on_redis
from .scripts import OVERRIDE, RECORD

# Of the arguments of a script, as lua/driver.lua describes them.
CHECK_SIZE = 7  # words per policy
REFUND_SIZE = 6
MARKER = ""  # in place of an algorithm

LOG_INTERVAL = 3600.0  # seconds


class Limit(NamedTuple):
    """One policy's part of a check."""

    key: str
    arguments: ScriptArguments
    shadow: bool


class Charge(NamedTuple):
    """One policy's part of a refund."""

    key: str
    arguments: ScriptArguments
    charged_at: int | None  # None: the newest units


class Row(NamedTuple):
    """One policy's part of a reply."""

    allowed: int
    current_count: int
    remaining: int
    retry_after: int  # ms; -1: never
    reset_after: int  # ms
    capacity: int
    charged_at: int  # -1: not charged


class ProcessStore:
    """The counters of this process, at most LOCAL_IDENTITIES."""

    def __init__(self, max_entries: int | None = None) -> None:
        self._max_entries = max_entries  # of a log; see Counter
        self.reset()

    def reset(self) -> None:
        """Start over; a thread of a forked parent may have held the lock."""
        self._lock = threading.Lock()
        # By algorithm and key.
        self._counters: dict[tuple[str, str], Counter] = {}
        # Each of them once, with a time before which it does not expire.
        self._queue: list[tuple[int, tuple[str, str]]] = []

    def __len__(self) -> int:
        return len(self._counters)

    def check(
        self, limits: Sequence[Limit], now: int, cost: int, *, charge: bool
    ) -> list[Row]:
        """Decide all policies, and charge all that pass or none."""
        with self._lock:
            rows = [self._check(limit, now, cost) for limit in limits]
            passes = all(
                row.allowed or limit.shadow
                for limit, row in zip(limits, rows, strict=True)
            )
            if not (charge and cost and passes):
                return rows

            for index, limit in enumerate(limits):
                if rows[index].allowed:
                    rows[index] = self._charge(limit, rows[index], now, cost)
            self._evict()
        return rows

    def _check(self, limit: Limit, now: int, cost: int) -> Row:
        counter = self._counters.get((limit.arguments.algo, limit.key))
        usage = Usage(0, 0, 0)
        if counter is not None:
            usage = counter.check(limit.arguments, now, cost)

        capacity = limit.arguments.capacity
        remaining = capacity - usage.units
        retry_after = 0
        if cost > capacity:
            retry_after = -1
        elif cost > remaining:
            retry_after = usage.wait
        return Row(
            int(cost <= remaining),
            usage.units,
            max(0, remaining),
            retry_after,
            usage.reset_after,
            capacity,
            charged_at=-1,
        )

    def _charge(self, limit: Limit, row: Row, now: int, cost: int) -> Row:
        arguments = limit.arguments
        counter = self._counter(arguments.algo, limit.key, now)
        charged_at = counter.charge(arguments, now, cost)
        reset_after = counter.check(arguments, now, 0).reset_after
        counter.expires_at = now + reset_after
        return row._replace(
            remaining=row.remaining - cost,
            reset_after=reset_after,
            charged_at=charged_at,
        )

    def _counter(self, algo: str, key: str, now: int) -> Counter:
        """Return the counter of a key, which is kept from now on."""
        counter = self._counters.get((algo, key))
        if counter is None:
            counter = ALGORITHMS[algo].counter()
            counter.max_entries = self._max_entries
            self._keep(algo, key, counter, now)
        return counter

    def _keep(self, algo: str, key: str, counter: Counter, now: int) -> None:
        self._counters[algo, key] = counter
        heapq.heappush(self._queue, (now, (algo, key)))

    def _evict(self) -> None:
        """Drop what expires soonest, until there is room."""
        excess = len(self._counters) - conf.config().local_identities
        while excess > 0:
            expected, key = heapq.heappop(self._queue)
            expires_at = self._counters[key].expires_at
            if expires_at > expected:
                heapq.heappush(self._queue, (expires_at, key))
            else:
                del self._counters[key]
                excess -= 1

    def refund(self, charges: Iterable[Charge], now: int, cost: int) -> list[int]:
        """Take back what a check charged, never more than is still counted.

        Return the units per policy.
        """
        with self._lock:
            return [self._refund(charge, now, cost) for charge in charges]

    def _refund(self, charge: Charge, now: int, cost: int) -> int:
        counter = self._counters.get((charge.arguments.algo, charge.key))
        if counter is None:
            return 0
        return counter.refund(charge.arguments, now, cost, charge.charged_at)

    def mark(self, key: str, now: int, ttl: int) -> bool:
        """Set a marker, and return whether it was not set yet."""
        with self._lock:
            marker = self._counters.get((MARKER, key))
            if marker is not None and marker.expires_at > now:
                return False
            if marker is None:
                marker = Counter()
                self._keep(MARKER, key, marker, now)
            marker.expires_at = now + ttl
            self._evict()
            return True

    def delete(self, counters: Iterable[tuple[str, str]], now: int) -> int:
        """Reset counters, by algorithm and key; return how many counted something."""
        deleted = 0
        with self._lock:
            for key in counters:
                counter = self._counters.get(key)
                if counter is not None and counter.expires_at > now:
                    # In its place, as it is in the queue once.
                    self._counters[key] = ALGORITHMS[key[0]].counter()
                    deleted += 1
        return deleted


process_store = ProcessStore()
process.on_fork(process_store.reset)


class ProcessServer:
    """What stands in a topology where a cache is not on Redis."""

    _next_line: ClassVar[float] = 0.0

    def __init__(self, alias: str, timeout: float) -> None:
        self.name = f"CACHES[{alias!r}]"
        self.alias = alias
        self.timeout = timeout
        self.breaker = CircuitBreaker(self.name, timeout)  # which is never open

    def send(self, call: Call) -> Any:
        """Return the reply to a call, or the list of replies to a pipeline."""
        call.sent_at = monotonic()
        calls = call.calls or (call,)
        if any(part.script in (None, OVERRIDE, RECORD) for part in calls):
            raise NoRedisError(self.alias)
        if call.sent_at >= ProcessServer._next_line:
            self._log(call.sent_at)

        if call.calls is not None:
            return [_reply(part) for part in calls]
        return _reply(call)

    async def asend(self, call: Call) -> Any:
        return self.send(call)

    def close(self) -> None:
        """Keep the counters, as Redis does when settings change."""

    def _log(self, now: float) -> None:
        ProcessServer._next_line = now + LOG_INTERVAL
        text = not_on_redis(self.alias)
        if conf.debug():
            log.warning(text)
        else:
            log.error(text)


def _reply(call: Call) -> Any:
    """Run a call on the store, as lua/driver.lua does in Redis."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(call.packed)
    words: Any = reader.gets()
    end_of_keys = 3 + int(words[2])
    keys = words[3:end_of_keys]
    time, operation, unique, cost, *arguments = words[end_of_keys:]
    now = int(time or local_time_ms())

    if operation == "reset":
        return process_store.delete(zip(arguments[::2], keys, strict=True), now)
    if operation == "refund":
        return _refund(keys, now, unique, int(cost), arguments)
    limits = [
        Limit(key, _script_arguments(part), part[5] == "1")
        for key, part in zip(keys, _parts(arguments, CHECK_SIZE), strict=False)
    ]
    rows = process_store.check(limits, now, int(cost), charge=operation == "check")
    return [now, *chain.from_iterable(rows)]


def _refund(
    keys: Sequence[str], now: int, unique: str, cost: int, arguments: Sequence[str]
) -> list[int]:
    charges = []
    for key, part in zip(keys, _parts(arguments, REFUND_SIZE), strict=False):
        charged_at = None
        if unique:
            charged_at = int(part[5])
        charges.append(Charge(key, _script_arguments(part), charged_at))

    is_marked = len(keys) > len(charges)
    if is_marked and not process_store.mark(keys[-1], now, int(arguments[-1])):
        return []
    return process_store.refund(charges, now, cost)


def _parts(words: Sequence[str], size: int) -> list[Sequence[str]]:
    """Return the words of each policy."""
    return [
        words[start : start + size] for start in range(0, len(words) - size + 1, size)
    ]


def _script_arguments(words: Sequence[str]) -> ScriptArguments:
    algo, *numbers = words[:5]
    return ScriptArguments(algo, *map(int, numbers))
