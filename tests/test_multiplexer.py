"""A loop's one connection, on asyncio's own loop and on uvloop's, which uvicorn takes where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import warnings

import pytest

from rlaas_django import Policy, acheck, backend
from rlaas_django.channel import MOST_IN_FLIGHT
from rlaas_django.policy import SLIDING_WINDOW_COMPACT, YEAR
from tests.deployments import wait_until
from tests.faults import Proxy
from tests.test_backend import onlooker, own, start, use  # noqa: F401

ROOMY = Policy("roomy", (100_000, YEAR), algo=SLIDING_WINDOW_COMPACT)
LOOPS = ["asyncio"] if sys.platform == "win32" else ["asyncio", "uvloop"]


@pytest.fixture(params=LOOPS)
def run(request):
    """Run something on a loop of this kind, which lasts as long as the test."""
    make = asyncio.new_event_loop
    if request.param == "uvloop":
        import uvloop

        make = uvloop.new_event_loop
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with asyncio.Runner(loop_factory=make) as runner:
            yield runner.run


def ours(url: str) -> int:
    """How many connections the server has, but for the one that asks."""
    with onlooker(url) as client:
        return len(client.client_list()) - 1


def test_many_more_than_may_be_in_flight_each_get_their_own_answer(own, run):  # noqa: F811
    number = 5 * MOST_IN_FLIGHT

    async def main():
        first = await asyncio.gather(*(acheck(f"user{n}", ROOMY, cost=n % 7 + 1) for n in range(number)))
        again = await asyncio.gather(*(acheck(f"user{n}", ROOMY, cost=0) for n in range(number)))
        return first, again

    first, again = run(main())
    assert [each.outcomes[0].identity for each in first] == [f"user{n}" for n in range(number)]
    assert [each.current_count for each in again] == [n % 7 + 1 for n in range(number)]
    assert not any(each.degraded for each in (*first, *again))
    assert ours(own.url) == 1


def test_cancelled_tasks_leave_no_reply_to_others(own, run):  # noqa: F811
    rng = random.Random(3)

    async def main():
        for i in range(300):
            cancelled = [asyncio.create_task(acheck("victim", ROOMY, cost=rng.randint(1, 9))) for _ in range(5)]
            kept = [asyncio.create_task(acheck(f"kept{i}-{n}", ROOMY, cost=n)) for n in range(1, 4)]
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
            for task in cancelled:
                task.cancel()
            for n, decision in enumerate(await asyncio.gather(*kept), 1):
                assert (decision.remaining, decision.degraded) == (100_000 - n, False)
            await asyncio.gather(*cancelled, return_exceptions=True)

    run(main())
    assert backend.site().master.breaker.error is None


@pytest.mark.parametrize("connected", [True, False])
def test_a_whole_batch_that_was_cancelled_keeps_nobody_waiting(own, run, connected):  # noqa: F811
    async def main():
        if connected:
            await acheck("alice", ROOMY)
        tasks = [asyncio.create_task(acheck(f"user{n}", ROOMY)) for n in range(3 * MOST_IN_FLIGHT)]
        await asyncio.sleep(0)
        first = MOST_IN_FLIGHT if connected else 0
        for task in tasks[first : first + MOST_IN_FLIGHT]:
            task.cancel()
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        return [each for each in told if not isinstance(each, asyncio.CancelledError)]

    decisions = run(main())
    assert len(decisions) == 2 * MOST_IN_FLIGHT
    assert not any(each.degraded for each in decisions)


def test_a_server_that_hangs_is_left_alone_though_nobody_waits_until_the_end(own, use, run, configure):  # noqa: F811
    configure(TIMEOUT=1)
    with Proxy(own.url) as proxy:
        use(proxy.url)

        async def impatient():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.6):
                    await acheck("alice", ROOMY)

        async def main():
            assert not (await acheck("alice", ROOMY)).degraded
            proxy.drop(of="EVALSHA")
            for _ in range(20):
                await impatient()
                await asyncio.sleep(0.1)
                if backend.site().master.breaker.error is not None:
                    return True
            return False

        assert run(main())


def test_who_waits_for_too_long_for_a_turn_is_told_so(own, run, monkeypatch):  # noqa: F811
    monkeypatch.setattr("rlaas_django.channel.LONGEST_WAIT", -1.0)

    async def main():
        return await acheck("alice", ROOMY)

    assert run(main()).degraded
    assert backend.site().master.breaker.error is None  # the server is not to blame


def test_a_connection_that_the_server_closed_while_nobody_asked_is_replaced(own, run):  # noqa: F811
    async def main():
        for n in range(5):
            assert (await acheck("alice", ROOMY)).current_count == n
            with onlooker(own.url) as client:
                client.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.02)

    run(main())


def test_a_reply_that_does_not_come_fails_all_in_flight_in_time_and_the_next_go_on(own, use, run, configure):  # noqa: F811
    configure(TIMEOUT=1)
    with Proxy(own.url) as proxy:
        use(proxy.url)

        async def some(number: int):
            return await asyncio.gather(*(acheck(f"user{n}", ROOMY) for n in range(number)))

        async def main():
            assert not (await acheck("alice", ROOMY)).degraded
            proxy.drop(of="EVALSHA")
            began = asyncio.get_running_loop().time()
            assert all(each.degraded for each in await some(3 * MOST_IN_FLIGHT))
            assert asyncio.get_running_loop().time() - began < 10
            proxy.pass_all()
            its = backend.site().master.breaker
            while its.error is not None:
                await asyncio.sleep(0.05)
                await acheck("alice", ROOMY)
            assert not any(each.degraded for each in await some(50))

        run(main())


def test_a_loop_that_ends_closes_its_connection(own, run):  # noqa: F811
    run(acheck("alice", ROOMY))
    assert ours(own.url) == 1
    with asyncio.Runner() as another:
        another.run(acheck("alice", ROOMY))
        assert ours(own.url) == 2
    wait_until(lambda: ours(own.url) == 1, "the connection of the loop that ended is closed")
