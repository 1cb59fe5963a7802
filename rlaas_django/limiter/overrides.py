"""Overrides: an operator blocks an identity, exempts it, or gives it a custom limit, until a time.

The script that decides reads them, so that they apply everywhere at once and cost no round trip. The database keeps
them (models.Override); Redis has

  rlaas:override:<identity>   HASH     <policy, or * for all> -> <kind>:<until, ms>:<amount>; expires with the last
  rlaas:overrides             STRING   a marker: when it is gone, Redis was emptied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from .. import backend
from ..backend.commands import script_call
from ..backend.scripts import OVERRIDE
from ..core.keys import override_key
from ..core.policy import EVERY_POLICY as EVERY_POLICY
from ..runtime.clock import script_time
from .refusal_cache import cached_refusals

BLOCK, EXEMPT, LIMIT, FACTOR = "block", "exempt", "limit", "factor"
MARKER, MARKER_TTL = "rlaas:overrides", 30 * 86_400


class Override(NamedTuple):
    """What applies to an identity, or to the clients in a network, instead of a policy, or of every policy."""

    identity: str  # or the network
    policy: str
    kind: str
    until: int  # ms since the epoch
    amount: int | None = None  # of a limit its units, of a factor thousandths
    every_client: bool = False  # of a network: also where a policy counts something else than addresses, such as users

    @property
    def text(self) -> str:
        """As the script takes it."""
        return f"{self.kind}:{self.until}:{self.amount or ''}"


class HasKind(Protocol):
    """An override, of Redis or of the database."""

    @property
    def kind(self) -> str: ...


Some = TypeVar("Some", bound=HasKind)


def in_force(widest_first: Iterable[Some]) -> Some | None:
    """Return the override that applies of those that a request matches, as the script chooses it.

    Each narrower one replaces the wider ones, but a custom limit never lifts a block.
    """
    found = None
    for override in widest_first:
        if found is None or found.kind != BLOCK or override.kind not in (LIMIT, FACTOR):
            found = override
    return found


def publish(identity: str, overrides: Iterable[Override]) -> None:
    """Replace the overrides of an identity by these."""
    fields: list[str] = []
    ends = 0
    for override in overrides:
        fields += (override.policy, override.text)
        ends = max(ends, override.until)
    topology = backend.topology()
    key = override_key(hash_tag=topology.clustered).key(identity)
    backend.execute(
        topology, script_call(OVERRIDE, (key,), (script_time(), ends, *fields))
    )
    cached_refusals().invalidate()


def differing(wanted: Mapping[str, Iterable[Override]]) -> list[str]:
    """Return the identities for which Redis does not have these overrides, or has others."""
    key = override_key(hash_tag=backend.topology().clustered).key
    # HGETALL tells a lost key, a lost field and an ended override; a key has at most one field per policy.
    replies = backend.run_commands([("HGETALL", key(identity)) for identity in wanted])
    found = []
    for (identity, overrides), reply in zip(wanted.items(), replies, strict=True):
        words = [word.decode() if isinstance(word, bytes) else word for word in reply]
        if dict(zip(words[::2], words[1::2], strict=True)) != {
            each.policy: each.text for each in overrides
        }:
            found.append(identity)
    return found


def mark_complete() -> None:
    """Note in Redis that it has every override."""
    backend.run_commands([("SET", MARKER, 1, "EX", MARKER_TTL)])


def is_lost() -> bool:
    """Return whether Redis was emptied since, and the overrides with it."""
    return backend.run_commands([("EXISTS", MARKER)]) == [0]
