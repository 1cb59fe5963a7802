"""For the test suites of sites: empty counters, a frozen clock, an embedded Redis.

With pytest, the plugin `rlaas_django.pytest_plugin` has fixtures that use these.
"""

from __future__ import annotations

import itertools
from typing import Any

from django.http.response import HttpResponseBase

from . import backend
from .runtime import process
from .runtime.clock import Clock, frozen_clock

__all__ = [
    "RateLimitTestMixin",
    "aexhaust",
    "assert_limited",
    "embedded_redis",
    "exhaust",
    "frozen_clock",
    "reset",
    "reset_all",
]

KEYS = "rlaas:*"  # in Redis
MAX_REQUESTS = 10_000  # that `exhaust` sends

_embedded = itertools.count(1)


def reset() -> None:
    """Reset the state of this process.

    That is connections, cached refusals, circuit breakers, local counters and pending
    statistics. The counters in Redis stay; `reset_all` also deletes them.
    """
    process.reset()


def reset_all() -> None:
    """Reset the process, and delete the counters, overrides and statistics in Redis.

    The site's own keys stay. Without Redis, the counters are in the process.
    """
    reset()
    if backend.counts_in_process():
        return
    for keys in backend.scan(KEYS):
        backend.run_commands([("DEL", key) for key in keys])


def assert_limited(response: HttpResponseBase) -> None:
    """Assert that a response is a refusal."""
    if response.status_code != 429:
        usage = response.headers.get("RateLimit", "none")
        raise AssertionError(
            f"Expected a refusal (429), not {response.status_code}; RateLimit: {usage}."
        )


def exhaust(client: Any, url: str, *, method: str = "get", **options: Any) -> Any:
    """Send requests with Django's test client until one is refused; return the refusal.

    >>> refusal = exhaust(client, "/login/", method="post", data={"user": "alice"})
    >>> assert refusal.headers["Retry-After"] == "60"
    """
    send = getattr(client, method)
    for _ in range(MAX_REQUESTS):
        response = send(url, **options)
        if response.status_code == 429:
            return response
    raise _never_refused(url)


async def aexhaust(
    client: Any, url: str, *, method: str = "get", **options: Any
) -> Any:
    """As `exhaust`, with Django's AsyncClient."""
    send = getattr(client, method)
    for _ in range(MAX_REQUESTS):
        response = await send(url, **options)
        if response.status_code == 429:
            return response
    raise _never_refused(url)


def _never_refused(url: str) -> AssertionError:
    return AssertionError(
        f"{url} refused none of {MAX_REQUESTS} requests; is it limited?"
    )


class RateLimitTestMixin:
    """Begins each test of a TestCase with empty counters and a frozen clock.

    >>> class LoginTests(RateLimitTestMixin, TestCase):
    ...     def test_the_sixth_waits(self):
    ...         self.assert_limited(self.exhaust("/login/"))
    ...         self.rate_limits.tick(60_000)
    ...         self.assertEqual(self.client.get("/login/").status_code, 200)
    """

    rate_limits: Clock
    assert_limited = staticmethod(assert_limited)

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        test: Any = self
        self.rate_limits = test.enterContext(frozen_clock())
        reset_all()

    def exhaust(self, url: str, **options: Any) -> Any:
        """Send requests until one is refused; return the refusal."""
        return exhaust(self.client, url, **options)  # type: ignore[attr-defined]


def embedded_redis() -> dict[str, Any]:
    """Return an entry for CACHES: an empty fakeredis of this process.

    >>> CACHES = {"default": embedded_redis()}
    """
    try:
        import fakeredis
    except ImportError as error:
        raise ImportError(
            "embedded_redis() needs fakeredis with Lua: pip install 'fakeredis[lua]'"
        ) from error

    pool_options = {
        "connection_class": getattr(fakeredis, "FakeRedisConnection", None)
        or fakeredis.FakeConnection,  # its name in older releases
        "server": fakeredis.FakeServer(),
    }
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        # django-redis keeps its pools by address, so each server needs one of its own.
        "LOCATION": f"redis://embedded-{next(_embedded)}:6379/0",
        "OPTIONS": {"CONNECTION_POOL_KWARGS": pool_options},
    }
