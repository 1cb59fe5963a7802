"""Block an identity, exempt it, or give it a custom limit, until a time.

The script that decides reads them, so that they apply everywhere at once and cost no
round trip. The database keeps them (models.Override); Redis has

  rlaas:override:<identity>   HASH     <policy, or * for all> ->
                                       <kind>:<until, ms>:<amount>;
                                       expires with the last
  rlaas:overrides             STRING   a marker: when it is gone, Redis was emptied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from .. import backend
from ..backend.commands import script_call
from ..backend.scripts import OVERRIDE
from ..core.keys import override_key
from ..core.policy import EVERY_POLICY as EVERY_POLICY
from ..runtime.clock import script_time
from .refusal_cache import cached_refusals

BLOCK = "block"
EXEMPT = "exempt"
LIMIT = "limit"
FACTOR = "factor"

MARKER = "rlaas:overrides"
MARKER_TTL = 30 * 86_400


class Override(NamedTuple):
    """What applies to an identity, or to a network, instead of a policy or of all."""

    identity: str  # or the network
    policy: str
    kind: str
    until: int  # ms since the epoch
    amount: int | None = None  # of a limit its units, of a factor thousandths
    # Of a network: also where a policy counts something else than addresses.
    every_client: bool = False

    @property
    def text(self) -> str:
        """As the script takes it."""
        return f"{self.kind}:{self.until}:{self.amount or ''}"


def in_force(widest_first: Iterable[Any]) -> Any:
    """Return the override that applies of those that a request matches, if any.

    They are those of the database, or of Redis. As the script chooses it: each narrower
    one replaces the wider ones, but a custom limit never lifts a block.
    """
    applied = None
    for override in widest_first:
        is_blocked = applied is not None and applied.kind == BLOCK
        if not (is_blocked and override.kind in (LIMIT, FACTOR)):
            applied = override
    return applied


def publish(identity: str, overrides: Iterable[Override]) -> None:
    """Replace the overrides of an identity by these."""
    publish_each({identity: overrides})


def publish_each(wanted: Mapping[str, Iterable[Override]]) -> None:
    """Replace the overrides of each identity by these, in few round trips."""
    topology = backend.topology()
    key = override_key(hash_tag=topology.clustered).key
    first, *others = [
        replacing_call(key(identity), fields(overrides), overrides)
        for identity, overrides in wanted.items()
    ]
    # By itself, so that the server has the script when it gets the others.
    backend.execute(topology, first)
    for reply in backend.execute_each(topology, others):
        if isinstance(reply, backend.UnavailableError):
            raise reply
    cached_refusals().invalidate_all()


def fields(overrides: Iterable[Override]) -> dict[str, str]:
    """Return what the key of an identity has."""
    return {override.policy: override.text for override in overrides}


def replacing_call(
    key: str,
    fields: Mapping[str, str],
    overrides: Iterable[Override],
    spare_ttl: int = 0,
) -> backend.Call:
    """Return the call that replaces a HASH, which expires with the last override."""
    ends = max([override.until for override in overrides], default=0) + spare_ttl
    words = chain.from_iterable(fields.items())
    call = script_call(OVERRIDE, (key,), (script_time(), ends, *words))
    call.for_page = True
    return call


def differing(wanted: Mapping[str, Iterable[Override]]) -> list[str]:
    """Return the identities for which Redis has not exactly these overrides."""
    key = override_key(hash_tag=backend.topology().clustered).key
    # HGETALL tells a lost key, a lost field and an ended override; a key has at most
    # one field per policy.
    replies = backend.run_commands([("HGETALL", key(identity)) for identity in wanted])

    identities = []
    for (identity, overrides), reply in zip(wanted.items(), replies, strict=True):
        words = [word.decode() for word in reply]
        stored = dict(zip(words[::2], words[1::2], strict=True))
        if stored != fields(overrides):
            identities.append(identity)
    return identities


def mark_complete() -> None:
    """Note in Redis that it has every override."""
    backend.run_commands([("SET", MARKER, 1, "EX", MARKER_TTL)])


def is_lost() -> bool:
    """Return whether Redis was emptied since, and the overrides with it."""
    return backend.run_commands([("EXISTS", MARKER)]) == [0]
