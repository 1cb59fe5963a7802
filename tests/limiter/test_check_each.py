"""check_each: independent checks in one round trip, each decided as `check` would decide it by itself."""

from __future__ import annotations

import asyncio

import pytest
from rlaas_django import Policy, check, peek
from rlaas_django.signals import backend_failed

from tests.support.faults import Proxy
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    acheck_each,
    check_each,
    check_plan,
    script_for,
)
from tests.support.observation import commands_sent

SMALL = Policy("small", "2/m")


@pytest.fixture(params=["sync", "async"])
def decide_each(request):
    """The sync function, or the async one on one event loop."""
    if request.param == "sync":
        yield check_each
        return
    with asyncio.Runner() as runner:
        yield lambda checks: runner.run(acheck_each(checks))


def test_each_check_is_decided_by_itself_and_in_order(store, decide_each, clock):
    names = ["alice", "bob", "alice", "alice", "bob"]
    decisions = decide_each([check_plan(name, SMALL, 1) for name in names])
    assert [decision.allowed for decision in decisions] == [True, True, True, False, True]
    assert [decision.remaining for decision in decisions] == [1, 1, 0, 0, 0]
    assert decisions[3].retry_after == 60.0


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_its_decisions_are_those_of_check(store, decide_each, clock, algo):
    ours, theirs = Policy("ours", "3/m", algo=algo), Policy("theirs", "3/m", algo=algo)
    costs = [1, 2, 1, 3, 0]
    decisions = decide_each([check_plan("alice", ours, cost) for cost in costs])
    expected = [check("alice", theirs, cost=cost) for cost in costs]
    figures = [(each.allowed, each.current_count, each.remaining, each.retry_after) for each in decisions]
    assert figures == [(each.allowed, each.current_count, each.remaining, each.retry_after) for each in expected]


def test_a_check_of_several_policies_is_all_or_nothing(store, decide_each, clock):
    policies = [SMALL, Policy("large", "9/m")]
    decide_each([check_plan("alice", policies, 1) for _ in range(5)])
    assert peek("alice", policies[1]).current_count == 2


def test_many_checks_are_sent_together_and_load_their_scripts_once(own, decide_each):
    checks = [check_plan(f"user-{i}", SMALL, 1) for i in range(100)]
    decide_each(checks)
    with commands_sent(own.url) as names:
        decide_each([check_plan(f"user-{i}", SMALL, 1) for i in range(100)])
    assert [name for name in names if name in ("EVALSHA", "SCRIPT")] == ["EVALSHA"] * 100


def test_scripts_that_redis_lost_are_loaded_and_nothing_is_charged_twice(own, client, decide_each):
    client.script_flush()
    decisions = decide_each([check_plan("alice", Policy("p", "9/m", algo=algo), 1) for algo in ALGORITHMS])
    assert [decision.current_count for decision in decisions] == [0] * len(ALGORITHMS)
    assert not any(decision.degraded for decision in decisions)
    assert all(peek("alice", Policy("p", "9/m", algo=algo)).current_count == 1 for algo in ALGORITHMS)


def test_a_cached_refusal_needs_no_redis(own, decide_each):
    for _ in range(3):
        check("alice", SMALL)
    with commands_sent(own.url) as names:
        (refused,) = decide_each([check_plan("alice", SMALL, 1)])
    assert not refused.allowed
    assert "EVALSHA" not in names


def test_without_redis_each_policy_applies_its_on_failure(redis_unavailable, decide_each):
    failures = []
    backend_failed.connect(receiver := lambda **arguments: failures.append(arguments["decision"]))
    checks = [
        check_plan("alice", Policy(mode, "1/m", on_failure=mode), 1) for mode in ("open", "closed", "local", "local")
    ]
    decisions = decide_each(checks)
    assert [decision.allowed for decision in decisions] == [True, False, True, False]
    assert all(decision.degraded for decision in decisions)
    assert failures == decisions
    backend_failed.disconnect(receiver)


def test_turned_off_nothing_is_limited(configure, decide_each):
    configure(ENABLED=False)
    assert all(decision.allowed for decision in decide_each([check_plan("alice", SMALL, 1) for _ in range(5)]))


def test_no_checks_are_no_decisions(store, decide_each):
    assert decide_each([]) == []


def test_what_was_charged_is_known_also_where_the_message_after_noscript_is_lost(
    own, client, decide_each, use, configure
):
    """Another algorithm's script is not loaded yet: its checks are sent again, and no reply comes."""
    other = Policy("other", "2/m", algo=FIXED_WINDOW)
    client.script_flush()
    client.script_load(script_for(SLIDING_WINDOW).text)
    with Proxy(own.url) as proxy:
        use(proxy.url)
        configure(TIMEOUT=0.3)
        proxy.drop(of="SCRIPT")
        known, lost = decide_each([check_plan("alice", SMALL, 1), check_plan("alice", other, 1)])
        proxy.pass_all()
        proxy.cut()
    assert (known.degraded, known.remaining, lost.degraded) == (False, 1, True)
