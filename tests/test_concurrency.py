"""Many at once, in processes, threads and tasks: a limit is a limit."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlaas_django import Policy, acheck, arefund, check, peek, refund
from rlaas_django.policy import ALGORITHMS, SLIDING_WINDOW, YEAR
from rlaas_django.testing import frozen_clock
from tests.conftest import NOW

WORKERS = 16
REQUESTS = 15  # of each worker; all together more than twice the limit
TASKS = 3  # of each asynchronous worker
LIMIT = 100
# On the server's own clock: within a year's window nothing leaves, refills or meets a boundary during a test.
RATE = (LIMIT, YEAR)


def in_processes(work, count: int = WORKERS) -> list:
    """What `work(n)` gives in each of so many forked processes, which begin together."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(count)

    def child(n, pipe):
        begin.wait(30)
        pipe.send(work(n))

    readers, processes = [], []
    for n in range(count):
        reader, writer = context.Pipe(duplex=False)
        processes.append(context.Process(target=child, args=(n, writer)))
        processes[-1].start()
        writer.close()  # so that a child that dies is an EOFError here
        readers.append(reader)
    try:
        return [reader.recv() for reader in readers]
    finally:
        for reader, process in zip(readers, processes, strict=True):
            process.join()
            reader.close()


def in_threads(work, count: int = WORKERS) -> list:
    """As `in_processes`, in threads."""
    begin = threading.Barrier(count)

    def thread(n):
        begin.wait(30)
        return work(n)

    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(thread, range(count)))


def ask(requests, cost: int = 1) -> list:
    """The decisions on some (identity, policy), one after the other."""
    return [check(*request, cost=cost) for request in requests]


def aask(requests, cost: int = 1) -> list:
    """The decisions on some (identity, policy), by several tasks of one loop."""

    async def some(n):
        return [await acheck(*request, cost=cost) for request in requests[n::TASKS]]

    async def every():
        return await asyncio.gather(*map(some, range(TASKS)))

    return [decision for part in asyncio.run(every()) for decision in part]


asking = pytest.mark.parametrize("asked", [ask, aask], ids=["sync", "async"])


@pytest.fixture
def unregistered(client):
    """The server knows no script, so that registering is part of the race."""
    client.script_flush()


def hammer(asked, policy: Policy, cost: int = 1):
    """A worker's part of a storm on one key: how many requests it got through."""
    return lambda n: sum(decision.allowed for decision in asked([("alice", policy)] * REQUESTS, cost))


@asking
def test_processes_admit_the_limit_and_not_one_more(algo, asked, unregistered):
    policy = Policy("p", RATE, algo=algo)
    assert sum(in_processes(hammer(asked, policy))) == LIMIT
    assert peek("alice", policy).current_count == LIMIT


@asking
def test_processes_forked_after_first_use_share_the_count_with_their_parent(algo, asked):
    """A fork has its parent's sockets; if it used them, replies would reach the wrong process."""
    policy = Policy("p", RATE, algo=algo)
    before = hammer(asked, policy)(0)
    assert before == REQUESTS
    assert sum(in_processes(hammer(asked, policy))) == LIMIT - before
    assert not any(decision.allowed for decision in asked([("alice", policy)] * REQUESTS))


@asking
def test_threads_admit_the_limit_and_not_one_more(server, algo, asked):
    policy = Policy("p", RATE, algo=algo)
    assert sum(in_threads(hammer(asked, policy))) == LIMIT
    assert peek("alice", policy).current_count == LIMIT


@asking
@pytest.mark.parametrize("turn", range(len(ALGORITHMS)))
def test_a_request_that_one_policy_refused_is_charged_to_none(asked, turn):
    """What an identity was charged is the number of allowed requests that named it; three policies on three kinds."""
    algos = (ALGORITHMS * 2)[turn:]
    policies = [
        Policy(f"by-{key}", (15, YEAR), key=key, algo=algo)
        for key, algo in zip(("user", "ip", "token"), algos, strict=False)
    ]
    # The first of each is the busiest, and so full long before the others.
    names = [["ann", "bob", "cid", "dee"], [f"192.0.2.{n}" for n in range(4)], ["t1", "t2", "t3", "t4"]]

    def work(n):
        rng = random.Random(f"{turn}-{n}")
        requests = [
            (
                {policy.key: rng.choices(some, [3, 1, 1, 1])[0] for policy, some in zip(policies, names, strict=True)},
                policies,
            )
            for _ in range(REQUESTS)
        ]
        return [
            (decision.allowed, [(each.policy.name, each.identity, each.allowed) for each in decision.outcomes])
            for decision in asked(requests)
        ]

    told = [each for part in in_processes(work) for each in part]
    charged = Counter((name, who) for allowed, outcomes in told if allowed for name, who, _ in outcomes)
    looks = [peek(who, policy).outcomes[0] for policy, some in zip(policies, names, strict=True) for who in some]
    assert {(look.policy.name, look.identity): look.current_count for look in looks} == charged

    # There was something to get wrong: each policy refused requests that another would have passed.
    mixed = [outcomes for _, outcomes in told if len({passed for _, _, passed in outcomes}) == 2]
    assert {name for outcomes in mixed for name, _, passed in outcomes if not passed} == {p.name for p in policies}


@asking
@pytest.mark.parametrize("cost", [1, 3])
def test_requests_in_the_same_millisecond_are_entries_of_their_own(client, asked, cost):
    policy, key = Policy("p", (10_000, 60), algo=SLIDING_WINDOW), "rlaas:rate_limit:p/alice"
    with frozen_clock(NOW):
        admitted = sum(in_processes(hammer(asked, policy, cost)))
    assert admitted == WORKERS * REQUESTS
    assert client.zcard(key) == client.zcount(key, NOW, NOW) == admitted * cost


@asking
def test_a_storm_in_one_millisecond_admits_the_limit(algo, asked):
    policy = Policy("p", (LIMIT, 60), algo=algo)
    with frozen_clock(NOW):
        assert sum(in_processes(hammer(asked, policy))) == LIMIT
        assert peek("alice", policy).current_count == LIMIT


@pytest.mark.parametrize(
    "give_back", [refund, lambda decision: asyncio.run(arefund(decision))], ids=["refund", "arefund"]
)
def test_a_decision_is_refunded_once_however_many_ask(algo, give_back):
    policy = Policy("p", RATE, algo=algo)
    check("alice", policy, cost=10)
    for _ in range(5):
        decision = check("alice", policy)
        assert sum(in_threads(lambda n, decision=decision: give_back(decision))) == 1
        assert peek("alice", policy).current_count == 10
