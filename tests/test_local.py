"""The limiter in memory: each algorithm against its model, and its bounds. Nothing here asks a server."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import random
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlaas_django.local import Answer, Memory, Question
from rlaas_django.policy import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)

from rlaas_django import local
from tests.conftest import NOW
from tests.models import MODELS
from tests.test_algorithms import random_trace

LOGS = (SLIDING_WINDOW, SLIDING_WINDOW_COMPACT)
MOST = 10_000
MINUTE = 60_000


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """In place of the one that looks at the servers."""


@pytest.fixture
def memory() -> Memory:
    return Memory()


def question(algo=SLIDING_WINDOW, limit=5, window=MINUTE, *, policy="p", identity="alice", burst=None, shadow=False):
    return Question(policy, identity, algo, limit, window, burst or limit, shadow)


def ask(memory: Memory, asked: Question, now: int = NOW, cost: int = 1) -> Answer:
    return memory.check([asked], now, cost, True, MOST)[0]


def look(memory: Memory, asked: Question, now: int = NOW, cost: int = 1) -> Answer:
    return memory.check([asked], now, cost, False, MOST)[0]


def figures(answer: Answer) -> tuple:
    """An answer as a model gives it."""
    return *answer[:3], math.inf if answer.retry_after < 0 else answer.retry_after, answer.reset_after


def assert_wait_is_exact(memory: Memory, asked: Question, now: int, cost: int, retry_after: int) -> None:
    """1 ms before the end of the wait: refused; then: allowed. Neither is charged."""
    assert not look(memory, asked, now + retry_after - 1, cost).allowed
    assert look(memory, asked, now + retry_after, cost).allowed


def follow(memory: Memory, asked: Question, model, trace, now: int = NOW) -> int:
    """Ask the memory and the model the same; the number that was allowed."""
    allowed = 0
    for tick, cost in trace:
        now += tick
        answer = ask(memory, asked, now, cost)
        assert figures(answer) == model.ask(now, cost)
        assert (answer.charged_at >= 0) == answer.allowed
        allowed += answer.allowed
        if answer.retry_after > 0:
            assert_wait_is_exact(memory, asked, now, cost, answer.retry_after)
    return allowed


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 1_000, 10_000, 100_000])
def test_agrees_with_its_model_on_long_traces(algo, limit):
    rng = random.Random(f"{algo}{limit}")
    for window in (10_000, MINUTE, 60 * MINUTE):
        for burst in (None, 1, limit // 2, 2 * limit) if algo == TOKEN_BUCKET else (None,):
            model = MODELS[algo](limit, window, burst)
            trace = random_trace(rng, limit, window, 120 if limit < 100_000 else 40)
            assert follow(Memory(), question(algo, limit, window, burst=burst), model, trace) > 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    limit=st.integers(1, 10_000),
    window=st.sampled_from([1_000, 10_000, 90_000, 86_400_000]),
    burst=st.none() | st.integers(1, 10_000),
    start=st.integers(0, 10**13),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 1, 0.1, 0.5, 0.999, 1.0, 1.5, 3]) | st.integers(0, 200), st.integers(1, 10_001)),
        min_size=1,
        max_size=25,
    ),
)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_agrees_with_its_model_on_any_trace(algo, limit, window, burst, start, steps):
    burst = burst if algo == TOKEN_BUCKET else None
    # A fraction is of a window, a whole number is ms; a cost is taken to be of the limit's size.
    trace = [
        (tick if isinstance(tick, int) else int(tick * window), (cost - 1) % (limit + 1) + 1) for tick, cost in steps
    ]
    follow(Memory(), question(algo, limit, window, burst=burst), MODELS[algo](limit, window, burst), trace, start)


@pytest.mark.parametrize("window", [1_000, MINUTE, 365 * 86_400_000])
def test_the_largest_rates_stay_exact_and_a_dear_cost_takes_no_more_room(algo, window):
    memory, limit = Memory(), 2**52 // window
    asked = question(algo, limit, window)
    now = NOW - NOW % window
    for i in range(1_000):  # what is charged adds up to far more than a log's numbers hold, were the dead not taken out
        at = now + 2 * i * window
        assert ask(memory, asked, at, limit - 1).remaining == 1
        assert ask(memory, asked, at, 1).remaining == 0
        refused = ask(memory, asked, at, limit)
        assert refused.count == limit
        assert_wait_is_exact(memory, asked, at, limit, refused.retry_after)
    assert memory._stamps <= 2


def test_a_log_agrees_with_its_model_when_the_clock_steps_back():
    rng = random.Random("back")
    for limit in (1, 5, 40, 1_000):
        memory, model, now = Memory(), MODELS[SLIDING_WINDOW](limit, MINUTE), NOW
        for tick, cost in random_trace(rng, limit, MINUTE, 1_000):
            now += tick if rng.random() < 0.9 else -rng.randint(0, 70_000)
            expected = model.ask(now, cost)
            for algo in LOGS:
                assert figures(ask(memory, question(algo, limit), now, cost)) == expected


@pytest.mark.parametrize("back", [1, 15_000, 59_999, 600_000])
def test_a_clock_that_steps_back_admits_nothing_extra_and_loses_nothing(memory, algo, back):
    asked = question(algo)
    for _ in range(5):
        assert ask(memory, asked).allowed
    refused = ask(memory, asked, NOW - back)
    assert (refused.allowed, refused.count, refused.charged_at) == (False, 5, -1)
    assert_wait_is_exact(memory, asked, NOW - back, 1, refused.retry_after)
    assert not ask(memory, asked).allowed


@pytest.mark.parametrize("back", [0, 1, 30_000, 90_000])
def test_a_window_that_fades_counts_whole_at_most_when_the_clock_steps_back(memory, back):
    asked, start = question(SLIDING_WINDOW_COUNTER, 10), NOW - NOW % MINUTE
    ask(memory, asked, start - 1, 4)
    ask(memory, asked, start, 3)
    seen = look(memory, asked, start - back, 4)
    assert (seen.allowed, seen.count, seen.reset_after) == (False, 7, 2 * MINUTE + back)
    assert_wait_is_exact(memory, asked, start - back, 4, seen.retry_after)


@pytest.mark.parametrize("back", [1, 15_000, 59_999])
def test_what_is_charged_after_a_step_back_counts_when_the_clock_is_right_again(memory, algo, back):
    asked = question(algo)
    ask(memory, asked, cost=3)
    charged = ask(memory, asked, NOW - back, 2)
    assert (charged.allowed, charged.count, charged.remaining) == (True, 3, 0)
    assert look(memory, asked, NOW - back).count == 5
    assert memory.refund(asked, NOW - back, 2, charged.charged_at) == 2
    assert look(memory, asked).count == 3


def test_a_cost_over_the_capacity_can_never_fit(memory, algo):
    assert ask(memory, question(algo), cost=6) == (False, 0, 5, -1, 0, -1)
    ask(memory, question(algo), cost=2)
    refused = ask(memory, question(algo), cost=6)
    assert refused[:4] == (False, 2, 3, -1)


def test_a_look_and_a_refusal_of_somebody_unknown_leave_nothing(memory, algo):
    look(memory, question(algo))
    ask(memory, question(algo), cost=0)
    ask(memory, question(algo), cost=6)
    assert len(memory) == 0


def test_a_look_at_cost_zero_passes_and_charges_nothing(memory, algo):
    ask(memory, question(algo), cost=5)
    seen = ask(memory, question(algo), cost=0)
    assert (seen.allowed, seen.count, seen.remaining, seen.retry_after, seen.charged_at) == (True, 5, 0, 0, -1)
    assert look(memory, question(algo)).count == 5


def test_raising_a_limit_keeps_the_usage_and_lowering_it_refuses(memory, algo):
    ask(memory, question(algo), cost=4)
    raised = look(memory, question(algo, 8))
    assert (raised.count, raised.remaining) == (4, 4)
    lowered = ask(memory, question(algo, 2))
    assert (lowered.allowed, lowered.count, lowered.remaining) == (False, 4, 0)
    assert_wait_is_exact(memory, question(algo, 2), NOW, 1, lowered.retry_after)
    assert len(memory) == 1


def test_policies_identities_algorithms_and_windows_are_counted_apart(memory):
    apart = [
        question(algo, window=window, policy=policy, identity=identity)
        for algo, window, policy, identity in itertools.product(ALGORITHMS, (1_000, MINUTE), "pq", ("alice", "bob"))
    ]
    for asked in apart:
        assert ask(memory, asked, cost=5).count == 0
    assert all(look(memory, asked).count == 5 for asked in apart)
    assert len(memory) == len(apart)


def test_several_policies_are_charged_together_or_not_at_all(memory):
    """Random requests of several policies, some of them shadows, against a model of each."""
    rng = random.Random("together")
    asked = [
        question(algo, rng.randint(3, 12), window, policy=f"{algo}{window}{shadow}", shadow=shadow)
        for algo, window, shadow in itertools.product(ALGORITHMS, (10_000, MINUTE), (False, True))
    ]
    models = {each: MODELS[each.algo](each.limit, each.window) for each in asked}
    now, seen = NOW, set()
    for tick, cost in random_trace(rng, 8, MINUTE, 2_000):
        now += tick
        some = rng.sample(asked, rng.randint(1, 6))
        before = {each: models[each].count(now) for each in some}
        passed = {each: before[each] + cost <= each.limit for each in some}
        together = all(passed[each] or each.shadow for each in some)
        answers = memory.check(some, now, cost, True, MOST)
        for each, answer in zip(some, answers, strict=True):
            assert (answer.allowed, answer.count) == (passed[each], before[each])
            charged = together and passed[each]
            assert (answer.charged_at >= 0) == charged
            assert answer.remaining == max(0, each.limit - before[each]) - (cost if charged else 0)
            if charged:
                models[each].charge(now, cost)
            assert answer.reset_after == models[each].whole(now)
            assert models[each].count(now) == look(memory, each, now).count
        seen.add((together, all(passed.values())))
    assert seen == {(True, True), (True, False), (False, False)}


def take_back(model, algo: str, now: int, cost: int, charged_at: int) -> int:
    """A refund, by a model."""
    if algo == TOKEN_BUCKET:
        units = min(cost, model.count(now))
        model.missing, model.at = max(0, model.level(now) - units), now
        return units
    if algo in LOGS:
        units = min(cost, model.stamps.count(charged_at)) if charged_at + model.window > now else 0
        for _ in range(units):
            model.stamps.remove(charged_at)
        return units
    index = charged_at // model.window
    if now // model.window - index > (algo == SLIDING_WINDOW_COUNTER):
        return 0
    units = min(cost, model.counts.get(index, 0))
    model.counts[index] = model.counts.get(index, 0) - units
    return units


@pytest.mark.parametrize("limit", [1, 5, 40, 1_000])
def test_refunds_agree_with_the_model(memory, algo, limit):
    rng = random.Random(f"refunds {algo}{limit}")
    asked, model, receipts, now, given_back = question(algo, limit), MODELS[algo](limit, MINUTE), [], NOW, 0
    for tick, cost in random_trace(rng, limit, MINUTE, 1_500):
        now += tick
        answer = ask(memory, asked, now, cost)
        assert figures(answer) == model.ask(now, cost)
        if answer.allowed:
            receipts.append((cost, answer.charged_at))
        if receipts and rng.random() < 0.3:
            receipt = receipts.pop(rng.randrange(max(0, len(receipts) - 5), len(receipts)))
            given = memory.refund(asked, now, *receipt)
            assert given == take_back(model, algo, now, *receipt)
            given_back += given
            assert look(memory, asked, now).count == model.count(now)
            assert look(memory, asked, now).reset_after == model.whole(now)
        assert memory._stamps == sum(map(len, memory._states.values()))
    assert given_back > 0


def test_a_refund_brings_back_what_was_charged_once(memory, algo):
    asked = question(algo)
    first, second = ask(memory, asked, cost=3), ask(memory, asked, NOW + 1, 2)
    assert memory.refund(asked, NOW + 2, 2, second.charged_at) == 2
    assert look(memory, asked, NOW + 2).count == 3
    assert memory.refund(asked, NOW + 2, 9, first.charged_at) == 3
    seen = look(memory, asked, NOW + 2)
    assert (seen.count, seen.remaining, seen.reset_after) == (0, 5, 0)
    assert memory.refund(asked, NOW + 2, 3, first.charged_at) == 0


def test_nothing_is_given_back_that_is_not_counted_any_more(memory, algo):
    asked = question(algo)
    charged_at = ask(memory, asked, cost=5).charged_at
    later = NOW + 2 * MINUTE
    assert memory.refund(asked, later, 5, charged_at) == 0
    ask(memory, asked, later)
    if algo != TOKEN_BUCKET:  # which has no windows: a unit is as good as any other
        assert memory.refund(asked, later, 5, charged_at) == 0
    assert memory.refund(question(algo, identity="bob"), NOW, 5, charged_at) == 0


def test_who_was_seen_last_is_kept_and_a_refusal_is_seen(memory):
    names = ["alice", "bob", "carol"]
    alice, bob, carol = (question(FIXED_WINDOW, 1, identity=name) for name in names)
    for asked in (alice, bob):
        memory.check([asked], NOW, 1, True, 2)
    assert not memory.check([alice], NOW, 1, True, 2)[0].allowed
    memory.check([bob], NOW, 1, False, 2)  # a look is not
    memory.check([carol], NOW, 1, True, 2)
    assert [look(memory, asked).count for asked in (alice, bob, carol)] == [1, 0, 1]
    assert len(memory) == 2


def test_a_lower_bound_holds_from_the_next_request_on(memory):
    for n in range(100):
        ask(memory, question(identity=str(n)))
    memory.check([question(identity="99")], NOW, 6, True, 10)
    assert (len(memory), memory._stamps) == (10, 10)


def test_clear_forgets_everything(memory, algo):
    ask(memory, question(algo), cost=5)
    memory.clear()
    assert (len(memory), memory._stamps) == (0, 0)
    assert ask(memory, question(algo)).count == 0


def traced(work) -> int:
    """The bytes that are still in use when the work is done."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_hundred_thousand_identities_stay_within_the_bound(memory):
    def storm():
        for n in range(100_000):
            asked = question(ALGORITHMS[n % 5], identity=f"ip=2001:db8::{n:x}")
            memory.check([asked], NOW + n, 1, True, MOST)

    used = traced(storm)
    assert len(memory) == MOST
    assert used < 1_000 * MOST


def test_long_logs_stay_within_their_bound_together(memory, monkeypatch):
    """1,000 a minute for each of 20, in a hundredth of the room that there is: the last 5 are kept."""
    monkeypatch.setattr(local, "MOST_STAMPS", local.MOST_STAMPS // 100)

    def storm():
        for n, i in itertools.product(range(20), range(1_000)):
            memory.check([question(limit=1_000, identity=str(n))], NOW + 20 * i, 1, True, MOST)

    used = traced(storm)
    assert len(memory) == 5
    assert memory._stamps == sum(map(len, memory._states.values())) == local.MOST_STAMPS
    assert used < 25 * local.MOST_STAMPS
    assert look(memory, question(limit=1_000, identity="19"), NOW + MINUTE - 1).remaining == 0


def test_a_log_that_is_very_long_keeps_its_limit_with_fewer_stamps(memory, monkeypatch):
    monkeypatch.setattr(local, "LONGEST_LOG", 100)
    rng = random.Random("long")
    asked, model, now, allowed = question(limit=1_000), MODELS[SLIDING_WINDOW](1_000, MINUTE), NOW, 0
    for _ in range(10_000):
        now += rng.randint(1, 60)
        if ask(memory, asked, now).allowed:
            assert model.ask(now, 1)[0]  # not one more than in a window of its own
            allowed += 1
        assert memory._stamps <= 100
    assert allowed > 0.95 * 1_000 * (now - NOW) / MINUTE
    refused = ask(memory, asked, now, 1_000)
    assert_wait_is_exact(memory, asked, now, 1_000, refused.retry_after)
    assert look(memory, asked, now + MINUTE).count == 0


def test_a_log_removes_what_is_dead(memory):
    for i in range(5_000):
        ask(memory, question(limit=100), NOW + 1_000 * i)
        assert memory._stamps <= 2 * 60 + 1


def test_threads_admit_the_limit_and_not_one_more(memory, algo, monkeypatch):
    begin = threading.Barrier(16)
    state = type(local._STATES[algo]())
    seen = state.look

    def look_and_give_way(*args):
        found = seen(*args)
        time.sleep(0)  # between look and charge is where another thread would do harm
        return found

    monkeypatch.setattr(state, "look", look_and_give_way)

    def hammer(_):
        begin.wait(30)
        return sum(ask(memory, question(algo, 1_000), NOW + i % 3).allowed for i in range(200))

    with ThreadPoolExecutor(16) as executor:
        assert sum(executor.map(hammer, range(16))) == 1_000
    assert look(memory, question(algo, 1_000), NOW + 2).count == 1_000


def in_a_fork(work):
    """What the work gives in a forked process; None when it has not ended in 20 s."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=lambda: writer.send(work()))
    process.start()
    ended = reader.poll(20)
    result = reader.recv() if ended else process.kill()
    process.join()
    reader.close()
    writer.close()
    return result


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_a_fork_while_a_thread_holds_the_lock_goes_on_with_nothing_half_written(memory):
    ask(memory, question(), cost=5)
    held, done = threading.Event(), threading.Event()

    def hold():
        with memory._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        assert in_a_fork(lambda: ask(memory, question()).count) == 0
    finally:
        done.set()
        thread.join()
    assert look(memory, question()).count == 5


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_goes_on_with_its_parents_counts(memory):
    ask(memory, question(), cost=3)
    assert in_a_fork(lambda: ask(memory, question()).count) == 3
    assert look(memory, question()).count == 3


def test_a_memory_that_nobody_needs_is_not_kept_for_a_fork():
    unneeded = weakref.ref(Memory())
    gc.collect()
    assert unneeded() is None
