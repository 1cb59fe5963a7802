"""Cancelled requests: Django cancels a request under ASGI when its client hangs up.

What it was charged is refunded, unless its view has begun: or clients that hang up would use up limits that they share
with others, by requests that another limit refuses.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory
from rlaas_django import Policy, acheck, apeek, arefund, check, rate_limit
from rlaas_django.middleware import RateLimitMiddleware
from rlaas_django.signals import backend_failed, rate_limited

from tests.support.cancellation import MOMENTS, assert_soon_charged, cancelled
from tests.support.internals import FIXED_WINDOW, SLIDING_WINDOW, YEAR, acheck_each, check_plan, script_for

SITE, OWN = Policy("site", (1000, YEAR), key="global"), Policy("own", (2, YEAR), key="ip")
CLIENT = {"global": "", "ip": "127.0.0.1"}


async def each_wait(client, make, used: int = 0):
    """Run what `make` returns again and again, cancelled one wait later each time, until there is none left.

    Each time begins with `used` units of the policy OWN, and of no other.
    """
    for moment in MOMENTS:
        for n in itertools.count():
            client.flushdb()
            await acheck(CLIENT, OWN, cost=used)
            if not await cancelled(make(), n, moment):
                break
            yield f"{moment}, wait {n}"
        assert n > 0


async def assert_charged(policy: Policy, units: int, when: str) -> None:
    await assert_soon_charged(CLIENT, policy, units, when)


@pytest.fixture
def receiver():
    """A receiver of our signals, which waits."""

    async def receive(**kwargs):
        await asyncio.sleep(0)

    for signal in (rate_limited, backend_failed):
        signal.connect(receive)
    yield receive
    for signal in (rate_limited, backend_failed):
        signal.disconnect(receive)


async def view(request):
    request.begun = True
    await asyncio.sleep(0)
    return HttpResponse("ok")


def stacked(request):
    return rate_limit(SITE)(rate_limit(OWN)(view))(request)


def behind_middleware(request, limited=None):
    """A rule of the middleware, then another middleware, then a limit that is decided by itself."""
    limited = limited or rate_limit(OWN, charge_when=lambda response: True)(view)

    async def get_response(request):
        await asyncio.sleep(0)
        await middleware.process_view(request, limited, (), {})
        return await limited(request)

    middleware = RateLimitMiddleware(get_response)
    return middleware(request)


@pytest.fixture(params=[stacked, behind_middleware])
def run(request, rule):
    return request.param


@pytest.fixture
def rule(configure):
    configure(POLICIES={"site": {"rate": SITE.rate, "key": "global"}}, MIDDLEWARE=[{"path": "/", "policies": ["site"]}])


# Django 6.1 does not close the coroutine of a receiver whose task is cancelled before it begins.
@pytest.mark.filterwarnings("ignore:coroutine 'Signal.asend_robust:RuntimeWarning")
async def test_a_refused_request_costs_nothing_whenever_it_is_cancelled(client, run, receiver):
    async for when in each_wait(client, lambda: run(AsyncRequestFactory().get("/")), used=2):
        await assert_charged(SITE, 0, when)
        await assert_charged(OWN, 2, when)


async def test_a_cancelled_request_is_charged_once_its_view_has_begun(client, run):
    requests = []

    def make():
        requests.append(AsyncRequestFactory().get("/"))
        return run(requests[-1])

    async for when in each_wait(client, make):
        begun = int(hasattr(requests[-1], "begun"))
        await assert_charged(SITE, begun, when)
        await assert_charged(OWN, begun, when)
    assert {hasattr(each, "begun") for each in requests} == {True, False}


async def test_a_view_that_only_the_middleware_limits_is_charged_once_it_has_begun(client, rule):
    requests = []

    def make():
        requests.append(AsyncRequestFactory().get("/"))
        return behind_middleware(requests[-1], view)

    async for when in each_wait(client, make):
        await assert_charged(SITE, int(hasattr(requests[-1], "begun")), when)
    assert {hasattr(each, "begun") for each in requests} == {True, False}


async def test_a_cancelled_check_is_refunded(client, algo):
    policy = Policy("p", (1000, YEAR), key="ip", algo=algo)
    async for when in each_wait(client, lambda: acheck(CLIENT, policy, cost=3)):
        await assert_charged(policy, 0, when)


async def test_a_cancelled_batch_is_refunded(client):
    def make():
        return acheck_each([check_plan(CLIENT, policy, 1) for policy in (SITE, OWN)])

    async for when in each_wait(client, make):
        await assert_charged(SITE, 0, when)
        await assert_charged(OWN, 0, when)


async def test_a_cancelled_batch_is_refunded_where_one_script_was_not_loaded(client):
    other = Policy("other", (1000, YEAR), key="ip", algo=FIXED_WINDOW)

    def make():
        client.script_flush()
        client.script_load(script_for(SLIDING_WINDOW).text)
        return acheck_each([check_plan(CLIENT, policy, 1) for policy in (SITE, other)])

    # So many turns of the loop later, as the waits are those of inner tasks; some times each, as the server's vary.
    for turns in itertools.chain.from_iterable([turns] * 4 for turns in itertools.count(1)):
        client.flushdb()
        task = asyncio.ensure_future(make())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            break
        await asyncio.wait([task])
        await assert_charged(SITE, 0, f"turn {turns}")
        await assert_charged(other, 0, f"turn {turns}")
    assert turns > 5


async def test_a_cancelled_check_is_refunded_where_the_script_was_not_loaded(client):
    def make():
        client.script_flush()
        return acheck(CLIENT, SITE)

    async for when in each_wait(client, make):
        await assert_charged(SITE, 0, when)


async def test_a_refund_is_made_though_its_caller_is_cancelled(client):
    async for when in each_wait(client, lambda: arefund(check(CLIENT, SITE))):
        await assert_charged(SITE, 0, when)


async def test_a_cancelled_check_is_refunded_by_the_local_fallback(redis_unavailable, receiver):
    await acheck(CLIENT, OWN)  # opens the circuit breaker; the next ones wait for the receiver alone, or for a probe
    for n in range(2):
        policy = Policy(f"p{n}", "5/m", key="ip", on_failure="local")
        if await cancelled(acheck(CLIENT, policy), n, "at once"):
            await asyncio.sleep(0)
            assert (await apeek(CLIENT, policy)).current_count == 0
