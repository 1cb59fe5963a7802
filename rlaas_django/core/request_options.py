"""The options of a limit that concern requests: `method`, `cost` and functions of the site. No Django, no Redis."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from http import HTTPMethod
from typing import Any, NamedTuple

from .policy import (
    DOTTED_PATH,
    MAX_COST,
    SLIDING_WINDOW_COMPACT,
    Policy,
    PolicyError,
    Rate,
    nearest,
    shown,
)

METHODS = tuple(method.value for method in HTTPMethod)
OPTIONS = ("method", "cost", "charge_when")


class RequestOptions(NamedTuple):
    """What a policy of the settings, a rule or a decorator says about requests."""

    cost: Any = (
        None  # a whole number, a function of the request, or its dotted path; None: 1
    )
    methods: frozenset[str] | None = None  # None: all
    charge_when: Any = None  # a function of the response, or its dotted path

    def over(self, other: RequestOptions) -> RequestOptions:
        """Return these options, and the other ones where these are not set; where both set methods, those in both."""
        methods = (
            other.methods
            if self.methods is None
            else self.methods & (other.methods or self.methods)
        )
        cost = next((each for each in (self.cost, other.cost) if each is not None), 1)
        return RequestOptions(cost, methods, self.charge_when or other.charge_when)


def parse_options(options: Mapping[str, Any]) -> RequestOptions:
    """Parse the options of an entry in the settings."""
    method, cost, charge_when = (
        options.get("method"),
        options.get("cost"),
        options.get("charge_when"),
    )
    if cost is not None:
        check_cost(cost)
    if charge_when is not None:
        check_function("charge_when", charge_when)
    return RequestOptions(
        cost, None if method is None else parse_methods(method), charge_when
    )


def parse_methods(methods: str | Iterable[str]) -> frozenset[str]:
    """Return methods as they are matched; HEAD runs the view of GET, and would be a way around its limit."""
    listed = [methods] if isinstance(methods, str) else methods
    if not isinstance(listed, (list, tuple, set, frozenset)) or not listed:
        raise PolicyError(
            f'The method {shown(methods)} is neither text nor a list; write "POST" or ["POST", "PUT"].'
        )
    for method in listed:
        if not isinstance(method, str) or method.upper() not in METHODS:
            raise PolicyError(
                f"The HTTP method {shown(method)} is not known{nearest(method, METHODS)}"
            )
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
        raise PolicyError(
            f"The {option} {shown(function)} is neither a function nor the dotted path of one."
        )
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise PolicyError(
            f"The {option} {function!r} is an async function; write a plain one."
        )


def cost_problem(
    cost: Any, policy: Policy, default_algo: str | None = None
) -> str | None:
    """Return why a fixed cost does not work under a policy; None if it does, or if that depends on the request."""
    if not isinstance(cost, int) or not isinstance(policy.rate, Rate):
        return None
    if cost > policy.capacity:
        return f"the cost {shown(cost)} exceeds {policy.capacity}, so that no request would ever be admitted."
    algo = policy.algo or default_algo or ""
    if cost > (maximum := MAX_COST.get(algo, cost)):
        return f"the cost {cost} is over {maximum}, the most that {algo!r} accepts; use {SLIDING_WINDOW_COMPACT!r}."
    return None
