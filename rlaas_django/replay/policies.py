"""Policies as they are written on the command line: `100/m by ip`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..core.algorithms import ALGORITHMS, TOKEN_BUCKET
from ..core.policy import Policy, PolicyError, nearest

FORM = 'write "100/m by ip" or "20/10s by user, token bucket, burst 40"'

_RATE_AND_KEY = re.compile(r"(\d+/\S+)(?:\s+(?:by|per)\s+(.+))?")
_BURST = re.compile(r"burst\s*=?\s*(\d+)")


def _words(text: str) -> str:
    """Return the name of an algorithm as words: `token bucket`."""
    name = text.lower().removesuffix("-algo")
    return " ".join(re.split(r"[\s_-]+", name.strip()))


_ALGORITHMS = {_words(algorithm): algorithm for algorithm in ALGORITHMS}


def parse_policy(text: str, known: Mapping[str, Policy]) -> Policy:
    """Return the policy that a text describes, or a known one of this name."""
    first, *parts = [part.strip() for part in text.split(",")]
    if not parts and first in known:
        return known[first]

    match = _RATE_AND_KEY.fullmatch(first)
    if match is None:
        if "/" in first or " " in first:
            raise PolicyError(f"{text!r} does not begin with a rate and a key; {FORM}.")

        hint = nearest(first, known)
        raise PolicyError(
            f"RATE_LIMITER['POLICIES'] has no policy {first!r}{hint} Or {FORM}."
        )

    options: dict[str, Any] = {}
    if match[2]:
        options["key"] = re.sub(r"\s+or\s+", "_or_", match[2])

    for part in parts:
        if burst := _BURST.fullmatch(part):
            options["burst"] = int(burst[1])
            options.setdefault("algo", TOKEN_BUCKET)
        else:
            options["algo"] = parse_algorithm(part)

    try:
        return Policy("replay", match[1], **options)
    except PolicyError as error:
        raise PolicyError(f"{text!r}: {error}") from None


def parse_algorithm(text: str) -> str:
    """Return the algorithm that `token bucket` or `token-bucket-algo` names."""
    words = _words(text)
    if words in _ALGORITHMS:
        return _ALGORITHMS[words]

    hint = nearest(words, [*_ALGORITHMS, "burst 40"])
    raise PolicyError(
        f"{text!r} is not an algorithm{hint} Write one of {', '.join(_ALGORITHMS)}."
    )
