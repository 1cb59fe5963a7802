"""The rules of RATE_LIMITER['MIDDLEWARE']: which requests they match, and which policies apply."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .policy import DEFAULT, Policy, PolicyError, nearest

OPTIONS = ("path", "regex", "methods", "policies", "exempt")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as it is matched."""

    path: str | None
    regex: re.Pattern[str] | None
    methods: frozenset[str] | None
    policies: tuple[str, ...]  # empty: exempt

    @property
    def matches_all(self) -> bool:
        return self.methods is None and self.regex is None and self.path in (None, "/")

    def matches(self, path: str, method: str | None) -> bool:
        if self.methods is not None and method not in self.methods:
            return False
        if self.regex is not None:
            return self.regex.search(path) is not None
        # By whole segments: a rule for /health does not match /healthcare.
        return self.path is None or path == self.path or path.startswith(self.path.rstrip("/") + "/")


def with_head(methods: Iterable[str]) -> frozenset[str]:
    """Return methods as they are matched; HEAD runs the view of GET, and would be a way around its limit."""
    upper = {method.upper() for method in methods}
    return frozenset(upper | {"HEAD"} if "GET" in upper else upper)


def refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise PolicyError for an option that does not exist."""
    for option in options:
        if option not in known:
            hint = nearest(option, known)
            raise PolicyError(f"there is no option {option!r}{hint} The options are {', '.join(known)}.")


def parse_rule(entry: Any, policies: Mapping[str, Policy]) -> Rule:
    """Parse an entry of RATE_LIMITER['MIDDLEWARE']; PolicyError or re.error when it is invalid."""
    if not isinstance(entry, Mapping):
        raise PolicyError(f'{entry!r} is not a rule; write {{"path": "/api/", "policies": ["search"]}}.')
    refuse_unknown(entry, OPTIONS)
    path, regex, methods = entry.get("path"), entry.get("regex"), entry.get("methods")
    if not isinstance(path, str | None) or (path is not None and not path.startswith("/")):
        raise PolicyError(f"path {path!r} does not begin with a slash.")
    if not isinstance(regex, str | None):
        raise PolicyError(f"regex {regex!r} is not text.")
    if path is not None and regex is not None:
        raise PolicyError("a rule has a path or a regex, not both.")
    if not isinstance(methods, list | tuple | None) or not all(isinstance(method, str) for method in methods or ()):
        raise PolicyError(f'methods {methods!r} is not a list; write ["POST"].')
    pattern = None if regex is None else re.compile(regex)
    return Rule(path, pattern, None if methods is None else with_head(methods), _parse_policies(entry, policies))


def _parse_policies(entry: Mapping[str, Any], policies: Mapping[str, Policy]) -> tuple[str, ...]:
    exempt, names = entry.get("exempt", False), entry.get("policies")
    if type(exempt) is not bool or (exempt and names is not None):
        raise PolicyError("a rule has policies, or exempt: True.")
    if exempt:
        return ()
    if names is None:
        return (DEFAULT,)
    if not isinstance(names, (list, tuple)) or not names:
        raise PolicyError(f'policies {names!r} is not a list of names; write ["search"].')
    for name in names:
        if name not in [*policies]:
            raise PolicyError(f"RATE_LIMITER['POLICIES'] has no policy {name!r}{nearest(name, policies)}")
    return tuple(names)
