"""How statistics are stored in Redis: key names, fields and bounds.

Every key is bounded and has a TTL. The keys of a policy are in one slot of a Cluster; those of the whole site are kept
under the name `*`, which no policy can have.

  rlaas:stats:{<policy>}:minutes:<hour>   HASH   <minute of the hour>:<code> -> number of decisions
  rlaas:stats:{<policy>}:hours:<day>      HASH   <hour of the day>:<code> -> number of decisions
  rlaas:stats:{*}:totals                  HASH   <policy>:<code> -> number of decisions since the first, for metrics
  rlaas:refused:{<policy>}:<day>          ZSET   identity -> times over the limit that day; those with the most
  rlaas:paths:{*}:<day>                   ZSET   path, or source of a check in code -> refusals that day
  rlaas:watch:{<policy>}:<hour>           ZSET   identity -> percent of the limit used, from 80 on; those with the most.
                                                 Of the site: <policy>/<identity>
  rlaas:refusals:{<policy>}               LIST   recent refusals as JSON, newest first

Under the name of the site a request is counted once, under that of a policy each request that the policy was checked
for. Days and hours are counted from the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..runtime.observers import ALLOWED, DEGRADED, OTHER, OVER, REFUSED

MINUTE, HOUR, DAY = 60, 3_600, 86_400
SITE = "*"

# What stands for a result in the fields of a HASH. Unlogged are the refusals that no line was written for.
UNLOGGED = "unlogged"
CODES = {
    ALLOWED: "a",
    REFUSED: "r",
    OTHER: "x",
    OVER: "o",
    DEGRADED: "d",
    UNLOGGED: "u",
}

MINUTES_TTL = DAY + 2 * HOUR
HOURS_TTL = 9 * DAY
TOTALS_TTL = 30 * DAY  # after the last decision
RANKS_TTL = DAY + 2 * HOUR
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
    source: str  # "request", or the label of the caller of `check()`
    method: str
    path: str
    address: str  # of the client of a request
    agent: str  # the class of its user agent: browser, bot, program, none
    count: int
    limit: int
    window: int
    retry_after: (
        float | None
    )  # None: the cost exceeds the limit, so it is never allowed
    over: bool = (
        False  # over the limit, but not refused: a shadow policy, or block=False
    )


def minutes_key(policy: str, hour: int) -> str:
    return f"rlaas:stats:{{{policy}}}:minutes:{hour}"


def hours_key(policy: str, day: int) -> str:
    return f"rlaas:stats:{{{policy}}}:hours:{day}"


def totals_key() -> str:
    return f"rlaas:stats:{{{SITE}}}:totals"


def refused_key(policy: str, day: int) -> str:
    return f"rlaas:refused:{{{policy}}}:{day}"


def paths_key(day: int) -> str:
    return f"rlaas:paths:{{{SITE}}}:{day}"


def watch_key(policy: str, hour: int) -> str:
    return f"rlaas:watch:{{{policy}}}:{hour}"


def refusals_key(policy: str) -> str:
    return f"rlaas:refusals:{{{policy}}}"


def as_pairs(reply: Any) -> list[tuple[str, Any]]:
    """Return a reply of names and values as pairs: RESP2 sends a flat list, RESP3 a map or a list of pairs."""
    pairs = reply.items() if isinstance(reply, dict) else reply
    if reply and isinstance(reply, list) and not isinstance(reply[0], (list, tuple)):
        pairs = zip(reply[::2], reply[1::2], strict=True)
    return [(as_text(name), value) for name, value in pairs]


def as_text(reply: bytes | str) -> str:
    """Return a reply of Redis as text."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else reply
