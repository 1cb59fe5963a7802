"""For test suites of sites that use us: a clock that stands still, and a Redis inside the process.

With pytest, `from rlaas_django.testing import rate_limit_clock` in a conftest.py gives tests that fixture.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import plans
from .plans import Clock

_embedded = itertools.count(1)


@contextmanager
def frozen_clock(ms: int | None = None) -> Iterator[Clock]:
    """Every decision inside, in any thread or task, is made at this time; left out: the present.

    >>> with frozen_clock() as clock:
    ...     check("alice")
    ...     clock.tick(60_000)
    """
    before, plans.frozen = plans.frozen, Clock(time.time_ns() // 1_000_000 if ms is None else int(ms))
    try:
        yield plans.frozen
    finally:
        plans.frozen = before


def reset() -> None:
    """Forget the state of this process: the refusal cache, local counters, log lines left out, statistics not written.

    For the tests of a site, between two of them; Redis keeps what it has.
    """
    from . import background, failure, log, refusals, stats  # not above: settings import this module

    with background._round:  # one that is under way would write them all the same
        stats._notes.clear()
    refusals.known.clear()
    failure.memory.clear()
    log._written = log._left_out = 0


def embedded_redis() -> dict[str, Any]:
    """An entry for CACHES: an empty fakeredis of this process, for sync and async alike.

    >>> CACHES = {"default": embedded_redis()}
    """
    try:
        import fakeredis
    except ImportError as error:
        raise ImportError("embedded_redis() needs fakeredis with Lua: pip install 'fakeredis[lua]'") from error
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        # django-redis keeps its pools by address, so each embedded server needs one of its own.
        "LOCATION": f"redis://embedded-{next(_embedded)}:6379/0",
        "OPTIONS": {
            "CONNECTION_POOL_KWARGS": {
                "connection_class": getattr(fakeredis, "FakeRedisConnection", None) or fakeredis.FakeConnection,
                "server": fakeredis.FakeServer(),
            }
        },
    }


try:
    import pytest
except ImportError:
    pass
else:

    @pytest.fixture
    def rate_limit_clock() -> Iterator[Clock]:
        """The frozen clock, at the present, for the length of a test."""
        with frozen_clock() as clock:
            yield clock
