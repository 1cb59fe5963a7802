"""Keep observations in memory, and write them to Redis in batches.

A background thread writes them, so that an observation costs a request no round trip.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from .. import backend
from ..core.decision import Decision, Outcome
from ..limiter import PolicySet
from ..limiter.replies import passes_below
from ..runtime import background, process
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
from .schema import (
    CODES,
    HOUR,
    MINUTE,
    SITE,
    UNLOGGED,
    Refusal,
    Statistic,
    user_agent_class,
)

Entry = TypeVar("Entry")

MAX_PENDING = 20_000  # the oldest are dropped beyond
# Per policy and process; refusals beyond are counted, and not listed.
REFUSALS_PER_FLUSH = 50

# The observations of this process that are not yet written, with their time. A forked
# child leaves them to its parent.
pending: deque[tuple[float, Observation]] = deque(maxlen=MAX_PENDING)
# Nearly all are allowed and far from every limit. Of these, only what is counted is
# kept: the policies, and whom they count. To keep the whole and to add it up later took
# four times as long (67,000 instructions, more than the decision itself).
uneventful: deque[tuple[float, PolicySet, tuple[str, ...]]] = deque(maxlen=MAX_PENDING)
dropped = 0  # observations of this process that were not written


def reset() -> None:
    """Drop what is not written."""
    global dropped
    pending.clear()
    uneventful.clear()
    dropped = 0


process.on_fork(reset)


def record(observation: Observation) -> None:
    """Keep an observation, which is written to Redis within a second or two."""
    count(observation.decision, observation)


def count(decision: Decision, observation: Observation | None = None) -> bool:
    """Keep what is counted of a decision; return False if an observation is needed."""
    global dropped
    now = time.time()
    queue: deque[Any] = pending
    entry: Any = (now, observation)
    if decision.reply is not None and passes_below(decision, schema.WATCH_PERCENT):
        check = decision.reply[0]
        queue = uneventful
        entry = (now, check.policy_set, check.identities)
    elif observation is None:
        return False

    if len(queue) == queue.maxlen:
        dropped += 1

    queue.append(entry)
    if time.monotonic() > background.state.wake_at:
        background.wake()
    return True


def flush() -> None:
    """Write the pending observations to Redis.

    They stay pending while Redis is unavailable.
    """
    global dropped
    if pending or uneventful:
        # Raises while Redis is unavailable.
        backend.run_commands([("EXISTS", schema.REFUSALS.key(SITE))])

    tallies: dict[str, Tally] = defaultdict(Tally)  # by policy
    # First those near a limit, which operators look at: a flush notes MAX_LIMITS rates.
    for at, observation in _taken(pending):
        _count(tallies, at, observation)
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
        # By statistic and number of its period: the fields or members.
        self.numbers: dict[tuple[Statistic, int], defaultdict[str, float]] = {}
        self.lines: list[str] = []  # refusals as JSON

    @property
    def observed(self) -> int:
        """How many observations are counted here."""
        return sum(
            number for (_, result), number in self.counts.items() if result != UNLOGGED
        )

    def members(self, statistic: Statistic, at: float) -> defaultdict[str, float]:
        """Return what is added to the key for a time."""
        period = int(at) // statistic.period
        return self.numbers.setdefault((statistic, period), defaultdict(int))

    def watch(self, at: float, identity: str, level: float) -> None:
        """Keep the highest level of an identity in this hour."""
        # Among identities with the same usage, the fraction of the hour ranks the one
        # that was seen last first.
        level += at % HOUR / HOUR
        levels = self.members(schema.WATCHED, at)
        levels[identity] = max(level, levels[identity])

    def call(self, name: str) -> backend.Call:
        """Return the call that adds all of it.

        It is made once: the counts are first added to their minutes and hours.
        """
        for (minute, result), number in self.counts.items():
            at = minute * MINUTE
            code = CODES[result]
            self.members(schema.MINUTES, at)[f"{minute % 60}:{code}"] += number
            self.members(schema.HOURS, at)[f"{minute // 60 % 24}:{code}"] += number

        additions: list[schema.Addition] = []
        for (statistic, period), members in self.numbers.items():
            ranked = sorted(members.items(), key=itemgetter(1), reverse=True)
            kept = ranked[: statistic.size or None]
            key = statistic.pattern.format(name, period)
            additions.append((key, statistic, [*chain(*kept)]))

        if self.lines:
            statistic = schema.REFUSALS
            additions.append((statistic.key(name), statistic, self.lines))

        return schema.record_call(additions)


def _count_uneventful(tallies: dict[str, Tally]) -> None:
    """Count the observations that were allowed and far from every limit."""
    numbers: Counter[tuple[int, PolicySet]] = Counter()  # by minute
    for at, policy_set, identities in _taken(uneventful):
        numbers[int(at) // MINUTE, policy_set] += 1
        for policy, identity in zip(policy_set.policies, identities, strict=True):
            definitions.note(policy, identity)

    for (minute, policy_set), number in numbers.items():
        site = tallies[SITE]
        site.counts[minute, ALLOWED] += number
        for name in policy_set.names:
            tallies[name].counts[minute, ALLOWED] += number
            site.members(schema.TOTALS, 0)[f"{name}:{CODES[ALLOWED]}"] += number


def _taken(queue: deque[Entry]) -> Iterator[Entry]:
    """Yield the entries of a queue, which other threads may add to meanwhile."""
    with contextlib.suppress(IndexError):  # it is empty
        while True:
            yield queue.popleft()


def _count(tallies: dict[str, Tally], at: float, observation: Observation) -> None:
    """Count an observation under each of its policies, and for the site."""
    minute = int(at) // MINUTE
    site = tallies[SITE]
    results = [*observation.results()]

    for outcome, result in results:
        name = outcome.policy.name
        identity = outcome.identity
        tally = tallies[name]

        tally.counts[minute, result] += 1
        site.members(schema.TOTALS, at)[f"{name}:{CODES[result]}"] += 1
        definitions.note(outcome.policy, identity)

        if result in (REFUSED, OVER):
            tally.members(schema.IDENTITIES, at)[identity] += 1
            for listing in (tally, site):
                _log_refusal(listing, at, observation, outcome, result)
        if result != DEGRADED:
            _watch(tally, site, at, outcome)

    whole = overall(result for _, result in results)
    site.counts[minute, whole] += 1

    refused = {outcome.identity for outcome, result in results if result == REFUSED}
    for identity in refused:
        site.members(schema.IDENTITIES, at)[identity] += 1

    if refused:
        path = observation.path
        if observation.source != REQUEST:
            path = observation.source

        site.members(schema.PATHS, at)[path] += 1


def _watch(tally: Tally, site: Tally, at: float, outcome: Outcome) -> None:
    """Watch an identity that has used most of a limit; a refusal ranks it higher."""
    used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
    if used < schema.WATCH_PERCENT:
        return

    level = used + (not outcome.allowed)
    tally.watch(at, outcome.identity, level)
    site.watch(at, f"{outcome.policy.name}/{outcome.identity}", level)


def _log_refusal(
    tally: Tally, at: float, observation: Observation, outcome: Outcome, result: str
) -> None:
    """List what was over a limit, or count it as unlogged where there is no room."""
    if len(tally.lines) >= REFUSALS_PER_FLUSH:
        tally.counts[int(at) // MINUTE, UNLOGGED] += 1
        return

    agent = ""
    if observation.source == REQUEST:
        agent = user_agent_class(observation.user_agent)

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
        retry_after=outcome.retry_after,
        over=result == OVER,
    )
    tally.lines.append(json.dumps(asdict(refusal)))
