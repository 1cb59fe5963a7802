"""Check what Redis permits and evicts, with `manage.py check --deploy` only.

These are the checks that connect to Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.core import checks

from .. import backend, conf, limiter
from ..backend.scripts import SCRIPTS
from ..conf import Problem
from ..core.algorithms import ALGORITHMS
from ..core.keys import COUNTER_PREFIX, OVERRIDE_PREFIX
from ..core.policy import Policy
from .settings import as_messages

NAME = "system-check"  # of the policies that are tried, and of who is counted
KEY_PREFIXES = (COUNTER_PREFIX, OVERRIDE_PREFIX, "rlaas:")
RIGHTS = (
    "~rlaas:* +@read +@write +@connection -@dangerous "
    "+evalsha +script|load +script|exists +time +info"
)


@checks.register("caches", deploy=True)
def check_rights(**_: Any) -> list[checks.CheckMessage]:
    """Decide once, and use each kind of key; report everything that fails."""
    if not _can_connect():
        return []

    failures: dict[str, list[str]] = {}  # what was tried, by the error
    for name, attempt in _attempts():
        try:
            attempt()
        except backend.UnavailableError as error:
            failures.setdefault(str(error), []).append(name)

    if not failures:
        return []

    listed = "; ".join(
        f"{', '.join(names)}: {error}" for error, names in failures.items()
    )
    problem = Problem(
        "W010",
        f"Redis does not do what the limiter needs ({listed}). It would decide "
        "without Redis, by `on_failure`.",
        f"A Redis user for the limiter needs these rights: {RIGHTS}. More in "
        "docs/security.md.",
    )

    return as_messages([problem])


@checks.register("caches", deploy=True)
def check_eviction(**_: Any) -> list[checks.CheckMessage]:
    """Warn of servers that drop keys when their memory is full."""
    if not _can_connect():
        return []

    problems = []
    with suppress(backend.UnavailableError):  # `check_rights` reports it
        for server in backend.servers():
            policy = backend.eviction_policy(backend.server_info(server))
            if policy is None:
                continue

            problem = Problem(
                "W011",
                f"{server.name} drops keys when its memory is full "
                f"(maxmemory-policy {policy}): usage would be lost, and overrides for "
                "up to half a minute.",
                "Let RATE_LIMITER['CACHE'] be on a server of its own, with "
                "maxmemory-policy noeviction.",
            )
            problems.append(problem)

    return as_messages(problems)


def _can_connect() -> bool:
    try:
        if backend.counts_in_process():
            return False
        return conf.config().enabled and backend.topology() is not None
    except Exception:  # noqa: BLE001  (`check_settings` reports what is wrong)
        return False


def _attempts() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what the limiter does with Redis, by name."""
    load_scripts = [("SCRIPT", "LOAD", script.text) for script in SCRIPTS]
    yield "SCRIPT LOAD", partial(_run_everywhere, load_scripts)
    yield "TIME", partial(_run_everywhere, [("TIME",)])

    for prefix in KEY_PREFIXES:
        command = ("EXISTS", f"{prefix}{NAME}")
        yield f"{prefix}*", partial(backend.run_commands, [command])

    yield "a decision", _decide


def _run_everywhere(commands: Sequence[tuple[str, ...]]) -> None:
    for server in backend.servers():
        backend.run_commands(commands, server)


def _decide() -> None:
    """Decide by every algorithm, refund and reset.

    Through the backend itself: `limiter.check` would decide without Redis.
    """
    policies = [
        Policy(f"{NAME}-{record.name}", "1/s", algo=record.name)
        for record in ALGORITHMS.values()
    ]
    check = limiter.plan(NAME, policies, 1)
    limiter.refund(limiter.decide_by_redis(check))
    limiter.reset(NAME, policies, may_refund=False)
