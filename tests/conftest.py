from __future__ import annotations

import pytest
import redis

from rlaas_django import backend, conf, decorators, refusals
from rlaas_django.policy import ALGORITHMS
from rlaas_django.stats import background, recorder
from rlaas_django.testing import frozen_clock

# 20 s into a window of a minute.
NOW = 1_700_000_000_000

# A machine that is busy with tests is no fault of Redis'; tests of faults set what they need.
DEFAULTS = dict(conf.DEFAULTS)
conf.DEFAULTS["TIMEOUT"] = 20.0


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Each test starts with empty servers, and may leave no key of ours without a TTL."""
    clients = [backend.client(alias) for alias in ("default", "fakeredis")]
    with background.paused():  # what earlier tests recorded is not written into this one
        recorder.state.reset()
        for client in clients:
            client.flushdb()
    refusals.known.clear()
    views, refundable = set(decorators.in_use), set(refusals.refundable)
    yield
    refusals.refundable.intersection_update(refundable)
    decorators.in_use.intersection_update(views)  # a test's own views are none of the next test's checks
    for client in clients:
        lasting = [key for key in client.scan_iter("rlaas:*", count=1000) if client.pttl(key) == -1]
        assert not lasting, f"keys without a TTL: {lasting}"


@pytest.fixture
def client() -> redis.Redis:
    """The server that the limiter uses, asked directly."""
    return backend.client(conf.config().cache)


@pytest.fixture(params=["default", "fakeredis"])
def server(request, settings):
    """A real server, and fakeredis as our users' tests have it."""
    settings.RATE_LIMITER = {**getattr(settings, "RATE_LIMITER", {}), "CACHE": request.param}
    return backend.client(request.param)


@pytest.fixture(params=ALGORITHMS)
def algo(request) -> str:
    return request.param


@pytest.fixture
def clock():
    with frozen_clock(NOW) as clock:
        yield clock


@pytest.fixture
def configure(settings):
    """Set keys of RATE_LIMITER for the length of a test."""

    def set_keys(**options):
        settings.RATE_LIMITER = {**getattr(settings, "RATE_LIMITER", {}), **options}

    return set_keys


@pytest.fixture
def no_views():
    """As in a site without decorated views; those of other tests are none of the checks' business."""
    views = set(decorators.in_use)
    decorators.in_use.clear()
    yield
    decorators.in_use.update(views)
