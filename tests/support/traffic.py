"""Traffic in the background: checks by threads of one process and tasks of another, with a record of them."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

from django.conf import settings
from django.test import override_settings
from rlaas_django import Policy, acheck, check, peek

from tests.support.deployments import Node, wait_until
from tests.support.internals import ALGORITHMS, SLIDING_WINDOW, YEAR, Decision

TIMEOUT = 0.1  # seconds, as a site has it
SLACK = 0.4  # seconds that a server or a client may be kept from running by a busy machine
TICK = 0.005  # seconds; see Stalls
ROOMY = {algo: Policy(algo, (100_000, YEAR), algo=algo) for algo in ALGORITHMS}

Counted = tuple[str, str]  # a policy and an identity
Request = tuple[object, Policy | Sequence[Policy]]


class Made(NamedTuple):
    """A check that was made."""

    at: float  # seconds on the clock that processes share
    elapsed: float  # seconds
    took: float  # of them, those in which the machine let this process run
    counters: tuple[Counted, ...]
    allowed: bool
    degraded: bool


class Stalls:
    """The time in which this process was not let run: a thread that wants to wake every few ms notices.

    What is measured of a call is the limiter's time, and not what other processes took of the machine meanwhile.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stalls: list[tuple[float, float]] = []
        self.stop = stop
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.stop():
            began = time.monotonic()
            time.sleep(TICK)
            ended = time.monotonic()
            if ended - began > 3 * TICK:
                self.stalls.append((began + TICK, ended))

    def without(self, made: list[Made]) -> list[Made]:
        self.thread.join()
        return [each._replace(took=each.elapsed - self._within(each.at, each.at + each.elapsed)) for each in made]

    def _within(self, began: float, ended: float) -> float:
        return sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self.stalls)


class Load:
    """Checks these requests, in random order, from when it is entered until it is left.

    >>> with Load([("alice", policy)]) as load:
    ...     something_happens()
    >>> load.charges()["p", "alice"]
    """

    def __init__(self, requests: Sequence[Request], *, sync: int = 3, tasks: int = 6, pause: float = 0.004) -> None:
        self.requests, self.pause = requests, pause
        self.made: list[Made] = []
        context = multiprocessing.get_context("fork")
        self._stop, self._begun = context.Event(), context.Barrier(3)
        self._children = []
        for work in (self._in_threads(sync), self._in_tasks(tasks)):
            reader, writer = context.Pipe(duplex=False)
            self._children.append((context.Process(target=self._child, args=(work, writer)), reader, writer))

    def __enter__(self) -> Self:
        for process, _, writer in self._children:
            process.start()
            writer.close()  # so that a child that dies is an EOFError here
        self._begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        try:
            for _, reader, _ in self._children:
                self.made += reader.recv()
        finally:
            for process, reader, _ in self._children:
                process.join()
                reader.close()

    def _child(self, work: Callable[[], list[Made]], pipe) -> None:
        gc.freeze()  # to look through all that the tests have made would take longer than any request
        self._begun.wait(60)
        stalls = Stalls(self._stop.is_set)
        pipe.send(stalls.without(work()))

    def _in_threads(self, count: int) -> Callable[[], list[Made]]:
        def thread(n: int, made: list[Made]) -> None:
            rng = random.Random(n)
            while not self._stop.is_set():
                request, began = rng.choice(self.requests), time.monotonic()
                made.append(record(began, check(*request)))
                time.sleep(self.pause)

        def work() -> list[Made]:
            made: list[Made] = []
            threads = [threading.Thread(target=thread, args=(n, made)) for n in range(count)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            return made

        return work

    def _in_tasks(self, count: int) -> Callable[[], list[Made]]:
        async def task(n: int, made: list[Made]) -> None:
            rng = random.Random(-n)
            while not self._stop.is_set():
                request, began = rng.choice(self.requests), time.monotonic()
                made.append(record(began, await acheck(*request)))
                await asyncio.sleep(self.pause)

        async def work() -> list[Made]:
            made: list[Made] = []
            await asyncio.gather(*[task(n, made) for n in range(1, count + 1)])
            return made

        return lambda: asyncio.run(work())

    # The record

    def charges(self, since: float = 0, until: float = math.inf) -> Counter[Counted]:
        """Return how often each identity was allowed by Redis, and so charged, under each policy."""
        return Counter(
            counter
            for made in self.made
            if made.allowed and not made.degraded and since <= made.at < until
            for counter in made.counters
        )

    def checks(self) -> Counter[Counted]:
        return Counter(counter for made in self.made for counter in made.counters)

    def degraded(self) -> list[Made]:
        return [made for made in self.made if made.degraded]

    def timed_out(self) -> Counter[Counted]:
        """Return the checks without a reply in time: they may have been charged."""
        return Counter(made.counters[0] for made in self.degraded() if made.elapsed > 0.9 * TIMEOUT)

    @property
    def longest(self) -> float:
        return max(made.took for made in self.made)

    def slowest(self, since: float) -> list[tuple[float, Made]]:
        """Return the slowest checks, for a message: seconds after an event, and which."""
        return [(made.at - since, made) for made in sorted(self.made, key=lambda made: made.took)[-10:]]

    def longer_than(self, seconds: float) -> int:
        return sum(made.took > seconds for made in self.made)


def record(began: float, decision: Decision) -> Made:
    took = time.monotonic() - began
    counters = tuple((outcome.policy.name, outcome.identity) for outcome in decision.outcomes)
    return Made(began, took, took, counters, decision.allowed, decision.degraded)


def counted(identity: str, policy: Policy) -> int:
    """Return the count in Redis, which may take a moment to be available after a failure."""
    peeked: list[Decision] = []
    wait_until(lambda: peeked.append(peek(identity, policy)) or not peeked[-1].degraded, "Redis is available")
    return peeked[-1].current_count


@contextmanager
def long_timeout() -> Iterator[None]:
    """Make no check of this process degraded because the machine is busy."""
    with override_settings(RATE_LIMITER={**settings.RATE_LIMITER, "TIMEOUT": 20}):
        yield


CLOSED = Policy("closed", (300, YEAR), on_failure="closed")
EXACT = [Policy(f"exact-{algo}", (40, YEAR), algo=algo, on_failure="closed") for algo in ALGORITHMS]


class Failover:
    """A failover under traffic: a master is killed or stopped (`how`) while its identities, and others, are checked.

    Replication is asynchronous: a write that was acknowledged right before may be lost, and such a unit be admitted
    once more. So one identity is left alone until its writes are known to be on the replica: its counts are exact
    afterwards. Those of the others may lack what was charged in the last half second, and no more.
    """

    def __init__(self, victim: Node, how: str, settled: Callable[[], float], names: list[str], others: list[str]):
        alone, probe, *names = names
        self.names, self.others, self.alone = names, others, alone
        policies = (*ROOMY.values(), CLOSED)
        with Load([(name, policy) for name in names + others for policy in policies]) as self.load:
            time.sleep(1)
            with long_timeout():
                assert all(check(alone, policy).allowed for policy in EXACT for _ in range(25))
            wait_until(lambda: not check(probe, ROOMY[SLIDING_WINDOW]).degraded, "Redis is available")
            victim.client().set(f"{{{alone}}}", 1, ex=60)
            assert victim.client().wait(1, 3000) >= 1
            self.at = time.monotonic()
            getattr(victim, how)()
            with Load([(alone, policy) for policy in EXACT]) as self.waiting:
                settled()
                self.took = time.monotonic() - self.at
                wait_until(lambda: not check(probe, ROOMY[SLIDING_WINDOW]).degraded, "Redis is available again")
                self.back = time.monotonic() - self.at
                time.sleep(2)

    def assert_right(self) -> None:
        self._assert_exact()
        charges, checks, timed_out = self.load.charges(), self.load.checks(), self.load.timed_out()
        recent = self.load.charges(self.at - 0.5, self.at + TIMEOUT)
        self.lost = 0
        for (policy, name), charged in charges.items():
            found = counted(name, ROOMY.get(policy, CLOSED))
            assert found <= checks[policy, name]
            if name in self.others:
                assert 0 <= found - charged <= timed_out[policy, name]
            else:
                self.lost += max(0, charged - found)
                assert charged - recent[policy, name] <= found
            if policy == CLOSED.name:
                assert charged <= CLOSED.capacity + (recent[policy, name] if name in self.names else 0)
        degraded = self.load.degraded()
        self.last_degraded = max(made.at for made in degraded) - self.at
        self.admitted = sum(made.allowed for made in degraded)
        assert self.admitted == sum(made.counters[0][0] != CLOSED.name for made in degraded) > 0
        # The servers may be kept from running for a moment; if checks waited for Redis twice, many would be longer.
        assert self.load.longer_than(TIMEOUT + 0.05) <= len(self.load.made) / 200, self.load.slowest(self.at)
        assert self.load.longest < TIMEOUT + 2 * SLACK, self.load.slowest(self.at)

    def _assert_exact(self) -> None:
        """Check that a policy that fails closed admits its limit and not one more."""
        charges, timed_out = self.waiting.charges(), self.waiting.timed_out()
        for policy in EXACT:
            admitted = 25 + charges[policy.name, self.alone]
            assert counted(self.alone, policy) == policy.capacity
            assert 0 <= policy.capacity - admitted <= timed_out[policy.name, self.alone]
        assert not any(made.allowed for made in self.waiting.degraded())

    def __str__(self) -> str:
        over = self.load.longer_than(TIMEOUT + 0.05)
        return (
            f"new master after {self.took:.1f} s, available after {self.back:.1f} s, "
            f"last degraded check after {self.last_degraded:.1f} s; {len(self.load.made)} checks, "
            f"longest {self.load.longest * 1000:.0f} ms, {over} over {TIMEOUT * 1000:.0f} + 50 ms; "
            f"{self.admitted} admitted while degraded; {self.lost} acknowledged units lost"
        )
