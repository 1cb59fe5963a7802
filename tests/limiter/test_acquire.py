"""acquire: wait for room under a limit."""

from __future__ import annotations

import math
import time

import pytest
from rlaas_django import Policy

PARTNER = Policy("partner", "2/m")


def test_it_waits_until_there_is_room(store, limiter, clock):
    started = clock.ms
    decisions = [limiter.acquire("payments", PARTNER, timeout=300) for _ in range(5)]
    assert all(decision.allowed for decision in decisions)
    assert clock.ms - started == 120_000


def test_a_wait_beyond_the_timeout_is_a_refusal_at_once(store, limiter, clock):
    started, now = time.monotonic(), clock.ms
    for _ in range(2):
        limiter.acquire("payments", PARTNER)
    refused = limiter.acquire("payments", PARTNER, timeout=59)
    assert (refused.allowed, refused.retry_after, clock.ms) == (False, 60.0, now)
    assert time.monotonic() - started < 30


def test_a_cost_that_never_fits_is_not_waited_for(store, limiter, clock):
    refused = limiter.acquire("payments", PARTNER, cost=3, timeout=math.inf)
    assert (refused.allowed, refused.retry_after) == (False, math.inf)


def test_it_really_waits(store, limiter):
    second = Policy("second", "1/s")
    limiter.acquire("payments", second)
    started = time.monotonic()
    assert limiter.acquire("payments", second).allowed
    assert time.monotonic() - started > 0.5


@pytest.mark.usefixtures("redis_unavailable")
def test_without_redis_a_policy_that_fails_closed_is_tried_again(limiter):
    refused = limiter.acquire("payments", Policy("closed", "1/s", on_failure="closed"), timeout=0.5)
    assert (refused.allowed, refused.degraded) == (False, True)
