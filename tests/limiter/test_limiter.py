"""check, peek, refund and reset, sync and async, on a real server and on fakeredis."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import rlaas_django
from rlaas_django import Policy, PolicyError, check, peek, refund, reset

from tests.conftest import fakeredis_store_is_slow
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)


def test_the_default_policy(server, limiter, clock):
    decisions = [limiter.check("alice") for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False]
    assert [decision.current_count for decision in decisions] == [0, 1, 2, 3, 4, 5]
    assert [decision.remaining for decision in decisions] == [4, 3, 2, 1, 0, 0]
    assert (decisions[5].retry_after, decisions[5].reset_after, decisions[5].ttl) == (60.0, 60.0, 60)
    assert server.keys() == [b"rlaas:rate_limit:alice"]


def test_all_policies_are_charged_or_none(store, limiter, clock):
    mixed = [Policy(algo, (3 + i, 60), algo=algo) for i, algo in enumerate(ALGORITHMS)]
    for _ in range(3):
        assert limiter.check("alice", mixed).allowed
    refused = limiter.check("alice", mixed)
    assert not refused.allowed
    assert refused.policy.name == ALGORITHMS[0]
    assert [outcome.allowed for outcome in refused.outcomes] == [False, True, True, True, True]
    assert [outcome.remaining for outcome in refused.outcomes] == [0, 1, 2, 3, 4]
    for policy in mixed:
        assert limiter.peek("alice", policy).current_count == 3


def test_the_wait_is_the_longest_of_the_refusing_policies(store, limiter, clock):
    policies = [Policy("a", "1/10s"), Policy("b", "1/h"), Policy("c", "1/m")]
    limiter.check("alice", policies)
    refused = limiter.check("alice", policies)
    assert (refused.policy.name, refused.retry_after) == ("b", 3600.0)
    assert [outcome.retry_after for outcome in refused.outcomes] == [10.0, 3600.0, 60.0]


def test_each_policy_counts_the_identity_of_its_kind(store, limiter, clock):
    policies = [Policy("user", "5/m", key="user"), Policy("ip", "2/m", key="ip")]
    for user in ("a", "b"):
        assert limiter.check({"user": user, "ip": "203.0.113.9"}, policies).allowed
    assert limiter.check({"user": "c", "ip": "203.0.113.9"}, policies).policy.name == "ip"
    assert limiter.peek("c", policies[0]).current_count == 0
    assert limiter.check({"user": "c", "ip": "203.0.113.10"}, policies).allowed


def test_a_shadow_policy_is_charged_and_never_refuses(store, limiter, clock):
    policies = [Policy("real", "3/m"), Policy("trial", "1/m", shadow=True)]
    decisions = [limiter.check("alice", policies) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False]
    assert [decision.outcomes[1].allowed for decision in decisions] == [True, False, False, False]
    assert all(decision.policy.name == "real" for decision in decisions)
    assert limiter.peek("alice", policies[1]).current_count == 1


def test_a_refused_check_does_not_charge_a_shadow_policy(store, limiter, clock):
    limiter.check("alice", Policy("real", "1/m"))
    limiter.check("alice", [Policy("real", "1/m"), Policy("trial", "5/m", shadow=True)])
    assert limiter.peek("alice", Policy("trial", "5/m")).current_count == 0


def test_one_policy_named_twice_is_charged_once(store, limiter):
    assert limiter.check("alice", [Policy("a", "5/m"), Policy("a", "5/m")]).remaining == 4


def test_two_different_policies_of_one_name_are_an_error(client):
    with pytest.raises(PolicyError, match="Two different policies are named 'a'"):
        check("alice", [Policy("a", "5/m"), Policy("a", "6/m")])
    assert client.dbsize() == 0


def test_no_policy_at_all_is_an_error():
    with pytest.raises(ValueError, match="no policy"):
        check("alice", [])


@pytest.mark.parametrize("cost", [-1, 1.0, "1", None, True])
def test_a_cost_is_a_whole_number(cost):
    with pytest.raises(ValueError, match="is not a whole number of at least 0"):
        check("alice", cost=cost)


@pytest.mark.parametrize("cost", [10**6, 10**30, 10**400])
def test_a_cost_of_any_size_over_the_limit_is_refused(store, algo, cost):
    decision = check("alice", Policy("p", "5/m", algo=algo), cost=cost)
    assert (decision.allowed, decision.retry_after) == (False, math.inf)


def test_a_rate_function_is_an_error_without_a_request():
    with pytest.raises(PolicyError, match="takes its rate from a request"):
        check("alice", Policy("p", lambda request: "5/m"))


def test_a_burst_needs_the_token_bucket_also_when_the_setting_chooses(configure):
    policy = Policy("p", "5/m", burst=9)
    with pytest.raises(PolicyError, match="burst goes with 'token-bucket-algo', not with 'sliding-window-algo'"):
        check("alice", policy)
    configure(USE_ALGO=TOKEN_BUCKET)
    assert check("alice", policy).limit == 9


def test_the_ttl_is_the_window_or_for_the_fixed_window_what_is_left_of_it(store, clock):
    assert {algo: check("alice", Policy("p", "5/m", algo=algo)).ttl for algo in ALGORITHMS} == {
        FIXED_WINDOW: 40,
        SLIDING_WINDOW: 60,
        SLIDING_WINDOW_COMPACT: 60,
        SLIDING_WINDOW_COUNTER: 60,
        TOKEN_BUCKET: 60,
    }
    clock.tick(39_001)
    assert check("alice", Policy("p", "5/m", algo=FIXED_WINDOW)).ttl == 1
    clock.tick(999)
    assert check("alice", Policy("p", "5/m", algo=FIXED_WINDOW)).ttl == 60


@pytest.mark.parametrize("cost", [1, 3])
def test_a_refund_takes_the_charge_back_once(store, limiter, algo, cost, clock):
    policy = Policy("p", "9/m", algo=algo)
    limiter.check("alice", policy, cost=2)
    clock.tick(10)
    decision = limiter.check("alice", policy, cost=cost)
    clock.tick(10)
    limiter.check("alice", policy, cost=2)
    clock.tick(0 if algo != TOKEN_BUCKET else 1)
    assert limiter.refund(decision) is True
    assert limiter.peek("alice", policy).current_count == 4
    assert limiter.refund(decision) is False
    assert refund(decision) is False
    assert limiter.peek("alice", policy).current_count == 4


@fakeredis_store_is_slow
def test_after_a_refund_the_state_is_as_without_the_charge(store, algo, clock):
    """The other units are admitted and expire at the same times."""
    with_refund, without = Policy("p", "6/m", algo=algo), Policy("q", "6/m", algo=algo)
    for i in range(4):
        decision = check("alice", with_refund, cost=2 if i == 1 else 1)
        if i == 1:
            refunded = decision
        else:
            check("alice", without)
        clock.tick(2_000)
    assert refund(refunded)
    for _ in range(40):
        seen, wanted = [peek("alice", p) for p in (with_refund, without)]
        assert (seen.current_count, seen.reset_after) == (wanted.current_count, wanted.reset_after)
        clock.tick(1_777)


def test_a_refund_is_false_when_nothing_was_charged(store, limiter, algo, clock):
    policy = Policy("p", "1/m", algo=algo)
    limiter.check("alice", policy)
    for decision in (
        limiter.check("alice", policy),
        limiter.peek("alice", policy),
        limiter.check("alice", policy, cost=0),
    ):
        assert limiter.refund(decision) is False
    assert limiter.peek("alice", policy).current_count == 1


def test_a_refund_after_the_window_or_a_reset_is_false(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    old = check("alice", policy, cost=3)
    clock.tick(120_000)
    assert refund(old) is False
    assert not [key for key in server.keys() if server.pttl(key) == -1]
    cleared = check("bob", policy, cost=3)
    reset("bob", policy)
    assert refund(cleared) is False
    assert peek("bob", policy).current_count == 0


def test_a_refund_of_all_charges_restores_the_whole_quota(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    assert refund(check("alice", policy, cost=5))
    seen = peek("alice", policy)
    assert (seen.current_count, seen.remaining, seen.reset_after) == (0, 5, 0.0)
    assert check("alice", policy, cost=5).allowed


def test_a_refund_covers_every_charged_policy(store, limiter, clock):
    mixed = [Policy(algo, "5/m", algo=algo) for algo in ALGORITHMS]
    decision = limiter.check("alice", [*mixed, Policy("trial", "1/m", shadow=True)], cost=2)
    assert limiter.refund(decision)
    for policy in mixed:
        assert limiter.peek("alice", policy).current_count == 0


@pytest.mark.parametrize("function", [check, peek])
def test_a_cost_that_would_keep_redis_busy_is_an_error(store, function):
    policy = Policy("p", "100000/m", algo="sliding-window-algo")
    with pytest.raises(ValueError, match=r"10001 is over 10000.*use 'sliding-window-compact-algo'"):
        function("alice", policy, cost=10_001)
    assert function("alice", policy, cost=10_000).allowed
    assert not function("alice", policy, cost=100_001).allowed
    assert function("alice", Policy("q", "100000/m", algo="sliding-window-compact-algo"), cost=10_001).allowed


def test_a_reset_clears_what_any_algorithm_wrote(server, limiter, clock):
    for algo, name in itertools.product(ALGORITHMS, ("a", "default")):
        limiter.check("alice", Policy(name, "5/m", algo=algo))
        limiter.check("bob", Policy(name, "5/m", algo=algo))
    assert limiter.reset("alice", Policy("a", "5/m")) == 5
    assert limiter.reset("alice", Policy("a", "5/m")) == 0
    counters = [key for key in server.keys("rlaas:*") if not key.endswith(b":reset")]
    assert len(counters) == 15
    assert limiter.reset("alice") == 5
    assert limiter.check("alice").current_count == 0


def test_a_reset_takes_several_policies(server, limiter, clock):
    policies = [
        Policy("a", "5/m", key="ip", algo=FIXED_WINDOW),
        Policy("b", "7/h", algo=FIXED_WINDOW),
        Policy("c", "5/m"),
    ]
    identity = {"user": "alice", "ip": "203.0.113.9"}
    limiter.check(identity, policies)
    assert limiter.reset(identity, policies) == 3
    assert [key for key in server.keys() if not key.endswith(b":reset")] == []


def test_a_reset_reaches_the_next_fixed_window_after_the_clock_stepped_back(store, clock):
    policy = Policy("p", "5/m", algo=FIXED_WINDOW)
    check("alice", policy)
    clock.tick(-30_000)
    assert reset("alice", policy) == 1
    assert check("alice", policy).current_count == 0


async def test_the_async_functions_are_coroutine_functions():
    for name in ("check", "peek", "reset", "refund"):
        assert inspect.iscoroutinefunction(getattr(rlaas_django, f"a{name}"))
        assert not inspect.iscoroutinefunction(getattr(rlaas_django, name))
        sync, twin = (inspect.signature(getattr(rlaas_django, each)) for each in (name, f"a{name}"))
        assert sync.parameters == twin.parameters


def test_the_clock_is_the_server_s(client, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    before, _ = client.time()
    check("alice")
    after, _ = client.time()
    ((_, score),) = client.zrange("rlaas:rate_limit:alice", 0, -1, withscores=True)
    assert before <= score / 1000 < after + 1
