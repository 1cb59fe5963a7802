"""Exceptions that an operator makes for one identity: blocked, exempt, or under another limit, until a time.

The script that decides looks at them, so that they hold everywhere at once and cost no round trip. The database keeps
them for good (models.Override); Redis has

  rlaas:override:<identity>   HASH     <policy, or * for all> -> <kind>:<until, ms>:<limit>; expires with the last
  rlaas:overrides             STRING   tells that Redis has them all; when it is gone, Redis was emptied
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import backend, plans, refusals
from .identity import override_parts
from .scripts import OVERRIDE

EVERY_POLICY = "*"
BLOCK, EXEMPT, LIMIT = "block", "exempt", "limit"
COMPLETE = "rlaas:overrides"
COMPLETE_TTL = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Override:
    """What holds for one identity instead of a policy, or of all."""

    identity: str
    policy: str
    kind: str
    until: int  # ms since the epoch
    limit: int | None = None


def publish(identity: str, overrides: Iterable[Override]) -> None:
    """Let these hold for an identity, and nothing else."""
    fields: list[str | int] = []
    ends = 0
    for override in overrides:
        fields += (override.policy, f"{override.kind}:{override.until}:{override.limit or ''}")
        ends = max(ends, override.until)
    key = identity.join(override_parts(tagged=backend.site().clustered))
    backend.run(backend.call(OVERRIDE, (key,), (plans.now(), ends, *fields)))
    refusals.end()


def mark_complete() -> None:
    backend.execute([("SET", COMPLETE, 1, "EX", COMPLETE_TTL)])


def is_lost() -> bool:
    """Return whether Redis lost the overrides: it was emptied, or never had them."""
    return bool(backend.execute([("EXISTS", COMPLETE)]) == [0])
