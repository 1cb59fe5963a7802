"""The refusal log, filtered as the panel and the commands ask for it."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.keys import split_login
from ..runtime.observers import REQUEST
from ..stats import reader
from ..stats.schema import SITE, Refusal
from .identities import encode_address


def find_refusals(
    policy: str = "",
    text: str = "",
    identities: Iterable[str] = (),
    path: str = "",
    oldest: float = 0,
) -> list[Refusal]:
    """Return refusals, the newest first; what is left out does not matter.

    Those of an identity that has this text in it, or is one of these.
    """
    return [
        refusal
        for refusal in reader.refusals([policy or SITE])
        if refusal.at >= oldest
        and path in refusal.path
        and (text in refusal.identity or concerns(refusal, identities))
    ]


def concerns(refusal: Refusal, identities: Iterable[str]) -> bool:
    """Return whether a refusal is of these identities, their logins or addresses."""
    identity = refusal.identity
    names = {identity, split_login(identity)[0], encode_address(refusal.address)}
    return not names.isdisjoint(identities)


def source_of(refusal: Refusal) -> str:
    """Return the method and path of a request, or who called `check()`."""
    if refusal.source == REQUEST:
        return f"{refusal.method} {refusal.path}"
    return refusal.source
