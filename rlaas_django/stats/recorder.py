"""Keep observations in memory, and write them to Redis in batches."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from .. import backend
from ..backend.scripts import RECORD
from ..core.decision import Outcome
from ..limiter.policy_set import CompiledPolicySet
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
from .schema import CODES, DAY, HOUR, MINUTE, SITE, UNLOGGED, Refusal, user_agent_class

Entry = TypeVar("Entry")
Results = list[tuple[Outcome, str]]  # of an observation, by policy

MAX_PENDING = 20_000  # the oldest are dropped beyond
# Per policy and process; refusals beyond are counted, and not listed.
REFUSALS_PER_FLUSH = 50

# The observations of this process that are not yet written, with their time. A forked
# child leaves them to its parent.
pending: deque[tuple[float, Observation]] = deque(maxlen=MAX_PENDING)
# Nearly all are allowed and far from every limit. Of these, only what is counted is
# kept: the policies, and whom they count. To keep the whole and to add it up later took
# four times as long (67,000 instructions, more than the decision itself).
uneventful: deque[tuple[float, CompiledPolicySet, tuple[str, ...]]] = deque(
    maxlen=MAX_PENDING
)
dropped = 0  # observations of this process that were not written


def reset() -> None:
    """Drop what is not written."""
    global dropped
    pending.clear()
    uneventful.clear()
    dropped = 0


process.on_fork(reset)


def flush() -> None:
    """Write the pending observations to Redis.

    They stay pending while Redis is unavailable.
    """
    global dropped
    if pending or uneventful:
        # Raises while Redis is unavailable.
        backend.run_commands([("EXISTS", schema.refusals_key(SITE))])

    tallies: dict[str, Tally] = defaultdict(Tally)  # by policy
    # First those near a limit, which operators look at: a flush notes MAX_LIMITS rates.
    _count_pending(tallies)
    _count_uneventful(tallies)

    failed = 0
    for name, tally in tallies.items():
        try:
            # One after the other, so that decisions need not wait for all of them.
            backend.execute(backend.topology(), tally.call(name))
        except backend.UnavailableError:  # a shard of a Cluster, or there is no room
            failed = max(failed, tally.observed)  # an observation is in several tallies
    dropped += failed

    with contextlib.suppress(backend.UnavailableError):
        definitions.write()


class Tally:
    """What is to be added to the keys of one policy, or of the site.

    One call adds thousands of observations.
    """

    def __init__(self) -> None:
        # By minute since the epoch, and result.
        self.counts: Counter[tuple[int, str]] = Counter()
        # By day, and identity.
        self.refused: dict[int, Counter[str]] = defaultdict(Counter)
        # By day, and path; of the site only.
        self.paths: dict[int, Counter[str]] = defaultdict(Counter)
        # By hour, and identity: the percentage.
        self.watched: dict[int, dict[str, float]] = defaultdict(dict)
        # By policy and result; of the site only.
        self.totals: Counter[str] = Counter()
        # Refusals as JSON.
        self.lines: list[str] = []

    @property
    def observed(self) -> int:
        """How many observations are counted here."""
        return sum(
            number for (_, result), number in self.counts.items() if result != UNLOGGED
        )

    def log(self, minute: int, line: Callable[[], str], number: int) -> None:
        """List a refusal, or count so many as unlogged where there is no room."""
        if len(self.lines) < REFUSALS_PER_FLUSH:
            self.lines.append(line())
        else:
            self.counts[minute, UNLOGGED] += number

    def watch(self, at: float, identity: str, level: float) -> None:
        """Keep the highest level of an identity in this hour."""
        # Among identities with the same usage, the fraction of the hour ranks the one
        # that was seen last first.
        levels = self.watched[int(at) // HOUR]
        level = round(level + at % HOUR / HOUR, 7)
        levels[identity] = max(level, levels.get(identity, 0))

    def call(self, name: str) -> backend.Call:
        """Return the call of record.lua that adds all of it."""
        keys = []
        arguments: list[Any] = [0]
        for key, kind, ttl, most, values in self._additions(name):
            keys.append(key)
            arguments += (kind, ttl, most, len(values), *values)
        return backend.script_call(RECORD, keys, arguments)

    def _additions(self, name: str) -> Iterator[tuple[str, str, int, int, list[Any]]]:
        """Yield for each key what record.lua takes: type, TTL, maximum size, values."""
        minutes: dict[int, Counter[str]] = defaultdict(Counter)  # by hour, and field
        hours: dict[int, Counter[str]] = defaultdict(Counter)  # by day, and field
        for (minute, result), number in self.counts.items():
            hour = minute // 60
            code = CODES[result]
            minutes[hour][f"{minute % 60}:{code}"] += number
            hours[hour // 24][f"{hour % 24}:{code}"] += number

        most = schema.MAX_IDENTITIES
        for hour, numbers in minutes.items():
            key = schema.minutes_key(name, hour)
            yield key, "counts", schema.MINUTES_TTL, 0, _highest(numbers)
        for day, numbers in hours.items():
            key = schema.hours_key(name, day)
            yield key, "counts", schema.HOURS_TTL, 0, _highest(numbers)
        if self.totals:
            key = schema.totals_key()
            yield key, "counts", schema.TOTALS_TTL, 0, _highest(self.totals)
        for day, numbers in self.refused.items():
            key = schema.refused_key(name, day)
            yield key, "ranks", schema.RANKS_TTL, most, _highest(numbers, most)
        for day, numbers in self.paths.items():
            key = schema.paths_key(day)
            yield key, "ranks", schema.RANKS_TTL, most, _highest(numbers, most)
        for hour, levels in self.watched.items():
            key = schema.watch_key(name, hour)
            yield key, "levels", schema.WATCH_TTL, most, _highest(levels, most)
        if self.lines:
            key = schema.refusals_key(name)
            yield key, "lines", schema.REFUSALS_TTL, schema.MAX_REFUSALS, self.lines


def _highest(numbers: Mapping[str, float], most: int | None = None) -> list[Any]:
    """Return names and numbers in turn, those of all or of the highest."""
    items = sorted(numbers.items(), key=itemgetter(1), reverse=True)
    return [*chain(*items[:most])]


def _count_uneventful(tallies: dict[str, Tally]) -> None:
    """Count the observations that were allowed and far from every limit."""
    numbers: Counter[tuple[int, CompiledPolicySet]] = Counter()  # by minute
    for at, policy_set, identities in _taken(uneventful):
        numbers[int(at) // MINUTE, policy_set] += 1
        for policy, identity in zip(policy_set.policies, identities, strict=True):
            definitions.note(policy, identity)

    for (minute, policy_set), number in numbers.items():
        site = tallies[SITE]
        site.counts[minute, ALLOWED] += number
        for name in policy_set.names:
            tallies[name].counts[minute, ALLOWED] += number
            site.totals[f"{name}:{CODES[ALLOWED]}"] += number


def _count_pending(tallies: dict[str, Tally]) -> None:
    """Count the other observations.

    Beyond the first of a kind, those that count alike, as in an attack, are counted
    together.
    """
    numbers: Counter[tuple[Any, ...]] = Counter()
    latest: dict[tuple[Any, ...], tuple[float, Observation, Results]] = {}
    for at, observation in _taken(pending):
        results = [*observation.results()]
        alike = (
            int(at) // MINUTE,
            observation.source,
            observation.path,
            *[
                (each.policy.name, each.identity, each.limit, each.remaining, result)
                for each, result in results
            ],
        )
        numbers[alike] += 1
        if numbers[alike] <= REFUSALS_PER_FLUSH:
            _count(tallies, at, observation, results, 1)
        else:
            latest[alike] = (at, observation, results)

    for alike, (at, observation, results) in latest.items():
        number = numbers[alike] - REFUSALS_PER_FLUSH
        _count(tallies, at, observation, results, number)


def _taken(queue: deque[Entry]) -> Iterator[Entry]:
    """Yield the entries of a queue, which other threads may add to meanwhile."""
    with contextlib.suppress(IndexError):  # it is empty
        while True:
            yield queue.popleft()


def _count(
    tallies: dict[str, Tally],
    at: float,
    observation: Observation,
    results: Results,
    number: int,
) -> None:
    """Count so many observations under each of their policies, and for the site."""
    minute = int(at) // MINUTE
    day = int(at) // DAY
    site = tallies[SITE]
    refused = {outcome.identity for outcome, result in results if result == REFUSED}

    for outcome, result in results:
        name = outcome.policy.name
        tally = tallies[name]
        tally.counts[minute, result] += number
        site.totals[f"{name}:{CODES[result]}"] += number
        definitions.note(outcome.policy, outcome.identity)
        if result in (REFUSED, OVER):
            line = partial(_refusal_json, at, observation, outcome, result)
            tally.log(minute, line, number)
            site.log(minute, line, number)
            tally.refused[day][outcome.identity] += number
        if result != DEGRADED:
            _watch(tally, site, at, outcome)

    if not getattr(observation, "is_continued", False):
        site.counts[minute, overall(result for _, result in results)] += number
    for identity in refused:
        site.refused[day][identity] += number
    if refused:
        path = observation.path
        if observation.source != REQUEST:
            path = observation.source
        site.paths[day][path] += number


def _watch(tally: Tally, site: Tally, at: float, outcome: Outcome) -> None:
    """Watch an identity that has used most of a limit; a refusal ranks it higher."""
    used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
    if used < schema.WATCH_PERCENT:
        return
    level = used + (not outcome.allowed)
    tally.watch(at, outcome.identity, level)
    site.watch(at, f"{outcome.policy.name}/{outcome.identity}", level)


def _refusal_json(
    at: float, observation: Observation, outcome: Outcome, result: str
) -> str:
    agent = ""
    if observation.source == REQUEST:
        agent = user_agent_class(observation.user_agent)
    retry_after: float | None = outcome.retry_after
    if retry_after == math.inf:
        retry_after = None
    refusal = Refusal(
        at=round(at, 3),
        policy=outcome.policy.name,
        identity=outcome.identity,
        source=observation.source,
        method=observation.method,
        path=observation.path,
        address=observation.address,
        agent=agent,
        count=outcome.current_count,
        limit=outcome.limit,
        window=outcome.policy.window,
        retry_after=retry_after,
        over=result == OVER,
    )
    return json.dumps(asdict(refusal))
