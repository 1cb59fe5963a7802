"""System checks that connect to Redis, with `manage.py check --deploy` only: what it permits, and what it evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from .settings import as_message

NAME = "system-check"  # of the policies that are tried, and of who is counted
RIGHTS = "~rlaas:* +@read +@write +@connection -@dangerous +evalsha +script|load +script|exists +time +info"


@checks.register("caches", deploy=True)
def check_rights(**_: Any) -> list[checks.CheckMessage]:
    """Decide once, and use each kind of key; report everything that fails."""
    failed: dict[str, list[str]] = {}  # what was tried, by the error
    for tried, attempt in _attempts() if _can_be_tried() else ():
        try:
            attempt()
        except backend.UnavailableError as error:
            failed.setdefault(str(error), []).append(tried)
    if not failed:
        return []
    listed = "; ".join(
        f"{', '.join(tried)}: {error}" for error, tried in failed.items()
    )
    message = f"Redis does not do what the limiter needs ({listed}). It would decide without Redis, by `on_failure`."
    hint = f"A Redis user for the limiter needs these rights: {RIGHTS}. More in docs/security.md."
    return [as_message(Problem("W010", message, hint))]


@checks.register("caches", deploy=True)
def check_eviction(**_: Any) -> list[checks.CheckMessage]:
    messages: list[checks.CheckMessage] = []
    with suppress(backend.UnavailableError):  # `check_rights` reports it
        for server in backend.servers() if _can_be_tried() else ():
            if (
                policy := backend.eviction_policy(backend.server_info(server))
            ) is not None:
                message = (
                    f"{server.name} drops keys when its memory is full (maxmemory-policy {policy}): usage would be "
                    "lost, and overrides for up to half a minute."
                )
                hint = "Let RATE_LIMITER['CACHE'] be on a server of its own, with maxmemory-policy noeviction."
                messages.append(as_message(Problem("W011", message, hint)))
    return messages


def _can_be_tried() -> bool:
    try:
        return conf.config().enabled and backend.topology() is not None
    except Exception:  # noqa: BLE001  (`check_settings` reports what is wrong)
        return False


def _attempts() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield (
        "SCRIPT LOAD",
        partial(
            _run_everywhere, *[("SCRIPT", "LOAD", script.text) for script in SCRIPTS]
        ),
    )
    yield "TIME", partial(_run_everywhere, ("TIME",))
    for prefix in (
        COUNTER_PREFIX,
        OVERRIDE_PREFIX,
        "rlaas:",
    ):  # counters, overrides, and all others
        yield (
            f"{prefix}*",
            partial(backend.run_commands, [("EXISTS", f"{prefix}{NAME}")]),
        )
    yield "a decision", _decide


def _run_everywhere(*commands: tuple[str, ...]) -> None:
    for server in backend.servers():
        backend.run_commands(commands, server)


def _decide() -> None:
    """Decide by every algorithm, refund and reset, without the rules for an unavailable Redis."""
    policies = [
        Policy(f"{NAME}-{i}", "1/s", algo=algo) for i, algo in enumerate(ALGORITHMS)
    ]
    planned = limiter.plan(NAME, policies, 1)
    limiter.refund(limiter.decide_by_redis(planned))
    limiter.reset(NAME, policies)
