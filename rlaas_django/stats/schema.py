"""How statistics are stored in Redis: key names, fields and bounds.

Every key is bounded and has a TTL. The keys of a policy are in one slot of a Cluster;
those of the whole site are kept under the name `*`, which no policy can have.

  rlaas:stats:{<policy>}:minutes:<hour>   HASH   <minute of the hour>:<code> -> number
  rlaas:stats:{<policy>}:hours:<day>      HASH   <hour of the day>:<code> -> number
  rlaas:stats:{*}:totals                  HASH   <policy>:<code> -> number since the
                                                 first decision, for metrics
  rlaas:refused:{<policy>}:<day>          ZSET   identity -> times refused
  rlaas:over:{<policy>}:<day>             ZSET   identity -> times over the limit, and
                                                 not refused
  rlaas:paths:{*}:<day>                   ZSET   path, or source of a check in code ->
                                                 refusals
  rlaas:watch:{<policy>}:<hour>           ZSET   identity -> percent of the limit used,
                                                 from 80 on. Of the site:
                                                 <policy>/<identity>
  rlaas:refusals:{<policy>}               LIST   refusals as JSON, newest first

A ZSET keeps the members with the highest scores. Under the name of the site a request
is counted once, under that of a policy each request that the policy was checked for.
Days and hours are counted from the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import backend
from ..backend.scripts import RECORD
from ..runtime.observers import ALLOWED, DEGRADED, OTHER, OVER, REFUSED, REQUEST

MINUTE = 60
HOUR = 3_600
DAY = 86_400
SITE = "*"

UNLOGGED = "unlogged"  # refusals that are counted, and not in the LIST
# What stands for a result in the fields of a HASH.
CODES = {
    ALLOWED: "a",
    REFUSED: "r",
    OTHER: "x",
    OVER: "o",
    DEGRADED: "d",
    UNLOGGED: "u",
}
RESULTS = {code: result for result, code in CODES.items()}

WATCH_PERCENT = 80  # of a limit
MAX_IDENTITIES = 1_000  # per ZSET
MAX_REFUSALS = 1_000  # per LIST


@dataclass(frozen=True, eq=False)
class Statistic:
    """One kind of statistics: its keys, and how `record.lua` adds to them."""

    pattern: str  # of a key, for a policy and the number of a period
    kind: str
    ttl: int
    period: int = 2**40  # seconds that a key covers; without a number, for ever
    size: int = 0  # that a key is cut to; 0: its fields are few

    def key(self, policy: str, at: float = 0) -> str:
        """Return the key for the period of a time."""
        return self.pattern.format(policy, int(at) // self.period)


MINUTES = Statistic("rlaas:stats:{{{}}}:minutes:{}", "counts", DAY + 2 * HOUR, HOUR)
HOURS = Statistic("rlaas:stats:{{{}}}:hours:{}", "counts", 9 * DAY, DAY)
TOTALS = Statistic("rlaas:stats:{{{}}}:totals", "counts", 30 * DAY)
IDENTITIES = Statistic(
    "rlaas:refused:{{{}}}:{}", "ranks", DAY + 2 * HOUR, DAY, MAX_IDENTITIES
)
OVER_LIMIT = replace(IDENTITIES, pattern="rlaas:over:{{{}}}:{}")
PATHS = Statistic("rlaas:paths:{{{}}}:{}", "ranks", DAY + 2 * HOUR, DAY, MAX_IDENTITIES)
WATCHED = Statistic("rlaas:watch:{{{}}}:{}", "levels", 3 * HOUR, HOUR, MAX_IDENTITIES)
REFUSALS = Statistic("rlaas:refusals:{{{}}}", "lines", 7 * DAY, size=MAX_REFUSALS)

# What is added: to which key, how, and the values.
Addition = tuple[str, Statistic, Sequence[Any]]


def record_call(additions: Iterable[Addition]) -> backend.Call:
    """Return the call of `record.lua` that adds values to keys of one slot."""
    keys = []
    arguments: list[Any] = [0]
    for key, statistic, values in additions:
        keys.append(key)
        bounds = (statistic.ttl, statistic.size)
        arguments += (statistic.kind, *bounds, len(values), *values)

    return backend.script_call(RECORD, keys, arguments)


_BOT = re.compile(r"bot\b|crawl|spider|slurp|preview|monitor|scan", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An entry of the refusal log. Times are in seconds, `at` since the epoch."""

    at: float
    policy: str
    identity: str
    source: str  # "request", or the label of the caller of `check()`
    method: str
    path: str
    address: str  # of the client of a request
    agent: str  # the class of its user agent; empty for a check in code
    count: int
    limit: int
    window: int
    retry_after: float  # inf: the cost exceeds the limit, whatever the wait
    over: bool = False  # the limit, but not refused: a shadow policy, or block=False

    @property
    def request(self) -> str:
        """The method and path of the request, or the label of who called `check()`."""
        if self.source == REQUEST:
            return f"{self.method} {self.path}"
        return self.source


def user_agent_class(user_agent: str) -> str:
    """Return `browser`, `bot` (it says so), `program` (curl, a library) or `none`.

    Enough to tell a person from a program, and not a fingerprint.
    """
    if not user_agent.strip():
        return "none"
    if _BOT.search(user_agent):
        return "bot"
    if user_agent.startswith(("Mozilla/", "Opera/")):
        return "browser"

    return "program"


def as_pairs(reply: list[bytes]) -> list[tuple[str, bytes]]:
    """Return a flat reply of names and values as pairs."""
    names = [name.decode(errors="replace") for name in reply[::2]]
    return list(zip(names, reply[1::2], strict=True))
