"""The data of the panel: which policies there are, and what is counted under them. No HTML and no requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .. import backend, conf, limiter
from ..core import registry
from ..core.decision import Outcome
from ..core.keys import COUNTER_PREFIX, EncodedIdentity, decode, key_kind, parse_counter_key
from ..core.policy import DEFAULT, Policy, Rate
from ..models import Override
from ..stats import reader, schema
from .formats import duration
from .identities import IdentityLabel, describe, is_encoded

PAGE_SIZE = 50
SCANS_PER_PAGE = 20  # of SCAN_COUNT keys each: bounds the cost of a page, however many keys there are
SCAN_COUNT = 1_000
MAX_WATCHED = 500


class Row(NamedTuple):
    """The usage of one identity under one policy."""

    outcome: Outcome
    identity: IdentityLabel
    refused_today: int
    override: Override | None = None  # the active one

    @property
    def percent(self) -> int:
        """How much of the limit is used."""
        return min(100, 100 * self.outcome.current_count // self.outcome.limit)

    @property
    def level(self) -> str:
        """How much of the limit is used, in three steps."""
        return "full" if self.percent >= 100 else "high" if self.percent >= schema.WATCH_PERCENT else "normal"

    @property
    def resets_in(self) -> str:
        """The time until the counter is empty; an empty string if it is."""
        return duration(self.outcome.reset_after) if self.outcome.current_count else ""


def policies() -> dict[str, Policy]:
    """Return every policy of the settings and of decorated views, by name.

    A policy whose rate is a function has the rate of its latest refusal, and is left out until it has one.
    """
    known = dict(conf.config().policies)
    for policy in (policy for limits in registry.limits_in_use() for policy in limits.policies):
        if isinstance(policy, Policy):
            known.setdefault(policy.name, policy)
    dynamic = [name for name, policy in known.items() if not isinstance(policy.rate, Rate)]
    for name, latest in reader.latest_refusals(dynamic).items():
        policy = known.pop(name)
        if latest:
            known[name] = replace(policy, rate=Rate(latest[0].limit, latest[0].window))
    return known


def rows(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Return the usage for pairs of policy name and encoded identity; unknown policies are left out."""
    known = policies()
    wanted = [(known[name], identity) for name, identity in pairs if name in known]
    outcomes = limiter.peek_each(wanted)
    labels = describe({outcome.identity for outcome in outcomes})
    refused = reader.refused_today(sorted({policy.name for policy, _ in wanted}))
    active = Override.objects.active().filter(identity__in=list(labels))
    overrides = {(override.identity, override.policy): override for override in active}
    found = []
    for outcome in outcomes:
        identity, name = outcome.identity, outcome.policy.name
        override = overrides.get((identity, name)) or overrides.get((identity, ""))
        found.append(Row(outcome, labels[identity], refused.get((name, identity), 0), override))
    return found


def identity_rows(*identities: EncodedIdentity) -> list[Row]:
    """Return the usage of identities under every policy that limits their kind, in one round trip."""
    known = policies().items()
    # Requests without the kind of identity that a policy limits are limited by IP address.
    kinds = {name: ("ip", "user" if policy.key == "user_or_ip" else key_kind(policy.key)) for name, policy in known}
    return rows((name, each) for each in identities for name, _ in known if decode(each)[0] in kinds[name])


def watch_list(policy: str | None = None) -> list[Row]:
    """Return the identities that were refused or came near a limit and still have usage, the highest first."""
    names = [policy] if policy else sorted(policies())
    found = rows([(name, identity) for name, identity, _ in reader.watched(names, limit=MAX_WATCHED)])
    return sorted(
        (row for row in found if row.outcome.current_count or row.refused_today),
        key=lambda row: (-row.percent, -row.refused_today),
    )


def active(cursor: int, policy: str | None = None) -> tuple[list[Row], int, int]:
    """Return a page of all active counters, by SCAN; the cursor of the next, 0 at the end; and the keys scanned."""
    pattern = f"{COUNTER_PREFIX}{policy}/*" if policy and policy != DEFAULT else f"{COUNTER_PREFIX}*"
    servers = backend.servers()
    found: dict[tuple[str, str], None] = {}
    scanned, count = 0, 2 * PAGE_SIZE
    while scanned < SCANS_PER_PAGE * SCAN_COUNT:
        count = min(SCAN_COUNT, count)
        # The servers of a Cluster are scanned one after the other; our cursor holds the server and its own cursor.
        position, index = divmod(cursor, len(servers))
        scan = ("SCAN", position, "MATCH", pattern, "COUNT", count)
        ((position, keys),) = backend.run_commands([scan], servers[index])
        index += int(position) == 0
        cursor = int(position) * len(servers) + index if index < len(servers) else 0
        scanned, count = scanned + count, 2 * count  # scan more at once where few keys match
        for pair in map(parse_counter_key, map(as_text, keys)):
            if pair and is_encoded(pair[1]) and (policy is None or pair[0] == policy):
                found[pair] = None
        if cursor == 0 or len(found) >= PAGE_SIZE:
            break
    return rows(found), cursor, scanned


def as_text(reply: bytes | str) -> str:
    """Return a reply of Redis as text."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else reply
