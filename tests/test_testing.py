from __future__ import annotations

import threading
import time

from django.test import override_settings

from rlaas_django import acheck, check, plans
from rlaas_django.testing import embedded_redis, frozen_clock, rate_limit_clock  # noqa: F401


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
    assert plans.frozen is None


def test_clocks_nest_and_end_with_their_block_also_after_an_error():
    with frozen_clock(1000):
        try:
            with frozen_clock(2000):
                raise RuntimeError
        except RuntimeError:
            pass
        assert plans.frozen.ms == 1000
    assert plans.frozen is None


def test_without_a_time_the_clock_stands_at_the_present():
    with frozen_clock() as clock:
        assert abs(clock.ms - time.time() * 1000) < 1000


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
    assert plans.frozen is rate_limit_clock
