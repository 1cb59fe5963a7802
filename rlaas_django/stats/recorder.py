"""Record decisions in memory, and write them to Redis in batches."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

from .. import backend
from ..backend.scripts import RECORD
from ..core import process
from ..core.decision import Decision, Outcome
from ..core.policy import DEFAULT
from . import schema
from .schema import ALLOWED, DAY, DEGRADED, HOUR, MINUTE, REFUSED, SHADOWED, UNLOGGED, Refusal

MAX_PENDING = 20_000  # the oldest decisions are dropped beyond
MAX_METHOD, MAX_PATH = 16, 300  # characters of a request that are kept
REFUSALS_PER_FLUSH = 50  # per policy and process; refusals beyond are counted, and not listed


# The decisions of this process that are not yet written; a forked child leaves them to its parent.
pending: deque[tuple[float, Decision, str, str]] = deque(maxlen=MAX_PENDING)
process.on_fork(pending.clear)


def flush() -> None:
    """Write the pending decisions to Redis; they stay pending while Redis is unavailable."""
    if pending:
        backend.run_commands([("EXISTS", schema.refusals_key(DEFAULT))])  # raises while Redis is unavailable
    batch = Batch()
    with contextlib.suppress(IndexError):  # none is left
        while True:
            batch.add(*pending.popleft())
    for call in batch.calls():
        with contextlib.suppress(backend.UnavailableError):  # one shard of a Cluster may be unavailable
            backend.execute(backend.topology(), call)


class Batch:
    """Pending decisions, added up so that thousands take few commands."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # policy, day -> minute:kind
        self.refused: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # policy, day -> identity
        self.watched: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)  # policy, hour -> identity -> level
        self.refusals: dict[str, list[str]] = defaultdict(list)  # policy -> JSON

    def add(self, at: float, decision: Decision, method: str, path: str) -> None:
        """Count a decision under each of its policies."""
        day, second = divmod(int(at), DAY)
        minute = second // MINUTE
        for outcome in decision.outcomes:
            name, kind = outcome.policy.name, _kind(outcome)
            counts = self.counts[name, day]
            counts[f"{minute}:{kind}"] += 1
            if kind == DEGRADED:
                continue
            if not outcome.allowed:
                self.refused[name, day][outcome.identity] += 1
                if len(self.refusals[name]) < REFUSALS_PER_FLUSH:
                    self.refusals[name].append(_refusal_json(at, outcome, method, path))
                else:
                    counts[f"{minute}:{UNLOGGED}"] += 1
            used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
            if used >= schema.WATCH_PERCENT:
                # The fraction of the hour ranks the identity that was seen last first among those with the same usage.
                level = used + (not outcome.allowed) + at % HOUR / HOUR
                levels = self.watched[name, int(at) // HOUR]
                levels[outcome.identity] = max(level, levels.get(outcome.identity, 0))

    def calls(self) -> Iterator[backend.Call]:
        """Yield one script call per key."""
        for (name, day), counts in self.counts.items():
            yield _call("counts", schema.stats_key(name, day), schema.STATS_TTL, 0, *chain(*counts.items()))
        for (name, day), refused in self.refused.items():
            key = schema.refused_key(name, day)
            yield _call("ranks", key, schema.STATS_TTL, schema.MAX_IDENTITIES, *chain(*_highest(refused)))
        for (name, hour), watched in self.watched.items():
            levels = ((identity, f"{level:.7f}") for identity, level in _highest(watched))
            key = schema.watch_key(name, hour)
            yield _call("levels", key, schema.WATCH_TTL, schema.MAX_IDENTITIES, *chain(*levels))
        for name, lines in self.refusals.items():
            yield _call("lines", schema.refusals_key(name), schema.REFUSALS_TTL, schema.MAX_REFUSALS, *lines)


def _call(what: str, key: str, ttl: int, most: int, *values: Any) -> backend.Call:
    return backend.script_call(RECORD, (key,), (0, what, ttl, most, *values))


def _highest(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: -item[1])[: schema.MAX_IDENTITIES]


def _kind(outcome: Outcome) -> str:
    if outcome.degraded and (outcome.allowed or outcome.failed_closed):
        return DEGRADED
    if outcome.allowed:
        return ALLOWED
    return SHADOWED if outcome.policy.shadow else REFUSED


def _refusal_json(at: float, outcome: Outcome, method: str, path: str) -> str:
    refusal = Refusal(
        at=round(at, 3),
        policy=outcome.policy.name,
        identity=outcome.identity,
        method=method,
        path=path,
        count=outcome.current_count,
        limit=outcome.limit,
        window=outcome.policy.window,
        retry_after=None if math.isinf(outcome.retry_after) else outcome.retry_after,
        shadow=outcome.policy.shadow,
    )
    return json.dumps(asdict(refusal))
