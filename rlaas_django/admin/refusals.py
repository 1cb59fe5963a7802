"""The refusal log: filter it, explain an entry in a sentence, and export it as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from ..limiter import overrides
from ..models import Override
from ..stats import reader
from ..stats.schema import Refusal
from .formats import duration, local_time, printable
from .identities import search

MAX_LISTED = 5_000
CSV_COLUMNS = ("time", "policy", "identity", "method", "path", "count", "limit", "retry_after", "shadow")


def filtered(filters: Mapping[str, str], policies: Iterable[str]) -> list[Refusal]:
    """Return the refusals that match the filters `policy`, `identity`, `path` and `since` (minutes), newest first."""
    policy, path, since = (filters.get(name, "") for name in ("policy", "path", "since"))
    oldest = timezone.now().timestamp() - 60 * int(since) if since.isdecimal() and len(since) < 9 else 0
    text = filters.get("identity", "").strip()
    identities = set(search(text))
    return [
        refusal
        for refusal in reader.refusals(policies, limit=MAX_LISTED)
        if policy in ("", refusal.policy)
        and (text in refusal.identity or refusal.identity in identities)
        and path in refusal.path
        and refusal.at >= oldest
    ]


def explain(refusal: Refusal, history: Sequence[Override] = ()) -> str:
    """Return why a request was refused.

    Such as `5 of 5 in 1 min, refused at 10:31:09 on POST /login/, allowed again in 38 s`; `history` is the identity's
    overrides, one of which may have blocked it.
    """
    at = local_time(refusal.at)
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": duration(refusal.window),
        "time": date_format(at, "H:i:s" if at.date() == timezone.localdate() else "j N, H:i:s"),
        "request": f"{printable(refusal.method)} {printable(refusal.path)}",
    }
    for override in history:
        blocks = override.kind == overrides.BLOCK and override.policy in ("", refusal.policy)
        if blocks and override.is_active(at):
            words["reason"] = override.reason
            return _("Blocked (%(reason)s), refused at %(time)s on %(request)s") % words
    if refusal.shadow:
        return _("%(count)d of %(limit)d in %(window)s, would have been refused at %(time)s on %(request)s") % words
    words["refusal"] = _("%(count)d of %(limit)d in %(window)s, refused at %(time)s on %(request)s") % words
    if refusal.retry_after is None:
        return _("%(refusal)s: the cost exceeds the limit") % words
    left = refusal.at + refusal.retry_after - timezone.now().timestamp()
    if left > 0:
        return _("%(refusal)s, allowed again in %(wait)s") % {**words, "wait": duration(left)}
    return _("%(refusal)s, allowed again after %(wait)s") % {**words, "wait": duration(refusal.retry_after)}


class _Echo:
    """A file that returns what is written to it, so that csv.writer.writerow returns the line."""

    def write(self, value: str) -> str:
        return value


def csv_lines(refusals: Iterable[Refusal]) -> Iterator[str]:
    """Yield the refusals as lines of CSV, after a line of column names."""
    writer = csv.writer(_Echo())
    yield writer.writerow(CSV_COLUMNS)
    for refusal in refusals:
        values = {**asdict(refusal), "time": local_time(refusal.at).isoformat()}
        yield writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])


def _cell(value: object) -> str:
    """Return the text of a cell, quoted if a spreadsheet would run it as a formula: a client chooses the path."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
