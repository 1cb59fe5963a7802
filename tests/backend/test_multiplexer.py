"""The shared connection of an event loop, on asyncio's own loop and on uvloop's, which uvicorn uses if installed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
import sys
import time
import warnings
import weakref

import pytest
from rlaas_django import Policy, acheck
from rlaas_django.backend.multiplexer import MAX_BATCH

from tests.support.deployments import wait_until
from tests.support.faults import Proxy
from tests.support.internals import SLIDING_WINDOW_COMPACT, YEAR, single_server
from tests.support.observation import observer

pytestmark = pytest.mark.slow  # the long tier

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


def connections(url: str) -> int:
    """Return how many connections the server has, but for the one that counts them."""
    with observer(url) as client:
        return len(client.client_list()) - 1


def test_more_commands_than_a_batch_holds_each_get_their_own_reply(own, run):
    number = 5 * MAX_BATCH

    async def main():
        first = await asyncio.gather(*(acheck(f"user{n}", ROOMY, cost=n % 7 + 1) for n in range(number)))
        again = await asyncio.gather(*(acheck(f"user{n}", ROOMY, cost=0) for n in range(number)))
        return first, again

    first, again = run(main())
    assert [each.outcomes[0].identity for each in first] == [f"user{n}" for n in range(number)]
    assert [each.current_count for each in again] == [n % 7 + 1 for n in range(number)]
    assert not any(each.degraded for each in (*first, *again))
    assert connections(own.url) == 1


def test_the_connection_keeps_nothing_of_the_request_that_opened_it(own, run):
    """Or a request's id, which is a context variable, would stand in the log lines of all requests after it."""
    request_id = contextvars.ContextVar("request_id", default="none")

    class Value:
        """What nobody else refers to."""

    async def main():
        request_id.set(value := Value())
        reference = weakref.ref(value)
        await acheck("alice", ROOMY)
        return reference

    async def later():
        await acheck("alice", ROOMY)
        gc.collect()

    reference = run(main(), context=contextvars.Context())
    run(later(), context=contextvars.Context())
    assert reference() is None


def test_a_reply_to_a_cancelled_task_reaches_no_other(own, run):
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
    assert single_server().breaker.error is None


@pytest.mark.parametrize("connected", [True, False])
def test_a_batch_of_cancelled_commands_keeps_nobody_waiting(own, run, connected):
    async def main():
        if connected:
            await acheck("alice", ROOMY)
        tasks = [asyncio.create_task(acheck(f"user{n}", ROOMY)) for n in range(3 * MAX_BATCH)]
        await asyncio.sleep(0)
        first = MAX_BATCH if connected else 0
        for task in tasks[first : first + MAX_BATCH]:
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        return [each for each in results if not isinstance(each, asyncio.CancelledError)]

    decisions = run(main())
    assert len(decisions) == 2 * MAX_BATCH
    assert not any(each.degraded for each in decisions)


def test_a_timeout_opens_the_breaker_though_no_caller_waits_for_it(own, use, run, configure):
    configure(TIMEOUT=1)
    with Proxy(own.url) as proxy:
        use(proxy.url)

        async def give_up_early():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.6):
                    await acheck("alice", ROOMY)

        async def main():
            assert not (await acheck("alice", ROOMY)).degraded
            proxy.drop(of="EVALSHA")
            for _ in range(20):
                await give_up_early()
                await asyncio.sleep(0.1)
                if single_server().breaker.error is not None:
                    return True
            return False

        assert run(main())


def test_a_connection_that_the_server_closed_while_idle_is_replaced(own, run):
    async def main():
        for n in range(5):
            assert (await acheck("alice", ROOMY)).current_count == n
            with observer(own.url) as client:
                client.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.02)

    run(main())


def test_calls_that_wait_for_a_connection_that_breaks_go_out_on_the_next(own, use, run):
    with Proxy(own.url) as proxy:
        use(proxy.url)

        async def main():
            assert not (await acheck("alice", ROOMY)).degraded
            proxy.drop(of="EVALSHA", close=True)
            tasks = [asyncio.create_task(acheck(f"user{n}", ROOMY)) for n in range(3 * MAX_BATCH)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            proxy.pass_all()
            return await asyncio.gather(*tasks)

        decisions = run(main())
        assert all(each.degraded for each in decisions[:MAX_BATCH])
        assert not any(each.degraded for each in decisions[2 * MAX_BATCH :])
        assert single_server().breaker.error is None


def test_a_lost_reply_fails_the_batch_in_time_and_the_next_succeed(own, use, run, configure):
    configure(TIMEOUT=1)
    with Proxy(own.url) as proxy:
        use(proxy.url)

        async def some(number: int):
            return await asyncio.gather(*(acheck(f"user{n}", ROOMY) for n in range(number)))

        async def main():
            assert not (await acheck("alice", ROOMY)).degraded
            proxy.drop(of="EVALSHA")
            began = asyncio.get_running_loop().time()
            assert all(each.degraded for each in await some(3 * MAX_BATCH))
            assert asyncio.get_running_loop().time() - began < 10
            proxy.pass_all()
            breaker = single_server().breaker
            while breaker.error is not None:
                await asyncio.sleep(0.05)
                await acheck("alice", ROOMY)
            assert not any(each.degraded for each in await some(50))

        run(main())


def test_a_loop_that_ends_closes_its_connection(own, run):
    run(acheck("alice", ROOMY))
    assert connections(own.url) == 1
    with asyncio.Runner() as another:
        another.run(acheck("alice", ROOMY))
        assert connections(own.url) == 2
    wait_until(lambda: connections(own.url) == 1, "the connection of the loop that ended is closed")


def test_a_loop_that_was_blocked_loses_no_reply(own, run, configure):
    """The time limit passes while the loop cannot read; what has arrived by then is read."""
    configure(TIMEOUT=0.4)

    async def main():
        decisions, stop = [], False

        async def work(n):
            while not stop:
                decisions.append(await acheck(f"user{n}", ROOMY, cost=0))

        async def until(fact):
            async with asyncio.timeout(30):
                while not fact():  # noqa: ASYNC110  (the loop has to be busy)
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(work(n)) for n in range(40)]
        for _ in range(3):
            before = len(decisions)
            await until(lambda: len(decisions) > before + 200)  # noqa: B023
            time.sleep(0.5)  # noqa: ASYNC251
        stop = True
        await asyncio.gather(*tasks)
        return decisions

    assert not [decision for decision in run(main()) if decision.degraded]
    assert single_server().breaker.error is None
