"""The callers of the HTTP service.

They are other programs, each with what it may do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .policy import NAME, Policy, PolicyError
from .rules import refuse_unknown, require_known

VERBS = ("check", "usage", "refund", "reset", "policies", "info", "metrics")
OPTIONS = ("digests", "verbs", "policies", "limit")
DEFAULT_VERBS = frozenset({"check"})

_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch


@dataclass(frozen=True, slots=True)
class Caller:
    """A program that calls the service.

    >>> Caller("billing", frozenset({"check", "refund"}), frozenset({"search"}))
    """

    name: str
    verbs: frozenset[str] = DEFAULT_VERBS
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

    # The SHA-256 of each token, in hex, and whose it is.
    digests: tuple[tuple[str, Caller], ...] = ()
    authenticate: Callable[[Any], Any] | None = None  # the site's own function

    @property
    def is_open(self) -> bool:
        """Whether anybody may call it."""
        return bool(self.digests) or self.authenticate is not None


def parse_tokens(
    tokens: Any, policies: Mapping[str, Policy]
) -> Iterator[tuple[str, Caller]]:
    """Parse RATE_LIMITER['SERVICE']['TOKENS'].

    PolicyError when an entry is invalid.
    """
    if not isinstance(tokens, Mapping):
        raise PolicyError("TOKENS should be a dict of names and tokens.")

    for name, entry in tokens.items():
        try:
            caller = _parse_caller(name, entry, policies)
        except PolicyError as error:
            raise PolicyError(f"TOKENS[{name!r}]: {error}") from None

        for digest in entry["digests"]:
            yield digest, caller


def _parse_caller(name: Any, entry: Any, policies: Mapping[str, Policy]) -> Caller:
    """Parse an entry of TOKENS.

    >>> _parse_caller("billing", {"digests": ["<SHA-256>"], "verbs": ["check"]}, {})
    """
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise PolicyError("write a name of 1 to 100 of A-Z a-z 0-9 _ . -")

    if not isinstance(entry, Mapping):
        raise PolicyError(
            'write {"digests": ["<SHA-256 of the token>"], "verbs": ["check"]}.'
        )
    refuse_unknown(entry, OPTIONS)

    digests = _texts(entry, "digests", ())
    if not digests or not all(map(_is_digest, digests)):
        raise PolicyError(
            "digests should list the SHA-256 of each token, as 64 hex digits; "
            "`rlaas token new` makes one."
        )

    verbs = _texts(entry, "verbs", DEFAULT_VERBS)
    require_known("verb", verbs, VERBS)

    names = _texts(entry, "policies", None)
    require_known("policy", names or (), policies)

    limit = entry.get("limit")
    if limit is not None:
        require_known("policy", [limit], policies)

    return Caller(name, verbs, names, limit)


def _texts(entry: Mapping[str, Any], option: str, default: Any) -> Any:
    """Return the set of texts that an option lists."""
    texts = entry.get(option)
    if texts is None:
        return default

    is_list = isinstance(texts, (list, tuple))
    if not is_list or not all(isinstance(text, str) for text in texts):
        kind = type(texts).__name__
        raise PolicyError(f"{option} should be a list of texts, not {kind}.")

    return frozenset(texts)
