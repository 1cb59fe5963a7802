"""The site's functions: imported by their dotted path, and called so that an error in one never fails the request.

A function that raises, or returns what it should not, is logged; then the stricter of what is left applies: the address
instead of a key, the default policy's rate instead of a rate, 1 instead of a cost (or the most that the algorithm
accepts), and a charge instead of none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.keys import Name
from ..core.policy import (
    DEFAULT,
    KeyFunction,
    Policy,
    PolicyError,
    Rate,
    shown,
)
from ..limiter import PolicySet
from ..runtime import log

BY_ADDRESS = "counted by IP address instead"


def site_function(value: Any) -> Any:
    """Return a function of the site, importing its dotted path; any other value as it is."""
    return import_string(value) if isinstance(value, str) else value


def call_key(key: str | KeyFunction, request: HttpRequest) -> Name | None:
    """Return the name that a key function gives; None, to count by IP address, if it gives none."""
    try:
        name: Any = site_function(key)(request)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The key {_name(key)}", error, BY_ADDRESS)
        return None
    if name is None or (
        isinstance(name, (str, int, UUID)) and not isinstance(name, bool)
    ):
        return name
    _log(
        f"The key {_name(key)} returned a {type(name).__name__}, which is no identity",
        BY_ADDRESS,
    )
    return None


def call_rate(policy: Policy, request: HttpRequest) -> Rate | None:
    """Return the rate of a policy for a request; None for no limit."""
    if not callable(policy.rate):
        return policy.fixed_rate
    instead = "the default policy's rate applies"
    try:
        rate = policy.rate(request)
        return None if rate is None else Rate.parse(rate)
    except PolicyError as error:
        _log(f"The rate of policy {policy}: {error}", instead)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The rate of policy {policy}", error, instead)
    return conf.config().policy(DEFAULT).fixed_rate


def call_cost(
    function: Callable[[HttpRequest], int],
    request: HttpRequest,
    policy_set: PolicySet | None,
) -> int:
    """Return the cost of a request under these policies."""
    try:
        cost = function(request)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The cost {_name(function)}", error, "1 is charged")
        return 1
    if type(cost) is not int or cost < 0:
        _log(
            f"The cost {shown(cost)} is not a whole number of at least 0",
            "1 is charged",
        )
        return 1
    try:
        if policy_set is not None:
            policy_set.check_cost(cost)
    except ValueError as error:
        most = min(filter(None, [a.max_cost for a in ALGORITHMS.values()]))
        _log(str(error), f"{most} is charged")
        return most
    return cost


def is_charged(
    charge_when: Callable[[HttpResponseBase], Any], response: HttpResponseBase
) -> bool:
    """Return whether a request with this response stays charged."""
    try:
        return bool(charge_when(response))
    except Exception as error:  # noqa: BLE001
        _log_error(
            f"charge_when {_name(charge_when)}", error, "the request stays charged"
        )
        return True


def _name(function: Any) -> str:
    return (
        f"{function.__module__}.{function.__qualname__}"
        if hasattr(function, "__qualname__")
        else str(function)
    )


def _log_error(function: str, error: Exception, instead: str) -> None:
    _log(f"{function} raised {type(error).__name__}: {error}", instead)


def _log(problem: str, instead: str) -> None:
    """Log what is wrong; it may have text of a client."""
    log.error("%s; %s.", log.escaped(problem.rstrip(".")), instead)
