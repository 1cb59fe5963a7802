"""How statistics are stored in Redis: key names, fields and bounds.

Every key is bounded, has a TTL and is used by single-key commands only, as a Cluster demands.

  rlaas:stats:{<policy>}:<day>     HASH   <minute of the day>:<kind> -> number of decisions
  rlaas:refused:{<policy>}:<day>   ZSET   identity -> refusals that day; those with the most
  rlaas:watch:{<policy>}:<hour>    ZSET   identity -> percent of the limit used, from 80 on; those with the most
  rlaas:refusals:{<policy>}        LIST   recent refusals as JSON, newest first

Days and hours are counted from the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE, HOUR, DAY = 60, 3_600, 86_400

# Kinds of decisions; the first letters stand in the fields of the HASH.
KINDS = ALLOWED, REFUSED, SHADOWED, DEGRADED, UNLOGGED = "a", "r", "s", "d", "u"

STATS_TTL = DAY + 2 * HOUR
WATCH_TTL = 3 * HOUR
REFUSALS_TTL = 7 * DAY

WATCH_PERCENT = 80  # of a limit
MAX_IDENTITIES = 1_000  # per ZSET
MAX_REFUSALS = 1_000  # per LIST


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry of the refusal log. `at` is in seconds since the epoch; `window` and `retry_after` are in seconds."""

    at: float
    policy: str
    identity: str
    method: str
    path: str
    count: int
    limit: int
    window: int
    retry_after: float | None  # None: the cost exceeds the limit, so it is never allowed
    shadow: bool = False


def stats_key(policy: str, day: int) -> str:
    return f"rlaas:stats:{{{policy}}}:{day}"


def refused_key(policy: str, day: int) -> str:
    return f"rlaas:refused:{{{policy}}}:{day}"


def watch_key(policy: str, hour: int) -> str:
    return f"rlaas:watch:{{{policy}}}:{hour}"


def refusals_key(policy: str) -> str:
    return f"rlaas:refusals:{{{policy}}}"
