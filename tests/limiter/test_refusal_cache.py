"""Cached refusals: as exact as Redis' own, for a second at most."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import time

import pytest
from django.http import HttpResponse
from django.test import override_settings
from django.views.decorators.cache import never_cache
from rlaas_django import Policy, acheck, arefund, areset, backend, check, peek, rate_limit, refund, reset
from rlaas_django.limiter import overrides, refusal_cache
from rlaas_django.testing import embedded_redis, frozen_clock

from tests.support.http import OURS, both_ways
from tests.support.internals import (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    YEAR,
    EncodedIdentity,
    cached_refusals,
    paused_background,
)
from tests.support.observation import commands_sent

POLICY = Policy("p", "2/h")


@pytest.fixture
def now(monkeypatch):
    """This process' clock, to be moved on."""
    moved = [0.0]
    real = time.monotonic
    for module in (time, refusal_cache):
        monkeypatch.setattr(module, "monotonic", lambda: real() + moved[0])

    def move(seconds: float) -> None:
        moved[0] += seconds

    return move


def use_up(check, policy=POLICY, identity="alice"):
    """Return the first refusal."""
    for _ in range(10):
        decision = check(identity, policy)
        if not decision.allowed:
            return decision
    raise AssertionError


def test_a_refusal_is_repeated_without_a_call(own, limiter):
    first = use_up(limiter.check)
    with commands_sent(own.url) as seen:
        again = [limiter.check("alice", POLICY) for _ in range(20)]
    assert seen == []
    for decision in again:
        assert not decision.allowed
        assert not decision.degraded
        assert (decision.limit, decision.remaining, decision.current_count) == (2, 0, 2)
        assert decision.policy == POLICY
        assert 0 < first.retry_after - decision.retry_after < 5
        assert decision.reset_after < first.reset_after
        assert len(decision.outcomes) == 1


def test_its_wait_gets_shorter_as_time_goes_by(limiter, now):
    first = use_up(limiter.check)
    now(0.5)
    again = limiter.check("alice", POLICY)
    assert first.retry_after - again.retry_after == pytest.approx(0.5, abs=0.2)
    assert first.reset_after - again.reset_after == pytest.approx(0.5, abs=0.2)
    assert again == again
    assert "retry_after" in repr(again)


def test_after_a_second_redis_is_called_again(own, limiter, now):
    use_up(limiter.check)
    now(1.0)
    with commands_sent(own.url) as seen:
        assert not limiter.check("alice", POLICY).allowed
    assert seen == ["EVALSHA"]


def test_a_refusal_holds_until_its_wait_is_over_while_redis_is_unavailable(own, limiter, now):
    policy = Policy("p", (2, 100))
    use_up(limiter.check, policy)
    own.kill()
    for _ in range(3):
        now(20)
        refused, fresh = limiter.check("alice", policy), limiter.check("bob", policy)
        assert (refused.allowed, refused.degraded) == (False, False)
        assert (fresh.allowed, fresh.degraded) == (True, True)
    assert 0 < refused.retry_after < 41
    now(40)
    assert limiter.check("alice", policy).degraded


def test_a_refusal_that_was_reset_does_not_hold_while_redis_is_unavailable(own, limiter, now):
    use_up(limiter.check)
    limiter.reset("alice", POLICY)
    own.kill()
    now(1)
    assert limiter.check("alice", POLICY).allowed


def test_when_the_wait_is_over_redis_is_called(limiter):
    """On the real clock: a client that waits for retry_after, to the millisecond, is admitted."""
    policy = Policy("short", (1, 1))
    assert use_up(limiter.check, policy).retry_after <= 1
    time.sleep(0.3)
    again = limiter.check("alice", policy)
    assert 0 < again.retry_after < 0.75
    time.sleep(again.retry_after)
    assert limiter.check("alice", policy).allowed


def test_each_identity_and_policy_has_its_own(limiter):
    other = Policy("other", "2/h")
    use_up(limiter.check)
    assert limiter.check("bob", POLICY).allowed
    assert limiter.check("alice", other).allowed
    assert limiter.check("alice", [POLICY, other]).policy.name == "p"
    assert limiter.check({"user": "alice"}, POLICY).allowed is False


def test_a_raised_limit_applies_at_once(limiter):
    use_up(limiter.check)
    assert limiter.check("alice", Policy("p", "3/h")).allowed


def test_another_cost_is_checked(limiter):
    policy = Policy("p", "5/h")
    limiter.check("alice", policy, cost=4)
    assert not limiter.check("alice", policy, cost=2).allowed
    assert limiter.check("alice", policy).allowed


def test_a_policy_of_the_settings_is_known_by_its_name(configure, limiter):
    configure(POLICIES={"named": {"rate": "2/h"}})
    use_up(limiter.check, "named")
    assert cached_refusals()
    configure(POLICIES={"named": {"rate": "3/h"}})
    assert limiter.check("alice", "named").allowed


@pytest.mark.parametrize("end", ["reset", "areset", "refund", "arefund", "override"])
def test_a_refund_reset_or_override_of_this_process_ends_it_at_once(end):
    charged = check("alice", POLICY)
    use_up(check)
    assert cached_refusals()
    match end:
        case "reset":
            reset("alice", POLICY)
        case "areset":
            asyncio.run(areset("alice", POLICY))
        case "refund":
            refund(charged)
        case "arefund":
            asyncio.run(arefund(charged))
        case "override":
            until = int(time.time() * 1000) + 60_000
            overrides.publish(EncodedIdentity("alice"), [overrides.Override("alice", "p", overrides.EXEMPT, until)])
    assert check("alice", POLICY).allowed


def test_a_refund_leaves_the_refusals_of_other_identities(own, limiter):
    """Or an attack that causes refunds of its own charges would cost a call per request."""
    charged = limiter.check("bob", POLICY)
    use_up(limiter.check)
    assert limiter.refund(charged)
    with commands_sent(own.url) as seen:
        assert not limiter.check("alice", POLICY).allowed
    assert seen == []


def test_a_refund_ends_the_refusal_of_every_check_of_its_counter(limiter):
    charged = limiter.check("alice", POLICY)
    use_up(limiter.check, [POLICY, Policy("other", "9/h")])
    use_up(limiter.check)
    assert limiter.refund(charged)
    assert limiter.check("alice", [POLICY, Policy("other", "9/h")]).allowed


def test_what_was_refunded_is_remembered_within_bounds(own, monkeypatch, limiter, lasting):
    """Where there is too much of it, the oldest ends every refusal before it: never too few."""
    monkeypatch.setattr(refusal_cache, "MAX_CHANGES", 3)
    use_up(limiter.check)
    charged = [limiter.check(f"user-{n}", POLICY) for n in range(5)]
    for decision in charged[:3]:
        limiter.refund(decision)
    with commands_sent(own.url) as seen:
        limiter.check("alice", POLICY)
    assert seen == []
    limiter.refund(charged[3])
    with commands_sent(own.url) as seen:
        limiter.check("alice", POLICY)
    assert seen == ["EVALSHA"]


def test_an_old_change_that_is_dropped_does_not_undo_a_change_of_all(own, monkeypatch, now, lasting):
    monkeypatch.setattr(refusal_cache, "MAX_CHANGES", 1)
    cache = refusal_cache.cached_refusals()
    cache.invalidate([("other", "bob")])
    now(0.1)
    use_up(check)
    cache.invalidate_all()
    cache.invalidate([("other", "carol")])
    with commands_sent(own.url) as seen:
        check("alice", POLICY)
    assert seen == ["EVALSHA"]


@pytest.mark.parametrize(
    "policies",
    [
        Policy("shadow", "2/h", shadow=True),
        [POLICY, Policy("shadow", "100/h", shadow=True)],
    ],
    ids=["alone", "beside another"],
)
def test_shadow_policies_are_always_checked(own, limiter, policies):
    for _ in range(3):
        limiter.check("alice", policies)
    with commands_sent(own.url) as seen:
        limiter.check("alice", policies)
    assert seen == ["EVALSHA"]


def test_a_cost_that_never_fits_is_not_kept(limiter):
    assert not limiter.check("alice", POLICY, cost=3).allowed
    assert not cached_refusals()


def test_it_can_be_turned_off(own, limiter, configure):
    configure(LOCAL_REFUSALS=False)
    use_up(limiter.check)
    with commands_sent(own.url) as seen:
        limiter.check("alice", POLICY)
    assert seen == ["EVALSHA"]


def test_nothing_is_cached_under_the_frozen_clock(limiter):
    with frozen_clock() as clock:
        use_up(limiter.check)
        clock.tick(3_600_000)
        assert limiter.check("alice", POLICY).allowed
    use_up(limiter.check, Policy("q", "2/h"))
    with frozen_clock() as clock:
        clock.tick(3_600_000)
        assert limiter.check("alice", Policy("q", "2/h")).allowed


def test_a_peek_is_always_executed(own):
    use_up(check)
    with commands_sent(own.url) as seen:
        peek("alice", POLICY)
    assert seen == ["EVALSHA"]


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(refusal_cache, "MAX_ENTRIES", 50)
    policy = Policy("p", "1/h")
    for n in range(120):
        use_up(check, policy, f"user-{n}")
        assert cached_refusals() <= 50


@both_ways
def test_refused_requests_do_not_reach_redis(own, site):
    site.serve(rate_limit("2/h", key="ip")(site.view(lambda request: HttpResponse("ok"))))
    assert site.statuses(3) == [200, 200, 429]
    with commands_sent(own.url) as seen:
        assert site.statuses(10) == [429] * 10
        assert site.get(address="198.51.100.7").status_code == 200
    assert seen.count("EVALSHA") < 10  # the other address', and statistics


@both_ways
@pytest.mark.parametrize("options", [{"charge_when": lambda r: r.status_code == 401}, {"charge_on_error": False}])
def test_policies_that_are_refunded_are_always_checked(own, site, options):
    """Another process may refund a unit at any moment."""
    site.serve(rate_limit("1/h", key="ip", group="back", **options)(site.view(lambda r: HttpResponse(status=401))))
    assert site.statuses(3) == [401, 429, 429]
    assert not cached_refusals()


async def test_async_refusals_are_shared_with_sync_ones():
    for _ in range(2):
        await acheck("alice", POLICY)
    assert not (await acheck("alice", POLICY)).allowed
    assert cached_refusals() == 1
    assert not (await acheck("alice", POLICY)).allowed


# What must not be repeated

ONE = Policy("one", (1, YEAR))  # within a year's window nothing leaves, refills or meets a boundary during a test


@pytest.fixture
def lasting(monkeypatch):
    """Let refusals be cached until the wait is over, however busy the machine."""
    monkeypatch.setattr(refusal_cache, "MAX_AGE", 1_000.0)


def test_a_refusal_of_another_server_is_not_repeated(limiter, lasting):
    """Each test of a site may have an empty one, by the same name."""
    for _ in range(3):
        with override_settings(CACHES={"default": embedded_redis()}):
            assert [limiter.check("alice", ONE).allowed for _ in range(3)] == [True, False, False]
            assert cached_refusals() == 1


@both_ways
def test_a_refusal_stays_cached_though_an_outer_limit_is_refunded(site, own, configure, lasting):
    configure(
        POLICIES={"site": {"rate": "1000/h", "key": "global"}, "login": {"rate": "1/h", "key": "ip"}},
        MIDDLEWARE=[{"path": "/", "policies": ["site"]}],
    )
    site.own_body = True  # never_cache, which keeps the two from being decided together, writes a Cache-Control
    site.serve(never_cache(rate_limit("login")(site.view(lambda request: HttpResponse("ok")))), [OURS])
    assert site.statuses(2) == [200, 429]
    with paused_background(), commands_sent(own.url) as seen:
        assert site.statuses(5) == [429] * 5
    assert seen.count("EVALSHA") == 10  # the outer limit is checked and refunded
    assert peek({}, "site").current_count == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_refusal_that_a_reset_overtakes_is_not_cached(monkeypatch, lasting, moment):
    """The reset of another thread is executed while the reply of a check is on its way, or the other way round."""
    check("alice", ONE)
    execute = backend.execute

    def execute_with_reset(where, call, **options):
        monkeypatch.setattr(backend, "execute", execute)
        if moment == "before":
            reply = execute(where, call, **options)
            reset("alice", ONE)
            return reply
        assert not check("alice", ONE).allowed  # which is cached before the reset is executed
        return execute(where, call, **options)

    monkeypatch.setattr(backend, "execute", execute_with_reset)
    if moment == "before":
        assert not check("alice", ONE).allowed
    else:
        reset("alice", ONE)
    assert check("alice", ONE).allowed


def test_the_ttl_of_a_fixed_window_gets_shorter(lasting, now):
    policy = Policy("fixed", (1, YEAR), algo=FIXED_WINDOW)
    first = use_up(check, policy)
    now(10)
    cached = check("alice", policy)
    for decision in (first, cached):
        assert decision.ttl == math.ceil(decision.reset_after) == math.ceil(decision.retry_after)
    assert 10 <= first.ttl - cached.ttl < 40


def test_the_ttl_of_other_windows_stays(lasting, now):
    policy = Policy("sliding", (1, YEAR), algo=SLIDING_WINDOW)
    assert use_up(check, policy).ttl == YEAR
    now(10)
    assert check("alice", policy).ttl == YEAR


def test_an_invalid_cost_is_an_error_though_a_refusal_is_cached(limiter, lasting):
    use_up(limiter.check, ONE)
    for cost in (True, 1.0):
        with pytest.raises(ValueError, match="whole number"):
            limiter.check("alice", ONE, cost=cost)


def test_cached_refusals_can_be_copied_and_pickled(lasting):
    policies = (ONE, Policy("roomy", (100, YEAR)))
    decisions = [check("alice", policies), check("bob", ONE), use_up(check, ONE, "carol"), check("carol", ONE)]
    for decision in decisions:
        for again in (copy.copy(decision), copy.deepcopy(decision), pickle.loads(pickle.dumps(decision))):
            assert again == decision
            assert again.retry_after == decision.retry_after
            assert refund(again) is False


def test_settings_that_appear_end_what_was_cached(settings, lasting):
    del settings.RATE_LIMITER
    use_up(check, ONE)
    with override_settings(RATE_LIMITER={"MAX_REQUESTS": 100}):
        assert cached_refusals() == 0


# Several policies


@pytest.mark.parametrize(
    ("passed", "seconds"),
    [
        pytest.param(Policy("passed", "5/s"), 0.9, id="one that never refuses for as long"),
        pytest.param(Policy("passed", "1000/d"), 0.05, id="one that may refuse for longer"),
        pytest.param(Policy("passed", "1/s", algo="token-bucket-algo", burst=9000), 0.05, id="a large bucket"),
    ],
)
def test_a_refusal_beside_a_policy_that_may_refuse_for_longer_is_repeated_briefly(own, limiter, now, passed, seconds):
    use_up(limiter.check, [POLICY, passed])
    with commands_sent(own.url) as seen:
        limiter.check("alice", [POLICY, passed])
        now(seconds)
        limiter.check("alice", [POLICY, passed])
    assert seen == []
    now(0.1)
    with commands_sent(own.url) as seen:
        limiter.check("alice", [POLICY, passed])
    assert seen == ["EVALSHA"]
