"""The options of a limit that concern requests: `method`, `cost` and functions of the site. No Django, no Redis."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from http import HTTPMethod
from typing import Any

from .policy import DOTTED_PATH, MAX_COST, SLIDING_WINDOW_COMPACT, Policy, PolicyError, Rate, nearest, shown

METHODS = tuple(method.value for method in HTTPMethod)


def parse_methods(methods: str | Iterable[str]) -> frozenset[str]:
    """Return methods as they are matched; HEAD runs the view of GET, and would be a way around its limit."""
    listed = [methods] if isinstance(methods, str) else methods
    if not isinstance(listed, (list, tuple, set, frozenset)) or not listed:
        raise PolicyError(f'The method {shown(methods)} is neither text nor a list; write "POST" or ["POST", "PUT"].')
    for method in listed:
        if not isinstance(method, str) or method.upper() not in METHODS:
            raise PolicyError(f"The HTTP method {shown(method)} is not known{nearest(method, METHODS)}")
    upper = {method.upper() for method in listed}
    return frozenset(upper | {"HEAD"} if "GET" in upper else upper)


def check_cost(cost: Any) -> None:
    """Raise PolicyError for a cost that is neither a whole number nor a function."""
    if isinstance(cost, str) or callable(cost):
        check_function("cost", cost)
    elif type(cost) is not int or cost < 0:
        reason = "is not a whole number of at least 0, a function of a request or the dotted path of one"
        raise PolicyError(f"The cost {shown(cost)} {reason}.")


def check_function(option: str, function: Any, *, may_be_async: bool = False) -> None:
    """Raise PolicyError for what is neither a function nor the dotted path of one."""
    if isinstance(function, str) and DOTTED_PATH.fullmatch(function):
        return  # imported by the system checks, and with the first request
    if not callable(function):
        raise PolicyError(f"The {option} {shown(function)} is neither a function nor the dotted path of one.")
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise PolicyError(f"The {option} {function!r} is an async function; write a plain one.")


def cost_problem(cost: Any, policy: Policy, default_algo: str | None = None) -> str | None:
    """Return why a fixed cost does not work under a policy; None if it does, or if that depends on the request."""
    if not isinstance(cost, int) or not isinstance(policy.rate, Rate):
        return None
    if cost > policy.capacity:
        return f"the cost {shown(cost)} exceeds {policy.capacity}, so that no request would ever be admitted."
    algo = policy.algo or default_algo or ""
    if cost > (maximum := MAX_COST.get(algo, cost)):
        return f"the cost {cost} is over {maximum}, the most that {algo!r} accepts; use {SLIDING_WINDOW_COMPACT!r}."
    return None
