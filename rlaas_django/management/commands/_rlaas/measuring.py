"""Measure on a server what identities take: memory and time, with sample keys that are deleted afterwards."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from .... import backend, conf
from ....backend.commands import Call, pack
from ....core.algorithms import ALGORITHMS
from ....core.keys import EncodedIdentity
from ....core.policy import (
    Policy,
    Rate,
)
from ....limiter import PolicySet, plan
from ....runtime.clock import frozen_clock

MAX_LIMIT = 100_000  # that is filled; the logs of a larger one are extrapolated
MAX_STEPS = (
    1_000  # requests of an identity; under a larger limit each has more than one unit
)
CALLS, UNITS = 40_000, 200_000  # per algorithm, about
LEAST_SAMPLE, LARGEST_SAMPLE = 3, 5_000  # identities
CALLS_TOGETHER = 1_000
LEAST_TTL = 10 * 60_000  # ms
TIMEOUT = 30.0  # seconds
# What MEMORY USAGE leaves out of a key with an expiry, in bytes: its places in two hash tables, and rounding.
TABLES = 50
# The growth of the server's memory counts everything, but also what others do, and what the server frees meanwhile. So
# it counts only if it is so large, in bytes, and differs from MEMORY USAGE by no more than this share.
LEAST_GROWTH, PLAUSIBLE = 300_000, 0.25
WARM_UP = EncodedIdentity("plan=warm-up")


class Measured(NamedTuple):
    """What one algorithm takes."""

    algo: str
    bytes_per_identity: int
    decisions_per_second: int


class Sample:
    """Identities that use up their limit, under names of their own. A context manager, which deletes its keys."""

    def __init__(self, rate: Rate, cache: str) -> None:
        self.rate, self.topology = rate, backend.make_topology(cache, TIMEOUT)
        self._prefix, self._keys = f"plan-{secrets.token_hex(3)}", list[str]()
        self._numbers = itertools.count()
        self._limit, window = min(rate.limit, MAX_LIMIT), rate.window * 1000
        steps = min(self._limit, MAX_STEPS)
        self.size = max(
            LEAST_SAMPLE, min(CALLS // steps, UNITS // self._limit, LARGEST_SAMPLE)
        )
        self._chance = random.Random(1)  # noqa: S311  (no secret)
        self._start = (
            time.time_ns() // 1_000_000 // window * window
        )  # of a window, so that all are in the same
        self._costs = [
            self._limit // steps + (i < self._limit % steps) for i in range(steps)
        ]
        # Calls run in a thread, which Ctrl-C does not reach: of a message that is broken off, the server would still
        # run the rest, and make keys after they were deleted.
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Sample:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        calls = [Call(None, key, pack(("UNLINK", key))) for key in self._keys]
        for _attempt in range(2):  # again, where a connection was lost
            replies = backend.execute_each(self.topology, calls)
            calls = [
                call
                for call, reply in zip(calls, replies, strict=True)
                if isinstance(reply, Exception)
            ]
        self.topology.close()

    @property
    def calls(self) -> int:
        """How many calls an algorithm takes."""
        return self.size * len(self._costs)

    def measure(self, algo: str, progress: Callable[[int], None]) -> Measured:
        """Fill the sample under an algorithm, and return what it takes."""
        name = f"{self._prefix}{next(self._numbers)}"  # about as long as names are
        policy = Policy(name, (self._limit, self.rate.window), key="user", algo=algo)
        policies = PolicySet((policy,), conf.config(), self.topology)
        first, seconds = len(self._keys), 0.0
        self._keys.append(self._key(policies, WARM_UP))
        # Loads the script, and fills the buffers of our connection as the others will, which the server counts.
        warm_up = self._checks(policies, [WARM_UP])
        _raise_errors(self._execute(warm_up * (CALLS_TOGETHER // len(warm_up))))
        before = self._data_size()
        together = max(1, CALLS_TOGETHER // len(self._costs))
        for start in range(0, self.size, together):
            identities = [
                EncodedIdentity(f"plan={n:09}")
                for n in range(start, min(start + together, self.size))
            ]
            self._keys += (self._key(policies, identity) for identity in identities)
            calls = self._checks(policies, identities)
            started = time.perf_counter()
            _raise_errors(self._execute(calls))
            seconds += time.perf_counter() - started
            progress(len(calls))
        # Of all keys on the server, as the tables grow in steps.
        tables = backend.table_bytes_per_key(self.topology.servers()[0]) or TABLES
        grown = (self._data_size() - before) / self.size + tables
        calls = [
            Call(None, key, pack(("MEMORY", "USAGE", key)))
            for key in self._keys[first + 1 :]
        ]
        sizes = [
            size
            for size in self._execute(calls)
            if size and not isinstance(size, Exception)
        ]
        used = sum(sizes) / max(1, len(sizes)) + TABLES
        if grown * self.size >= LEAST_GROWTH and abs(grown - used) < PLAUSIBLE * used:
            used = grown
        if ALGORITHMS[algo].bytes_per_unit:
            used *= self.rate.limit / self._limit
        return Measured(algo, round(used), round(self.calls / seconds))

    def _checks(
        self, policies: PolicySet, identities: Iterable[EncodedIdentity]
    ) -> list[Call]:
        """Return the checks that use up the limits of some identities, each at times of its own, on a frozen clock."""
        calls: list[Call] = []
        with frozen_clock(0) as clock:
            for identity in identities:
                times = sorted(
                    self._chance.randrange(self.rate.window * 1000) for _ in self._costs
                )
                for time_in_window, cost in zip(times, self._costs, strict=True):
                    clock.ms = self._start + time_in_window
                    calls.append(plan(identity, policies, cost).pack())
        return calls

    def _key(self, policies: PolicySet, identity: str) -> str:
        (key,) = policies.keys((identity,))
        is_fixed = ALGORITHMS[policies.arguments[0].algo].is_aligned
        return f"{key}:{self._start // (self.rate.window * 1000)}" if is_fixed else key

    def _execute(self, calls: list[Call]) -> list[Any]:
        """Return the replies, or errors in their places."""
        return self._thread.submit(backend.execute_each, self.topology, calls).result()

    def _data_size(self) -> int:
        """Return the bytes of all keys and values on the servers, without hash tables and buffers."""
        infos = [backend.server_info(server) for server in self.topology.servers()]
        return sum(int(info.get("used_memory_dataset", 0)) for info in infos)


def _raise_errors(replies: Iterable[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
