"""Read statistics from Redis, for the admin's pages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import backend
from . import schema
from .schema import DAY, HOUR, KINDS, MINUTE, Refusal


class Minute(NamedTuple):
    """The decisions of a policy in one minute."""

    start: int  # seconds since the epoch
    allowed: int
    refused: int
    shadowed: int
    degraded: int
    unlogged: int


def minutes(policies: Iterable[str], hours: int = 24) -> dict[str, list[Minute]]:
    """Return the minutes of the last hours per policy, the current minute last."""
    names = list(policies)
    end = int(time.time()) // MINUTE * MINUTE
    days = (end // DAY - 1, end // DAY)
    replies = iter(backend.run_commands([("HGETALL", schema.stats_key(name, day)) for name in names for day in days]))
    starts = range(end - hours * HOUR + MINUTE, end + MINUTE, MINUTE)
    series = {}
    for name in names:
        counts = {}
        for day in days:
            for field, number in _pairs(next(replies)):
                minute, _, kind = field.partition(":")
                counts[day * DAY + int(minute) * MINUTE, kind] = int(number)
        series[name] = [Minute(start, *(counts.get((start, kind), 0) for kind in KINDS)) for start in starts]
    return series


def refusals(policies: Iterable[str], limit: int = schema.MAX_REFUSALS) -> list[Refusal]:
    """Return the latest refusals under these policies, newest first."""
    found = [refusal for each in latest_refusals(policies, limit).values() for refusal in each]
    return sorted(found, key=lambda refusal: -refusal.at)[:limit]


def latest_refusals(policies: Iterable[str], limit: int = 1) -> dict[str, list[Refusal]]:
    """Return the latest refusals of each policy, newest first."""
    names = list(policies)
    replies = backend.run_commands([("LRANGE", schema.refusals_key(name), 0, limit - 1) for name in names])
    return {name: [Refusal(**json.loads(line)) for line in lines] for name, lines in zip(names, replies, strict=True)}


def watched(policies: Iterable[str], limit: int = schema.MAX_IDENTITIES) -> list[tuple[str, str, int]]:
    """Return (policy, identity, percent of the limit used) for this hour and the last, the highest first.

    The percentage is the one of the latest of the two hours; a refused request counts one percent more.
    """
    hour = int(time.time()) // HOUR
    keys = [(name, schema.watch_key(name, each)) for name in policies for each in (hour - 1, hour)]
    levels = _ranked(keys, limit)  # the later hour overwrites the earlier
    ranked = sorted(levels.items(), key=lambda item: -item[1])[:limit]
    return [(name, identity, int(level)) for (name, identity), level in ranked]


def refused_today(policies: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return today's refusals by (policy, identity), of the identities with the most."""
    day = int(time.time()) // DAY
    ranked = _ranked([(name, schema.refused_key(name, day)) for name in policies], 0)
    return {pair: int(number) for pair, number in ranked.items()}


def _ranked(keys: list[tuple[str, str]], limit: int) -> dict[tuple[str, str], float]:
    """Return the scores of the ZSETs of some policies by (policy, identity), the highest `limit` of each; 0 for all."""
    replies = backend.run_commands([("ZREVRANGE", key, 0, limit - 1, "WITHSCORES") for _, key in keys])
    return {
        (name, identity): float(score)
        for (name, _), reply in zip(keys, replies, strict=True)
        for identity, score in _pairs(reply)
    }


def _pairs(reply: Any) -> list[tuple[str, Any]]:
    """Return a reply of names and numbers as pairs: RESP2 sends a flat list, RESP3 a map or a list of pairs."""
    pairs = reply.items() if isinstance(reply, dict) else reply
    if reply and isinstance(reply, list) and not isinstance(reply[0], (list, tuple)):
        pairs = zip(reply[::2], reply[1::2], strict=True)
    return [(name.decode() if isinstance(name, bytes) else name, number) for name, number in pairs]
