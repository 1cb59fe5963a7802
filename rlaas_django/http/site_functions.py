"""The site's functions: imported by their dotted path, and called safely.

An error in one never fails the request. A function that raises, or returns what it
should not, is logged; then the stricter of what is left applies: the address instead
of a key, the default policy's rate instead of a rate, 1 instead of a cost (or the most
that the algorithm accepts), and a charge instead of none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.keys import Name, is_name
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
DEFAULT_RATE = "the default policy's rate applies"


def site_function(value: Any) -> Any:
    """Import a dotted path; return any other value as it is."""
    if isinstance(value, str):
        return import_string(value)
    return value


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a function that runs another in Django's thread for sync code.

    The site's code may use the database, which the event loop must not.
    """

    @sync_to_async
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:  # a future cannot carry one, and would never end
            raise RuntimeError(f"{function!r} raised StopIteration.") from error

    return run


def call_key(key: str | KeyFunction, request: HttpRequest) -> Name | None:
    """Return the name that a key function gives; None to count by IP address."""
    try:
        name: Any = site_function(key)(request)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The key {_name(key)}", error, BY_ADDRESS)
        return None

    if name is None or is_name(name):
        return name  # type: ignore[no-any-return]
    kind = type(name).__name__
    _log(
        f"The key {_name(key)} returned a {kind}, which is not an identity", BY_ADDRESS
    )
    return None


def call_rate(policy: Policy, request: HttpRequest) -> Rate | None:
    """Return the rate of a policy for a request; None for no limit."""
    if not callable(policy.rate):
        return policy.fixed_rate
    try:
        rate = policy.rate(request)
        if rate is None:
            return None
        return Rate.parse(rate)
    except PolicyError as error:
        _log(f"The rate of policy {policy}: {error}", DEFAULT_RATE)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The rate of policy {policy}", error, DEFAULT_RATE)
    return conf.config().policy(DEFAULT).fixed_rate


def call_cost(
    function: Callable[[HttpRequest], int],
    request: HttpRequest,
    policy_set: PolicySet,
) -> int:
    """Return the cost of a request under these policies."""
    try:
        cost = function(request)
    except Exception as error:  # noqa: BLE001
        _log_error(f"The cost {_name(function)}", error, "1 is charged")
        return 1

    if type(cost) is not int or cost < 0:
        problem = f"The cost {shown(cost)} is not a whole number of at least 0"
        _log(problem, "1 is charged")
        return 1
    try:
        policy_set.check_cost(cost)
    except ValueError as error:
        most = _greatest_cost(policy_set)
        _log(str(error), f"{most} is charged")
        return most
    return cost


def _greatest_cost(policy_set: PolicySet) -> int:
    """Return the most that every algorithm of the policies accepts."""
    algorithms = [ALGORITHMS[arguments.algo] for arguments in policy_set.arguments]
    costs = [algorithm.max_cost for algorithm in algorithms]
    return min(cost for cost in costs if cost is not None)


def is_charged(
    charge_when: Callable[[HttpResponseBase], Any], response: HttpResponseBase
) -> bool:
    """Return whether a request with this response stays charged."""
    try:
        return bool(charge_when(response))
    except Exception as error:  # noqa: BLE001
        name = f"charge_when {_name(charge_when)}"
        _log_error(name, error, "the request stays charged")
        return True


def _name(function: Any) -> str:
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return str(function)


def _log_error(function: str, error: Exception, instead: str) -> None:
    _log(f"{function} raised {type(error).__name__}: {error}", instead)


def _log(problem: str, instead: str) -> None:
    """Log what is wrong; it may have text of a client."""
    log.error("%s; %s.", log.escaped(problem.rstrip(".")), instead)
