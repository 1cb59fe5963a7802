"""The pytest plugin: fixtures for the tests of a site.

It reads no settings when it is loaded, and needs no pytest-django.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import conf
from .runtime.clock import Clock, frozen_clock
from .testing import reset_all

__all__ = ["rate_limit_clock", "rate_limits", "rate_limits_disabled"]


@pytest.fixture
def rate_limit_clock() -> Iterator[Clock]:
    """Freeze the clock at the present, for the length of a test."""
    with frozen_clock() as frozen:
        yield frozen


@pytest.fixture
def rate_limits(rate_limit_clock: Clock) -> Clock:
    """Empty counters and the frozen clock: `rate_limits.tick(60_000)`."""
    reset_all()
    return rate_limit_clock


@pytest.fixture
def rate_limits_disabled() -> Iterator[None]:
    """No rate limiting for the length of a test."""
    from django.test import override_settings  # here, as it reads settings

    with override_settings(RATE_LIMITER={**(conf.raw() or {}), "ENABLED": False}):
        yield
