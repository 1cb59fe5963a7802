"""Policies as they are written on the command line: `100/m by ip`, `20/10s by user, token bucket, burst 40`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..core.algorithms import ALGORITHMS, TOKEN_BUCKET
from ..core.policy import Policy, PolicyError, nearest

FORM = 'write "100/m by ip" or "20/10s by user, token bucket, burst 40"'
ALGORITHM_WORDS = {
    name.removesuffix("-algo").replace("-", " "): name for name in ALGORITHMS
}

_RATE_AND_KEY = re.compile(r"(\d+/\S+)(?:\s+(?:by|per)\s+(.+))?")
_BURST = re.compile(r"burst\s*=?\s*(\d+)")


def parse_policy(text: str, known: Mapping[str, Policy]) -> Policy:
    """Return the policy that a text describes, or that the settings have under this name."""
    first, *parts = [part.strip() for part in text.split(",")]
    if not parts and first in known:
        return known[first]
    found = _RATE_AND_KEY.fullmatch(first)
    if found is None:
        if "/" in first or " " in first:
            raise PolicyError(f"{text!r} does not begin with a rate and a key; {FORM}.")
        raise PolicyError(
            f"RATE_LIMITER['POLICIES'] has no policy {first!r}{nearest(first, known)} Or {FORM}."
        )
    options: dict[str, Any] = {}
    if found[2]:
        options["key"] = re.sub(r"\s+or\s+", "_or_", found[2])
    for part in parts:
        if burst := _BURST.fullmatch(part):
            options["burst"] = int(burst[1])
            options.setdefault("algo", TOKEN_BUCKET)
        else:
            options["algo"] = parse_algorithm(part)
    try:
        return Policy("replay", found[1], **options)
    except PolicyError as error:
        raise PolicyError(f"{text!r}: {error}") from None


def parse_algorithm(text: str) -> str:
    """Return the algorithm of a name as people write it: `token bucket`, `fixed-window`, `token-bucket-algo`."""
    words = " ".join(
        text.lower().removesuffix("-algo").replace("-", " ").replace("_", " ").split()
    )
    if words in ALGORITHM_WORDS:
        return ALGORITHM_WORDS[words]
    known = [*ALGORITHM_WORDS, "burst 40"]
    raise PolicyError(
        f"{text!r} is no algorithm{nearest(words, known)} Write one of {', '.join(ALGORITHM_WORDS)}."
    )
