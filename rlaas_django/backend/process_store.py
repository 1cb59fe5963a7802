"""Counting in this process, where the cache is not on Redis.

A store decides as lua/driver.lua does; a `ProcessServer` stands before it where a
`Server` stands before Redis.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, ClassVar

import hiredis

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.counters import Counter
from ..core.policy import ScriptArguments
from ..runtime import log, process
from ..runtime.clock import local_time_ms
from .circuit_breaker import CircuitBreaker
from .commands import Call
from .errors import UnavailableError, not_on_redis
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

    def __init__(self, max_entries: float = math.inf) -> None:
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
        time, operation, unique, cost, *policies = words
        now = int(time or local_time_ms())
        with self._lock:
            if operation == "reset":
                return self._reset(keys, now, policies[::2])
            if operation == "refund":
                return self._refund(keys, now, unique, int(cost), policies)
            charging = operation == "check"
            return self._check(keys, now, int(cost), policies, charging)

    def _check(
        self,
        keys: Sequence[str],
        now: int,
        cost: int,
        words: Sequence[Any],
        charging: bool,
    ) -> list[int]:
        """Decide all policies, and charge all that pass or none."""
        charging = charging and cost > 0
        decided = []
        for key, arguments, is_shadow in _parts(keys, words, CHECK_SIZE):
            counter = self._counter(key)
            capacity = arguments.capacity
            usage = counter.check(arguments, now, min(cost, capacity))
            allowed = usage.units + cost <= capacity
            charging = charging and (allowed or is_shadow > 0)
            decided.append((key, counter, arguments, usage, allowed))

        reply = [now]
        for key, counter, arguments, usage, allowed in decided:
            capacity = arguments.capacity
            units = usage.units
            remaining = max(0, capacity - units)
            charged_at = NOT_CHARGED
            if charging and allowed:
                charged_at = counter.charge(arguments, now, cost)
                counter.is_charged = True
                remaining -= cost
                usage = counter.check(arguments, now, 0)
                # A window after it counts nothing, as the clock may step back.
                counter.expires_at = now + usage.reset_after + arguments.window
                self._keep(key, counter, now)

            retry_after = usage.wait
            if cost > capacity:
                retry_after = -1
            reply += (int(allowed), units, remaining, retry_after)
            reply += (usage.reset_after, capacity, charged_at)
        return reply

    def _refund(
        self,
        keys: Sequence[str],
        now: int,
        unique: str,
        cost: int,
        words: Sequence[Any],
    ) -> list[int]:
        """Take back what a check charged; nothing where its marker is set already."""
        has_marker = len(words) % REFUND_SIZE > 0
        if has_marker and not self._mark(keys[-1], now, int(words[-1])):
            return []

        refunded = []
        for key, arguments, stamp in _parts(keys, words, REFUND_SIZE):
            charged_at = None  # the newest units
            if unique:
                charged_at = stamp
            counter = self._counter(key)
            units = 0
            if charged_at is None or charged_at >= counter.reset_at:
                units = counter.refund(arguments, now, cost, charged_at)
            refunded.append(units)
        return refunded

    def _mark(self, key: str, now: int, ttl: int) -> bool:
        """Set a marker, and return whether it was not set yet."""
        marker = self._counters.get((MARKER, key), Counter())
        is_new = marker.expires_at <= now
        if is_new:
            marker.expires_at = now + ttl
            self._keep((MARKER, key), marker, now)
        return is_new

    def _reset(self, keys: Sequence[str], now: int, algorithms: Sequence[str]) -> int:
        """Delete counters; return how many there were."""
        deleted = 0
        for key in zip(algorithms, keys, strict=True):
            counter = self._counter(key)
            if counter.is_charged and counter.expires_at > now:
                # In its place, as it is in the queue once, and for as long, as what
                # was charged to the old one may still be refunded.
                self._counters[key] = empty = self._new(key)
                empty.expires_at = counter.expires_at
                empty.reset_at = now
                deleted += 1
        return deleted

    def _counter(self, key: Key) -> Counter:
        """Return a counter, or a new one that is not kept yet."""
        return self._counters.get(key) or self._new(key)

    def _new(self, key: Key) -> Counter:
        counter = ALGORITHMS[key[0]].counter()
        counter.max_entries = self._max_entries
        return counter

    def _keep(self, key: Key, counter: Counter, now: int) -> None:
        """Keep a counter, and make room for it if it is new."""
        if key not in self._counters:
            self._drop_expired(now)
            heapq.heappush(self._queue, (counter.expires_at, key))
        self._counters[key] = counter

    def _drop_expired(self, now: int) -> None:
        """Drop what has expired, and what expires soonest where the store is full."""
        most = conf.config().local_identities
        while self._queue and (self._queue[0][0] <= now or len(self._counters) >= most):
            expected, key = heapq.heappop(self._queue)
            expires_at = self._counters[key].expires_at
            if expires_at > expected:
                heapq.heappush(self._queue, (expires_at, key))
            else:
                del self._counters[key]


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
        if call.calls is not None:
            return [self.send(part) for part in call.calls]
        if call.script in (None, OVERRIDE, RECORD):
            raise UnavailableError(f"This needs Redis. {not_on_redis(self.alias)}")

        call.sent_at = monotonic()
        if call.sent_at >= ProcessServer._next_line:
            self._log(call.sent_at)
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


def _parts(
    keys: Sequence[str], words: Sequence[Any], size: int
) -> Iterator[tuple[Key, ScriptArguments, int]]:
    """Yield the key and the arguments of each policy, and the word after these."""
    for index in range(len(words) // size):
        algo, *numbers = words[size * index : size * index + REFUND_SIZE]
        *arguments, last = map(int, numbers)
        yield (algo, keys[index]), ScriptArguments(algo, *arguments), last
