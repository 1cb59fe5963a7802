"""The pages about policies: the overview, one policy, and the shadow policies."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.policy import Policy, Rate
from ..core.text import printable
from ..operators import usage
from ..operators.identities import describe
from ..operators.usage import PolicyRow
from ..stats import reader
from ..stats.reader import Counts, total
from ..stats.schema import SITE
from . import charts
from .tables import Column, heads, sort_rows
from .text import grouped

Context = dict[str, Any]

TOP = 5  # identities and paths with the most refusals, of the site
TOP_OF_POLICY = 20
DEGRADED_MINUTES = 5


class Span(NamedTuple):
    """How a span of time of `usage.SPANS` is shown."""

    name: str
    label: Any
    bar: Any  # what a bar of the chart stands for
    per_bar: int  # minutes, or hours of a week
    per_sparkline_bar: int  # minutes of an hour, or hours
    time_format: str


SPANS = {
    "hour": Span(
        "hour", gettext_lazy("Last hour"), gettext_lazy("per minute"), 1, 2, "H:i"
    ),
    "day": Span(
        "day", gettext_lazy("Last day"), gettext_lazy("per 15 minutes"), 15, 1, "H:i"
    ),
    "week": Span(
        "week", gettext_lazy("Last week"), gettext_lazy("per hour"), 1, 6, "D H:i"
    ),
}
COLUMNS = {
    "policy": Column(
        gettext_lazy("Policy"), lambda row: (row.policy.label.lower(), row.policy.name)
    ),
    "rate": Column(gettext_lazy("Rate"), lambda row: _per_second(row.policy)),
    "requests": Column(
        gettext_lazy("Requests"), lambda row: -row.counts.total, highest_first=True
    ),
    "allowed": Column(
        gettext_lazy("Allowed"), lambda row: -row.counts.allowed, highest_first=True
    ),
    "refused": Column(
        gettext_lazy("Refused"),
        lambda row: (-row.counts.refused, -row.counts.over),
        highest_first=True,
    ),
    "share": Column(gettext_lazy("Share"), lambda row: -row.share, highest_first=True),
}


def _per_second(policy: Policy) -> float:
    return (
        policy.rate.limit / policy.rate.window if isinstance(policy.rate, Rate) else 0
    )


def overview(request: HttpRequest) -> Context:
    """Show the whole site in a chart, what was refused most, the policies in a table, and the state of Redis."""
    query, span = request.GET, _span(request)
    text, sort = query.get("q", "").strip(), query.get("sort", "")
    sort = sort if sort.removeprefix("-") in COLUMNS else "policy"
    every = usage.policy_table(span.name)
    rows = [
        row
        for row in every
        if text.lower() in f"{row.policy.label} {row.policy.name}".lower()
    ]
    sort_rows(rows, COLUMNS, sort)
    site = usage.series("hour")
    identities, paths = reader.most_refused(TOP)
    labels = describe(identities)
    return {
        "title": _("Rate limits"),
        "query": query,
        "q": text,
        **_chart(span, _("the whole site"), SITE),
        "minute": site[-1],
        "hour": total(site),
        "rows": [(row, _sparkline(row, span)) for row in rows],
        "columns": heads(COLUMNS, sort),
        "policies_count": len(every),
        "identities": [
            (labels[identity], number) for identity, number in identities.items()
        ],
        "paths": [(printable(path), number) for path, number in paths.items()],
        "server": usage.server_state(),
        "breakers": usage.open_breakers(),
        "degraded": sum(minute.degraded for minute in site[-DEGRADED_MINUTES:]),
    }


def policy(request: HttpRequest) -> Context | None:
    """Show one policy: its numbers, its chart, and the identities that it refused most. None if there is none."""
    found = usage.policies().get(request.GET.get("policy", ""))
    if found is None:
        return None
    hour, week = usage.series("hour", found.name), usage.series("week", found.name)
    identities = reader.refused_identities([found.name], TOP_OF_POLICY)[found.name]
    labels = describe(identities)
    return {
        "title": found.label,
        "query": request.GET,
        **_chart(_span(request), found.label, found.name),
        "row": PolicyRow(found, week),
        "algorithm": _(ALGORITHMS[found.algo or conf.config().algo].label),
        "key": found.key
        if isinstance(found.key, str)
        else getattr(found.key, "__name__", repr(found.key)),
        "counts": [
            (_("this minute"), hour[-1]),
            (_("last hour"), total(hour)),
            (_("last day"), total(week[-24:])),
            (_("last week"), total(week)),
        ],
        "identities": [
            (labels[identity], number) for identity, number in identities.items()
        ],
    }


def shadow(_request: HttpRequest) -> Context:
    """Show what each shadow policy would have refused in the last day."""
    rows = [row for row in usage.policy_table("day") if row.policy.shadow]
    identities = reader.refused_identities(row.policy.name for row in rows)
    if not rows:
        usage.ping()  # raises if Redis is unavailable; without policies nothing else calls it
    return {
        "title": _("Shadow policies"),
        "rows": [
            (row, _sparkline(row, SPANS["day"]), len(identities[row.policy.name]))
            for row in rows
        ],
    }


def _span(request: HttpRequest) -> Span:
    return SPANS.get(request.GET.get("span", ""), SPANS["hour"])


def _sparkline(row: PolicyRow, span: Span) -> SafeString:
    return charts.sparkline(charts.add_up(row.series, span.per_sparkline_bar))


def _chart(span: Span, subject: str, name: str) -> Context:
    """Return a chart for the template: of the site or of a policy."""
    series: list[Counts] = charts.add_up(usage.series(span.name, name), span.per_bar)
    bars = charts.bars(series, span.time_format)
    sums = total(series)
    label = _("%(span)s, %(subject)s: %(total)s requests, %(refused)s refused") % {
        "span": span.label,
        "subject": subject,
        "total": grouped(sums.total),
        "refused": grouped(sums.refused),
    }
    return {
        "span": span,
        "spans": [(each.name, each.label, each is span) for each in SPANS.values()],
        "chart": charts.chart(bars, label),
        "bars": [bar for bar in reversed(bars) if bar.counts.total],
        "total": sums,
    }
