"""Read statistics from Redis, for the admin's pages.

Each function takes one round trip (on a Cluster one per key), whatever the number of policies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .. import backend
from . import schema
from .schema import CODES, DAY, HOUR, MINUTE, SITE, Refusal, as_pairs


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
    return Counts(series[0].start, *map(sum, list(zip(*series, strict=True))[1:]))


def minutes(policies: Iterable[str], hours: int = 24) -> dict[str, list[Counts]]:
    """Return the minutes of up to 24 hours per policy, or of the site (`schema.SITE`), the current minute last.

    A key per policy and hour is read: for many policies, read one hour of minutes, or a day of hours.
    """
    return _series([*policies], schema.minutes_key, HOUR, MINUTE, 60 * hours)


def hours(policies: Iterable[str], days: int = 7) -> dict[str, list[Counts]]:
    """Return the hours of up to seven days per policy, or of the site, the current hour last."""
    return _series([*policies], schema.hours_key, DAY, HOUR, 24 * days)


def _series(
    names: Sequence[str],
    key: Callable[[str, int], str],
    span: int,
    step: int,
    number: int,
) -> dict[str, list[Counts]]:
    """Return the last `number` steps; each key has those of one span. Spans and steps are in seconds."""
    end = int(time.time()) // step * step
    starts = range(end - (number - 1) * step, end + step, step)
    spans = range(starts[0] // span, end // span + 1)
    replies = iter(
        backend.run_commands(
            [("HGETALL", key(name, each)) for name in names for each in spans]
        )
    )
    column = {code: 1 + i for i, code in enumerate(CODES.values())}  # of Counts
    series = {}
    for name in names:
        found: dict[int, list[int]] = {}  # the figures of each start
        for each in spans:
            for field, count in as_pairs(next(replies)):
                position, _, code = field.partition(":")
                start = each * span + int(position) * step
                figures = found.get(start) or found.setdefault(
                    start, [start, *([0] * len(column))]
                )
                figures[column[code]] = int(count)
        series[name] = [
            Counts(*found[start]) if start in found else Counts(start)
            for start in starts
        ]
    return series


def totals() -> dict[tuple[str, str], int]:
    """Return the number of decisions by policy and result, of all processes; it only grows."""
    names = {code: result for result, code in CODES.items()}
    (reply,) = backend.run_commands([("HGETALL", schema.totals_key())])
    found = {}
    for field, count in as_pairs(reply):
        policy, _, code = field.rpartition(":")
        found[policy, names[code]] = int(count)
    return found


def refusals(
    policies: Iterable[str] = (SITE,), limit: int = schema.MAX_REFUSALS
) -> list[Refusal]:
    """Return the latest refusals under these policies, or of the site, newest first."""
    found = [
        refusal
        for each in latest_refusals(policies, limit).values()
        for refusal in each
    ]
    return sorted(found, key=lambda refusal: -refusal.at)[:limit]


def latest_refusals(
    policies: Iterable[str], limit: int = 1
) -> dict[str, list[Refusal]]:
    """Return the latest refusals of each policy, newest first."""
    names = list(policies)
    replies = backend.run_commands(
        [("LRANGE", schema.refusals_key(name), 0, limit - 1) for name in names]
    )
    return {
        name: [Refusal(**json.loads(line)) for line in lines]
        for name, lines in zip(names, replies, strict=True)
    }


def watched(
    policy: str | None = None, limit: int = schema.MAX_IDENTITIES
) -> list[tuple[str, str, int]]:
    """Return (policy, identity, percent of the limit used) for this hour and the last, the highest first.

    The percentage is the one of the latest of the two hours; a refused request counts one percent more.
    """
    hour = int(time.time()) // HOUR
    name = policy or SITE
    levels: dict[str, float] = {}
    for found in _ranked(
        [schema.watch_key(name, hour - 1), schema.watch_key(name, hour)], limit
    ):
        levels |= found  # the later hour overwrites the earlier
    ranked = sorted(levels.items(), key=lambda item: -item[1])[:limit]
    if policy is not None:
        return [(policy, identity, int(level)) for identity, level in ranked]
    return [(*_split(member), int(level)) for member, level in ranked]


def _split(member: str) -> tuple[str, str]:
    policy, _, identity = member.partition("/")
    return policy, identity


def most_refused(limit: int = 10) -> tuple[dict[str, int], dict[str, int]]:
    """Return the identities, and the paths or sources, with the most refusals today, the most first."""
    day = int(time.time()) // DAY
    identities, paths = _ranked(
        [schema.refused_key(SITE, day), schema.paths_key(day)], limit
    )
    return {each: int(number) for each, number in identities.items()}, {
        each: int(n) for each, n in paths.items()
    }


def refused_identities(
    policies: Iterable[str], limit: int = schema.MAX_IDENTITIES
) -> dict[str, dict[str, int]]:
    """Return the identities that were over the limit of each policy today, with how often, the most first."""
    names, day = list(policies), int(time.time()) // DAY
    ranked = _ranked([schema.refused_key(name, day) for name in names], limit)
    return {
        name: {identity: int(number) for identity, number in found.items()}
        for name, found in zip(names, ranked, strict=True)
    }


def refused_today(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return how often each pair of policy and identity was over the limit today; 0 beyond the 1,000 with the most."""
    wanted, day = list(pairs), int(time.time()) // DAY
    replies = backend.run_commands(
        [
            ("ZSCORE", schema.refused_key(name, day), identity)
            for name, identity in wanted
        ]
    )
    return {
        pair: int(float(score or 0))
        for pair, score in zip(wanted, replies, strict=True)
    }


def _ranked(keys: Sequence[str], limit: int) -> list[dict[str, float]]:
    """Return the members and scores of ZSETs, the highest `limit` of each, the highest first."""
    replies = backend.run_commands(
        [("ZREVRANGE", key, 0, limit - 1, "WITHSCORES") for key in keys]
    )
    return [
        {member: float(score) for member, score in as_pairs(reply)} for reply in replies
    ]
