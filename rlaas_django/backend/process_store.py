"""Counting in this process, where the cache is not on Redis.

A store decides as lua/driver.lua does; a `ProcessServer` stands before it where a
`Server` stands before Redis.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from itertools import chain
from time import monotonic
from typing import Any, ClassVar

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
NOT_CHARGED = -1  # in place of charged_at

Key = tuple[str, str]  # of a counter: its algorithm and its key in Redis
MARKER = ""  # in place of an algorithm

LOG_INTERVAL = 3600.0  # seconds


class ProcessStore:
    """The counters of this process, at most LOCAL_IDENTITIES."""

    def __init__(self, max_entries: int | None = None) -> None:
        self._max_entries = max_entries  # of a log; see Counter
        self.reset()

    def reset(self) -> None:
        """Start over; a thread of a forked parent may have held the lock."""
        self._lock = threading.Lock()
        self._counters: dict[Key, Counter] = {}
        # Each of them once, with a time before which it does not expire.
        self._queue: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._counters)

    def run(self, keys: Sequence[str], words: Sequence[Any]) -> Any:
        """Decide, refund or reset: as lua/driver.lua, with its arguments and replies.

        There are no overrides.
        """
        time, operation, unique, cost, *arguments = words
        now = int(time or local_time_ms())
        with self._lock:
            if operation == "reset":
                return self._reset(keys, now, arguments[::2])
            if operation == "refund":
                return self._refund(keys, now, unique, int(cost), arguments)
            charging = operation == "check"
            return self._check(keys, now, int(cost), arguments, charging)

    def _check(
        self,
        keys: Sequence[str],
        now: int,
        cost: int,
        words: Sequence[Any],
        charging: bool,
    ) -> list[int]:
        """Decide all policies, and charge all that pass or none."""
        rows = []
        passing = []
        passes = True
        for key, part in zip(keys, _parts(words, CHECK_SIZE), strict=False):
            arguments = _script_arguments(part)
            row = self._row(key, arguments, now, cost)
            rows.append(row)
            if row[0]:
                passing.append((row, key, arguments))
            elif int(part[5]) == 0:  # not a shadow policy
                passes = False

        if charging and cost and passes:
            for row, key, arguments in passing:
                row[2] -= cost
                row[4:] = self._charge(key, arguments, now, cost)
            self._evict()
        return [now, *chain.from_iterable(rows)]

    def _row(
        self, key: str, arguments: ScriptArguments, now: int, cost: int
    ) -> list[int]:
        """Return what the reply says of a policy that is not charged."""
        counter = self._counters.get((arguments.algo, key))
        usage = Usage(0, 0, 0)
        if counter is not None:
            usage = counter.check(arguments, now, cost)

        capacity = arguments.capacity
        remaining = capacity - usage.units
        allowed = cost <= remaining
        retry_after = 0
        if cost > capacity:
            retry_after = -1
        elif not allowed:
            retry_after = usage.wait
        return [
            int(allowed),
            usage.units,
            max(0, remaining),
            retry_after,
            usage.reset_after,
            capacity,
            NOT_CHARGED,
        ]

    def _charge(
        self, key: str, arguments: ScriptArguments, now: int, cost: int
    ) -> tuple[int, int, int]:
        """Charge, and return the end of the row."""
        counter = self._counters.get((arguments.algo, key))
        if counter is None:
            counter = ALGORITHMS[arguments.algo].counter()
            counter.max_entries = self._max_entries
            self._keep((arguments.algo, key), counter, now)

        charged_at = counter.charge(arguments, now, cost)
        reset_after = counter.check(arguments, now, 0).reset_after
        counter.expires_at = now + reset_after
        return reset_after, arguments.capacity, charged_at

    def _refund(
        self,
        keys: Sequence[str],
        now: int,
        unique: str,
        cost: int,
        words: Sequence[Any],
    ) -> list[int]:
        """Take back what a check charged; nothing where its marker is set already."""
        parts = _parts(words, REFUND_SIZE)
        if len(keys) > len(parts) and not self._mark(keys[-1], now, int(words[-1])):
            return []

        refunded = []
        for key, part in zip(keys, parts, strict=False):
            arguments = _script_arguments(part)
            charged_at = None  # the newest units
            if unique:
                charged_at = int(part[5])
            counter = self._counters.get((arguments.algo, key))
            units = 0
            if counter is not None:
                units = counter.refund(arguments, now, cost, charged_at)
            refunded.append(units)
        return refunded

    def _mark(self, key: str, now: int, ttl: int) -> bool:
        """Set a marker, and return whether it was not set yet."""
        marker = self._counters.get((MARKER, key))
        if marker is None:
            marker = Counter()
            self._keep((MARKER, key), marker, now)
        is_new = marker.expires_at <= now
        if is_new:
            marker.expires_at = now + ttl
        self._evict()
        return is_new

    def _reset(self, keys: Sequence[str], now: int, algorithms: Sequence[str]) -> int:
        """Delete counters; return how many counted something."""
        deleted = 0
        for key in zip(algorithms, keys, strict=True):
            counter = self._counters.get(key)
            if counter is not None and counter.expires_at > now:
                # In its place, as it is in the queue once.
                self._counters[key] = ALGORITHMS[key[0]].counter()
                deleted += 1
        return deleted

    def _keep(self, key: Key, counter: Counter, now: int) -> None:
        self._counters[key] = counter
        heapq.heappush(self._queue, (now, key))

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
    """Read a packed EVALSHA back, and run it on the store."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(call.packed)
    words: Any = reader.gets()
    end_of_keys = 3 + int(words[2])
    return process_store.run(words[3:end_of_keys], words[end_of_keys:])


def _parts(words: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return the words of each policy."""
    return [
        words[start : start + size] for start in range(0, len(words) - size + 1, size)
    ]


def _script_arguments(words: Sequence[Any]) -> ScriptArguments:
    algo, *numbers = words[:5]
    return ScriptArguments(algo, *map(int, numbers))
