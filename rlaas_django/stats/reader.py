"""Read statistics from Redis, for the admin's pages and the commands.

Each function takes one round trip (on a Cluster one per key), whatever the number of
policies.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from .. import backend
from . import schema
from .schema import HOUR, MINUTE, RESULTS, SITE, Refusal, Statistic, as_pairs


class Counts(NamedTuple):
    """The decisions about a policy, or about the site, in a minute or an hour."""

    start: int  # seconds since the epoch
    allowed: int = 0
    refused: int = 0  # by this policy
    other: int = 0  # refused by another policy
    over: int = 0  # over the limit, but not refused: a shadow policy, or block=False
    degraded: int = 0  # decided without Redis
    unlogged: int = 0  # of those that were refused or over: not in the refusal log

    @property
    def total(self) -> int:
        """The number of decisions."""
        return self.allowed + self.refused + self.other + self.over + self.degraded


def total(series: Sequence[Counts]) -> Counts:
    """Return a series added up."""
    _starts, *columns = zip(*series, strict=True)
    sums = map(sum, columns)

    return Counts(series[0].start, *sums)


def minutes(policies: Iterable[str], hours: int = 24) -> dict[str, list[Counts]]:
    """Return the minutes of up to 24 hours per policy, the current minute last.

    `schema.SITE` stands for the site. A key per policy and hour is read: for many
    policies, read one hour of minutes, or a day of hours.
    """
    return _series(policies, schema.MINUTES, MINUTE, 60 * hours)


def hours(policies: Iterable[str], days: int = 7) -> dict[str, list[Counts]]:
    """Return the hours of up to seven days per policy, the current hour last."""
    return _series(policies, schema.HOURS, HOUR, 24 * days)


def _series(
    policies: Iterable[str],
    statistic: Statistic,
    step: int,
    number: int,
) -> dict[str, list[Counts]]:
    """Return the last `number` steps, of so many seconds each."""
    end = int(time.time()) // step * step
    starts = range(end - (number - 1) * step, end + step, step)

    period = statistic.period
    periods = range(starts[0] // period * period, end + 1, period)
    pairs = [(name, at) for name in policies for at in periods]
    replies = backend.run_commands(
        [("HGETALL", statistic.key(*pair)) for pair in pairs]
    )

    # By policy, start of the step, and result.
    numbers: dict[str, dict[int, dict[str, int]]] = {}
    for (name, at), reply in zip(pairs, replies, strict=True):
        steps = numbers.setdefault(name, defaultdict(dict))
        for field, count in as_pairs(reply):
            position, _, code = field.partition(":")
            steps[at + int(position) * step][RESULTS[code]] = int(count)

    return {
        name: [Counts(start, **steps.get(start, {})) for start in starts]
        for name, steps in numbers.items()
    }


def totals() -> dict[tuple[str, str], int]:
    """Return the decisions of all processes by policy and result; it only grows."""
    (reply,) = backend.run_commands([("HGETALL", schema.TOTALS.key(SITE))])
    numbers = {}
    for field, count in as_pairs(reply):
        policy, _, code = field.rpartition(":")
        numbers[policy, RESULTS[code]] = int(count)

    return numbers


def refusals(policies: Iterable[str] = (SITE,)) -> list[Refusal]:
    """Return the latest refusals under these policies, or of the site, newest first."""
    replies = backend.run_commands(
        [("LRANGE", schema.REFUSALS.key(name), 0, -1) for name in policies]
    )
    latest = [Refusal(**json.loads(line)) for lines in replies for line in lines]
    return sorted(latest, key=attrgetter("at"), reverse=True)


def watched(
    policy: str | None = None,
    limit: int = schema.MAX_IDENTITIES,
) -> dict[tuple[str, str], int]:
    """Return who used how much of a limit in this hour and the last.

    The percentages by policy and identity, the highest first. A percentage is that of
    the latest of the two hours; a refused request counts one percent more.
    """
    prefix = ""
    if policy is not None:
        prefix = f"{policy}/"  # which the members under the name of the site have

    now = time.time()
    keys = [schema.WATCHED.key(policy or SITE, at) for at in (now - HOUR, now)]
    last, current = _ranked(keys, limit)

    levels = current | last | current  # of two with the same level, the latest first
    highest = sorted(levels, key=lambda member: levels[member], reverse=True)

    percentages = {}
    for member in highest[:limit]:
        name, _, identity = f"{prefix}{member}".partition("/")
        percentages[name, identity] = levels[member]

    return percentages


def most_refused(limit: int = 10) -> tuple[dict[str, int], dict[str, int]]:
    """Return the identities, and the paths or sources, with the most refusals today."""
    now = time.time()
    keys = [schema.IDENTITIES.key(SITE, now), schema.PATHS.key(SITE, now)]
    identities, paths = _ranked(keys, limit)

    return identities, paths


def refused_identities(
    policies: Iterable[str],
    limit: int = schema.MAX_IDENTITIES,
    statistic: Statistic = schema.IDENTITIES,
) -> dict[str, dict[str, int]]:
    """Return how often each policy refused identities today.

    Those with the most come first. With `schema.OVER_LIMIT`, how often they were over
    the limit and not refused.
    """
    names = list(policies)
    now = time.time()
    keys = [statistic.key(name, now) for name in names]
    ranked = _ranked(keys, limit)

    return dict(zip(names, ranked, strict=True))


def refused_today(
    pairs: Iterable[tuple[str, str]],
    statistic: Statistic = schema.IDENTITIES,
) -> dict[tuple[str, str], int]:
    """Return how often each policy refused the identity beside it today.

    It is 0 beyond the 1,000 identities with the most. With `schema.OVER_LIMIT`, how
    often it was over the limit and not refused.
    """
    pairs = list(pairs)
    now = time.time()
    commands = []
    for name, identity in pairs:
        key = statistic.key(name, now)
        commands.append(("ZSCORE", key, identity))

    scores = backend.run_commands(commands)
    numbers = [int(float(score or 0)) for score in scores]

    return dict(zip(pairs, numbers, strict=True))


def _ranked(keys: Iterable[str], limit: int) -> list[dict[str, int]]:
    """Return the members with the highest scores of each ZSET, the highest first."""
    replies = backend.run_commands(
        [("ZREVRANGE", key, 0, limit - 1, "WITHSCORES") for key in keys]
    )
    return [
        {member: int(float(score)) for member, score in as_pairs(reply)}
        for reply in replies
    ]
