"""Overrides: an operator blocks an identity, exempts it, or gives it a custom limit, until a time.

The script that decides reads them, so that they apply everywhere at once and cost no round trip. The database keeps
them (models.Override); Redis has

  rlaas:override:<identity>   HASH     <policy, or * for all> -> <kind>:<until, ms>:<limit>; expires with the last
  rlaas:overrides             STRING   a marker: when it is gone, Redis was emptied
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import backend
from ..backend.commands import script_call
from ..backend.scripts import OVERRIDE
from ..core.clock import script_time
from ..core.keys import override_key
from .refusal_cache import EVERY_POLICY, cached_refusals

BLOCK, EXEMPT, LIMIT = "block", "exempt", "limit"
MARKER, MARKER_TTL = "rlaas:overrides", 30 * 86_400

__all__ = ["BLOCK", "EVERY_POLICY", "EXEMPT", "LIMIT", "Override", "is_lost", "mark_complete", "publish"]


@dataclass(frozen=True, slots=True)
class Override:
    """What applies to one identity instead of a policy, or of every policy."""

    identity: str
    policy: str
    kind: str
    until: int  # ms since the epoch
    limit: int | None = None


def publish(identity: str, overrides: Iterable[Override]) -> None:
    """Replace the overrides of an identity by these."""
    fields, ends = [], 0
    for override in overrides:
        fields += [override.policy, f"{override.kind}:{override.until}:{override.limit or ''}"]
        ends = max(ends, override.until)
    topology = backend.topology()
    key = override_key(hash_tag=topology.clustered).key(identity)
    backend.execute(topology, script_call(OVERRIDE, (key,), (script_time(), ends, *fields)))
    cached_refusals().invalidate()


def mark_complete() -> None:
    """Note in Redis that it has every override."""
    backend.run_commands([("SET", MARKER, 1, "EX", MARKER_TTL)])


def is_lost() -> bool:
    """Return whether Redis was emptied since, and the overrides with it."""
    return backend.run_commands([("EXISTS", MARKER)]) == [0]
