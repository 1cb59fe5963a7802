"""The refusal log: filtered, grouped, explained, and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.text import printable
from ..models import Override
from ..operators import usage
from ..operators.formatting import duration, local_time, time_with_zone
from ..operators.identities import describe, encode_address, search
from ..stats import reader
from ..stats.schema import REFUSALS, SITE, Refusal

GROUPS_PER_PAGE = 50
MAX_EXPLAINED = 50  # groups on the page of an identity
CSV_COLUMNS = (
    "time",
    "policy",
    "identity",
    "method",
    "path",
    "count",
    "limit",
    "retry_after",
    "over",
    "source",
    "address",
    "agent",
)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
AGENTS = {
    "browser": gettext_lazy("browser"),
    "bot": gettext_lazy("bot"),
    "program": gettext_lazy("program"),
    "none": gettext_lazy("no user agent"),
}


@dataclass
class Group:
    """Refusals that differ in nothing but their time and numbers."""

    latest: Refusal
    number: int = 0
    first_at: float = 0
    block: Override | None = None  # why the latest was refused, if not by usage

    @property
    def at(self) -> datetime:
        """The time of the latest refusal."""
        return local_time(self.latest.at)

    @property
    def since(self) -> datetime | None:
        """The time of the first refusal; None if there is only one."""
        if self.number == 1:
            return None
        return local_time(self.first_at)

    @property
    def request(self) -> str:
        """What was refused, safe to print."""
        return printable(self.latest.request)

    @property
    def address(self) -> str:
        """The encoded identity of the client's address; empty if it has none."""
        return encode_address(self.latest.address) or ""

    @property
    def agent(self) -> Any:
        """The class of the user agent, translated."""
        return AGENTS.get(self.latest.agent, self.latest.agent)


def group_refusals(refusals: Iterable[Refusal]) -> list[Group]:
    """Group refusals, which are sorted by time, the newest first."""
    groups: dict[Refusal, Group] = {}
    for refusal in refusals:
        key = replace(refusal, at=0, count=0, limit=0, window=0, retry_after=0)
        group = groups.setdefault(key, Group(refusal))
        group.number += 1
        group.first_at = refusal.at

    return list(groups.values())


def find_blocks(groups: Iterable[Group]) -> None:
    """Find the override that blocked the latest refusal of each group, if any."""
    identities: set[str] = set()
    for group in groups:
        identities |= {group.latest.identity, group.address}

    oldest = timezone.now() - timedelta(seconds=REFUSALS.ttl)
    blocks = Override.objects.filter(kind=Override.Kind.BLOCK, until__gt=oldest)
    matching = blocks.matching(identities)
    for group in groups:
        group.block = _find_block(group, matching)


def _find_block(group: Group, matching: dict[str, list[Override]]) -> Override | None:
    """Return the narrowest block: of the identity, or of all clients of the address."""
    refusal = group.latest
    blocks = list(matching[refusal.identity])
    blocks += [block for block in matching[group.address] if block.every_client]

    for block in reversed(blocks):
        applies = block.policy in ("", refusal.policy)
        if applies and block.is_active(group.at):
            return block

    return None


def page(request: HttpRequest) -> dict[str, Any]:
    """Show the refusal log, filtered and grouped."""
    refusals = _filtered(request)
    groups = group_refusals(refusals)
    shown = Paginator(groups, GROUPS_PER_PAGE).get_page(request.GET.get("page"))
    find_blocks(shown)
    labels = describe({group.latest.identity for group in shown})
    over = sum(refusal.over for refusal in refusals)

    return {
        "title": _("Refusals"),
        "groups": [(group, labels[group.latest.identity]) for group in shown],
        "page_of": shown,
        "found": len(refusals),
        "refused": len(refusals) - over,
        "over": over,
        "unlogged": reader.total(reader.hours([SITE], days=1)[SITE]).unlogged,
        "policies": sorted(usage.policies()),
    }


def _filtered(request: HttpRequest) -> list[Refusal]:
    """Return the refusals that the query asks for, the newest first.

    By `policy`, `identity`, `path` and `since`, in minutes.
    """
    query = request.GET
    text = query.get("identity", "").strip()

    return usage.refusals(
        query.get("policy", ""),
        text,
        search(text, request.user),
        query.get("path", ""),
        _oldest(query.get("since", "")),
    )


def _oldest(since: str) -> float:
    """Return the time so many minutes ago; 0 for what is not a number of them."""
    if not since.isdecimal() or len(since) > 8:
        return 0
    return timezone.now().timestamp() - 60 * int(since)


def download(request: HttpRequest) -> HttpResponse:
    """Return the refusal log as CSV, filtered like the page, one line per refusal."""
    headers = {"Content-Disposition": 'attachment; filename="refusals.csv"'}
    response = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    writer = csv.writer(response)
    writer.writerow(CSV_COLUMNS)

    for refusal in _filtered(request):
        values = asdict(refusal)
        values["time"] = local_time(refusal.at).isoformat(timespec="seconds")
        values["retry_after"] = ""
        if refusal.retry_after != math.inf:
            # As in the header Retry-After.
            values["retry_after"] = math.ceil(refusal.retry_after)

        writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])

    return response


def _cell(value: object) -> object:
    """Return the value of a cell, quoted if a spreadsheet would run it as a formula.

    A client chooses the path.
    """
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value


def explained_refusals(
    identities: Container[str], policies: Iterable[str]
) -> list[tuple[Group, str]]:
    """Return the refusals of identities in groups, each with its explanation."""
    refusals = reader.refusals(policies)
    groups = group_refusals(
        refusal for refusal in refusals if refusal.identity in identities
    )
    shown = groups[:MAX_EXPLAINED]
    find_blocks(shown)

    return [(group, _explain(group)) for group in shown]


def _explain(group: Group) -> str:
    """Return why requests were refused: by usage, or by an override.

    >>> "5 of 5 in 1 min, refused at 10:31:09 CET on POST /, allowed again in 38 s"
    """
    refusal = group.latest
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": duration(refusal.window),
        "time": time_with_zone(group.at),
        "request": group.request,
    }
    if group.block is not None:
        words["reason"] = group.block.reason
        return _("Blocked (%(reason)s), refused at %(time)s on %(request)s") % words
    if refusal.over:
        text = _(
            "%(count)d of %(limit)d in %(window)s, over the limit at %(time)s on "
            "%(request)s"
        )

        return text % words

    text = _("%(count)d of %(limit)d in %(window)s, refused at %(time)s on %(request)s")
    refused = text % words
    if refusal.retry_after == math.inf:
        return _("%(refusal)s: the cost exceeds the limit") % {"refusal": refused}

    left = refusal.at + refusal.retry_after - timezone.now().timestamp()
    if left <= 0:
        return refused

    text = _("%(refusal)s, allowed again in %(wait)s")
    return text % {"refusal": refused, "wait": duration(left)}
