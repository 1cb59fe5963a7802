"""One deadline per call: connecting, waiting for a connection, further attempts and the reply share TIMEOUT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import redis
from rlaas_django import acheck, check

from tests.support.deployments import HOST
from tests.support.faults import CHUNK, Loopback, messages
from tests.support.internals import (
    ConnectionOptions,
    DiscoveredTopology,
    UnavailableError,
    backend,
    breaker_module,
    call_now,
    check_plan,
    connection_pool,
    paused_background,
)
from tests.support.outages import ROOMY, TIMEOUT, timed

pytestmark = pytest.mark.slow  # the long tier

STEP = 0.9 * TIMEOUT  # each step is in time, and two of them are not
LATE = TIMEOUT + 0.05
ATTEMPTS = 3  # a busy machine may delay some of them


@pytest.fixture(autouse=True)
def _no_background_jobs():
    with paused_background():
        yield


@pytest.fixture
def no_skipped_calls(monkeypatch):
    """Circuit breakers that skip no call."""
    monkeypatch.setattr(breaker_module, "FIRST_INTERVAL", 0.0)
    monkeypatch.setattr(breaker_module, "MAX_INTERVAL", 0.0)


def fastest(work: Callable[[], bool]) -> float:
    """Return the seconds of the fastest of some attempts, each of which has to be degraded."""
    attempts = [timed(work) for _ in range(ATTEMPTS)]
    assert all(degraded for _, degraded in attempts)
    return min(seconds for seconds, _ in attempts)


def test_the_steps_of_a_new_connection_share_the_time_of_the_call(limiter, target, use_url, no_skipped_calls):
    use_url(target.proxy.url, TIMEOUT)
    target.proxy.delay(STEP)
    assert fastest(lambda: limiter.check("alice", ROOMY).degraded) < LATE


def test_a_slow_reply_on_a_new_connection_has_what_connecting_left(limiter, use_url, no_skipped_calls):
    class SlowServer(Loopback):
        """It replies to AUTH at the end of the first step, and to a call one step later."""

        async def serve(self, reader, writer):
            data = bytearray()
            while chunk := await reader.read(CHUNK):
                data += chunk
                for message in messages(data):
                    if b"CLIENT" not in message:
                        await asyncio.sleep(STEP)
                    writer.write(b"*8\r\n" + 8 * b":1\r\n" if b"EVALSHA" in message else b"+OK\r\n")

    with SlowServer() as server:
        use_url(server.url.replace("//", "//:secret@"), TIMEOUT)
        assert fastest(lambda: limiter.check("alice", ROOMY).degraded) < LATE


def test_a_script_that_the_server_lacks_shares_the_time_of_the_call(limiter, target, use_url, no_skipped_calls):
    use_url(target.proxy.url, TIMEOUT)

    def work() -> bool:
        target.proxy.pass_all()
        while limiter.check("alice", ROOMY).degraded:
            pass
        target.node.client().script_flush()
        target.proxy.delay(STEP)
        began = time.monotonic()
        degraded = limiter.check("alice", ROOMY).degraded
        elapsed.append(time.monotonic() - began)
        return degraded

    elapsed: list[float] = []
    fastest(work)
    assert min(elapsed) < LATE


def test_waiting_for_a_connection_takes_no_longer_than_the_timeout(target, use_url):
    use_url(target.node.url, TIMEOUT, max_connections=1)
    assert not check("alice", ROOMY).degraded
    pool = connection_pool()
    held = pool.acquire(call_now())
    assert fastest(lambda: check("alice", ROOMY).degraded) < LATE
    pool.discard(held)


def test_the_first_request_s_wait_for_the_topology_is_part_of_its_time(target):
    class SlowTopology(DiscoveredTopology):
        no_server = "none"

        def discover(self) -> None:
            time.sleep(STEP)
            address = {"host": HOST, "port": target.proxy.port}
            self.master = backend.Server(ConnectionOptions.of(redis.Connection, address, 10), TIMEOUT)

    def work() -> bool:
        topology = SlowTopology("slow", TIMEOUT)
        with pytest.raises(UnavailableError):
            backend.execute(topology, check_plan("alice", ROOMY, 1).pack())
        return True

    async def awork() -> None:
        topology = SlowTopology("slow", TIMEOUT)
        with pytest.raises(UnavailableError):
            await backend.aexecute(topology, check_plan("alice", ROOMY, 1).pack())

    target.proxy.delay(STEP)
    assert fastest(work) < LATE
    assert fastest(lambda: asyncio.run(awork()) is None) < LATE


async def test_a_task_behind_a_slow_batch_waits_one_timeout(target, use_url):
    """The reply to the batch before takes most of its time."""
    use_url(target.proxy.url, TIMEOUT)
    elapsed = []
    for _ in range(ATTEMPTS):
        target.proxy.pass_all()
        assert not (await acheck("alice", ROOMY)).degraded
        target.proxy.delay(STEP)
        first = asyncio.create_task(acheck("alice", ROOMY))
        await asyncio.sleep(0.02)
        began = time.monotonic()
        assert (await acheck("bob", ROOMY)).degraded
        elapsed.append(time.monotonic() - began)
        assert not (await first).degraded
    assert min(elapsed) < LATE


async def test_a_reply_that_comes_too_late_reaches_nobody_and_is_not_refunded(target, use_url):
    use_url(target.proxy.url, TIMEOUT)
    assert not (await acheck("alice", ROOMY)).degraded
    target.proxy.delay(STEP)
    first = asyncio.create_task(acheck("bob", ROOMY))
    await asyncio.sleep(0.05)
    assert (await acheck("alice", ROOMY, cost=5)).degraded
    assert not (await first).degraded
    target.proxy.pass_all()
    await asyncio.sleep(2 * TIMEOUT)
    decision = await acheck("alice", ROOMY)
    assert (decision.degraded, decision.current_count) == (False, 6)
