"""Keep observations in memory, and write them to Redis in batches."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

from .. import backend
from ..backend.scripts import RECORD
from ..core.decision import Outcome
from ..limiter.policy_set import PolicySet
from ..runtime import process
from ..runtime.observers import (
    ALLOWED,
    DEGRADED,
    OVER,
    REFUSED,
    REQUEST,
    Observation,
    overall,
)
from . import schema
from .policies import definitions
from .schema import CODES, DAY, HOUR, MINUTE, SITE, UNLOGGED, Refusal
from .user_agents import classify

Results = list[tuple[Outcome, str]]  # of an observation, by policy

MAX_PENDING = 20_000  # the oldest are dropped beyond
REFUSALS_PER_FLUSH = (
    50  # per policy and process; refusals beyond are counted, and not listed
)


# The observations of this process that are not yet written, with their time; a forked child leaves them to its parent.
pending: deque[tuple[float, Observation]] = deque(maxlen=MAX_PENDING)
# Of nearly all, which are allowed and far from every limit, only what is counted: the policies, and whom they count. To
# keep the whole and to add it up later took four times as long (67,000 instructions, more than the decision itself).
uneventful: deque[tuple[float, PolicySet, tuple[str, ...]]] = deque(maxlen=MAX_PENDING)
dropped = 0  # observations of this process that were not written


def reset() -> None:
    """Drop what is not written."""
    global dropped
    pending.clear()
    uneventful.clear()
    dropped = 0


process.on_fork(reset)


def flush() -> None:
    """Write the pending observations to Redis; they stay pending while Redis is unavailable."""
    global dropped
    if pending or uneventful:
        backend.run_commands(
            [("EXISTS", schema.refusals_key(SITE))]
        )  # raises while Redis is unavailable
    tallies: dict[str, Tally] = defaultdict(Tally)  # by policy
    add_pending(
        tallies
    )  # first: MAX_LIMITS rates are noted per flush, and operators look at those near a limit
    add_uneventful(tallies)
    failed = 0  # most observations in one tally; others are in several
    for name, tally in tallies.items():
        try:
            # One after the other: decisions need not wait until the server has written all of them.
            backend.execute(backend.topology(), tally.call(name))
        except (
            backend.UnavailableError
        ):  # one shard of a Cluster may be, or the server has no room
            failed = max(failed, tally.observed)
    dropped += failed
    with contextlib.suppress(backend.UnavailableError):
        definitions.write()


class Tally:
    """What is to be added to the keys of one policy, or of the site: thousands of observations in one call."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str]] = (
            Counter()
        )  # by minute since the epoch, and result
        self.refused: dict[int, Counter[str]] = defaultdict(Counter)  # day -> identity
        self.paths: dict[int, Counter[str]] = defaultdict(
            Counter
        )  # day -> path; of the site only
        self.watched: dict[int, dict[str, float]] = defaultdict(
            dict
        )  # hour -> identity -> percent
        self.totals: Counter[str] = Counter()  # by policy and result; of the site only
        self.lines: list[str] = []  # refusals as JSON

    @property
    def observed(self) -> int:
        """How many observations are counted here."""
        return sum(
            number for (_, result), number in self.counts.items() if result != UNLOGGED
        )

    def log(self, minute: int, line: Callable[[], str], number: int) -> None:
        """List a refusal, or count so many as unlogged where there is no more room."""
        if len(self.lines) < REFUSALS_PER_FLUSH:
            self.lines.append(line())
        else:
            self.counts[minute, UNLOGGED] += number

    def watch(self, at: float, identity: str, level: float) -> None:
        """Keep the highest level of an identity in this hour."""
        # The fraction of the hour ranks the identity that was seen last first among those with the same usage.
        levels = self.watched[int(at) // HOUR]
        levels[identity] = max(level + at % HOUR / HOUR, levels.get(identity, 0))

    def call(self, name: str) -> backend.Call:
        """Return the call that adds all of it."""
        minutes: dict[int, Counter[str]] = defaultdict(Counter)  # hour -> field
        hours: dict[int, Counter[str]] = defaultdict(Counter)  # day -> field
        for (minute, result), number in self.counts.items():
            minutes[minute // 60][f"{minute % 60}:{CODES[result]}"] += number
            hours[minute // 1440][f"{minute // 60 % 24}:{CODES[result]}"] += number
        keys: list[str] = []
        words: list[Any] = [0]

        def add(
            key: str, kind: str, ttl: int, most: int, values: Iterable[Any]
        ) -> None:
            keys.append(key)
            found = [*values]
            words.extend((kind, ttl, most, len(found), *found))

        for hour, fields in minutes.items():
            add(
                schema.minutes_key(name, hour),
                "counts",
                schema.MINUTES_TTL,
                0,
                chain(*fields.items()),
            )
        for day, fields in hours.items():
            add(
                schema.hours_key(name, day),
                "counts",
                schema.HOURS_TTL,
                0,
                chain(*fields.items()),
            )
        if self.totals:
            add(
                schema.totals_key(),
                "counts",
                schema.TOTALS_TTL,
                0,
                chain(*self.totals.items()),
            )
        for day, refused in self.refused.items():
            add(
                schema.refused_key(name, day),
                "ranks",
                schema.RANKS_TTL,
                schema.MAX_IDENTITIES,
                _highest(refused),
            )
        for day, paths in self.paths.items():
            add(
                schema.paths_key(day),
                "ranks",
                schema.RANKS_TTL,
                schema.MAX_IDENTITIES,
                _highest(paths),
            )
        for hour, levels in self.watched.items():
            values = [
                f"{each:.7f}" if isinstance(each, float) else each
                for each in _highest(levels)
            ]
            add(
                schema.watch_key(name, hour),
                "levels",
                schema.WATCH_TTL,
                schema.MAX_IDENTITIES,
                values,
            )
        if self.lines:
            add(
                schema.refusals_key(name),
                "lines",
                schema.REFUSALS_TTL,
                schema.MAX_REFUSALS,
                self.lines,
            )
        return backend.script_call(RECORD, keys, words)


def add_uneventful(tallies: dict[str, Tally]) -> None:
    """Count the observations that were allowed and far from every limit, each under its policies, and for the site."""
    numbers: dict[tuple[int, PolicySet], int] = defaultdict(int)  # by minute
    with contextlib.suppress(IndexError):  # none is left
        while True:
            at, policy_set, identities = uneventful.popleft()
            numbers[int(at) // MINUTE, policy_set] += 1
            for policy, identity in zip(policy_set.policies, identities, strict=True):
                definitions.note(policy, identity)
    for (minute, policy_set), number in numbers.items():
        tallies[SITE].counts[minute, ALLOWED] += number
        for name in policy_set.names:
            tallies[name].counts[minute, ALLOWED] += number
            tallies[SITE].totals[f"{name}:{CODES[ALLOWED]}"] += number


def add_pending(tallies: dict[str, Tally]) -> None:
    """Count the other observations. Beyond the first of a kind, those that count alike, as in an attack, together."""
    numbers: Counter[tuple[Any, ...]] = Counter()
    latest: dict[tuple[Any, ...], tuple[float, Observation, Results]] = {}
    with contextlib.suppress(IndexError):  # none is left
        while True:
            at, observation = pending.popleft()
            results = [*observation.results()]
            counted = [
                (each.policy.name, each.identity, each.limit, each.remaining, result)
                for each, result in results
            ]
            alike = (
                int(at) // MINUTE,
                observation.source,
                observation.path,
                observation.is_continued,
                *counted,
            )
            numbers[alike] += 1
            if numbers[alike] <= REFUSALS_PER_FLUSH:
                add(tallies, at, observation, results, 1)
            else:
                latest[alike] = at, observation, results
    for alike, (at, observation, results) in latest.items():
        add(tallies, at, observation, results, numbers[alike] - REFUSALS_PER_FLUSH)


def add(
    tallies: dict[str, Tally],
    at: float,
    observation: Observation,
    results: Results,
    number: int,
) -> None:
    """Count so many observations under each of their policies, and for the site."""
    minute, day, site = int(at) // MINUTE, int(at) // DAY, tallies[SITE]
    refused: set[str] = set()  # identities
    for outcome, result in results:
        name = outcome.policy.name
        tally = tallies[name]
        tally.counts[minute, result] += number
        definitions.note(outcome.policy, outcome.identity)
        site.totals[f"{name}:{CODES[result]}"] += number
        if result == DEGRADED:
            continue
        if result in (REFUSED, OVER):
            line = partial(_refusal_json, at, observation, outcome, over=result == OVER)
            tally.log(minute, line, number)
            site.log(minute, line, number)
            tally.refused[day][outcome.identity] += number
        if result == REFUSED:
            refused.add(outcome.identity)
        used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
        if used >= schema.WATCH_PERCENT:
            level = used + (not outcome.allowed)
            tally.watch(at, outcome.identity, level)
            site.watch(at, f"{name}/{outcome.identity}", level)
    if not observation.is_continued:
        site.counts[minute, overall(result for _, result in results)] += number
    for identity in refused:
        site.refused[day][identity] += number
    if refused:
        is_request = observation.source == REQUEST
        site.paths[day][observation.path if is_request else observation.source] += (
            number
        )


def _highest(numbers: Mapping[str, float]) -> Iterable[Any]:
    return chain(
        *sorted(numbers.items(), key=lambda item: -item[1])[: schema.MAX_IDENTITIES]
    )


def _refusal_json(
    at: float, observation: Observation, outcome: Outcome, *, over: bool
) -> str:
    is_request = observation.source == REQUEST
    refusal = Refusal(
        at=round(at, 3),
        policy=outcome.policy.name,
        identity=outcome.identity,
        source=observation.source,
        method=observation.method,
        path=observation.path,
        address=observation.address,
        agent=classify(observation.user_agent) if is_request else "",
        count=outcome.current_count,
        limit=outcome.limit,
        window=outcome.policy.window,
        retry_after=None if math.isinf(outcome.retry_after) else outcome.retry_after,
        over=over,
    )
    return json.dumps(asdict(refusal))
