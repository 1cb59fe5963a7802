"""System checks: what is wrong in the settings is found by `manage.py check`, not by the first user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from . import conf
from .policy import SLIDING_WINDOW, SLIDING_WINDOW_COMPACT, Rate

LARGE_LOG = 1000
BYTES_PER_ENTRY = 120  # of a ZSET past 128 entries, as MEMORY USAGE counts


@checks.register("caches")
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    problems: list[conf.Problem] = []
    config = conf.read(conf.raw(), problems)
    if config is not None:
        problems += [*_cache(config.cache), *_large_logs(config)]
    return [_message(problem) for problem in problems]


def _message(problem: conf.Problem) -> checks.CheckMessage:
    kind = checks.Error if problem.id.startswith("E") else checks.Warning
    return kind(problem.message, hint=problem.hint, id=f"rlaas_django.{problem.id}")


def _cache(alias: str) -> Iterator[conf.Problem]:
    from . import backend

    try:
        entry = conf.cache_entry(alias)
    except ImproperlyConfigured as error:
        yield conf.Problem("E005", str(error))
        return
    try:
        options = backend.client(alias).connection_pool.connection_kwargs
    except Exception as error:  # noqa: BLE001  (whatever a cache backend raises when it cannot be made)
        yield conf.Problem("E007", f"RATE_LIMITER['CACHE'] should name a cache on Redis; {alias!r} is not: {error}")
        return
    if options.get("socket_timeout") is None and "server" not in options:
        yield conf.Problem(
            "W001",
            f"CACHES[{alias!r}] sets no socket timeout; while Redis hangs, a request waits for redis-py's default: "
            "5 seconds since redis-py 8, for ever before.",
            _timeout_hint(entry),
        )


def _timeout_hint(entry: dict[str, Any]) -> str:
    if str(entry.get("BACKEND", "")).startswith("django_redis"):
        return "Set OPTIONS['SOCKET_TIMEOUT'] and OPTIONS['SOCKET_CONNECT_TIMEOUT'], to 0.25 seconds say."
    return "Set OPTIONS['socket_timeout'] and OPTIONS['socket_connect_timeout'], to 0.25 seconds say."


def _large_logs(config: conf.Config) -> Iterator[conf.Problem]:
    for policy in config.policies.values():
        algo = policy.algo or config.algo
        if algo == SLIDING_WINDOW and isinstance(policy.rate, Rate) and policy.rate.limit >= LARGE_LOG:
            megabytes = policy.rate.limit * BYTES_PER_ENTRY
            yield conf.Problem(
                "W002",
                f"Policy {policy.name!r} keeps up to {policy.rate.limit} entries per identity in a ZSET: "
                f"about {megabytes:,} MB per million users.",
                f"{SLIDING_WINDOW_COMPACT!r} gives the same verdicts in a sixtieth of the memory.",
            )
