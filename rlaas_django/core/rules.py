"""What rules and decorators say about requests.

They say which are limited, and how. No Django, no Redis.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPMethod
from typing import Any

from .algorithms import ALGORITHMS
from .policy import DEFAULT, DOTTED_PATH, Policy, PolicyError, Rate, nearest, shown

METHODS = tuple(method.value for method in HTTPMethod)
OPTIONS = (
    "path",
    "regex",
    "methods",
    "policies",
    "exempt",
    "method",
    "cost",
    "charge_when",
)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An entry of RATE_LIMITER['MIDDLEWARE'], as it is matched."""

    path: str | None
    regex: re.Pattern[str] | None
    methods: frozenset[str] | None  # None: all
    policies: tuple[str, ...]  # empty: exempt
    # A whole number, a function of the request, or its dotted path.
    cost: Any = 1
    # A function of the response, or its dotted path.
    charge_when: Any = None

    def covers(self, other: Rule) -> bool:
        """Return whether this rule matches all that another one matches.

        As far as a regex shows it.
        """
        if not self._covers_methods(other):
            return False
        if self.regex is None and self.path in (None, "/"):  # all paths
            return True
        if self.regex is not None or other.regex is not None:
            return self.regex == other.regex
        return other.path is not None and self.matches_path(other.path)

    def _covers_methods(self, other: Rule) -> bool:
        if self.methods is None:
            return True
        return other.methods is not None and other.methods <= self.methods

    def matches(self, path: str, method: str | None) -> bool:
        if self.methods is not None and method not in self.methods:
            return False
        return self.matches_path(path)

    def matches_path(self, path: str) -> bool:
        """Return whether this rule matches a path, for some method at least."""
        if self.regex is not None:
            return self.regex.search(path) is not None
        if self.path is None or path == self.path:
            return True
        # By whole segments: a rule for /health does not match /healthcare.
        return path.startswith(self.path.rstrip("/") + "/")


def parse_rule(entry: Any, policies: Mapping[str, Policy]) -> Rule:
    """Parse an entry of RATE_LIMITER['MIDDLEWARE'].

    PolicyError or re.error when it is invalid.
    """
    if not isinstance(entry, Mapping):
        raise PolicyError(
            f"{entry!r} is not a rule; "
            'write {"path": "/api/", "policies": ["search"]}.'
        )
    refuse_unknown(entry, OPTIONS)

    path = entry.get("path")
    if path is not None and not (isinstance(path, str) and path.startswith("/")):
        raise PolicyError(f"path {path!r} does not begin with a slash.")
    regex = entry.get("regex")
    if not isinstance(regex, str | None):
        raise PolicyError(f"regex {regex!r} is not text.")
    if path is not None and regex is not None:
        raise PolicyError("a rule has a path or a regex, not both.")

    cost = entry.get("cost", 1)
    check_cost(cost)
    charge_when = entry.get("charge_when")
    check_function("charge_when", charge_when)

    if entry.keys() >= {"method", "methods"}:
        raise PolicyError("a rule has a method or methods, not both.")
    methods = entry.get("methods", entry.get("method"))
    if methods is not None:
        methods = parse_methods(methods)

    names = _parse_policies(entry, policies)
    for name in names:
        problem = cost_problem(cost, policies[name])
        if problem is not None:
            raise PolicyError(f"policy {name!r}: {problem}")

    return Rule(
        path,
        None if regex is None else re.compile(regex),
        methods,
        names,
        cost,
        charge_when,
    )


def _parse_policies(
    entry: Mapping[str, Any], policies: Mapping[str, Policy]
) -> tuple[str, ...]:
    exempt = entry.get("exempt", False)
    names = entry.get("policies")
    if type(exempt) is not bool or (exempt and names is not None):
        raise PolicyError("a rule has policies, or exempt: True.")
    if exempt:
        return ()
    if names is None:
        return (DEFAULT,)

    if not isinstance(names, (list, tuple)) or not names:
        raise PolicyError(
            f'policies {names!r} is not a list of names; write ["search"].'
        )
    require_known("policy", names, policies)
    return tuple(names)


def require_known(word: str, names: Iterable[Any], known: Iterable[str]) -> None:
    """Raise PolicyError for a name that is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise PolicyError(f"there is no {word} {name!r}{nearest(name, known)}")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise PolicyError for an option that does not exist."""
    for option in options:
        if option not in known:
            raise PolicyError(
                f"there is no option {option!r}{nearest(option, known)} "
                f"The options are {', '.join(known)}."
            )


def parse_methods(methods: str | Iterable[str]) -> frozenset[str]:
    """Return methods as they are matched.

    HEAD runs the view of GET, and would be a way around its limit.
    """
    listed = [methods] if isinstance(methods, str) else methods
    if not isinstance(listed, (list, tuple, set, frozenset)) or not listed:
        raise PolicyError(
            f"The method {shown(methods)} is neither text nor a list; "
            'write "POST" or ["POST", "PUT"].'
        )
    for method in listed:
        if not isinstance(method, str) or method.upper() not in METHODS:
            hint = nearest(method, METHODS)
            raise PolicyError(f"The HTTP method {shown(method)} is not known{hint}")

    upper = {method.upper() for method in listed}
    if "GET" in upper:
        upper.add("HEAD")
    return frozenset(upper)


def check_cost(cost: Any) -> None:
    """Raise PolicyError for a cost that is neither a whole number nor a function."""
    if isinstance(cost, str) or callable(cost):
        check_function("cost", cost)
    elif type(cost) is not int or cost < 0:
        raise PolicyError(
            f"The cost {shown(cost)} is not a whole number of at least 0, "
            "a function of a request or the dotted path of one."
        )


def check_function(option: str, function: Any, *, may_be_async: bool = False) -> None:
    """Raise PolicyError for what is neither a function nor the dotted path of one.

    None is an option that is left out.
    """
    if function is None:
        return
    if isinstance(function, str) and DOTTED_PATH.fullmatch(function):
        return  # imported by the system checks, and with the first request
    if not callable(function):
        raise PolicyError(
            f"The {option} {shown(function)} is neither a function "
            "nor the dotted path of one."
        )
    if inspect.iscoroutinefunction(function) and not may_be_async:
        raise PolicyError(
            f"The {option} {function!r} is an async function; write a plain one."
        )


def cost_problem(
    cost: Any, policy: Policy, default_algo: str | None = None
) -> str | None:
    """Return why a fixed cost does not work under a policy.

    None if it does, or if that depends on the request.
    """
    if not isinstance(cost, int) or not isinstance(policy.rate, Rate):
        return None
    if cost > policy.capacity:
        return (
            f"the cost {shown(cost)} exceeds {policy.capacity}, "
            "so that no request would ever be admitted."
        )
    algo = policy.algo or default_algo
    if algo is None:
        return None
    return excessive_cost(cost, algo)


def excessive_cost(cost: int, algo: str) -> str | None:
    """Return why an algorithm does not accept a cost, or None if it does."""
    algorithm = ALGORITHMS[algo]
    if algorithm.max_cost is None or cost <= algorithm.max_cost:
        return None
    return (
        f"the cost {shown(cost)} is over {algorithm.max_cost}, the most that {algo!r} "
        f"accepts; use {algorithm.alternative!r}."
    )
