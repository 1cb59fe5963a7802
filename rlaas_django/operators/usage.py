"""Who used what under each policy, and the state of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from django.urls import get_resolver

from .. import backend, limiter
from ..core.decision import Outcome
from ..core.keys import (
    COUNTER_PREFIX,
    EncodedIdentity,
    decode,
    key_kind,
    parse_counter_key,
    split_login,
)
from ..core.policy import DEFAULT, Policy, Rate
from ..limiter.overrides import in_force
from ..models import Override
from ..stats import reader, schema
from ..stats.policies import all_policies, with_decided_rates
from ..stats.reader import Counts, total
from ..stats.schema import Refusal
from . import logins
from .identities import IdentityLabel, describe, is_encoded

# Reads a series for each of some policies.
Reader = Callable[[Iterable[str]], dict[str, list[Counts]]]

PAGE_SIZE = 50
# Bounds of the cost of a page, however many keys there are.
SCANS_PER_PAGE = 20
SCAN_COUNT = 1_000
MAX_WATCHED = 300
SAMPLE_SIZE = 100  # keys whose memory is measured

# What reads a series, by its span: in minutes, or of a week in hours.
READERS: dict[str, Reader] = {
    "hour": partial(reader.minutes, hours=1),
    "day": reader.minutes,
    "week": reader.hours,
}
# Of every policy, at most eight keys each.
TABLE_READERS: dict[str, Reader] = {**READERS, "day": partial(reader.hours, days=1)}


class Row(NamedTuple):
    """The usage of one identity under one policy."""

    outcome: Outcome
    identity: IdentityLabel
    refused_today: int
    over_today: int  # times over the limit, and not refused
    override: Override | None = None  # the one that applies, maybe of a network

    @property
    def is_used(self) -> bool:
        """Whether there is anything to show."""
        return any((self.outcome.current_count, self.refused_today, self.over_today))

    @property
    def percent(self) -> int:
        """How much of the limit is used."""
        return min(100, 100 * self.outcome.current_count // self.outcome.limit)

    @property
    def level(self) -> str:
        """How much of the limit is used, in three steps."""
        if self.percent >= 100:
            return "full"
        if self.percent >= schema.WATCH_PERCENT:
            return "high"
        return "normal"


class PolicyRow(NamedTuple):
    """What was decided under one policy in a span of time."""

    policy: Policy
    series: list[Counts]

    @property
    def rate(self) -> str:
        """The rate; empty where it depends on the request."""
        if not isinstance(self.policy.rate, Rate):
            return ""
        return str(self.policy.rate)

    @property
    def counts(self) -> Counts:
        """The series added up."""
        return total(self.series)

    @property
    def share(self) -> float:
        """The percentage that it refused, or would have as a shadow policy."""
        counts = self.counts
        return 100 * (counts.refused + counts.over) / (counts.total or 1)


def policies() -> dict[str, Policy]:
    """Return every policy by name, also those of views; the rate may be a function."""
    # The URLs import the views; Django's own checks report what is wrong with them.
    with suppress(Exception):
        _ = get_resolver().url_patterns

    return all_policies()


def policy_table(span: str) -> list[PolicyRow]:
    """Return what was decided under each policy in the last hour, day or week."""
    known = policies()
    series = TABLE_READERS[span](known)
    return [PolicyRow(known[name], series[name]) for name in sorted(known)]


def series(span: str, name: str = schema.SITE) -> list[Counts]:
    """Return what was decided on the site, or under a policy, in a span of time."""
    return READERS[span]([name])[name]


def rows(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Return the usage for pairs of policy name and encoded identity.

    Unknown policies are left out, and identities whose rate is not known.
    """
    known = policies()
    return _rows((known[name], identity) for name, identity in pairs if name in known)


def identity_rows(
    *identities: EncodedIdentity,
    policy: str | None = None,
) -> list[Row]:
    """Return the usage of identities under every policy that limits their kind.

    With `policy`, under the policy of this name only.
    """
    known = policies()
    counted = [*identities]
    for identity in identities:
        counted += logins.of_user(identity)
    return _rows(
        (limiting, identity)
        for identity in dict.fromkeys(counted)
        for limiting in known.values()
        if policy in (None, limiting.name) and _limits(limiting, identity)
    )


def _rows(pairs: Iterable[tuple[Policy, str]]) -> list[Row]:
    """Return the usage for pairs of policy and encoded identity.

    It takes one round trip per kind of data, whatever the number of pairs.
    """
    outcomes = limiter.peek_each(with_decided_rates(pairs))
    decided = [(outcome.policy.name, outcome.identity) for outcome in outcomes]
    refused_today = reader.refused_today(decided)
    over_today = reader.refused_today(decided, schema.OVER_LIMIT)
    labels = describe({outcome.identity for outcome in outcomes})
    active = Override.objects.active().matching(labels)

    table = []
    for outcome in outcomes:
        identity = outcome.identity
        name = outcome.policy.name
        override = in_force(
            override for override in active[identity] if override.policy in ("", name)
        )
        refused = refused_today[name, identity]
        over = over_today[name, identity]
        table.append(Row(outcome, labels[identity], refused, over, override))

    return table


def _limits(policy: Policy, identity: str) -> bool:
    """Return whether a policy limits this kind of identity.

    Requests without the kind that it counts are limited by their IP address.
    """
    kind = key_kind(policy.key)
    if kind == "user_or_ip":
        kind = "user"
    kinds = logins.kinds(policy) or ("ip", kind)
    return decode(identity)[0] in kinds


def watch_list(policy: str | None = None) -> list[Row]:
    """Return identities that came near a limit and have usage, the highest first."""
    watched = rows(reader.watched(policy, limit=MAX_WATCHED))
    used = [row for row in watched if row.is_used]
    return sorted(
        used, key=lambda row: (-row.percent, -row.refused_today, -row.over_today)
    )


def refusals(
    policy: str, text: str, identities: Iterable[str], path: str, oldest: float
) -> list[Refusal]:
    """Return what the refusal log has under a policy, or any, the newest first.

    Of these identities, and of those that have the text in them or in their address.
    """
    return [
        refusal
        for refusal in reader.refusals([policy or schema.SITE])
        if refusal.at >= oldest
        and path in refusal.path
        and (
            text in f"{refusal.identity} {refusal.address}"
            or split_login(refusal.identity)[0] in identities
        )
    ]


def active(cursor: int, policy: str | None = None) -> tuple[list[Row], int, int]:
    """Return a page of all active counters, by SCAN.

    With the cursor of the next page, 0 at the end, and the number of keys scanned.
    """
    pattern = f"{COUNTER_PREFIX}*"
    if policy and policy != DEFAULT:
        pattern = f"{COUNTER_PREFIX}{policy}/*"

    pairs: dict[tuple[str, str], None] = {}
    scanned = 0
    count = 2 * PAGE_SIZE

    while scanned < SCANS_PER_PAGE * SCAN_COUNT:
        count = min(SCAN_COUNT, count)
        cursor, keys = backend.scan_page(cursor, pattern, count)
        scanned += count
        count *= 2  # few keys match, so scan more at once
        for name, identity in filter(None, map(parse_counter_key, keys)):
            if is_encoded(identity) and policy in (None, name):
                pairs[name, identity] = None

        if cursor == 0 or len(pairs) >= PAGE_SIZE:
            break

    return rows(pairs), cursor, scanned


def unavailable_servers() -> list[backend.Server]:
    """Return the servers whose circuit breaker is open in this process."""
    servers = backend.topology().servers()
    return [server for server in servers if server.breaker.error is not None]


def ping() -> float:
    """Return the mean latency of the servers in ms, or raise UnavailableError."""
    servers = backend.servers()
    started = time.perf_counter()
    for server in servers:
        backend.run_commands([("PING",)], server)

    return (time.perf_counter() - started) * 1000 / len(servers)


def server_state() -> SimpleNamespace:
    """Return the state of Redis; of a Cluster, the servers added up."""
    servers = backend.servers()
    infos = [backend.server_info(server) for server in servers]
    info = infos[0]
    version = info.get("valkey_version") or info.get("redis_version", "?")
    eviction_policies = {backend.eviction_policy(info) for info in infos}
    sizes = [backend.run_commands([("DBSIZE",)], server)[0] for server in servers]

    return SimpleNamespace(
        latency_ms=ping(),
        version=f"{info.get('server_name', 'redis')} {version}",
        eviction_policies=sorted(filter(None, eviction_policies)),
        used_memory=sum(int(info.get("used_memory", 0)) for info in infos),
        keys=sum(sizes),
        rate_limit_memory=_rate_limit_memory(sum(sizes)),
    )


def _rate_limit_memory(keys: int) -> int | None:
    """Return the bytes of our keys; None if the server lacks MEMORY USAGE.

    Those of the counters are estimated from a sample of all keys of each server.
    """
    sample: list[str] = []
    for index in range(len(backend.servers())):  # the first cursor of each server
        _cursor, keys_of_server = backend.scan_page(index, "*", SAMPLE_SIZE)
        sample += keys_of_server
    counters = [key for key in sample if key.startswith(COUNTER_PREFIX)]
    statistics = _statistics_keys()
    commands = [("MEMORY", "USAGE", key) for key in (*counters, *statistics)]

    try:
        replies = backend.run_commands(commands)
    except backend.UnavailableError:  # also the error about an unknown command
        return None

    sizes = [int(size or 0) for size in replies]
    memory = keys * sum(sizes[: len(counters)]) // max(1, len(sample))
    for size, number in zip(sizes[len(counters) :], statistics.values(), strict=True):
        memory += size * number

    return memory


def _statistics_keys() -> dict[str, int]:
    """Return keys of statistics, each with how many like it there are.

    Of the series, those of the last full hour and of the last full day.
    """
    now = time.time()
    keys = {}
    for name in (schema.SITE, *policies()):
        for statistic in (schema.MINUTES, schema.HOURS):
            last = statistic.key(name, now - statistic.period)
            keys[last] = statistic.ttl // statistic.period

        keys[schema.REFUSALS.key(name)] = 1

    return keys
