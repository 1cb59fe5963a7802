"""What was decided about requests: counts per minute, recent refusals, and whom to watch.

A decision is noted in memory and written by the background thread, so that it costs a request next to nothing and no
round trip. Every key is bounded, has a TTL and is touched by single-key commands only.

  rlaas:stats:{<policy>}:<day>     HASH    <minute of the day>:<kind> -> decisions; kinds below
  rlaas:refused:{<policy>}:<day>   ZSET    identity -> refusals that day; the strongest are kept
  rlaas:watch:{<policy>}:<hour>    ZSET    identity -> percent of the limit, of those beyond 80 when last seen
  rlaas:refusals:{<policy>}        LIST    the latest refusals, as JSON, newest first
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from . import backend, background
from .policy import DEFAULT, Decision, Outcome, undecided
from .scripts import NOTE

ALLOWED, REFUSED, SHADOWED, DEGRADED, UNLOGGED = "a", "r", "s", "d", "u"
KINDS = (ALLOWED, REFUSED, SHADOWED, DEGRADED, UNLOGGED)

HOUR, DAY = 3_600, 86_400
WATCH_FROM = 80  # percent of a limit
MOST_IDENTITIES = 1_000
MOST_REFUSALS = 1_000
REFUSALS_PER_ROUND = 50  # of one policy and process; what is beyond is counted, not listed
MOST_NOTES = 100_000

_notes: deque[tuple[float, Decision, str, str]] = deque(maxlen=MOST_NOTES)


os.register_at_fork(after_in_child=_notes.clear)  # they are the parent's to write


def note(decision: Decision, method: str, path: str) -> None:
    """Remember a decision about a request."""
    _notes.append((time.time(), decision, method, path))
    background.wake()


@dataclass(frozen=True, slots=True)
class Refusal:
    """One line of the refusal log. Times are seconds since the epoch, and seconds."""

    at: float
    policy: str
    identity: str
    method: str
    path: str
    count: int
    limit: int
    window: int
    retry_after: float | None  # None: never
    shadow: bool = False


class Minute(NamedTuple):
    """What a policy decided in one minute."""

    start: int  # seconds since the epoch
    allowed: int
    refused: int
    shadowed: int
    degraded: int
    unlogged: int


def flush() -> None:
    """Write what was noted; while Redis is away, the latest notes wait for it."""
    if _notes:
        backend.execute([("EXISTS", refusals_key(DEFAULT))])  # raises while Redis is away
    written = _Round()
    while True:
        try:
            written.add(*_notes.popleft())
        except IndexError:
            break
    for call in written.calls():
        with contextlib.suppress(backend.UnavailableError):  # of a cluster, a part may be away
            backend.run(call)


background.every_second(flush)


class _Round:
    """Notes of about a second, added up. Under attack there are thousands, which all take time from requests."""

    def __init__(self) -> None:
        # By policy, then by minute and kind, by day and identity, by hour and identity.
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self.refused: Counter[tuple[str, int, str]] = Counter()
        self.watched: dict[tuple[str, int, str], float] = {}
        self.refusals: dict[str, list[str]] = defaultdict(list)

    def add(self, at: float, decision: Decision, method: str, path: str) -> None:
        second = int(at)
        origin, age = decision.origin
        for outcome in origin.outcomes:
            name, kind = outcome.policy.name, _kind(outcome)
            self.counts[name, second // 60, kind] += 1
            if kind == DEGRADED:
                continue
            if not outcome.allowed:
                self.refused[name, second // DAY, outcome.identity] += 1
                if len(self.refusals[name]) < REFUSALS_PER_ROUND:
                    self.refusals[name].append(_line(at, outcome, age, method, path))
                else:
                    self.counts[name, second // 60, UNLOGGED] += 1
            used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
            if used >= WATCH_FROM:
                # Of those as near their limit, who was seen last goes first.
                level = used + (not outcome.allowed) + at % HOUR / HOUR
                watched = name, second // HOUR, outcome.identity
                self.watched[watched] = max(level, self.watched.get(watched, 0))

    def calls(self) -> Iterator[backend.Call]:
        counts: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        for (name, minute, kind), number in self.counts.items():
            counts[name, minute * 60 // DAY].append((f"{minute % (DAY // 60)}:{kind}", number))
        for (name, day), fields in counts.items():
            yield _call("counts", stats_key(name, day), DAY + 7200, fields)
        for (name, day), refused in _strongest(self.refused):
            yield _call("ranks", refused_key(name, day), DAY + 7200, refused)
        for (name, hour), watched in _strongest(self.watched):
            yield _call("levels", watch_key(name, hour), 3 * HOUR, [(who, f"{level:.7f}") for who, level in watched])
        for name, lines in self.refusals.items():
            yield backend.call(NOTE, (refusals_key(name),), (0, "lines", 7 * DAY, MOST_REFUSALS, *lines))


def _strongest(
    numbers: Mapping[tuple[str, int, str], float],
) -> Iterable[tuple[tuple[str, int], list[tuple[str, Any]]]]:
    """Per policy and time the identities with the most."""
    by_time: dict[tuple[str, int], list[tuple[str, Any]]] = defaultdict(list)
    for (name, when, who), number in numbers.items():
        by_time[name, when].append((who, number))
    for key, found in by_time.items():
        yield key, sorted(found, key=lambda item: -item[1])[:MOST_IDENTITIES]


def _call(what: str, key: str, ttl: int, pairs: Iterable[tuple[str, int | str]]) -> backend.Call:
    return backend.call(NOTE, (key,), (0, what, ttl, MOST_IDENTITIES, *(word for pair in pairs for word in pair)))


def _kind(outcome: Outcome) -> str:
    if outcome.degraded and (outcome.allowed or undecided(outcome)):
        return DEGRADED
    if outcome.allowed:
        return ALLOWED
    return SHADOWED if outcome.policy.shadow else REFUSED


def _line(at: float, outcome: Outcome, age: float, method: str, path: str) -> str:
    never = outcome.retry_after == float("inf")
    refusal = Refusal(
        round(at, 3),
        outcome.policy.name,
        outcome.identity,
        method[:16],
        path[:300],
        outcome.current_count,
        outcome.limit,
        outcome.policy.window,
        None if never else max(0.0, outcome.retry_after - age),
        outcome.policy.shadow,
    )
    return json.dumps(asdict(refusal))


def stats_key(policy: str, day: int) -> str:
    return f"rlaas:stats:{{{policy}}}:{day}"


def refused_key(policy: str, day: int) -> str:
    return f"rlaas:refused:{{{policy}}}:{day}"


def watch_key(policy: str, hour: int) -> str:
    return f"rlaas:watch:{{{policy}}}:{hour}"


def refusals_key(policy: str) -> str:
    return f"rlaas:refusals:{{{policy}}}"


def minutes(policies: Iterable[str], hours: int = 24, now: float | None = None) -> dict[str, list[Minute]]:
    """Per policy the minutes of the last hours, the present one last."""
    names = list(policies)
    end = int(time.time() if now is None else now) // 60 * 60
    days = (end // DAY - 1, end // DAY)
    replies = iter(backend.execute([("HGETALL", stats_key(name, day)) for name in names for day in days]))
    series = {}
    for name in names:
        counts = {}
        for day in days:
            for field, number in _pairs(next(replies)):
                minute, _, kind = field.partition(":")
                counts[day * DAY + int(minute) * 60, kind] = int(number)
        starts = range(end - hours * 3600 + 60, end + 60, 60)
        series[name] = [Minute(start, *(counts.get((start, kind), 0) for kind in KINDS)) for start in starts]
    return series


def refusals(policies: Iterable[str], most: int = MOST_REFUSALS) -> list[Refusal]:
    """The latest refusals under these policies, newest first."""
    found = [refusal for each in latest_refusals(policies, most).values() for refusal in each]
    return sorted(found, key=lambda refusal: -refusal.at)[:most]


def latest_refusals(policies: Iterable[str], most: int = 1) -> dict[str, list[Refusal]]:
    """Per policy its latest refusals, newest first."""
    names = list(policies)
    replies = backend.execute([("LRANGE", refusals_key(name), 0, most - 1) for name in names])
    return {name: [Refusal(**json.loads(line)) for line in lines] for name, lines in zip(names, replies, strict=True)}


def watched(
    policies: Iterable[str], most: int = MOST_IDENTITIES, now: float | None = None
) -> list[tuple[str, str, int]]:
    """(policy, identity, percent of the limit when last seen) of this hour and the last, the strongest first."""
    hour = int(time.time() if now is None else now) // HOUR
    keys = [(name, watch_key(name, each)) for name in policies for each in (hour - 1, hour)]
    replies = backend.execute([("ZREVRANGE", key, 0, most - 1, "WITHSCORES") for _, key in keys])
    levels: dict[tuple[str, str], float] = {}
    for (name, _), reply in zip(keys, replies, strict=True):
        for who, level in _pairs(reply):
            levels[name, who] = float(level)  # the later hour's holds
    ranked = sorted(levels.items(), key=lambda item: -item[1])[:most]
    return [(name, who, int(level)) for (name, who), level in ranked]


def refused_today(policies: Iterable[str], now: float | None = None) -> dict[tuple[str, str], int]:
    """Refusals today per policy and identity, of those with the most."""
    names = list(policies)
    day = int(time.time() if now is None else now) // DAY
    replies = backend.execute([("ZREVRANGE", refused_key(name, day), 0, -1, "WITHSCORES") for name in names])
    return {
        (name, who): int(float(number))
        for name, reply in zip(names, replies, strict=True)
        for who, number in _pairs(reply)
    }


def _pairs(reply: Any) -> list[tuple[str, Any]]:
    """A reply of names and numbers, whatever the protocol and the client made of it."""
    if isinstance(reply, dict):
        pairs = list(reply.items())
    elif reply and isinstance(reply[0], (list, tuple)):
        pairs = [(name, number) for name, number in reply]
    else:
        pairs = list(zip(reply[::2], reply[1::2], strict=True))
    return [(name.decode() if isinstance(name, bytes) else name, number) for name, number in pairs]
