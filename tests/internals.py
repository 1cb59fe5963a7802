"""The names inside the package that tests use, in one place: when a module moves, this file alone changes."""

from __future__ import annotations

from rlaas_django import backend, conf, decorators, log, refusals, responses
from rlaas_django.background import run as run_background_jobs
from rlaas_django.checks import check_proxies, check_settings
from rlaas_django.conf import POLICY_OPTIONS, RULE_OPTIONS
from rlaas_django.identity import client_address, encode, identify, redis_key
from rlaas_django.policy import (
    ALGORITHMS,
    FIXED_WINDOW,
    KEY_PREFIXES,
    KEYS,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    YEAR,
    Decision,
    Outcome,
    Policy,
    Rate,
    strictest,
)
from rlaas_django.responses import whole_seconds
from rlaas_django.scripts import CHECK, REFUND, RESET

__all__ = [
    "ALGORITHMS",
    "DEFAULTS",
    "FIXED_WINDOW",
    "KEYS",
    "KEY_PREFIXES",
    "POLICY_OPTIONS",
    "RULE_OPTIONS",
    "SCRIPTS",
    "SLIDING_WINDOW",
    "SLIDING_WINDOW_COMPACT",
    "SLIDING_WINDOW_COUNTER",
    "TOKEN_BUCKET",
    "YEAR",
    "Decision",
    "Outcome",
    "Policy",
    "Rate",
    "check_proxies",
    "check_settings",
    "client_address",
    "conf",
    "encode",
    "escape_for_log",
    "forget_limits",
    "header_module",
    "identify",
    "limits_in_use",
    "log",
    "redis_client",
    "redis_key",
    "restore_limits",
    "run_background_jobs",
    "strictest",
    "whole_seconds",
]

DEFAULTS = conf.DEFAULTS
SCRIPTS = (*CHECK.values(), *REFUND.values(), RESET)
escape_for_log = log.escaped
header_module = responses  # the one that names headers


def redis_client(alias: str):
    """Return the client of a cache, for a test to look into Redis."""
    return wrap_client(backend.client(alias))


def wrap_client(client):
    """Return the client as it is; tests/on_cluster.py puts its own in place of this."""
    return client


# The limits that decorators have registered, which the system checks and the admin read.


def limits_in_use() -> tuple[set, set]:
    return set(decorators.in_use), set(refusals.refundable)


def restore_limits(before: tuple[set, set]) -> None:
    """Forget the limits that were registered since, and bring back those that were forgotten."""
    limits, refundable = before
    decorators.in_use.intersection_update(limits)
    decorators.in_use.update(limits)
    refusals.refundable.intersection_update(refundable)


def forget_limits() -> None:
    decorators.in_use.clear()
