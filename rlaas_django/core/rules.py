"""The rules of RATE_LIMITER['MIDDLEWARE']: which requests they match, and which policies apply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .policy import DEFAULT, Policy, PolicyError, nearest
from .request_options import OPTIONS as REQUEST_OPTIONS
from .request_options import cost_problem, parse_options

OPTIONS = ("path", "regex", "methods", "policies", "exempt", *REQUEST_OPTIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule as it is matched."""

    path: str | None
    regex: re.Pattern[str] | None
    methods: frozenset[str] | None
    policies: tuple[str, ...]  # empty: exempt
    cost: Any = None  # as in RequestOptions, and so is `charge_when`
    charge_when: Any = None

    @property
    def _matches_all_paths(self) -> bool:
        return self.regex is None and self.path in (None, "/")

    def covers(self, other: Rule) -> bool:
        """Return whether this rule matches all that another one matches, as far as can be told from a regex."""
        if self.methods is not None and (
            other.methods is None or not other.methods <= self.methods
        ):
            return False
        if self.regex is not None or other.regex is not None:
            return self._matches_all_paths or self.regex == other.regex
        return self._matches_all_paths or (
            other.path is not None and self.matches_path(other.path)
        )

    def matches(self, path: str, method: str | None) -> bool:
        return (self.methods is None or method in self.methods) and self.matches_path(
            path
        )

    def matches_path(self, path: str) -> bool:
        """Return whether this rule matches a path, for some method at least."""
        if self.regex is not None:
            return self.regex.search(path) is not None
        # By whole segments: a rule for /health does not match /healthcare.
        return (
            self.path is None
            or path == self.path
            or path.startswith(self.path.rstrip("/") + "/")
        )


def refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise PolicyError for an option that does not exist."""
    for option in options:
        if option not in known:
            hint = nearest(option, known)
            raise PolicyError(
                f"there is no option {option!r}{hint} The options are {', '.join(known)}."
            )


def parse_rule(entry: Any, policies: Mapping[str, Policy]) -> Rule:
    """Parse an entry of RATE_LIMITER['MIDDLEWARE']; PolicyError or re.error when it is invalid."""
    if not isinstance(entry, Mapping):
        raise PolicyError(
            f'{entry!r} is not a rule; write {{"path": "/api/", "policies": ["search"]}}.'
        )
    refuse_unknown(entry, OPTIONS)
    path, regex = entry.get("path"), entry.get("regex")
    if not isinstance(path, str | None) or (
        path is not None and not path.startswith("/")
    ):
        raise PolicyError(f"path {path!r} does not begin with a slash.")
    if not isinstance(regex, str | None):
        raise PolicyError(f"regex {regex!r} is not text.")
    if path is not None and regex is not None:
        raise PolicyError("a rule has a path or a regex, not both.")
    names, (cost, methods, charge_when) = (
        _parse_policies(entry, policies),
        parse_options(_with_method(entry)),
    )
    for name in names:
        if problem := cost_problem(cost, policies[name]):
            raise PolicyError(f"policy {name!r}: {problem}")
    return Rule(
        path,
        None if regex is None else re.compile(regex),
        methods,
        names,
        cost,
        charge_when,
    )


def _with_method(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a rule with its `methods`, a list, as `method`, which is text or a list as in a decorator."""
    methods = entry.get("methods")
    if methods is None:
        return entry
    if "method" in entry:
        raise PolicyError("a rule has a method or methods, not both.")
    if not isinstance(methods, list | tuple):
        raise PolicyError(f'methods {methods!r} is not a list; write ["POST"].')
    return {**entry, "method": methods}


def _parse_policies(
    entry: Mapping[str, Any], policies: Mapping[str, Policy]
) -> tuple[str, ...]:
    exempt, names = entry.get("exempt", False), entry.get("policies")
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
    for name in names:
        if name not in [*policies]:
            raise PolicyError(
                f"RATE_LIMITER['POLICIES'] has no policy {name!r}{nearest(name, policies)}"
            )
    return tuple(names)
