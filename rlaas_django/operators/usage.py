"""Usage: what is counted under each policy, and the state of Redis. For the admin's pages and the commands."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import NamedTuple

from django.urls import get_resolver

from .. import backend, limiter
from ..backend.scripts import SCRIPTS
from ..core.decision import Outcome
from ..core.keys import (
    COUNTER_PREFIX,
    EncodedIdentity,
    decode,
    key_kind,
    parse_counter_key,
)
from ..core.policy import DEFAULT, Policy, Rate
from ..limiter.overrides import in_force
from ..models import Override
from ..stats import reader, schema
from ..stats.policies import all_policies, with_decided_rates
from ..stats.reader import Counts, total
from ..stats.schema import as_text
from .identities import IdentityLabel, describe, duration, is_encoded

PAGE_SIZE = 50
SCANS_PER_PAGE = 20  # of SCAN_COUNT keys each: bounds the cost of a page, however many keys there are
SCAN_COUNT = 1_000
MAX_WATCHED = 500
SPANS = ("hour", "day", "week")
SAMPLE_SIZE = 100  # keys per server whose memory is measured


class Row(NamedTuple):
    """The usage of one identity under one policy."""

    outcome: Outcome
    identity: IdentityLabel
    refused_today: int
    override: Override | None = None  # the one that applies, maybe of a network

    @property
    def percent(self) -> int:
        """How much of the limit is used."""
        return min(100, 100 * self.outcome.current_count // self.outcome.limit)

    @property
    def level(self) -> str:
        """How much of the limit is used, in three steps."""
        return (
            "full"
            if self.percent >= 100
            else "high"
            if self.percent >= schema.WATCH_PERCENT
            else "normal"
        )

    @property
    def resets_in(self) -> str:
        """The time until the counter is empty; an empty string if it is."""
        return duration(self.outcome.reset_after) if self.outcome.current_count else ""


class PolicyRow(NamedTuple):
    """What was decided under one policy in a span of time, for the table of policies."""

    policy: Policy
    series: list[Counts]

    @property
    def rate(self) -> str:
        """The rate; empty where it depends on the request."""
        return str(self.policy.rate) if isinstance(self.policy.rate, Rate) else ""

    @property
    def counts(self) -> Counts:
        """The series added up."""
        return total(self.series)

    @property
    def share(self) -> float:
        """How many percent of the requests this policy refused, or would have as a shadow policy."""
        counts = self.counts
        return 100 * (counts.refused + counts.over) / (counts.total or 1)


def policies() -> dict[str, Policy]:
    """Return every policy by name, with those of all views; the rate may be a function."""
    with suppress(
        Exception
    ):  # the URLs import the views; Django's own checks tell what is wrong with them
        _ = get_resolver().url_patterns
    return all_policies()


def policy_table(span: str) -> list[PolicyRow]:
    """Return what was decided under each policy in the last hour, day or week, by name; a point is a minute or an hour.

    Two round trips, and at most eight keys per policy.
    """
    every, days = policies(), 7 if span == "week" else 1
    found = (
        reader.minutes(every, hours=1) if span == "hour" else reader.hours(every, days)
    )
    return [PolicyRow(every[name], found[name]) for name in sorted(every)]


def series(span: str, name: str = schema.SITE) -> list[Counts]:
    """Return what was decided on the site, or under one policy, in the last hour or day by minute, or week by hour."""
    if span == "week":
        return reader.hours([name])[name]
    return reader.minutes([name], hours=24 if span == "day" else 1)[name]


def rows(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Return the usage for pairs of policy name and encoded identity.

    Unknown policies are left out, and identities whose rate is not fixed and not known.
    """
    every = policies()
    wanted = with_decided_rates(
        (every[name], identity) for name, identity in pairs if name in every
    )
    outcomes = limiter.peek_each(wanted)
    labels = describe({outcome.identity for outcome in outcomes})
    refused = reader.refused_today(
        (policy.name, identity) for policy, identity in wanted
    )
    overrides = Override.objects.active().matching(labels)
    found = []
    for outcome in outcomes:
        identity, name = outcome.identity, outcome.policy.name
        override = in_force(
            each for each in overrides[identity] if each.policy in ("", name)
        )
        found.append(
            Row(outcome, labels[identity], refused.get((name, identity), 0), override)
        )
    return found


def identity_rows(*identities: EncodedIdentity) -> list[Row]:
    """Return the usage of identities under every policy that limits their kind, in one round trip."""
    every = policies().items()
    # Requests without the kind of identity that a policy limits are limited by IP address.
    kinds = {
        name: ("ip", "user" if policy.key == "user_or_ip" else key_kind(policy.key))
        for name, policy in every
    }
    return rows(
        (name, each)
        for each in identities
        for name, _ in every
        if decode(each)[0] in kinds[name]
    )


def watch_list(policy: str | None = None) -> list[Row]:
    """Return the identities that were refused or came near a limit and still have usage, the highest first."""
    found = rows(
        [
            (name, identity)
            for name, identity, _ in reader.watched(policy, limit=MAX_WATCHED)
        ]
    )
    return sorted(
        (row for row in found if row.outcome.current_count or row.refused_today),
        key=lambda row: (-row.percent, -row.refused_today),
    )


def active(cursor: int, policy: str | None = None) -> tuple[list[Row], int, int]:
    """Return a page of all active counters, by SCAN; the cursor of the next, 0 at the end; and the keys scanned."""
    pattern = (
        f"{COUNTER_PREFIX}{policy}/*"
        if policy and policy != DEFAULT
        else f"{COUNTER_PREFIX}*"
    )
    found: dict[tuple[str, str], None] = {}
    scanned, count = 0, 2 * PAGE_SIZE
    while scanned < SCANS_PER_PAGE * SCAN_COUNT:
        count = min(SCAN_COUNT, count)
        cursor, keys = backend.scan_page(cursor, pattern, count)
        scanned, count = (
            scanned + count,
            2 * count,
        )  # scan more at once where few keys match
        for pair in map(parse_counter_key, keys):
            if pair and is_encoded(pair[1]) and (policy is None or pair[0] == policy):
                found[pair] = None
        if cursor == 0 or len(found) >= PAGE_SIZE:
            break
    return rows(found), cursor, scanned


def open_breakers() -> list[dict[str, str]]:
    """Return the servers whose circuit breaker is open in this process."""
    return [
        {
            "name": server.name,
            "unavailable_for": duration(server.breaker.open_for),
            "next_probe": duration(server.breaker.next_probe_in),
        }
        for server in backend.topology().servers()
        if server.breaker.error is not None
    ]


def ping() -> float:
    """Return the mean latency of the servers in ms; raise UnavailableError if one is unavailable."""
    servers = backend.servers()
    started = time.perf_counter()
    for server in servers:
        backend.run_commands([("PING",)], server)
    return (time.perf_counter() - started) * 1000 / len(servers)


def server_state() -> SimpleNamespace:
    """Return the state of Redis; of a Cluster, the servers added up."""
    servers = backend.servers()
    commands = [("DBSIZE",), ("SCRIPT", "EXISTS", *(script.sha for script in SCRIPTS))]
    replies = [backend.run_commands(commands, server) for server in servers]
    infos = [backend.server_info(server) for server in servers]
    version = infos[0].get("valkey_version") or infos[0].get("redis_version", "?")
    keys = sum(size for size, _ in replies)
    return SimpleNamespace(
        latency_ms=ping(),
        version=f"{infos[0].get('server_name', 'redis')} {version}",
        eviction_policies=sorted(
            {policy for info in infos if (policy := backend.eviction_policy(info))}
        ),
        used_memory=sum(int(info.get("used_memory", 0)) for info in infos),
        keys=keys,
        rate_limit_memory=_rate_limit_memory(keys),
        # The version of each script, and whether it is loaded.
        scripts=[
            (script.version, all(loaded[i] for _, loaded in replies))
            for i, script in enumerate(SCRIPTS)
        ],
    )


def _rate_limit_memory(size: int) -> int | None:
    """Return the bytes of our keys, or None if the server does not support MEMORY USAGE.

    Counters are extrapolated from a sample of keys, statistics from the last full hour and the last full day.
    """
    now = int(time.time())
    statistics: dict[str, int] = {}  # key -> how many like it there are
    for name in (schema.SITE, *policies()):
        statistics[schema.minutes_key(name, now // schema.HOUR - 1)] = (
            schema.MINUTES_TTL // schema.HOUR
        )
        statistics[schema.hours_key(name, now // schema.DAY - 1)] = (
            schema.HOURS_TTL // schema.DAY
        )
        statistics[schema.refusals_key(name)] = 1
    try:
        sample = []
        for server in backend.servers():
            ((_cursor, keys),) = backend.run_commands(
                [("SCAN", 0, "COUNT", SAMPLE_SIZE)], server
            )
            sample += keys
        counters = [
            key for key in map(as_text, sample) if key.startswith(COUNTER_PREFIX)
        ]
        replies = backend.run_commands(
            [("MEMORY", "USAGE", key) for key in (*counters, *statistics)]
        )
    except (
        backend.UnavailableError
    ):  # the error of a server that does not know MEMORY USAGE, too
        return None
    sizes = [int(reply or 0) for reply in replies]
    estimated = size * sum(sizes[: len(counters)]) // max(1, len(sample))
    return estimated + sum(
        a * b for a, b in zip(sizes[len(counters) :], statistics.values(), strict=True)
    )
