"""What the admin's pages show, gathered from Redis; no HTML and no requests here."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Q
from django.utils.translation import gettext, pgettext

from . import backend, conf, decorators, identity, limiter, scripts, stats
from .identity import PREFIX, Id, parse_key
from .models import Override
from .policy import Outcome, Policy, Rate

PAGE = 50
SCANS_PER_PAGE = 20  # of SCAN_COUNT keys each: what a page may cost, however many keys there are
SCAN_COUNT = 1_000
SEARCH_LIMIT = 20
SAMPLE = 100  # keys looked at to tell what ours weigh

_ID = re.compile(r"[!-.0-9;<>-z|~]+(=[!-.0-9;<>-z|~]+)?")  # what `identity` writes: printable, none of : / = { }


class Row(NamedTuple):
    """A counter, and whose it is."""

    outcome: Outcome
    who: Who
    refused_today: int
    override: Override | None = None  # that is in force

    @property
    def percent(self) -> int:
        return min(100, 100 * self.outcome.current_count // self.outcome.limit)

    @property
    def level(self) -> str:
        """How near the limit is, in three steps."""
        return "full" if self.percent >= 100 else "near" if self.percent >= stats.WATCH_FROM else "calm"

    @property
    def resets_in(self) -> str:
        return duration(self.outcome.reset_after) if self.outcome.current_count else ""


class Who(NamedTuple):
    """An identity as a person reads it."""

    id: Id
    kind: str
    text: str
    user: Any = None

    @property
    def name(self) -> str:
        if self.kind == "global":
            return gettext("everyone")
        return printable(self.text if self.user is None else self.user.get_username())

    @property
    def kind_name(self) -> str:
        """What sort of identity it is, in words."""
        names = {
            "user": gettext("user"),
            "ip": gettext("address"),
            "token": gettext("token"),
            "header": gettext("header"),
            "global": gettext("all together"),
        }
        return names.get(self.kind, self.kind)

    @property
    def is_digest(self) -> bool:
        """Whether the text is a hash, which tells a person nothing."""
        return self.kind in ("token", "header") or self.text.startswith("blake2=")


class ServerState(NamedTuple):
    """How Redis is, seen from here."""

    latency_ms: float
    version: str
    used_memory: int
    keys: int
    our_memory: int | None  # an estimate; None where the server does not tell
    scripts: list[tuple[str, bool]]  # version, loaded


class OpenBreaker(NamedTuple):
    """A server that this process does not ask at present."""

    name: str
    away: str
    next_probe: str


def breakers() -> list[OpenBreaker]:
    return [
        OpenBreaker(server.name, duration(server.breaker.away), duration(server.breaker.next_probe_in))
        for server in backend.site().servers()
        if server.breaker.error is not None
    ]


def printable(text: str) -> str:
    """Text with what cannot be seen, or would turn it around, written out: `a\\n`, `\\x1b`, `\\u202e`."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def duration(seconds: float) -> str:
    """`38 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`; rounded up."""
    if math.isinf(seconds):
        return gettext("never")
    left = math.ceil(seconds)
    units = [
        (86_400, pgettext("unit of time", "d")),
        (3_600, pgettext("unit of time", "h")),
        (60, pgettext("unit of time", "min")),
        (1, pgettext("unit of time", "s")),
    ]
    for (size, unit), (smaller, name) in itertools.pairwise(units):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size} {unit} {rest} {name}" if rest else f"{left // size} {unit}"
    return f"{left} {units[-1][1]}"


def is_id(text: str) -> bool:
    """Whether this can be an identity as it stands in a key."""
    return len(text) <= 200 and _ID.fullmatch(text) is not None


def policies() -> dict[str, Policy]:
    """Every policy of the settings and of the views, by name.

    One whose rate only a request can tell is shown with the rate of its latest refusal, once there is one.
    """
    known = dict(conf.config().policies)
    for limit in decorators.in_use:
        for gate in limit.gates.values():
            for policy in gate.policies:
                if isinstance(policy, Policy):
                    known.setdefault(policy.name, policy)
    unsettled = [name for name, policy in known.items() if not isinstance(policy.rate, Rate)]
    latest = {name: found[0] for name, found in stats.latest_refusals(unsettled).items() if found}
    return {
        name: replace(policy, rate=Rate(latest[name].limit, latest[name].window)) if name in latest else policy
        for name, policy in known.items()
        if name in latest or name not in unsettled
    }


def server_state() -> ServerState:
    """All servers of a cluster together."""
    used = [*scripts.CHECK.values()]
    nodes = backend.nodes()
    questions = [("DBSIZE",), ("SCRIPT", "EXISTS", *(script.sha for script in used))]
    replies = [backend.execute(questions, node) for node in nodes]
    infos = [_info(node) for node in nodes]
    size = sum(keys for keys, _ in replies)
    return ServerState(
        latency_ms=ping(),
        version=_version(infos[0]),
        used_memory=sum(int(info.get("used_memory", 0)) for info in infos),
        keys=size,
        our_memory=_our_memory(size),
        scripts=[(script.version, all(there[i] for _, there in replies)) for i, script in enumerate(used)],
    )


def _info(node: backend.Server) -> dict[str, str]:
    """What INFO tells, if we are allowed to ask."""
    try:
        (info,) = backend.execute([("INFO",)], node)
    except backend.UnavailableError:
        return {}
    return dict(line.split(":", 1) for line in _text(info).splitlines() if ":" in line)


def _version(info: dict[str, str]) -> str:
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info.get('redis_version', '?')}"


def _our_memory(size: int) -> int | None:
    """Bytes of all keys that we wrote: the counters reckoned from a few, the statistics, few and large, as they are."""
    today = int(time.time()) // stats.DAY
    known = [stats.stats_key(name, day) for name in policies() for day in (today - 1, today)]
    known += [stats.refusals_key(name) for name in policies()]
    try:
        sample = []
        for node in backend.nodes():
            ((_cursor, keys),) = backend.execute([("SCAN", 0, "COUNT", SAMPLE)], node)
            sample += keys
        counters = [key for key in map(_text, sample) if key.startswith(PREFIX)]
        replies = backend.execute([("MEMORY", "USAGE", key) for key in (*counters, *known)])
    except backend.UnavailableError:  # such as a server that does not know the command
        return None
    weights = [int(reply or 0) for reply in replies]
    reckoned = size * sum(weights[: len(counters)]) // max(1, len(sample))
    return reckoned + sum(weights[len(counters) :])


def _text(key: bytes | str) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else key


def ping() -> float:
    """How long Redis takes to answer, in ms."""
    nodes = backend.nodes()
    started = time.perf_counter()
    for node in nodes:
        backend.execute([("PING",)], node)
    return (time.perf_counter() - started) * 1000 / len(nodes)


def reachable() -> bool:
    try:
        ping()
    except backend.UnavailableError:
        return False
    return True


def rows(pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """Counters by policy name and identity; those of unknown policies left out."""
    known = policies()
    wanted = [(known[name], who) for name, who in pairs if name in known]
    outcomes = limiter.peek_each(wanted)
    people = whoever({outcome.identity for outcome in outcomes})
    refused = stats.refused_today(sorted({policy.name for policy, _ in wanted}))
    held = in_force(people)
    found = []
    for outcome in outcomes:
        who, name = outcome.identity, outcome.policy.name
        override = held.get((who, name)) or held.get((who, ""))
        found.append(Row(outcome, people[who], refused.get((name, who), 0), override))
    return found


def in_force(ids: Iterable[str]) -> dict[tuple[str, str], Override]:
    """Overrides by identity and policy, in one query."""
    found = Override.objects.active().filter(identity__in=list(ids))
    return {(override.identity, override.policy): override for override in found}


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
    nodes = backend.nodes()
    found: dict[tuple[str, str], None] = {}
    looked_at, count = 0, 2 * PAGE
    while looked_at < SCANS_PER_PAGE * SCAN_COUNT:
        count = min(SCAN_COUNT, count)
        # The servers of a cluster are gone through one after the other; the cursor tells which, too.
        place, at = divmod(cursor, len(nodes))
        ((place, keys),) = backend.execute([("SCAN", place, "MATCH", pattern, "COUNT", count)], nodes[at])
        at += int(place) == 0
        cursor = int(place) * len(nodes) + at if at < len(nodes) else 0
        looked_at, count = looked_at + count, 2 * count  # more at once where few are found
        for key in keys:
            pair = parse_key(_text(key))
            if pair and is_id(pair[1]) and (name is None or pair[0] == name):
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
    as_it_stands = Id(text if ("=" in text or "%" in text) and is_id(text) else identity.encode(text))
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
    if (key := _primary_key(text)) is not None:
        wanted |= Q(pk=key)
    yield from model._default_manager.filter(wanted)[:SEARCH_LIMIT]


def _primary_key(text: str) -> Any:
    """A text as a user's id; None when it is not just as this site writes one, or no id at all."""
    field: Any = get_user_model()._meta.pk
    try:
        value = field.to_python(text)
        field.run_validators(value)
    except (ValidationError, ValueError, AttributeError, OverflowError):
        return None
    return value if str(value) == text else None


def _has(model: Any, field: str) -> bool:
    try:
        model._meta.get_field(field)
    except FieldDoesNotExist:
        return False
    return True


def whoever(ids: Iterable[str]) -> dict[str, Who]:
    """Identities with the users that they are, in one query."""
    decoded = {each: identity.decode(each) for each in ids}
    keys = {each: key for each, (kind, text) in decoded.items() if kind == "user" and (key := _primary_key(text))}
    users = get_user_model()._default_manager.in_bulk([*keys.values()]) if keys else {}
    return {each: Who(Id(each), kind, text, users.get(keys.get(each))) for each, (kind, text) in decoded.items()}
