"""Record decisions in memory, and write them to Redis in batches."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .. import backend
from ..backend.scripts import RECORD
from ..core import process
from ..core.decision import Decision, Outcome
from ..core.policy import DEFAULT
from . import schema
from .schema import ALLOWED, DAY, DEGRADED, HOUR, MINUTE, REFUSED, SHADOWED, UNLOGGED, Refusal

MAX_PENDING = 100_000  # the oldest decisions are dropped beyond
REFUSALS_PER_FLUSH = 50  # per policy and process; refusals beyond are counted, and not listed


class State:
    """The decisions of this process that are not yet written."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop them; a forked child leaves them to its parent."""
        self.pending: deque[tuple[float, Decision, str, str]] = deque(maxlen=MAX_PENDING)


state = State()
process.on_fork(state.reset)


def flush() -> None:
    """Write the pending decisions to Redis; they stay pending while Redis is unavailable."""
    pending = state.pending
    if pending:
        backend.run_commands([("EXISTS", schema.refusals_key(DEFAULT))])  # raises while Redis is unavailable
    batch = Batch()
    while True:
        try:
            batch.add(*pending.popleft())
        except IndexError:
            break
    for call in batch.calls():
        with contextlib.suppress(backend.UnavailableError):  # one shard of a Cluster may be unavailable
            backend.execute(backend.topology(), call)


class Batch:
    """Pending decisions, added up so that thousands take few commands."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int, str]] = Counter()  # policy, minute, kind
        self.refused: Counter[tuple[str, int, str]] = Counter()  # policy, day, identity
        self.watched: dict[tuple[str, int, str], float] = {}  # policy, hour, identity -> level
        self.refusals: dict[str, list[str]] = defaultdict(list)  # policy -> JSON

    def add(self, at: float, decision: Decision, method: str, path: str) -> None:
        """Count a decision under each of its policies."""
        second = int(at)
        for outcome in decision.outcomes:
            name, kind = outcome.policy.name, _kind(outcome)
            self.counts[name, second // MINUTE, kind] += 1
            if kind == DEGRADED:
                continue
            if not outcome.allowed:
                self.refused[name, second // DAY, outcome.identity] += 1
                if len(self.refusals[name]) < REFUSALS_PER_FLUSH:
                    self.refusals[name].append(_refusal_json(at, outcome, method, path))
                else:
                    self.counts[name, second // MINUTE, UNLOGGED] += 1
            self._watch(at, outcome)

    def _watch(self, at: float, outcome: Outcome) -> None:
        used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
        if used < schema.WATCH_PERCENT:
            return
        # The fraction of the hour ranks the identity that was seen last first among those with the same usage.
        level = used + (not outcome.allowed) + at % HOUR / HOUR
        key = outcome.policy.name, int(at) // HOUR, outcome.identity
        self.watched[key] = max(level, self.watched.get(key, 0))

    def calls(self) -> Iterator[backend.Call]:
        """Yield one script call per key."""
        counts: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        for (name, minute, kind), number in self.counts.items():
            counts[name, minute * MINUTE // DAY].append((f"{minute % (DAY // MINUTE)}:{kind}", number))
        for (name, day), fields in counts.items():
            yield counts_call(name, day, fields)
        for (name, day), refused in _highest(self.refused):
            yield _call("ranks", schema.refused_key(name, day), schema.STATS_TTL, schema.MAX_IDENTITIES, _flat(refused))
        for (name, hour), watched in _highest(self.watched):
            levels = _flat((identity, f"{level:.7f}") for identity, level in watched)
            yield _call("levels", schema.watch_key(name, hour), schema.WATCH_TTL, schema.MAX_IDENTITIES, levels)
        for name, lines in self.refusals.items():
            yield _call("lines", schema.refusals_key(name), schema.REFUSALS_TTL, schema.MAX_REFUSALS, lines)


def counts_call(policy: str, day: int, fields: Iterable[tuple[str, int]]) -> backend.Call:
    """Return the script call that adds to the decisions of a policy on a day."""
    return _call("counts", schema.stats_key(policy, day), schema.STATS_TTL, 0, _flat(fields))


def _call(what: str, key: str, ttl: int, most: int, values: Iterable[str | int]) -> backend.Call:
    return backend.script_call(RECORD, (key,), (0, what, ttl, most, *values))


def _flat(pairs: Iterable[tuple[str, Any]]) -> Iterator[str | int]:
    return (value for pair in pairs for value in pair)


def _highest(
    numbers: Mapping[tuple[str, int, str], float],
) -> Iterator[tuple[tuple[str, int], list[tuple[str, float]]]]:
    """Yield per policy and time the identities with the highest numbers."""
    groups: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
    for (name, when, identity), number in numbers.items():
        groups[name, when].append((identity, number))
    for key, found in groups.items():
        yield key, sorted(found, key=lambda item: -item[1])[: schema.MAX_IDENTITIES]


def _kind(outcome: Outcome) -> str:
    if outcome.degraded and (outcome.allowed or outcome.failed_closed):
        return DEGRADED
    if outcome.allowed:
        return ALLOWED
    return SHADOWED if outcome.policy.shadow else REFUSED


def _refusal_json(at: float, outcome: Outcome, method: str, path: str) -> str:
    """Return the entry of the refusal log."""
    refusal = Refusal(
        at=round(at, 3),
        policy=outcome.policy.name,
        identity=outcome.identity,
        method=method[:16],
        path=path[:300],
        count=outcome.current_count,
        limit=outcome.limit,
        window=outcome.policy.window,
        retry_after=None if math.isinf(outcome.retry_after) else outcome.retry_after,
        shadow=outcome.policy.shadow,
    )
    return json.dumps(asdict(refusal))
