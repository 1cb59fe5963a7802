"""What the public functions promise, on a real server and on fakeredis, sync and async."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math

import pytest

import rlaas_django
from rlaas_django import Policy, PolicyError, check, peek, refund, reset
from rlaas_django.policy import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """`ask.check(...)`, `ask.peek(...)` and so on, through the sync function or its async twin."""

    class Ask:
        def __getattr__(self, name):
            if request.param == "sync":
                return getattr(rlaas_django, name)
            return lambda *args, **kwargs: asyncio.run(getattr(rlaas_django, f"a{name}")(*args, **kwargs))

    return Ask()


def test_the_default_policy(server, ask, clock):
    decisions = [ask.check("alice") for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False]
    assert [decision.current_count for decision in decisions] == [0, 1, 2, 3, 4, 5]
    assert [decision.remaining for decision in decisions] == [4, 3, 2, 1, 0, 0]
    assert (decisions[5].retry_after, decisions[5].reset_after, decisions[5].ttl) == (60.0, 60.0, 60)
    assert server.keys() == [b"rlaas:rate_limit:alice"]


def test_all_policies_are_charged_or_none(server, ask, clock):
    mixed = [Policy(algo, (3 + i, 60), algo=algo) for i, algo in enumerate(ALGORITHMS)]
    for _ in range(3):
        assert ask.check("alice", mixed).allowed
    refused = ask.check("alice", mixed)
    assert not refused.allowed
    assert refused.policy == ALGORITHMS[0]
    assert [outcome.allowed for outcome in refused.outcomes] == [False, True, True, True, True]
    assert [outcome.remaining for outcome in refused.outcomes] == [0, 1, 2, 3, 4]
    for policy in mixed:
        assert ask.peek("alice", policy).current_count == 3


def test_the_longest_wait_is_told_when_several_refuse(server, ask, clock):
    policies = [Policy("a", "1/10s"), Policy("b", "1/h"), Policy("c", "1/m")]
    ask.check("alice", policies)
    refused = ask.check("alice", policies)
    assert (refused.policy, refused.retry_after) == ("b", 3600.0)
    assert [outcome.retry_after for outcome in refused.outcomes] == [10.0, 3600.0, 60.0]


def test_each_policy_counts_its_own_identity(server, ask, clock):
    policies = [Policy("user", "5/m", key="user"), Policy("ip", "2/m", key="ip")]
    for user in ("a", "b"):
        assert ask.check({"user": user, "ip": "203.0.113.9"}, policies).allowed
    assert ask.check({"user": "c", "ip": "203.0.113.9"}, policies).policy == "ip"
    assert ask.peek("c", policies[0]).current_count == 0
    assert ask.check({"user": "c", "ip": "203.0.113.10"}, policies).allowed


def test_a_shadow_policy_counts_and_never_refuses(server, ask, clock):
    policies = [Policy("real", "3/m"), Policy("trial", "1/m", shadow=True)]
    decisions = [ask.check("alice", policies) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False]
    assert [decision.outcomes[1].allowed for decision in decisions] == [True, False, False, False]
    assert all(decision.policy == "real" for decision in decisions)
    assert ask.peek("alice", policies[1]).current_count == 1


def test_a_request_that_is_refused_is_not_charged_to_a_shadow(server, ask, clock):
    ask.check("alice", Policy("real", "1/m"))
    ask.check("alice", [Policy("real", "1/m"), Policy("trial", "5/m", shadow=True)])
    assert ask.peek("alice", Policy("trial", "5/m")).current_count == 0


def test_one_policy_named_twice_is_charged_once(server, ask):
    assert ask.check("alice", [Policy("a", "5/m"), Policy("a", "5/m")]).remaining == 4


def test_two_policies_of_one_name_are_refused(client):
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
def test_no_cost_is_too_large_to_be_refused(server, algo, cost):
    decision = check("alice", Policy("p", "5/m", algo=algo), cost=cost)
    assert (decision.allowed, decision.retry_after) == (False, math.inf)


def test_a_rate_that_needs_a_request_is_an_error_without_one():
    with pytest.raises(PolicyError, match="takes its rate from a request"):
        check("alice", Policy("p", lambda request: "5/m"))


def test_a_burst_needs_a_bucket_also_when_the_setting_chooses(configure):
    policy = Policy("p", "5/m", burst=9)
    with pytest.raises(PolicyError, match="burst goes with 'token-bucket-algo', not with 'sliding-window-algo'"):
        check("alice", policy)
    configure(USE_ALGO=TOKEN_BUCKET)
    assert check("alice", policy).limit == 9


def test_the_ttl_is_what_the_documents_say(server, clock):
    """The window size; for the fixed window, whole seconds to its end."""
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
def test_a_refund_gives_back_what_was_charged_once(server, ask, algo, cost, clock):
    policy = Policy("p", "9/m", algo=algo)
    ask.check("alice", policy, cost=2)
    clock.tick(10)
    decision = ask.check("alice", policy, cost=cost)
    clock.tick(10)
    ask.check("alice", policy, cost=2)
    clock.tick(0 if algo != TOKEN_BUCKET else 1)
    assert ask.refund(decision) is True
    assert ask.peek("alice", policy).current_count == 4
    assert ask.refund(decision) is False
    assert refund(decision) is False
    assert ask.peek("alice", policy).current_count == 4


def test_a_refund_leaves_the_state_that_the_others_made(server, algo, clock):
    """As if it had not been: the rest is admitted and freed at the same times as without it."""
    with_refund, without = Policy("p", "6/m", algo=algo), Policy("q", "6/m", algo=algo)
    for i in range(4):
        decision = check("alice", with_refund, cost=2 if i == 1 else 1)
        if i == 1:
            taken_back = decision
        else:
            check("alice", without)
        clock.tick(2_000)
    assert refund(taken_back)
    for _ in range(40):
        seen, wanted = [peek("alice", p) for p in (with_refund, without)]
        assert (seen.current_count, seen.reset_after) == (wanted.current_count, wanted.reset_after)
        clock.tick(1_777)


def test_a_refund_gives_nothing_back_when_nothing_was_charged(server, ask, algo, clock):
    policy = Policy("p", "1/m", algo=algo)
    ask.check("alice", policy)
    for decision in (ask.check("alice", policy), ask.peek("alice", policy), ask.check("alice", policy, cost=0)):
        assert ask.refund(decision) is False
    assert ask.peek("alice", policy).current_count == 1


def test_a_refund_after_the_window_or_a_reset_gives_nothing_back(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    old = check("alice", policy, cost=3)
    clock.tick(120_000)
    assert refund(old) is False
    assert not [key for key in server.keys() if server.pttl(key) == -1]
    forgotten = check("bob", policy, cost=3)
    reset("bob", policy)
    assert refund(forgotten) is False
    assert peek("bob", policy).current_count == 0


def test_a_refund_of_all_that_was_charged_makes_the_quota_whole(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    assert refund(check("alice", policy, cost=5))
    seen = peek("alice", policy)
    assert (seen.current_count, seen.remaining, seen.reset_after) == (0, 5, 0.0)
    assert check("alice", policy, cost=5).allowed


def test_a_refund_covers_every_policy_that_was_charged(server, ask, clock):
    mixed = [Policy(algo, "5/m", algo=algo) for algo in ALGORITHMS]
    decision = ask.check("alice", [*mixed, Policy("trial", "1/m", shadow=True)], cost=2)
    assert ask.refund(decision)
    for policy in mixed:
        assert ask.peek("alice", policy).current_count == 0


def test_a_reset_clears_what_any_algorithm_wrote(server, ask, clock):
    for algo, name in itertools.product(ALGORITHMS, ("a", "default")):
        ask.check("alice", Policy(name, "5/m", algo=algo))
        ask.check("bob", Policy(name, "5/m", algo=algo))
    assert ask.reset("alice", Policy("a", "5/m")) == 5
    assert ask.reset("alice", Policy("a", "5/m")) == 0
    assert len(server.keys("rlaas:rate_limit:a/*")) == 5
    assert len(server.keys("rlaas:*")) == 15
    assert ask.reset("alice") == 5
    assert ask.check("alice").current_count == 0


def test_a_reset_takes_several_policies(server, ask, clock):
    policies = [
        Policy("a", "5/m", key="ip", algo=FIXED_WINDOW),
        Policy("b", "7/h", algo=FIXED_WINDOW),
        Policy("c", "5/m"),
    ]
    identity = {"user": "alice", "ip": "203.0.113.9"}
    ask.check(identity, policies)
    assert ask.reset(identity, policies) == 3
    assert server.dbsize() == 0


def test_a_reset_reaches_the_fixed_window_that_a_clock_stepped_out_of(server, clock):
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


def test_the_server_s_clock_is_used_not_ours(client, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    check("alice")
    seconds, _ = client.time()
    ((_, score),) = client.zrange("rlaas:rate_limit:alice", 0, -1, withscores=True)
    assert abs(score / 1000 - seconds) < 5
