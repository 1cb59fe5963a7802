"""The refusal log: filtered, grouped, explained, and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.text import printable
from ..models import Override
from ..operators import usage
from ..operators.identities import address_identity, describe, duration, search
from ..stats import reader
from ..stats.schema import REFUSALS_TTL, SITE, Refusal
from ..templatetags.rlaas_panel import with_zone
from .text import local_time, sees_users

MAX_GROUPS = 200  # on the page
MAX_FILTERED = 5_000
CSV_COLUMNS = (
    *(
        "time",
        "policy",
        "identity",
        "method",
        "path",
        "count",
        "limit",
        "retry_after",
        "over",
    ),
    *("source", "address", "agent"),
)
AGENTS = {
    "browser": gettext_lazy("browser"),
    "bot": gettext_lazy("bot"),
    "program": gettext_lazy("program"),
    "none": gettext_lazy("no user agent"),
}


@dataclass
class Group:
    """Refusals of one identity by one policy on one path, from one address and class of user agent."""

    latest: Refusal
    number: int = 0
    first_at: float = 0
    block: Override | None = None  # why the latest was refused, if not by usage

    def add(self, refusal: Refusal) -> None:
        """Count a refusal that is older than those before."""
        self.number += 1
        self.first_at = refusal.at

    @property
    def at(self) -> datetime:
        """The time of the latest refusal."""
        return local_time(self.latest.at)

    @property
    def since(self) -> datetime | None:
        """The time of the first refusal; None if there is one only."""
        return local_time(self.first_at) if self.number > 1 else None

    @property
    def method(self) -> str:
        """The method of the request; an empty string for a check in code."""
        return printable(self.latest.method)

    @property
    def path(self) -> str:
        """The path of the request, or the label of who called `check()`."""
        refusal = self.latest
        return printable(
            refusal.path if refusal.source == "request" else refusal.source
        )

    @property
    def agent(self) -> Any:
        """The class of the user agent, translated."""
        return AGENTS.get(self.latest.agent, self.latest.agent)

    @property
    def retry_after(self) -> str:
        """How long the latest had to wait."""
        wait = self.latest.retry_after
        return duration(math.inf if wait is None else wait)


def group(refusals: Iterable[Refusal]) -> list[Group]:
    """Group refusals, newest first, by all but their time and numbers."""
    groups: dict[tuple[Any, ...], Group] = {}
    for each in refusals:
        what = (
            each.policy,
            each.identity,
            each.source,
            each.method,
            each.path,
            each.address,
            each.agent,
            each.over,
        )
        groups.setdefault(what, Group(each)).add(each)
    return list(groups.values())


def find_blocks(groups: Iterable[Group]) -> None:
    """Find what blocked the latest refusal of each group: an override of the identity, its address or its network."""
    shown = [
        (each, each.latest.identity, address_identity(each.latest.address))
        for each in groups
    ]
    oldest = timezone.now() - timedelta(seconds=REFUSALS_TTL)
    blocks = Override.objects.filter(kind=Override.Kind.BLOCK, until__gt=oldest)
    found = blocks.matching(
        {identity for _, *identities in shown for identity in identities if identity}
    )
    for each, identity, address in shown:
        matching = [
            *found[identity],
            *(override for override in found.get(address, ()) if override.every_client),
        ]
        applied = [
            block
            for block in matching
            if block.policy in ("", each.latest.policy) and block.is_active(each.at)
        ]
        each.block = applied[-1] if applied else None


def page(request: HttpRequest) -> dict[str, Any]:
    """Show the refusal log, filtered and grouped."""
    query, policies = request.GET, usage.policies()
    found = _filtered(request, policies)
    groups = group(found)
    shown = groups[:MAX_GROUPS]
    find_blocks(shown)
    labels = describe({each.latest.identity for each in shown})
    return {
        "title": _("Refusals"),
        "groups": [(each, labels[each.latest.identity]) for each in shown],
        "groups_count": len(groups),
        "found": len(found),
        "unlogged": sum(hour.unlogged for hour in reader.hours([SITE], days=1)[SITE]),
        "policies": sorted(policies),
        "filters": {
            name: query.get(name, "")
            for name in ("policy", "identity", "path", "since")
        },
        "spans": [
            ("5", _("the last 5 minutes")),
            ("60", _("the last hour")),
            ("1440", _("the last day")),
        ],
        "query": query,
    }


def _filtered(request: HttpRequest, policies: Iterable[str]) -> list[Refusal]:
    """Return the refusals that match `policy`, `identity`, `path` and `since` (minutes) of the query, newest first."""
    query = request.GET
    policy, path, since = (query.get(name, "") for name in ("policy", "path", "since"))
    oldest = (
        timezone.now().timestamp() - 60 * int(since)
        if since.isdecimal() and len(since) < 9
        else 0
    )
    text = query.get("identity", "").strip()
    identities = set(search(text, by_email=sees_users(request)))
    return [
        refusal
        for refusal in reader.refusals(
            [policy] if policy in policies else [SITE], limit=MAX_FILTERED
        )
        if policy in ("", refusal.policy)
        and (text in refusal.identity or refusal.identity in identities)
        and path in refusal.path
        and refusal.at >= oldest
    ]


def write_csv(file: Any, request: HttpRequest) -> None:
    """Write the refusal log as CSV, filtered like the page, one line per refusal."""
    writer = csv.writer(file)
    writer.writerow(CSV_COLUMNS)
    for refusal in _filtered(request, usage.policies()):
        wait = (
            "" if refusal.retry_after is None else math.ceil(refusal.retry_after)
        )  # as in the header Retry-After
        time = local_time(refusal.at).isoformat(timespec="seconds")
        values = {**asdict(refusal), "time": time, "retry_after": wait}
        writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])


def _cell(value: object) -> str:
    """Return the text of a cell, quoted if a spreadsheet would run it as a formula: a client chooses the path."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def explain(group: Group) -> str:
    """Return why requests were refused: by usage, or by an override.

    >>> "5 of 5 in 1 min, refused at 10:31:09 CET on POST /login/, allowed again in 38 s"
    """
    refusal, at = group.latest, group.at
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": duration(refusal.window),
        "time": with_zone(at),
        "request": f"{group.method} {group.path}".strip(),
    }
    if group.block is not None:
        words["reason"] = group.block.reason
        return _("Blocked (%(reason)s), refused at %(time)s on %(request)s") % words
    if refusal.over:
        return (
            _(
                "%(count)d of %(limit)d in %(window)s, over the limit at %(time)s on %(request)s"
            )
            % words
        )
    words["refusal"] = (
        _("%(count)d of %(limit)d in %(window)s, refused at %(time)s on %(request)s")
        % words
    )
    if refusal.retry_after is None:
        return _("%(refusal)s: the cost exceeds the limit") % words
    if (left := refusal.at + refusal.retry_after - timezone.now().timestamp()) > 0:
        return _("%(refusal)s, allowed again in %(wait)s") % {
            **words,
            "wait": duration(left),
        }
    return _("%(refusal)s, allowed again after %(wait)s") % {
        **words,
        "wait": duration(refusal.retry_after),
    }
