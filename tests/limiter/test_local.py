"""Counting in this process: a sliding log and a token bucket, against plain models, and their bounds."""

from __future__ import annotations

import gc
import itertools
import math
import random
import threading
import time
import tracemalloc
from copy import deepcopy
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import NOW
from tests.support.internals import LocalLimit, LocalLimiter, LocalReply, local_limiter, local_module
from tests.support.models import random_trace
from tests.support.parallel import in_processes, in_threads

MAX_ENTRIES = local_module.MAX_ENTRIES
IDENTITIES = 10_000
MINUTE = 60_000
BURSTS = [None, 5]


@pytest.fixture(autouse=True)
def _clean_slate():
    """In place of the fixture that looks at the servers: none is used here."""
    local_limiter.reset()
    yield
    local_limiter.reset()


@pytest.fixture
def local() -> LocalLimiter:
    return LocalLimiter()


@pytest.fixture(params=BURSTS, ids=["log", "bucket"])
def burst(request) -> int | None:
    return request.param


def limit_of(
    limit: int = 5,
    window: int = MINUTE,
    *,
    policy: str = "p",
    identity: str = "alice",
    burst: int | None = None,
    shadow: bool = False,
) -> LocalLimit:
    return LocalLimit(policy, identity, limit, window, burst, shadow)


def check(local: LocalLimiter, limit: LocalLimit, now: int = NOW, cost: int = 1) -> LocalReply:
    return local.check([limit], now, cost, charge=True, max_identities=IDENTITIES)[0]


def peek(local: LocalLimiter, limit: LocalLimit, now: int = NOW, cost: int = 1) -> LocalReply:
    return local.check([limit], now, cost, charge=False, max_identities=IDENTITIES)[0]


def entries(local: LocalLimiter) -> int:
    """Return the number of entries of all logs."""
    return sum(len(state._entries) for state in local._states.values())


# Models


class LogModel:
    """Every unit's stamp in a list. A clock that steps back gives a unit the stamp of the newest one."""

    def __init__(self, limit: LocalLimit) -> None:
        self.capacity, self.window = limit.limit, limit.window
        self.stamps: list[int] = []

    def count(self, now: int) -> int:
        self.stamps = [stamp for stamp in self.stamps if stamp + self.window > now]
        return len(self.stamps)

    def charge(self, now: int, cost: int) -> None:
        stamp = max([now, *self.stamps])
        self.stamps += [stamp] * cost

    def wait(self, now: int, cost: int) -> int:
        """Wait until so many of the oldest units have left that the cost fits."""
        leaving = self.count(now) + cost - self.capacity
        return sorted(self.stamps)[leaving - 1] + self.window - now if leaving > 0 else 0

    def reset_after(self, now: int) -> int:
        return max(self.stamps) + self.window - now if self.count(now) else 0

    def refund(self, now: int, cost: int, charged_at: int) -> int:
        self.count(now)
        refunded = min(cost, self.stamps.count(charged_at))
        for _ in range(refunded):
            self.stamps.remove(charged_at)
        return refunded


class BucketModel:
    """What each charge still takes from the bucket, a fraction; a refill goes to the oldest charge.

    It refills nothing while the clock is behind its last use.
    """

    def __init__(self, limit: LocalLimit) -> None:
        self.capacity, self.speed = limit.burst, Fraction(limit.limit, limit.window)
        self.charges: list[Fraction] = []
        self.at, self.used = 0, False

    @property
    def missing(self) -> Fraction:
        return sum(self.charges, Fraction(0))

    def count(self, now: int) -> int:
        if self.used and now > self.at:
            refill, self.at = self.speed * (now - self.at), now
            for i, left in enumerate(self.charges):
                self.charges[i] -= min(left, refill)
                refill -= min(left, refill)
        return math.ceil(self.missing)

    def charge(self, now: int, cost: int) -> None:
        self.used = True
        self.count(now)
        self.charges.append(Fraction(cost))

    def wait(self, now: int, cost: int) -> int:
        self.count(now)
        over = self.missing + cost - self.capacity
        return self.at - now + math.ceil(over / self.speed) if over > 0 else 0

    def reset_after(self, now: int) -> int:
        self.count(now)
        return self.at - now + math.ceil(self.missing / self.speed) if self.missing else 0

    def refund(self, now: int, charge: int) -> int:
        self.count(now)
        refunded, self.charges[charge] = self.charges[charge], Fraction(0)
        return math.ceil(refunded)


def model_of(limit: LocalLimit) -> LogModel | BucketModel:
    return LogModel(limit) if limit.burst is None else BucketModel(limit)


def expected(model: LogModel | BucketModel, now: int, cost: int, *, charge: bool) -> tuple:
    """Return the model's reply; `charge` as decided by all policies together."""
    count = model.count(now)
    allowed = count + cost <= model.capacity
    wait = 0 if allowed else -1 if cost > model.capacity else model.wait(now, cost)
    remaining = max(0, model.capacity - count)
    if charge and allowed and cost:
        model.charge(now, cost)
        remaining -= cost
    return allowed, count, remaining, wait, model.reset_after(now)


def assert_wait_is_exact(local: LocalLimiter, limit: LocalLimit, now: int, cost: int, wait: int) -> None:
    """1 ms before the end of the wait: refused; then: allowed."""
    copy = LocalLimiter()
    copy._states = deepcopy(local._states)  # a later look deletes what is expired by then
    assert not peek(copy, limit, now + wait - 1, cost).allowed
    assert peek(copy, limit, now + wait, cost).allowed


def follow(local: LocalLimiter, limit: LocalLimit, trace, rng: random.Random, *, back: bool = False) -> tuple[int, int]:
    """Compare a trace of checks, peeks and refunds with the model; return the number of allowed checks and refunds."""
    model, now, receipts, allowed, refunds = model_of(limit), NOW, [], 0, 0
    for tick, cost in trace:
        now += -rng.randint(0, 70_000) if back and rng.random() < 0.1 else tick
        reply = check(local, limit, now, cost)
        assert reply[:5] == expected(model, now, cost, charge=True)
        assert (reply.charged_at >= 0) == reply.allowed
        if reply.allowed:
            allowed += 1
            receipts.append((cost, reply.charged_at, allowed - 1))
        if reply.retry_after > 0 and rng.random() < 0.2:
            assert_wait_is_exact(local, limit, now, cost, reply.retry_after)
        if receipts and rng.random() < 0.2:
            receipt = receipts.pop(rng.randrange(max(0, len(receipts) - 5), len(receipts)))
            refunded = local.refund(limit, now, *receipt[:2])
            assert refunded == model.refund(now, *(receipt[:2] if limit.burst is None else receipt[2:]))
            refunds += refunded > 0
            assert peek(local, limit, now, cost)[:5] == expected(model, now, cost, charge=False)
        assert limit.burst is not None or entries(local) <= limit.limit
    return allowed, refunds


# Exact up to a limit of MAX_ENTRIES


@pytest.mark.parametrize("back", [False, True], ids=["", "clock steps back"])
@pytest.mark.parametrize("limit", [1, 2, 7, 40, MAX_ENTRIES])
def test_log_agrees_with_its_model(limit, back):
    rng = random.Random(f"{limit}{back}")
    for window in (10_000, MINUTE, 60 * MINUTE):
        followed = LocalLimiter(), limit_of(limit, window), random_trace(rng, limit, window, 300), rng
        allowed, refunds = follow(*followed, back=back)
        assert allowed > 30
        assert refunds > 0


@pytest.mark.parametrize("back", [False, True], ids=["", "clock steps back"])
@pytest.mark.parametrize("limit", [1, 7, 100, 10_000, 2**52 // (60 * MINUTE)])
def test_bucket_agrees_with_its_model_under_any_limit(limit, back):
    rng = random.Random(f"{limit}{back}")
    for window, burst in itertools.product((10_000, 60 * MINUTE), (1, max(1, limit // 2), 2 * limit)):
        followed = LocalLimiter(), limit_of(limit, window, burst=burst), random_trace(rng, burst, window, 150), rng
        allowed, refunds = follow(*followed, back=back)
        assert allowed > 10
        assert refunds > 0


@given(
    limit=st.integers(1, MAX_ENTRIES),
    window=st.sampled_from([1_000, 10_000, 90_000, 86_400_000]),
    burst=st.none() | st.integers(1, 10_000),
    steps=st.lists(
        st.tuples(st.sampled_from([0.1, 0.5, 0.999, 1.0, 1.5, 3.0, -0.5]) | st.integers(-5, 200), st.integers(0, 101)),
        min_size=1,
        max_size=25,
    ),
)
def test_any_trace_agrees_with_the_model(limit, window, burst, steps):
    """A fraction is of a window, a whole number is ms."""
    trace = [(tick if isinstance(tick, int) else int(tick * window), cost % (limit + 2)) for tick, cost in steps]
    local, asked = LocalLimiter(), limit_of(limit, window, burst=burst)
    model, now = model_of(asked), NOW
    for tick, cost in trace:
        now += tick
        assert check(local, asked, now, cost)[:5] == expected(model, now, cost, charge=True)


# Properties of larger limits


@pytest.mark.parametrize("limit", [MAX_ENTRIES + 1, 1_000, 100_000])
@pytest.mark.parametrize("window", [1_000, MINUTE, 86_400_000])
def test_large_limit_is_never_exceeded_and_units_count_a_hundredth_longer_at_most(limit, window):
    """Between two logs: one with the exact window, which admits at least as much, and one with a longer window."""
    rng = random.Random(f"{limit}{window}")
    local, asked, now = LocalLimiter(), limit_of(limit, window), NOW
    charged: list[tuple[int, int]] = []
    for _ in range(2_000):
        now += rng.choice([0, 1, rng.randint(0, window // 50), rng.randint(0, window // 500)])
        cost = rng.choice([1, rng.randint(1, limit // 50 + 1), limit // 10])
        charged = [each for each in charged if each[0] > now - window - window // MAX_ENTRIES]
        in_window = sum(units for stamp, units in charged if stamp > now - window)
        in_longer = sum(units for _, units in charged)
        reply = check(local, asked, now, cost)
        assert in_window <= reply.current_count <= in_longer
        assert reply.allowed == (reply.current_count + cost <= limit)
        assert entries(local) <= MAX_ENTRIES + 2
        if reply.allowed:
            charged.append((now, cost))
        else:
            assert 0 < reply.retry_after <= window + window // MAX_ENTRIES
            if rng.random() < 0.05:
                assert_wait_is_exact(local, asked, now, cost, reply.retry_after)
    assert peek(local, asked, now + window + window // MAX_ENTRIES).current_count == 0


def test_large_limit_refunds_what_was_charged(local):
    asked = limit_of(1_000)
    receipts = [check(local, asked, NOW + i, 3) for i in range(300)]
    assert peek(local, asked, NOW + 300).current_count == 900
    for reply in receipts:
        assert local.refund(asked, NOW + 300, 3, reply.charged_at) == 3
    assert peek(local, asked, NOW + 300)[:5] == (True, 0, 1_000, 0, 0)


# One check


@pytest.mark.parametrize("back", [1, 15_000, 59_999, 600_000])
def test_clock_that_steps_back_admits_nothing_extra_and_loses_nothing(local, burst, back):
    asked = limit_of(burst=burst)
    for _ in range(5):
        assert check(local, asked).allowed
    refused = check(local, asked, NOW - back)
    assert (refused.allowed, refused.current_count, refused.charged_at) == (False, 5, -1)
    assert_wait_is_exact(local, asked, NOW - back, 1, refused.retry_after)
    assert not check(local, asked).allowed


@pytest.mark.parametrize("back", [1, 15_000, 59_999])
def test_charge_after_a_step_back_counts_and_can_be_refunded(local, burst, back):
    asked = limit_of(burst=burst)
    check(local, asked, cost=3)
    charged = check(local, asked, NOW - back, 2)
    assert (charged.allowed, charged.current_count, charged.remaining) == (True, 3, 0)
    assert peek(local, asked, NOW - back).current_count == 5
    assert local.refund(asked, NOW - back, 2, charged.charged_at) == 2
    assert peek(local, asked).current_count == 3


def test_cost_over_the_capacity_never_fits(local, burst):
    assert check(local, limit_of(burst=burst), cost=6) == (False, 0, 5, -1, 0, -1)
    check(local, limit_of(burst=burst), cost=2)
    assert check(local, limit_of(burst=burst), cost=6)[:4] == (False, 2, 3, -1)


def test_peek_and_refusal_of_a_new_identity_store_nothing(local, burst):
    peek(local, limit_of(burst=burst))
    check(local, limit_of(burst=burst), cost=0)
    check(local, limit_of(burst=burst), cost=6)
    assert len(local) == 0


def test_cost_zero_passes_and_charges_nothing(local, burst):
    check(local, limit_of(burst=burst), cost=5)
    reply = check(local, limit_of(burst=burst), cost=0)
    assert reply[:4] == (True, 5, 0, 0)
    assert reply.charged_at == -1
    assert peek(local, limit_of(burst=burst)).current_count == 5


def test_raised_limit_keeps_the_usage_and_a_lowered_one_refuses(local):
    check(local, limit_of(), cost=4)
    raised = peek(local, limit_of(8))
    assert (raised.current_count, raised.remaining) == (4, 4)
    lowered = check(local, limit_of(2))
    assert (lowered.allowed, lowered.current_count, lowered.remaining) == (False, 4, 0)
    assert_wait_is_exact(local, limit_of(2), NOW, 1, lowered.retry_after)
    large = check(local, limit_of(1_000), NOW + 1, 6)
    assert (large.allowed, large.current_count) == (True, 4)
    assert check(local, limit_of(), NOW + 2).current_count == 10
    assert len(local) == 1


def test_policies_identities_windows_and_bursts_are_counted_apart(local):
    apart = [
        limit_of(window=window, policy=policy, identity=identity, burst=burst)
        for window, policy, identity, burst in itertools.product((1_000, MINUTE), "pq", ("alice", "bob"), BURSTS)
    ]
    for asked in apart:
        assert check(local, asked, cost=5).current_count == 0
    assert all(peek(local, asked).current_count == 5 for asked in apart)
    assert len(local) == len(apart)


# Several policies


def test_several_policies_are_charged_together_or_not_at_all(local):
    """Random requests under several policies, some of them shadow policies, against a model of each."""
    rng = random.Random("together")
    limits = [
        limit_of(rng.randint(3, 12), window, policy=f"{window}{burst}{shadow}", burst=burst, shadow=shadow)
        for window, burst, shadow in itertools.product((10_000, MINUTE), BURSTS, (False, True))
    ]
    models = {each: model_of(each) for each in limits}
    now, seen = NOW, set()
    for tick, cost in random_trace(rng, 8, MINUTE, 2_000):
        now += tick
        some = rng.sample(limits, rng.randint(1, 6))
        fits = {each: models[each].count(now) + cost <= each.capacity for each in some}
        together = all(fits[each] or each.shadow for each in some)
        peeked = rng.random() < 0.1
        replies = local.check(some, now, cost, charge=not peeked, max_identities=IDENTITIES)
        for each, reply in zip(some, replies, strict=True):
            charged = together and fits[each] and not peeked
            assert (reply.charged_at >= 0) == charged
            assert reply[:5] == expected(models[each], now, cost, charge=charged)
        seen.add((together, all(fits.values())))
    assert seen == {(True, True), (True, False), (False, False)}


# Refunds


def test_refund_returns_what_was_charged_once(local, burst):
    asked = limit_of(burst=burst)
    first, second = check(local, asked, cost=3), check(local, asked, NOW + 1, 2)
    assert local.refund(asked, NOW + 2, 2, second.charged_at) == 2
    assert peek(local, asked, NOW + 2).current_count == 3
    assert local.refund(asked, NOW + 2, 9, first.charged_at) == 3
    assert peek(local, asked, NOW + 2)[:5] == (True, 0, 5, 0, 0)
    assert local.refund(asked, NOW + 2, 3, first.charged_at) == 0


def test_nothing_is_refunded_that_no_longer_counts(local, burst):
    asked = limit_of(burst=burst)
    charged_at = check(local, asked, cost=5).charged_at
    later = NOW + 2 * MINUTE
    assert local.refund(asked, later, 5, charged_at) == 0
    check(local, asked, later)
    if burst is None:  # in a bucket, a unit is as good as any other
        assert local.refund(asked, later, 5, charged_at) == 0
    assert local.refund(limit_of(burst=burst, identity="bob"), NOW, 5, charged_at) == 0


# Bounds


def test_identities_seen_last_are_kept_and_a_refusal_counts_as_seen(local):
    alice, bob, carol = (limit_of(1, identity=name) for name in ("alice", "bob", "carol"))
    for asked in (alice, bob):
        local.check([asked], NOW, 1, charge=True, max_identities=2)
    assert not local.check([alice], NOW, 1, charge=True, max_identities=2)[0].allowed
    local.check([carol], NOW, 1, charge=True, max_identities=2)
    assert [peek(local, asked).current_count for asked in (alice, bob, carol)] == [1, 0, 1]
    assert len(local) == 2


def test_lower_bound_holds_from_the_next_check_on(local):
    for n in range(100):
        check(local, limit_of(identity=str(n)))
    local.check([limit_of(identity="99")], NOW, 6, charge=True, max_identities=10)
    assert len(local) == 10


def test_reset_deletes_everything(local, burst):
    check(local, limit_of(burst=burst), cost=5)
    local.reset()
    assert len(local) == 0
    assert check(local, limit_of(burst=burst)).current_count == 0


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


def test_memory_of_many_identities_is_bounded(local):
    most = 1_000

    def storm():
        for n in range(10 * most):
            asked = limit_of(identity=f"ip=2001:db8::{n:x}", burst=BURSTS[n % 2])
            local.check([asked], NOW + n, 1, charge=True, max_identities=most)

    used = traced(storm)
    assert len(local) == most
    assert used < 2_000 * most


@pytest.mark.parametrize("limit", [MAX_ENTRIES, 100_000])
def test_memory_of_full_logs_is_bounded(local, limit):
    def storm():
        for n, i in itertools.product(range(20), range(1_000)):
            check(local, limit_of(limit, identity=str(n)), NOW + 60 * i)

    used = traced(storm)
    assert entries(local) <= 20 * (MAX_ENTRIES + 2)
    assert used < 20 * MAX_ENTRIES * 250


def test_expired_entries_are_deleted(local):
    for i in range(5_000):
        check(local, limit_of(100), NOW + 1_000 * i)
        assert entries(local) <= 60


# Threads and forks


@pytest.mark.parametrize("limit", [50, 1_000])
def test_threads_admit_the_limit_and_not_one_more(local, burst, limit, monkeypatch):
    kind = local_module.SlidingLog if burst is None else local_module.TokenBucket
    peek_state = kind.peek

    def peek_and_yield(*args):
        found = peek_state(*args)
        time.sleep(0)  # between peek and charge is where another thread would do harm
        return found

    monkeypatch.setattr(kind, "peek", peek_and_yield)
    asked = limit_of(limit, 365 * 86_400_000, burst=burst and limit)

    def work(_):
        return sum(check(local, asked, NOW + i % 3).allowed for i in range(limit // 5))

    assert sum(in_threads(work)) == limit
    assert peek(local, asked, NOW + 2).current_count == limit


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_fork_starts_at_zero_even_while_a_thread_holds_the_lock():
    check(local_limiter, limit_of(), cost=5)
    held, done = threading.Event(), threading.Event()

    def hold():
        with local_limiter._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        assert in_processes(lambda n: check(local_limiter, limit_of()).current_count, 2) == [0, 0]
    finally:
        done.set()
        thread.join()
    assert peek(local_limiter, limit_of()).current_count == 5
