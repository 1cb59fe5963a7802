"""What the admin's pages show, gathered from Redis; no HTML and no requests here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Q

from . import backend, conf, decorators, identity, limiter, scripts, stats
from .identity import PREFIX, Id, parse_key
from .policy import Outcome, Policy, Rate

PAGE = 50
SCANS_PER_PAGE = 20  # of SCAN_COUNT keys each: what a page may cost, however many keys there are
SCAN_COUNT = 1_000
SEARCH_LIMIT = 20


class Row(NamedTuple):
    """A counter, and whose it is."""

    outcome: Outcome
    who: Who
    refused_today: int

    @property
    def percent(self) -> int:
        return min(100, 100 * self.outcome.current_count // self.outcome.limit)


class Who(NamedTuple):
    """An identity as a person reads it."""

    id: Id
    kind: str
    text: str
    user: Any = None

    @property
    def name(self) -> str:
        return self.user.get_username() if self.user is not None else self.text or self.kind


class ServerState(NamedTuple):
    """How Redis is, seen from here."""

    latency_ms: float
    version: str
    used_memory: int
    keys: int
    scripts: list[tuple[str, bool]]  # version, loaded


def policies() -> dict[str, Policy]:
    """Every policy of the settings and of the views, by name; those whose rate only a request can tell left out."""
    known = dict(conf.config().policies)
    for limit in decorators.in_use:
        for gate in limit.gates.values():
            for policy in gate.policies:
                if isinstance(policy, Policy):
                    known.setdefault(policy.name, policy)
    return {name: policy for name, policy in known.items() if isinstance(policy.rate, Rate)}


def server_state() -> ServerState:
    started = time.perf_counter()
    backend.execute([("PING",)])
    latency = (time.perf_counter() - started) * 1000
    used = [script for script in scripts.CHECK.values() if script.sha]
    info, size, loaded = backend.execute([("INFO",), ("DBSIZE",), ("SCRIPT EXISTS", *(script.sha for script in used))])
    return ServerState(
        latency_ms=latency,
        version=f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info.get('redis_version', '?')}",
        used_memory=int(info.get("used_memory", 0)),
        keys=size,
        scripts=[(script.version, bool(there)) for script, there in zip(used, loaded, strict=True)],
    )


def rows(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Counters by policy name and identity; those of unknown policies left out."""
    known = policies()
    wanted = [(known[name], who) for name, who in pairs if name in known]
    outcomes = limiter.peek_each(wanted)
    people = whoever({outcome.identity for outcome in outcomes})
    refused = stats.refused_today(sorted({policy.name for policy, _ in wanted}))
    return [
        Row(outcome, people[outcome.identity], refused.get((outcome.policy.name, outcome.identity), 0))
        for outcome in outcomes
    ]


def watch_list(name: str | None = None) -> list[Row]:
    """Who was refused or came near a limit, and still has something counted; the nearest first."""
    names = [name] if name else sorted(policies())
    seen = rows([(policy, who) for policy, who, _ in stats.watched(names, most=500)])
    return sorted(
        (row for row in seen if row.outcome.current_count or row.refused_today),
        key=lambda row: (-row.percent, -row.refused_today),
    )


def active(cursor: int, name: str | None = None) -> tuple[list[Row], int, int]:
    """A page of all that is counted: rows, where the next page starts (0: the end), how many keys were looked at."""
    pattern = f"{PREFIX}{name}/*" if name and name != "default" else f"{PREFIX}*"
    found: dict[tuple[str, str], None] = {}
    looked_at = 0
    for _ in range(SCANS_PER_PAGE):
        ((cursor, keys),) = backend.execute([("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)])
        cursor, looked_at = int(cursor), looked_at + SCAN_COUNT
        for key in keys:
            pair = parse_key(key.decode() if isinstance(key, bytes) else key)
            if pair and (name is None or pair[0] == name):
                found[pair] = None
        if cursor == 0 or len(found) >= PAGE:
            break
    return rows(found), cursor, looked_at


def identity_rows(*ids: Id) -> list[Row]:
    """Identities under every policy that can count their kind, in one round trip."""
    known = policies()
    return rows(
        (name, who) for who in ids for name, policy in known.items() if identity.decode(who)[0] in _kinds(policy)
    )


def _kinds(policy: Policy) -> tuple[str, ...]:
    """The kinds of identity that a policy counts; whoever has no other name counts by address."""
    kind = identity.kind_of(policy.key)
    return ("user" if kind == "user_or_ip" else kind, "ip")


def search(text: str) -> list[Id]:
    """Identities that a person may mean: a user by name, id or e-mail, an address, or what stands in a key."""
    text = text.strip()
    if not text:
        return []
    found = [Id(identity.encode(str(user.pk))) for user in _users(text)]
    if identity.parse_address(text) is not None:
        found.append(Id(f"ip={identity.encode(identity.address(text))}"))
    as_it_stands = Id(text if "=" in text or "%" in text else identity.encode(text))
    return list(dict.fromkeys([*found, as_it_stands]))


def _users(text: str) -> Iterator[Any]:
    model = get_user_model()
    fields = {model.USERNAME_FIELD: "icontains"}
    email = model.get_email_field_name() if hasattr(model, "get_email_field_name") else None
    if email and _has(model, email):
        fields[email] = "icontains"
    wanted = Q()
    for name, lookup in fields.items():
        wanted |= Q(**{f"{name}__{lookup}": text})
    with contextlib.suppress(ValidationError, ValueError, AttributeError):  # not what this site's ids look like
        wanted |= Q(pk=model._meta.pk.to_python(text))
    yield from model._default_manager.filter(wanted)[:SEARCH_LIMIT]


def _has(model: Any, field: str) -> bool:
    try:
        model._meta.get_field(field)
    except FieldDoesNotExist:
        return False
    return True


def whoever(ids: Iterable[str]) -> dict[str, Who]:
    """Identities with the users that they are, in one query."""
    decoded = {each: identity.decode(each) for each in ids}
    model = get_user_model()
    keys = {}
    for each, (kind, text) in decoded.items():
        if kind == "user":
            try:
                keys[each] = model._meta.pk.to_python(text)
            except (ValidationError, ValueError, AttributeError):
                continue
    users = model._default_manager.in_bulk([key for key in keys.values() if key is not None]) if keys else {}
    return {each: Who(Id(each), kind, text, users.get(keys.get(each))) for each, (kind, text) in decoded.items()}
