"""Checks at the same time in processes, threads and tasks: a limit is exact.

The quick tier has 4 workers, the long one 16.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from rlaas_django import Policy, acheck, arefund, check, peek, refund
from rlaas_django.testing import frozen_clock

from tests.conftest import NOW
from tests.support.internals import ALGORITHMS, SLIDING_WINDOW, YEAR
from tests.support.parallel import WORKERS, in_processes, in_threads

CHECKS = 15  # of each worker
TASKS = 3  # of each asynchronous worker


@pytest.fixture(
    params=[pytest.param(4, id="4 workers"), pytest.param(WORKERS, marks=pytest.mark.slow, id="16 workers")]
)
def workers(request) -> int:
    return request.param


@pytest.fixture
def limit(workers) -> int:
    """Less than half of the checks of all workers."""
    return workers * CHECKS * 5 // 12


@pytest.fixture
def policy(algo, limit) -> Policy:
    """On the server's own clock: within a year's window nothing expires, refills or meets a boundary during a test."""
    return Policy("p", (limit, YEAR), algo=algo)


def one_by_one(requests, cost: int = 1) -> list:
    """Return the decisions on some (identity, policy), checked one after the other."""
    return [check(*request, cost=cost) for request in requests]


def in_tasks(requests, cost: int = 1) -> list:
    """Return the decisions on some (identity, policy), checked by several tasks of one event loop."""

    async def some(n):
        return [await acheck(*request, cost=cost) for request in requests[n::TASKS]]

    async def every():
        return await asyncio.gather(*map(some, range(TASKS)))

    return [decision for part in asyncio.run(every()) for decision in part]


sync_and_async = pytest.mark.parametrize("check_all", [one_by_one, in_tasks], ids=["sync", "async"])


@pytest.fixture
def unregistered(client):
    """The server has no script, so that loading them is part of the race."""
    client.script_flush()


def hammer(check_all, policy: Policy, cost: int = 1):
    """Return a worker's part of a burst on one key: it returns how many checks were allowed."""
    return lambda n: sum(decision.allowed for decision in check_all([("alice", policy)] * CHECKS, cost))


@sync_and_async
def test_processes_admit_the_limit_and_not_one_more(policy, limit, check_all, unregistered, workers):
    assert sum(in_processes(hammer(check_all, policy), workers)) == limit
    assert peek("alice", policy).current_count == limit


@sync_and_async
def test_processes_forked_after_first_use_share_the_count_with_their_parent(policy, limit, check_all, workers):
    """A fork has its parent's sockets; if it used them, replies would reach the wrong process."""
    before = hammer(check_all, policy)(0)
    assert before == CHECKS
    assert sum(in_processes(hammer(check_all, policy), workers)) == limit - before
    assert not any(decision.allowed for decision in check_all([("alice", policy)] * CHECKS))


@sync_and_async
def test_threads_admit_the_limit_and_not_one_more(server, policy, limit, check_all, workers):
    assert sum(in_threads(hammer(check_all, policy), workers)) == limit
    assert peek("alice", policy).current_count == limit


@sync_and_async
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(ALGORITHMS)))])
def test_a_check_that_one_policy_refuses_is_charged_to_none(check_all, turn):
    """The charges of an identity are the allowed checks that named it; three policies on three kinds of key."""
    algos = (ALGORITHMS * 2)[turn:]
    policies = [
        Policy(f"by-{key}", (15, YEAR), key=key, algo=algo)
        for key, algo in zip(("user", "ip", "token"), algos, strict=False)
    ]
    # The first of each is the busiest, and so full long before the others.
    identities = [["ann", "bob", "cid", "dee"], [f"192.0.2.{n}" for n in range(4)], ["t1", "t2", "t3", "t4"]]

    def work(n):
        rng = random.Random(f"{turn}-{n}")
        requests = [
            (
                {
                    policy.key: rng.choices(some, [3, 1, 1, 1])[0]
                    for policy, some in zip(policies, identities, strict=True)
                },
                policies,
            )
            for _ in range(CHECKS)
        ]
        return [
            (decision.allowed, [(each.policy.name, each.identity, each.allowed) for each in decision.outcomes])
            for decision in check_all(requests)
        ]

    decisions = [each for part in in_processes(work) for each in part]
    charged = Counter((name, each) for allowed, outcomes in decisions if allowed for name, each, _ in outcomes)
    peeks = [peek(each, policy).outcomes[0] for policy, some in zip(policies, identities, strict=True) for each in some]
    assert {(outcome.policy.name, outcome.identity): outcome.current_count for outcome in peeks} == charged

    # There was something to get wrong: each policy refused checks that another would have allowed.
    mixed = [outcomes for _, outcomes in decisions if len({allowed for _, _, allowed in outcomes}) == 2]
    assert {name for outcomes in mixed for name, _, allowed in outcomes if not allowed} == {p.name for p in policies}


@sync_and_async
@pytest.mark.parametrize("cost", [1, 3])
def test_checks_in_the_same_millisecond_are_entries_of_their_own(client, check_all, cost, workers):
    policy, key = Policy("p", (10_000, 60), algo=SLIDING_WINDOW), "rlaas:rate_limit:p/alice"
    with frozen_clock(NOW):
        admitted = sum(in_processes(hammer(check_all, policy, cost), workers))
    assert admitted == workers * CHECKS
    assert client.zcard(key) == client.zcount(key, NOW, NOW) == admitted * cost


@sync_and_async
def test_a_burst_in_one_millisecond_admits_the_limit(algo, limit, check_all, workers):
    policy = Policy("p", (limit, 60), algo=algo)
    with frozen_clock(NOW):
        assert sum(in_processes(hammer(check_all, policy), workers)) == limit
        assert peek("alice", policy).current_count == limit


@pytest.mark.parametrize(
    "refund_one", [refund, lambda decision: asyncio.run(arefund(decision))], ids=["refund", "arefund"]
)
def test_a_decision_is_refunded_once_by_many_threads(policy, refund_one, workers):
    check("alice", policy, cost=10)
    for _ in range(5):
        decision = check("alice", policy)
        assert sum(in_threads(lambda n, decision=decision: refund_one(decision), workers)) == 1
        assert peek("alice", policy).current_count == 10
