"""rlaas_django.testing: what it gives to the tests of a site."""

from __future__ import annotations

import threading
import time

from django.test import override_settings

from rlaas_django import Policy, acheck, check
from rlaas_django.testing import embedded_redis, frozen_clock, rate_limit_clock, reset  # noqa: F401


def test_the_clock_stands_until_it_ticks():
    with frozen_clock(1_000_000) as clock:
        for _ in range(5):
            check("alice")
        assert check("alice").retry_after == 60.0
        clock.tick(59_999)
        assert clock.ms == 1_059_999
        assert check("alice").retry_after == 0.001
        clock.tick(1)
        assert check("alice").allowed


def test_clocks_nest_and_end_with_their_block_also_after_an_error():
    policy = Policy("p", "1/m")
    with frozen_clock(1000):
        check("alice", policy)
        try:
            with frozen_clock(31_000):
                assert check("alice", policy).retry_after == 30.0
                raise RuntimeError
        except RuntimeError:
            pass
        assert check("alice", policy).retry_after == 60.0
    assert check("alice", policy).allowed  # by the server's clock


def test_without_a_time_the_clock_stands_at_the_present():
    before = time.time_ns() // 1_000_000
    with frozen_clock() as clock:
        assert before <= clock.ms <= time.time_ns() // 1_000_000


async def test_async_decisions_and_other_threads_use_the_frozen_clock():
    with frozen_clock(1_000_000) as clock:
        await acheck("alice")
        thread = threading.Thread(target=check, args=("alice",))
        thread.start()
        thread.join()
        clock.tick(10_000)
        decision = await acheck("alice")
        assert decision.current_count == 2
        assert decision.reset_after == 60.0


def test_an_embedded_server_is_empty_and_its_own():
    for _ in range(2):
        with override_settings(CACHES={"default": embedded_redis()}):
            assert check("alice").current_count == 0
            assert check("alice").current_count == 1


def test_the_fixture_freezes_the_clock(rate_limit_clock):  # noqa: F811
    check("alice", Policy("p", "1/m"))
    rate_limit_clock.tick(30_000)
    assert check("alice", Policy("p", "1/m")).retry_after == 30.0


def test_a_reset_forgets_cached_refusals(client):
    policy = Policy("p", "1/h")
    assert [check("alice", policy).allowed for _ in range(2)] == [True, False]
    client.flushdb()
    reset()
    assert check("alice", policy).allowed


def test_a_reset_forgets_the_counters_of_the_local_fallback(redis_unavailable):
    policy = Policy("p", "1/h", on_failure="local")
    assert [check("alice", policy).allowed for _ in range(2)] == [True, False]
    reset()
    assert check("alice", policy).allowed
