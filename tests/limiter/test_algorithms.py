"""Every algorithm against its model on random traces, and what holds for all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlaas_django import Policy, check, peek, refund, reset
from rlaas_django.testing import frozen_clock

from tests.conftest import NOW, fakeredis_store_is_slow
from tests.support.internals import (
    ALGORITHMS,
    DEFAULTS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    parse_counter_key,
    redis_client,
    refund_units,
)
from tests.support.models import MODELS, Replay, random_trace

LOGS = (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT)
_names = itertools.count()


def fresh_policy(algo: str, limit: int, window: int, burst: int | None = None) -> Policy:
    """Return a policy without a count yet, so that traces in one test do not meet."""
    return Policy(f"trace-{next(_names)}", (limit, window), algo=algo, burst=burst)


def summary(decision) -> tuple:
    """Return a decision as a model does."""
    ms = [t if math.isinf(t) else round(t * 1000) for t in (decision.retry_after, decision.reset_after)]
    return decision.allowed, decision.current_count, decision.remaining, *ms


def assert_wait_is_exact(policy: Policy, clock, cost: int, retry_after: float) -> None:
    """Check that a peek is refused 1 ms before the end of the wait, and allowed at its end."""
    wait, at = round(retry_after * 1000), clock.ms
    clock.ms = at + wait - 1
    assert not peek("alice", policy, cost=cost).allowed
    clock.ms = at + wait
    assert peek("alice", policy, cost=cost).allowed
    clock.ms = at


def more_after(decision) -> int:
    """Return in how many ms more than `remaining` can be used."""
    return round(decision.outcomes[0].more_after * 1000)


def model_more_after(policy: Policy, model, now: int) -> int:
    """Return when a model allows more than now, or is whole where the script does not know it: in the ZSET."""
    return model.whole(now) if policy.algo == SLIDING_WINDOW else model.more(now)


def follow(policy: Policy, model, trace, clock) -> int:
    """Make the same checks on the server and the model; return how many were allowed."""
    allowed = 0
    for tick, cost in trace:
        clock.tick(tick)
        decision = check("alice", policy, cost=cost)
        assert summary(decision) == model.check(clock.ms, cost)
        allowed += decision.allowed
        if math.isinf(decision.retry_after):
            assert decision.outcomes[0].more_after == decision.reset_after
        elif decision.allowed:
            wanted = model_more_after(policy, model, clock.ms)
            assert (more_after(decision), more_after(peek("alice", policy, cost=0))) == (wanted, wanted)
        else:
            assert decision.outcomes[0].more_after == decision.retry_after
            assert_wait_is_exact(policy, clock, cost, decision.retry_after)
    return allowed


@fakeredis_store_is_slow
@pytest.mark.parametrize("limit", [1, 2, 7, 100, 1_000, 10_000])
def test_an_algorithm_agrees_with_its_model_on_long_traces(store, algo, limit, clock, scale):
    rng = random.Random(f"{algo}{limit}")
    for window in (10, 60, 3_600):
        burst = rng.choice([None, 1, 2 * limit]) if algo == TOKEN_BUCKET else None
        model = MODELS[algo](limit, window * 1000, burst)
        trace = random_trace(rng, limit, window * 1000, scale(120, least=25))
        assert follow(fresh_policy(algo, limit, window, burst), model, trace, clock) > 0


@pytest.mark.parametrize("own_algo", ALGORITHMS)
def test_a_policy_that_another_keeps_from_being_charged_says_when_more_can_be_used(store, own_algo, clock):
    """Without the charge that did not take place."""
    rng = random.Random(own_algo)
    own, full = fresh_policy(own_algo, 7, 60), Policy("full", "1/d")
    check("alice", full)
    model = MODELS[own_algo](7, 60_000)
    for _ in range(40):
        clock.tick(rng.randint(0, 20_000))
        cost = rng.randint(1, 3)
        if rng.random() < 0.5:
            check("alice", own, cost=cost)
            model.check(clock.ms, cost)
        refusal = check("alice", [own, full])
        assert not refusal.allowed
        if refusal.outcomes[0].allowed:
            assert more_after(refusal) == model_more_after(own, model, clock.ms)


def test_when_more_can_be_used_is_never_told_too_early_after_a_step_back(store, algo, clock, scale):
    """What was counted when the clock showed a later time counts until then."""
    rng = random.Random(algo)
    for limit in (1, 5, 40):
        policy, latest = fresh_policy(algo, limit, 60), 0
        for tick, cost in random_trace(rng, limit, 60_000, scale(60, least=20)):
            latest = max(latest, clock.ms + tick)
            clock.ms = latest - rng.choice([0, 0, rng.randint(0, 59_999)])
            decision = check("alice", policy, cost=min(cost, limit))
            if decision.allowed:
                at, wait = clock.ms, more_after(decision)
                assert wait > 0
                clock.ms = at + wait
                assert peek("alice", policy, cost=decision.remaining + 1).allowed
                clock.ms = at


steps_of_a_trace = st.lists(
    st.tuples(st.sampled_from([0, 1, 0.1, 0.5, 0.999, 1.0, 1.5, 3]) | st.integers(0, 200), st.integers(1, 10_001)),
    min_size=1,
    max_size=25,
)


def test_an_algorithm_agrees_with_its_model_on_any_trace(store, algo, scale):
    @settings(max_examples=scale(60, least=10))
    @given(
        limit=st.integers(1, 10_000),
        window=st.sampled_from([10, 60, 90, 86_400]),
        burst=st.none() | st.integers(1, 10_000) if algo == TOKEN_BUCKET else st.none(),
        start=st.integers(0, 10**13),
        steps=steps_of_a_trace,
    )
    def any_trace(limit, window, burst, start, steps):
        model = MODELS[algo](limit, window * 1000, burst)
        # A fraction is of a window, a whole number is ms; a cost is taken to be of the limit's size.
        trace = [
            (tick if isinstance(tick, int) else int(tick * window * 1000), (cost - 1) % (limit + 1) + 1)
            for tick, cost in steps
        ]
        with frozen_clock(start) as clock:
            follow(fresh_policy(algo, limit, window, burst), model, trace, clock)

    any_trace()


@fakeredis_store_is_slow
@pytest.mark.parametrize("limit", [1, 5, 40])
def test_late_refunds_never_admit_more_than_if_the_charges_had_not_been_made(store, algo, limit, clock, scale):
    rng = random.Random(f"refunds {algo}{limit}")
    for share in (0.2, 0.5, 0.9):
        window, burst = rng.choice([10, 60]), rng.choice([None, 3, 2 * limit]) if algo == TOKEN_BUCKET else None
        replay, policy, pending = Replay(limit, window * 1000, burst), fresh_policy(algo, limit, window, burst), []
        for tick, cost in random_trace(rng, burst or limit, window * 1000, scale(120, least=60)):
            clock.tick(tick)
            decision = check("alice", policy, cost=cost)
            if decision.allowed:
                replay.charges.append(charge := [clock.ms, cost])
                pending.append((decision, charge))
            if rng.random() < 0.05:
                clock.tick(1)  # units of the same ms are not told apart
                reset("alice", policy)
                replay.charges.clear()
            while pending and rng.random() < share:
                decision, charge = pending.pop(rng.randrange(len(pending)))
                refund(decision)
                replay.charges = [each for each in replay.charges if each is not charge]
            seen, wanted = peek("alice", policy).current_count, replay.count(algo, clock.ms)
            assert seen >= wanted if algo == TOKEN_BUCKET else seen == wanted


def test_a_bucket_refunds_nothing_that_was_refilled(store, clock):
    policy = Policy("p", "60/m", algo=TOKEN_BUCKET, burst=5)
    admitted = 0
    for _ in range(10):
        decisions = [check("alice", policy) for _ in range(5)]
        admitted += sum(decision.allowed for decision in decisions)
        clock.tick(5_000)  # the bucket is full again
        charged = check("alice", policy)
        assert not any(refund(decision) for decision in decisions)
        assert refund(charged)
    assert admitted == 50
    assert peek("alice", policy).current_count == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_bucket_refunds_concurrent_charges_in_any_order(store, order, clock):
    policy = Policy("p", "5/h", algo=TOKEN_BUCKET)
    decisions = [check("alice", policy) for _ in range(3)]
    clock.tick(100)
    for i in order:
        assert refund(decisions[i])
    assert peek("alice", policy).current_count == 0


def test_a_bucket_refunds_part_of_a_charge_that_is_refilled_in_part(store, clock):
    policy = Policy("p", "60/m", algo=TOKEN_BUCKET, burst=9)
    decision = check("alice", policy, cost=4)
    clock.tick(3_000)
    check("alice", policy, cost=2)
    assert refund(decision)
    assert peek("alice", policy).current_count == 2


def test_a_refund_from_before_a_reset_takes_nothing_that_was_charged_after_it(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    decision = check("alice", policy, cost=3)
    clock.tick(1)
    reset("alice", policy)
    check("alice", policy, cost=2)
    assert not refund(decision)
    assert peek("alice", policy).current_count == 2


def test_what_was_charged_after_a_reset_is_refunded(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    check("alice", policy, cost=3)
    reset("alice", policy)
    decision = check("alice", policy, cost=2)
    assert refund(decision)
    assert peek("alice", policy).current_count == 0


@pytest.mark.parametrize("algo", [FIXED_WINDOW, SLIDING_WINDOW_COUNTER])
def test_an_operator_refunds_the_newest_units_also_after_a_reset_by_a_clock_ahead(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    check("alice", policy)
    clock.tick(5_000)
    reset("alice", policy)
    clock.tick(-3_000)
    check("alice", policy, cost=3)
    assert refund_units("alice", policy, 2) == 2


def test_a_reset_counts_the_counters_that_it_deletes_and_nothing_else(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    check("alice", policy)
    assert [reset("alice", policy) for _ in range(3)] == [1, 0, 0]
    check("alice", policy)
    assert reset("alice", policy) == 1


def test_every_key_that_a_reset_leaves_expires(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    check("alice", policy)
    reset("alice", policy)
    assert all(0 < server.pttl(key) <= 120_000 for key in server.keys("rlaas:*"))
    assert [key for key in server.keys("rlaas:*") if parse_counter_key(key.decode())] == []


@fakeredis_store_is_slow
def test_both_logs_decide_alike_also_when_the_clock_steps_back(store, clock, scale):
    rng = random.Random("logs")
    for limit in (1, 5, 40, 60):  # beyond 64, a refusal may drop expired entries that a step back would revive
        policies = [fresh_policy(algo, limit, 60) for algo in LOGS]
        decisions = []
        for tick, cost in random_trace(rng, limit, 60_000, scale(250, least=60)):
            clock.tick(tick if rng.random() < 0.9 else -rng.randint(0, 70_000))
            pair = [check("alice", policy, cost=cost) for policy in policies]
            assert summary(pair[0]) == summary(pair[1])
            decisions.append(pair)
            if rng.random() < 0.2:
                refunded = decisions.pop(rng.randrange(len(decisions)))
                assert refund(refunded[0]) == refund(refunded[1])


@fakeredis_store_is_slow
def test_both_logs_decide_alike_at_large_limits(store, clock, scale):
    rng = random.Random("large logs")
    for limit in (500, 3000):
        policies = [fresh_policy(algo, limit, 60) for algo in LOGS]
        for tick, cost in random_trace(rng, limit, 60_000, scale(150, least=30)):
            clock.tick(tick)
            pair = [check("alice", policy, cost=cost) for policy in policies]
            assert summary(pair[0]) == summary(pair[1])


def test_expired_entries_are_read_once(own, clock):
    """Also by checks that another policy refuses. On a server of its own, whose commands are counted."""
    client = redis_client("default")
    log, full = Policy("log", "2000/m", algo=SLIDING_WINDOW_COMPACT), Policy("full", "1/h")
    check("alice", full)
    for _ in range(1999):
        check("alice", log)
    clock.tick(30_000)
    check("alice", log)
    clock.tick(30_000)
    reads = []
    for _ in range(3):
        client.config_resetstat()
        assert not check("alice", [log, full]).allowed
        reads.append(client.info("commandstats")["cmdstat_getrange"]["calls"])
    assert reads[0] > 30
    assert reads[1:] == [1, 1]
    assert peek("alice", log).current_count == 1


@fakeredis_store_is_slow
def test_a_bucket_does_not_lose_fractions_of_a_millisecond(store, clock):
    """90 a minute is one each 666.67 ms; rounded to ms, an hour would be off by two."""
    policy = Policy("p", "90/m", algo=TOKEN_BUCKET, burst=2)
    check("alice", policy, cost=2)
    for i in range(1, 90 * 3):
        clock.ms = NOW + -(-i * 60_000 // 90) - 1
        assert check("alice", policy).retry_after == 0.001
        clock.tick(1)
        assert check("alice", policy).allowed


@fakeredis_store_is_slow
def test_the_largest_accepted_rates_are_exact(store, algo, clock):
    for window in (1, 60, 86_400, 365 * 86_400):
        limit = 2**52 // (window * 1000)
        if algo == SLIDING_WINDOW or (algo == SLIDING_WINDOW_COMPACT and limit > 200_000):
            continue  # a log of that length is a matter of memory, not of arithmetic
        model, policy = MODELS[algo](limit, window * 1000), fresh_policy(algo, limit, window)
        trace = [(0, limit - 2), (1, 1), (1, 1), (1, 1), (window * 999, 1), (window // 2, limit), (window * 500, 3)]
        follow(policy, model, trace, clock)


@pytest.mark.parametrize("back", [1, 15_000, 59_999])
def test_a_clock_that_steps_back_admits_nothing_extra_and_loses_nothing(store, algo, back, clock):
    policy = Policy("p", "5/m", algo=algo)
    for _ in range(5):
        assert check("alice", policy).allowed
    clock.tick(-back)
    refused = check("alice", policy)
    assert not refused.allowed
    assert refused.current_count == 5
    assert_wait_is_exact(policy, clock, 1, refused.retry_after)
    clock.tick(back)
    assert not check("alice", policy).allowed


def test_a_cost_over_the_capacity_is_refused_for_ever_and_writes_nothing(server, algo, clock):
    decision = check("alice", Policy("p", "5/m", algo=algo), cost=6)
    assert (decision.allowed, decision.retry_after, decision.remaining) == (False, math.inf, 5)
    assert not server.keys("rlaas:*")


def test_a_cost_is_charged_whole_or_not_at_all(store, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    assert check("alice", policy, cost=3).remaining == 2
    assert not check("alice", policy, cost=3).allowed
    assert peek("alice", policy).current_count == 3
    assert check("alice", policy, cost=2).allowed


def test_a_refused_check_does_not_change_the_value(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    for tick in (0, 30_000, 5_000, 5_000, 5_000, 14_900):  # the first is about to leave a sliding window
        clock.tick(tick)
        check("alice", policy)
    clock.tick(50)
    before = state(server)
    for cost in (5, 6, 5):
        assert not check("alice", policy, cost=cost).allowed
    assert state(server) == before


@pytest.mark.parametrize(
    "look",
    [lambda policy: peek("alice", policy), lambda policy: check("alice", policy, cost=0)],
    ids=["peek", "cost 0"],
)
def test_a_peek_and_a_check_of_cost_0_change_neither_values_nor_ttls_nor_keys(server, algo, look, clock):
    policy = Policy("p", "5/m", algo=algo)
    look(policy)
    assert server.dbsize() == 0
    for _ in range(4):
        check("alice", policy)
    for key in server.keys():
        server.pexpire(key, 12_345_678)  # so that an extension would show
    before = state(server)
    clock.tick(59_000)
    assert look(policy).remaining <= 5
    clock.tick(120_000)
    assert look(policy).remaining == 5
    assert state(server) == before
    assert all(12_000_000 < server.pttl(key) <= 12_345_678 for key in server.keys())


def state(server) -> dict:
    return {
        key: server.zrange(key, 0, -1, withscores=True) if server.type(key) == b"zset" else server.get(key)
        for key in server.keys()
    }


def test_a_check_of_cost_0_is_allowed_and_a_peek_decides_as_a_check_would(store, algo, clock):
    policy = Policy("p", "2/m", algo=algo)
    check("alice", policy, cost=2)
    assert check("alice", policy, cost=0).allowed
    seen = peek("alice", policy)
    assert (seen.allowed, seen.current_count, seen.remaining) == (False, 2, 0)
    assert seen.retry_after == check("alice", policy).retry_after


def test_raising_a_limit_keeps_the_usage_and_lowering_it_refuses(store, algo, clock):
    for _ in range(4):
        check("alice", Policy("p", "5/m", algo=algo))
    raised = peek("alice", Policy("p", "8/m", algo=algo))
    assert (raised.current_count, raised.remaining) == (4, 4)
    lowered = check("alice", Policy("p", "2/m", algo=algo))
    assert (lowered.allowed, lowered.current_count, lowered.remaining) == (False, 4, 0)
    assert_wait_is_exact(Policy("p", "2/m", algo=algo), clock, 1, lowered.retry_after)


def test_keys_expire_soon_after_their_window(server, algo, clock):
    check("alice", Policy("p", "5/m", algo=algo))
    (key,) = server.keys()
    longest = {FIXED_WINDOW: 60_000, TOKEN_BUCKET: 72_000}.get(algo, 120_000)
    assert longest - 2_000 < server.pttl(key) <= longest


def test_the_key_and_the_type_of_each_algorithm(server, algo, clock):
    for policy in (Policy("default", "5/m", algo=algo), Policy("p", "5/m", algo=algo)):
        check("alice", policy)
    ending, kind = {
        FIXED_WINDOW: (f":{NOW // 60_000}", b"string"),
        SLIDING_WINDOW: ("", b"zset"),
        SLIDING_WINDOW_COMPACT: (":log", b"string"),
        SLIDING_WINDOW_COUNTER: (":counter-60", b"string"),
        TOKEN_BUCKET: (":bucket-60", b"string"),
    }[algo]
    keys = {f"rlaas:rate_limit:alice{ending}".encode(), f"rlaas:rate_limit:p/alice{ending}".encode()}
    assert set(server.keys()) == keys
    assert {server.type(key) for key in keys} == {kind}


@pytest.mark.parametrize("limit", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pace", ["even", "random", "storm"])
def test_the_compact_log_takes_two_bytes_per_request(client, limit, pace, clock):
    """Filled, and then kept full for another window, so that expired entries and spare room count too."""
    policy, rng = Policy("p", (limit, 60), algo=SLIDING_WINDOW_COMPACT), random.Random(pace)
    worst = 0
    for i in range(2 * limit + 300):
        clock.tick({"even": 60_000 // limit, "random": rng.randint(0, 120_000 // limit), "storm": 0}[pace])
        if pace == "storm" and i % limit == 0:
            clock.tick(60_000)
        check("alice", policy)
        if i >= limit and i % 47 == 0 and peek("alice", policy).current_count >= 0.9 * limit:
            worst = max(worst, client.memory_usage("rlaas:rate_limit:p/alice:log"))
    assert 0 < worst <= 2 * limit


def test_every_algorithm_has_a_model():
    assert set(MODELS) == set(ALGORITHMS)
    assert DEFAULTS["USE_ALGO"] == SLIDING_WINDOW
