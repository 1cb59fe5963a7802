"""Brief trouble under load: connections that are closed, pauses shorter than the timeout, a crowded host.

None of it may leave requests without limits for longer than it lasts.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rlaas_django import acheck, check, peek

from tests.support.internals import circuit_breaker, paused_background
from tests.support.outages import AVAILABLE_AGAIN, ROOMY
from tests.support.parallel import in_processes

pytestmark = pytest.mark.slow  # the long tier

THREADS, TASKS = 8, 32
PROCESSES = 48


@pytest.fixture(autouse=True)
def _no_background_jobs():
    with paused_background():
        yield


class Load:
    """Checks one after the other, in threads or in the tasks of an event loop, until it ends."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.width = THREADS if mode == "sync" else TASKS  # checks under way at once
        self.checked = self.degraded = 0
        self._lock, self._end = threading.Lock(), threading.Event()

    def __enter__(self) -> Load:
        works = [self._check_all] * THREADS if self.mode == "sync" else [lambda: asyncio.run(self._acheck_all())]
        self._threads = [threading.Thread(target=work) for work in works]
        for thread in self._threads:
            thread.start()
        self.wait_for(10 * self.width)
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_for(10 * self.width)
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, number: int) -> None:
        """Wait until so many more checks are done."""
        wanted, deadline = self.checked + number, time.monotonic() + 30
        while self.checked < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _count(self, decision) -> None:
        with self._lock:
            self.checked += 1
            self.degraded += decision.degraded

    def _check_all(self) -> None:
        while not self._end.is_set():
            self._count(check("alice", ROOMY))

    async def _acheck_all(self) -> None:
        async def repeat() -> None:
            while not self._end.is_set():
                self._count(await acheck("alice", ROOMY))

        await asyncio.gather(*[repeat() for _ in range(TASKS)])


@pytest.fixture(params=["sync", "async"])
def load(request) -> Load:
    return Load(request.param)


def test_closed_connections_cost_what_was_under_way(load, target, use_url, log_lines):
    """At most one decision per connection of threads, one batch per connection of a loop, and none that come after."""
    use_url(target.node.url)
    client, closed = target.node.client(), 0
    with load:
        for _ in range(20):
            closed += client.client_kill_filter(_type="normal", skipme=True)
            load.wait_for(20 * load.width)
    assert closed >= 20
    assert load.degraded <= (closed if load.mode == "sync" else closed * TASKS)
    assert not log_lines(AVAILABLE_AGAIN)  # the breaker was never open
    counted = peek("alice", ROOMY).current_count
    assert load.checked - load.degraded <= counted <= load.checked


def test_idle_connections_that_were_closed_cost_nothing(limiter, target, use_url):
    use_url(target.node.url)
    for n in range(5):
        assert limiter.check("alice", ROOMY).current_count == n
        target.node.client().client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.02)


@contextmanager
def client_pause(node, seconds: float) -> Iterator[None]:
    node.client().client_pause(int(1000 * seconds))
    yield
    time.sleep(seconds)


@contextmanager
def stopped_process(node, seconds: float) -> Iterator[None]:
    node.hang()
    yield
    time.sleep(seconds)
    node.resume()


@pytest.mark.parametrize("pause", [client_pause, stopped_process])
def test_a_pause_shorter_than_the_timeout_costs_nothing(pause, load, target, use_url):
    use_url(target.node.url, 2.0)
    with load:
        for _ in range(3):
            with pause(target.node, 0.5):
                pass
            load.wait_for(5 * load.width)
    assert load.degraded == 0


def test_a_crowded_host_decides_with_redis(target, use_url):
    """More busy processes than cores, and the default timeout."""
    use_url(target.node.url, 0.1)

    def burn(seconds: float) -> None:
        ends = time.thread_time() + seconds
        while time.thread_time() < ends:
            sum(range(200))

    async def tasks(ends: float) -> list[bool]:
        async def repeat() -> list[bool]:
            found = []
            while time.monotonic() < ends:
                burn(0.002)
                found.append((await acheck("alice", ROOMY)).degraded)
            return found

        return [*itertools.chain(*await asyncio.gather(repeat(), repeat()))]

    def work(n: int) -> list[bool]:
        ends, found = time.monotonic() + 4, []
        if n % 2:
            return asyncio.run(tasks(ends))
        while time.monotonic() < ends:
            burn(0.002)
            found.append(check("alice", ROOMY).degraded)
        return found

    degraded = [*itertools.chain(*in_processes(work, PROCESSES))]
    assert len(degraded) > 2 * PROCESSES
    assert sum(degraded) <= 0.25 * len(degraded)  # measured: none to 1 %
    assert circuit_breaker().error is None
