"""Keep observations in memory, and write them to Redis in batches.

A background thread writes them, so that an observation costs a request no round trip.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
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
Observed = tuple[float, Observation]  # with its time

MAX_PENDING = 20_000  # the oldest are dropped beyond
# Per policy and process; refusals beyond are counted, and not listed.
REFUSALS_PER_FLUSH = 50

# The observations of this process that are not yet written, with their time. A forked
# child leaves them to its parent.
pending: deque[Observed] = deque(maxlen=MAX_PENDING)
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

    They stay pending while Redis is unavailable, and are dropped where there is none.
    """
    global dropped
    if pending or uneventful:
        if backend.counts_in_process():
            reset()
            return
        # Raises while Redis is unavailable.
        backend.run_commands([("EXISTS", schema.REFUSALS.key(SITE))])

    tallies: dict[str, Tally] = defaultdict(Tally)  # by policy
    # First those near a limit, which operators look at: a flush notes MAX_LIMITS rates.
    for observed in _group(_taken(pending)):
        _count(tallies, observed)
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


def _group(entries: Iterable[Observed]) -> Iterable[list[Observed]]:
    """Group what counts alike: refusals that were repeated from memory, in a minute.

    An attack causes thousands of them in a second.
    """
    groups: dict[tuple[Any, ...], list[Observed]] = defaultdict(list)
    for at, observation in entries:
        origin: Any = observation.decision
        if origin.reply is not None:
            origin = origin.reply[1]  # which all repetitions have

        minute = int(at) // MINUTE
        is_refused = observation.refusal is not None
        alike = (minute, id(origin), is_refused, observation.source, observation.path)
        groups[alike].append((at, observation))
    return groups.values()


def _count(tallies: dict[str, Tally], observed: list[Observed]) -> None:
    """Count observations alike, under each of their policies and for the site."""
    at, observation = observed[-1]
    number = len(observed)
    minute = int(at) // MINUTE
    site = tallies[SITE]
    results = [*observation.results()]

    for outcome, result in results:
        name = outcome.policy.name
        identity = outcome.identity
        tally = tallies[name]

        tally.counts[minute, result] += number
        site.members(schema.TOTALS, at)[f"{name}:{CODES[result]}"] += number
        definitions.note(outcome.policy, identity)

        if result in (REFUSED, OVER):
            ranked = schema.OVER_LIMIT
            if result == REFUSED:
                ranked = schema.IDENTITIES
            tally.members(ranked, at)[identity] += number
            for listing in (tally, site):
                _log_refusals(listing, observed, outcome, result)
        if result != DEGRADED:
            _watch(tally, site, at, outcome)

    whole = overall(result for _, result in results)
    site.counts[minute, whole] += number

    refused = {outcome.identity for outcome, result in results if result == REFUSED}
    for identity in refused:
        site.members(schema.IDENTITIES, at)[identity] += number

    if refused:
        path = observation.path
        if observation.source != REQUEST:
            path = observation.source

        site.members(schema.PATHS, at)[path] += number


def _watch(tally: Tally, site: Tally, at: float, outcome: Outcome) -> None:
    """Watch an identity that has used most of a limit; a refusal ranks it higher."""
    used = 100 * (outcome.limit - outcome.remaining) // outcome.limit
    if used < schema.WATCH_PERCENT:
        return

    level = used + (not outcome.allowed)
    tally.watch(at, outcome.identity, level)
    site.watch(at, f"{outcome.policy.name}/{outcome.identity}", level)


def _log_refusals(
    tally: Tally, observed: list[Observed], outcome: Outcome, result: str
) -> None:
    """List what was over a limit, or count it as unlogged where there is no room."""
    room = REFUSALS_PER_FLUSH - len(tally.lines)
    listed = observed[:room]
    tally.lines += [
        _refusal_json(at, observation, outcome, result) for at, observation in listed
    ]

    unlogged = len(observed) - len(listed)
    if unlogged:
        minute = int(observed[-1][0]) // MINUTE
        tally.counts[minute, UNLOGGED] += unlogged


def _refusal_json(
    at: float, observation: Observation, outcome: Outcome, result: str
) -> str:
    """Return an entry of the refusal log, as JSON."""
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
    return json.dumps(asdict(refusal))
