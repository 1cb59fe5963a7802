"""Counting in this process: the same replies as Redis gives, and the bounds of a store."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
import tracemalloc
from typing import NamedTuple

import pytest
import rlaas_django
from rlaas_django import Policy, acheck, check, peek, refund, reset
from rlaas_django.testing import frozen_clock, reset_all

from tests.conftest import NOW
from tests.support.internals import (
    ALGORITHM_RECORDS,
    ALGORITHMS,
    MAX_ENTRIES,
    SLIDING_WINDOW,
    TOKEN_BUCKET,
    ProcessStore,
    ScriptArguments,
    UnavailableError,
    arefund_receipt,
    backend,
    background,
    check_each,
    check_plan,
    compile_policies,
    forget_notice,
    overrides,
    process_store,
    receipts,
    recorder,
    refund_arguments,
    refund_call,
    refund_receipt,
    refund_units,
)
from tests.support.models import MODELS, random_trace
from tests.support.parallel import in_processes, in_threads

MINUTE = 60_000


@pytest.fixture
def in_process(configure):
    """Have decisions counted in this process."""
    configure(CACHE="locmem")


@pytest.fixture
def store() -> ProcessStore:
    return ProcessStore()


@pytest.fixture
def bounded() -> ProcessStore:
    """The store of an outage, whose logs are bounded."""
    return ProcessStore(MAX_ENTRIES)


class Limit(NamedTuple):
    key: str
    arguments: ScriptArguments


class Row(NamedTuple):
    """What a reply says of a policy."""

    allowed: int
    current_count: int
    remaining: int
    retry_after: int
    reset_after: int
    capacity: int
    charged_at: int


def limit_of(limit: int = 5, window: int = MINUTE, *, algo: str = SLIDING_WINDOW, key: str = "alice") -> Limit:
    return Limit(key, ScriptArguments(algo, limit, window, limit, window))


def run(store: ProcessStore, operation: str, limit: Limit, now: int, cost: int) -> Row:
    _, *row = store.run([limit.key], (now, operation, "", cost, *limit.arguments, 0, "p"))
    return Row(*row)


def charge(store: ProcessStore, limit: Limit, now: int = NOW, cost: int = 1) -> Row:
    return run(store, "check", limit, now, cost)


def look(store: ProcessStore, limit: Limit, now: int = NOW, cost: int = 1) -> Row:
    return run(store, "peek", limit, now, cost)


def give_back(store: ProcessStore, limit: Limit, now: int, cost: int, row: Row) -> int:
    (units,) = store.run([limit.key], (now, "refund", "a check", cost, *limit.arguments, row.charged_at))
    return units


# The same as in Redis

STORES = ("default", "locmem")


def run_on_both(call_of) -> object:
    """Return what both stores reply to a call, which is the same."""
    in_redis, in_process = [backend.execute(backend.topology(alias), call_of(alias)) for alias in STORES]
    assert in_process == in_redis
    return in_process


def decide_on_both(policies, cost: int, *, charge: bool = True) -> list:
    """Check on both stores; return what was planned and replied, for refunds."""
    checks = {}

    def call_of(alias):
        checks[alias] = check_plan("alice", compile_policies(policies, alias), cost, charge)
        return checks[alias].pack()

    reply = run_on_both(call_of)
    return [checks, reply]


def refund_on_both(checks, reply) -> None:
    def call_of(alias):
        return refund_call(*refund_arguments(checks[alias], reply))

    if refund_arguments(checks["default"], reply)[0]:
        run_on_both(call_of)


def refund_newest_on_both(policy: Policy, units: int) -> None:
    policy_set = compile_policies(policy)
    keys = policy_set.keys(policy_set.identify("alice"))
    run_on_both(lambda _: refund_call(keys, ["", units, *policy_set.arguments[0], 0]))


def reset_on_both(policy: Policy, configure) -> None:
    for alias in reversed(STORES):
        configure(CACHE=alias)
        reset("alice", policy)


def trace_with_steps_back(rng: random.Random, limit: int, length: int, back: int):
    """Yield times and costs; the clock is at most a window behind its latest time."""
    latest = now = NOW
    for tick, cost in random_trace(rng, limit, MINUTE, length):
        now += tick
        if rng.random() < 0.1:
            now -= rng.randint(0, back)
        now = max(now, latest - back)
        latest = max(now, latest)
        yield now, cost * (rng.random() > 0.05)


@pytest.mark.parametrize("back", [0, MINUTE - 1], ids=["", "clock steps back"])
@pytest.mark.parametrize("limit", [1, 5, 40])
def test_replies_are_those_of_redis(algo, limit, back, clock, configure, scale):
    """Checks, peeks, refunds, resets and the newest units, under limits that are raised and lowered."""
    rng = random.Random(f"resets {algo}{limit}{back}")
    burst = 2 * limit if algo == TOKEN_BUCKET else None
    policies = [
        Policy("p", (rate, 60), algo=algo, burst=burst) for rate in (limit, limit, limit + 3, max(1, limit // 2))
    ]
    charged = []
    passed = 0
    for now, cost in trace_with_steps_back(rng, limit, scale(600, least=120), back):
        clock.ms = now + passed
        policy = rng.choice(policies)
        decided = decide_on_both([policy], cost, charge=rng.random() < 0.9)
        charged.append(decided)
        if rng.random() < 0.2:
            refund_on_both(*charged.pop(rng.randrange(len(charged))))
        # In the ZSET, units of one ms are told apart by their check; elsewhere any of them are taken.
        if algo != SLIDING_WINDOW and rng.random() < 0.05:
            refund_newest_on_both(policy, rng.randint(1, limit))
        if rng.random() < 0.05:
            passed += 1
            clock.tick(1)  # units of the same ms are not told apart
            reset_on_both(policy, configure)


def test_several_policies_are_charged_together_as_in_redis(clock, scale):
    """Every algorithm, some of them shadow policies."""
    rng = random.Random("together")
    policies = [
        Policy(f"{algo}-{shadow}", (rng.randint(3, 12), rng.choice([60, 300])), algo=algo, shadow=shadow)
        for algo, shadow in itertools.product(ALGORITHMS, (False, True))
    ]
    seen = set()
    for tick, cost in random_trace(rng, 8, MINUTE, scale(1_000, least=150)):
        clock.tick(tick)
        _, reply = decide_on_both(rng.sample(policies, rng.randint(1, 6)), cost, charge=rng.random() < 0.9)
        seen.add(tuple(sorted(set(reply[7::7]))) == (-1,))
    assert seen == {True, False}


def test_a_reset_is_that_of_redis(configure, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    for alias in STORES:
        configure(CACHE=alias)
        assert reset("alice", policy) == 0
        check("alice", policy, cost=5)
        assert reset("alice", policy) == 1
        assert peek("alice", policy).remaining == 5


# Decisions


def test_a_decision_is_not_degraded(in_process, limiter):
    decision = limiter.check("alice")
    assert (decision.allowed, decision.degraded, decision.remaining) == (True, False, 4)


def test_local_share_does_not_apply(in_process, configure):
    configure(LOCAL_SHARE=4)
    assert check("alice").limit == 5


def test_newest_units_are_refunded(in_process, algo):
    policy = Policy("p", "5/h", algo=algo)
    check("alice", policy, cost=4)
    assert refund_units("alice", policy, 3) == 3
    assert peek("alice", policy).current_count == 1


def test_a_refund_works_once(in_process, algo):
    decision = check("alice", Policy("p", "5/h", algo=algo), cost=3)
    assert refund(decision)
    assert not refund(decision)


def test_a_receipt_is_refunded_once(in_process, algo):
    receipt = receipts.write(check("alice", Policy("p", "5/h", algo=algo), cost=3))
    assert [refund_receipt(receipt) for _ in range(2)] == [True, False]
    assert [asyncio.run(arefund_receipt(receipt)) for _ in range(2)] == [False, False]


def test_several_checks_are_decided_in_order(in_process):
    policy = Policy("p", "2/h")
    decisions = check_each([check_plan("alice", policy, 1) for _ in range(3)])
    assert [decision.allowed for decision in decisions] == [True, True, False]


def test_counters_outlive_a_change_of_settings(in_process, configure):
    check("alice")
    configure(HEADERS=[])
    assert peek("alice").current_count == 1


def test_a_reset_of_the_tests_empties_them(in_process):
    check("alice")
    reset_all()
    assert len(process_store) == 0
    assert peek("alice").current_count == 0


def test_a_cost_beyond_the_limit_stores_nothing(in_process, algo):
    policy = Policy("p", "5/m", algo=algo)
    peek("alice", policy)
    check("alice", policy, cost=0)
    check("alice", policy, cost=6)
    assert len(process_store) == 0


@pytest.mark.parametrize("limit", [50, 1_000])
def test_threads_admit_the_limit_and_not_one_more(in_process, algo, limit, monkeypatch):
    counter = ALGORITHM_RECORDS[algo].counter
    read = counter.check

    def read_and_yield(*args):
        usage = read(*args)
        time.sleep(0)  # between check and charge is where another thread would do harm
        return usage

    monkeypatch.setattr(counter, "check", read_and_yield)
    policy = Policy("p", (limit, 365 * 86_400), algo=algo)

    def work(_):
        return sum(check("alice", policy).allowed for _ in range(limit // 5))

    with frozen_clock(NOW):
        assert sum(in_threads(work)) == limit
        assert peek("alice", policy).current_count == limit


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_a_fork_starts_empty_even_while_a_thread_holds_the_lock(in_process, monkeypatch):
    check("alice", cost=5)
    held, done = threading.Event(), threading.Event()
    counter = ALGORITHM_RECORDS[SLIDING_WINDOW].counter
    read = counter.check

    def read_slowly(*args):
        held.set()
        done.wait(30)
        return read(*args)

    monkeypatch.setattr(counter, "check", read_slowly)
    thread = threading.Thread(target=peek, args=("alice",))
    thread.start()
    held.wait(30)
    monkeypatch.setattr(counter, "check", read)
    try:
        assert in_processes(lambda n: check("alice").current_count, 2) == [0, 0]
    finally:
        done.set()
        thread.join()
    assert peek("alice").current_count == 5


# What needs Redis


def test_overrides_need_redis(in_process):
    with pytest.raises(UnavailableError, match=r"needs Redis.*CACHES\['locmem'\] is not on Redis"):
        overrides.publish("alice", [])


def test_plain_commands_need_redis(in_process):
    with pytest.raises(UnavailableError, match="needs Redis"):
        backend.run_commands([("PING",)])


def test_background_jobs_are_silent_and_keep_no_statistics(in_process, log_lines, db):
    check("alice")
    assert recorder.pending or recorder.uneventful
    background.run()
    assert not recorder.pending
    assert not recorder.uneventful
    assert [line for line in log_lines("") if "each process" not in line] == []


@pytest.mark.parametrize(("debug", "level"), [(True, "WARNING"), (False, "ERROR")])
def test_the_log_says_so_at_the_first_decision(in_process, settings, caplog, debug, level):
    settings.DEBUG = debug
    forget_notice()
    for _ in range(3):
        check("alice")
    (record,) = [record for record in caplog.records if record.name == "rlaas_django"]
    assert record.levelname == level
    assert record.getMessage() == (
        "CACHES['locmem'] is not on Redis: each process counts by itself; configure Redis for more than one process."
    )


@pytest.mark.parametrize("name", ["locmem.LocMemCache", "dummy.DummyCache", "filebased.FileBasedCache"])
def test_caches_of_django_that_count_in_the_process(settings, name):
    settings.CACHES = {"default": {"BACKEND": f"django.core.cache.backends.{name}", "LOCATION": "/tmp/none"}}
    assert not check("alice").degraded
    assert len(process_store) == 1


@pytest.mark.parametrize("name", ["memcached.PyMemcacheCache", "memcached.PyLibMCCache", "db.DatabaseCache"])
def test_no_connection_to_the_cache_is_made(settings, name):
    settings.CACHES = {"default": {"BACKEND": f"django.core.cache.backends.{name}", "LOCATION": "nowhere:1"}}
    assert not check("alice").degraded
    assert len(process_store) == 1


# Bounds


def test_what_expires_soonest_is_evicted(in_process, configure, clock):
    configure(LOCAL_IDENTITIES=3)
    hour, minute = Policy("h", "2/h"), Policy("m", "2/m")
    check("alice", hour)
    check("bob", minute)
    check("carol", minute)
    clock.tick(1)
    check("bob", minute)  # who expires after carol then
    check("dave", hour)
    charged = (("alice", hour), ("bob", minute), ("carol", minute), ("dave", hour))
    counted = [peek(name, policy).current_count for name, policy in charged]
    assert counted == [1, 2, 0, 1]
    assert len(process_store) == 3


def test_expired_counters_are_dropped_when_a_new_one_is_kept(in_process, algo, clock):
    """They are kept for a window longer than they count, for a clock that steps back."""
    policy = Policy("p", "1/m", algo=algo)
    check("alice", policy)
    clock.tick(MINUTE)
    check("bob", policy)
    assert len(process_store) == 2
    clock.tick(3 * MINUTE)
    check("carol", policy)
    assert len(process_store) == 1


def test_a_reset_counter_is_evicted_and_counts_anew(in_process, configure, clock):
    configure(LOCAL_IDENTITIES=2)
    policy = Policy("p", "2/m")
    for _ in range(50):
        check("alice", policy)
        reset("alice", policy)
    for name in ("bob", "carol", "dave"):
        clock.tick(1)
        check(name, policy)
    assert [peek(name, policy).current_count for name in ("alice", "bob", "carol", "dave")] == [0, 0, 1, 1]


def traced(work) -> int:
    """Return the bytes that are still in use when the work is done."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_of_many_identities_is_bounded(store, algo, configure):
    configure(LOCAL_IDENTITIES=500)

    def storm():
        for n in range(5_000):
            charge(store, limit_of(algo=algo, key=f"ip=2001:db8::{n:x}"), NOW + n)

    used = traced(storm)
    assert len(store) == 500
    assert used < 500 * 2_000


def test_memory_of_full_logs_is_bounded_in_an_outage(bounded):
    def storm():
        for n, i in itertools.product(range(20), range(1_000)):
            charge(bounded, limit_of(100_000, key=str(n)), NOW + 60 * i)

    assert traced(storm) < 20 * MAX_ENTRIES * 250


@pytest.mark.parametrize("limit", [MAX_ENTRIES + 1, 1_000, 100_000])
@pytest.mark.parametrize("window", [1_000, MINUTE, 86_400_000])
def test_in_an_outage_units_of_a_large_limit_count_a_hundredth_longer_at_most(bounded, limit, window):
    """Between two logs: one with the exact window, which admits at least as much, and one with a longer window."""
    rng = random.Random(f"{limit}{window}")
    asked, now = limit_of(limit, window), NOW
    charged: list[tuple[int, int]] = []
    for _ in range(2_000):
        now += rng.choice([0, 1, rng.randint(0, window // 50), rng.randint(0, window // 500)])
        cost = rng.choice([1, rng.randint(1, limit // 50 + 1), limit // 10])
        charged = [pair for pair in charged if pair[0] > now - window - window // MAX_ENTRIES]
        in_window = sum(units for stamp, units in charged if stamp > now - window)
        in_longer = sum(units for _, units in charged)
        row = charge(bounded, asked, now, cost)
        assert in_window <= row.current_count <= in_longer
        assert row.allowed == (row.current_count + cost <= limit)
        if row.allowed:
            charged.append((now, cost))
        else:
            assert not look(bounded, asked, now + row.retry_after - 1, cost).allowed
            assert look(bounded, asked, now + row.retry_after, cost).allowed
    assert look(bounded, asked, now + window + window // MAX_ENTRIES).current_count == 0


def test_in_an_outage_a_large_limit_refunds_what_was_charged(bounded):
    asked = limit_of(1_000)
    rows = [charge(bounded, asked, NOW + i, 3) for i in range(300)]
    assert look(bounded, asked, NOW + 300).current_count == 900
    for row in rows:
        assert give_back(bounded, asked, NOW + 300, 3, row) == 3
    assert look(bounded, asked, NOW + 300)[:3] == (1, 0, 1_000)


def test_in_an_outage_a_limit_of_a_hundred_is_exact(bounded):
    rng = random.Random("exact")
    asked, model, now = limit_of(MAX_ENTRIES), MODELS[SLIDING_WINDOW](MAX_ENTRIES, MINUTE), NOW
    for tick, cost in random_trace(rng, MAX_ENTRIES, MINUTE, 500):
        now += tick
        assert charge(bounded, asked, now, cost)[:3] == model.check(now, cost)[:3]


@pytest.mark.parametrize("size", [20_000])
def test_a_full_log_of_a_large_limit_is_decided_quickly(store, size):
    asked = limit_of(size)
    for i in range(size):
        charge(store, asked, NOW + i // 4)
    started = time.perf_counter()
    for _ in range(100):
        assert not charge(store, asked, NOW + MINUTE - 2).allowed
    assert time.perf_counter() - started < 0.5


# Async


async def test_tasks_admit_the_limit_and_not_one_more(in_process, algo):
    policy = Policy("p", "20/h", algo=algo)
    decisions = await asyncio.gather(*[acheck("alice", policy) for _ in range(50)])
    assert sum(decision.allowed for decision in decisions) == 20


def test_the_frozen_clock_is_waited_for(in_process, limiter, clock):
    policy = Policy("p", "2/m")
    for _ in range(2):
        limiter.check("alice", policy)
    assert limiter.acquire("alice", policy, timeout=90).allowed
    assert clock.ms == NOW + MINUTE


def test_the_public_functions_need_no_redis(in_process):
    assert rlaas_django.check("alice").allowed
