"""The callers of the HTTP service: other programs, each with what it may do. No Django, no Redis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .policy import NAME, Policy, PolicyError, nearest
from .rules import refuse_unknown

VERBS = ("check", "usage", "refund", "reset", "policies", "info", "metrics")
OPTIONS = ("digests", "verbs", "policies", "limit")
_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Caller:
    """A program that calls the service.

    >>> Caller("billing", verbs=frozenset({"check", "refund"}), policies=frozenset({"search"}))
    """

    name: str
    verbs: frozenset[str] = frozenset({"check"})
    policies: frozenset[str] | None = None  # None: every policy of the settings
    limit: str | None = None  # the policy that limits the caller itself

    @property
    def source(self) -> str:
        """The label of its checks in the statistics."""
        return f"service:{self.name}"

    def may_use(self, policy: str) -> bool:
        return self.policies is None or policy in self.policies


@dataclass(frozen=True, slots=True)
class Service:
    """RATE_LIMITER['SERVICE'], parsed."""

    digests: tuple[
        tuple[str, Caller], ...
    ] = ()  # SHA-256 of a token, in hex, and whose it is
    authenticate: Callable[[Any], Any] | None = None  # the site's own function

    @property
    def is_open(self) -> bool:
        """Whether anybody may call it."""
        return bool(self.digests) or self.authenticate is not None


def parse_tokens(
    tokens: Any, policies: Mapping[str, Policy]
) -> Iterator[tuple[str, Caller]]:
    """Parse RATE_LIMITER['SERVICE']['TOKENS']; PolicyError when an entry is invalid."""
    if not isinstance(tokens, Mapping):
        raise PolicyError("TOKENS should be a dict of names and tokens.")
    for name, entry in tokens.items():
        try:
            caller = _parse_caller(name, entry, policies)
            yield from ((digest, caller) for digest in _texts(entry, "digests", ()))
        except PolicyError as error:
            raise PolicyError(f"TOKENS[{name!r}]: {error}") from None


def _parse_caller(name: Any, entry: Any, policies: Mapping[str, Policy]) -> Caller:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise PolicyError("write a name of 1 to 100 of A-Z a-z 0-9 _ . -")
    if not isinstance(entry, Mapping):
        raise PolicyError(
            'write {"digests": ["<SHA-256 of the token>"], "verbs": ["check"]}.'
        )
    refuse_unknown(entry, OPTIONS)
    digests, verbs = _texts(entry, "digests", ()), _texts(entry, "verbs", ("check",))
    if not digests or not all(map(_is_digest, digests)):
        raise PolicyError(
            "digests should list the SHA-256 of each token, as 64 hex digits; `rlaas token new` makes one."
        )
    names = _texts(entry, "policies", None)
    limit = entry.get("limit")
    _require_known("verb", verbs, VERBS)
    _require_known(
        "policy", [*(names or ()), *([] if limit is None else [limit])], policies
    )
    return Caller(
        name, frozenset(verbs), None if names is None else frozenset(names), limit
    )


def _texts(entry: Mapping[str, Any], option: str, default: Any) -> Any:
    found = entry.get(option, default)
    if found is not default and not (
        isinstance(found, (list, tuple))
        and all(isinstance(each, str) for each in found)
    ):
        raise PolicyError(
            f"{option} should be a list of texts, not {type(found).__name__}."
        )
    return found


def _require_known(word: str, names: Any, known: Any) -> None:
    for name in names:
        if name not in [*known]:
            raise PolicyError(f"there is no {word} {name!r}{nearest(name, known)}")
