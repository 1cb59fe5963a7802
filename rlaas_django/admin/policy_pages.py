"""The pages about policies: the overview, one policy, and the shadow policies."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from django.http import Http404, HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.policy import Rate
from ..core.text import printable
from ..operators import usage
from ..operators.formatting import grouped
from ..operators.identities import IdentityLabel, describe
from ..operators.usage import PolicyRow
from ..stats import reader, schema
from ..stats.reader import total
from ..stats.schema import SITE
from . import charts
from .pages import Column, Columns, Context, heads, sort_rows

TOP = 5  # identities and paths with the most refusals, of the site
TOP_OF_POLICY = 20
DEGRADED_MINUTES = 5


class Span(NamedTuple):
    """How a span of time is shown."""

    name: str
    label: Any
    bar: Any  # what a bar of the chart stands for
    per_bar: int  # minutes, or hours of a week
    per_sparkline_bar: int  # minutes of an hour, or hours
    time_format: str


HOUR = Span(
    "hour",
    gettext_lazy("Last hour"),
    gettext_lazy("per minute"),
    per_bar=1,
    per_sparkline_bar=2,
    time_format="H:i",
)
DAY = Span(
    "day",
    gettext_lazy("Last day"),
    gettext_lazy("per 15 minutes"),
    per_bar=15,
    per_sparkline_bar=1,
    time_format="H:i",
)
WEEK = Span(
    "week",
    gettext_lazy("Last week"),
    gettext_lazy("per hour"),
    per_bar=1,
    per_sparkline_bar=6,
    time_format="D H:i",
)
SPANS = {span.name: span for span in (HOUR, DAY, WEEK)}


def _per_second(row: PolicyRow) -> float:
    rate = row.policy.rate
    if not isinstance(rate, Rate):
        return 0
    return rate.limit / rate.window


POLICIES: Columns = {
    "policy": Column(
        gettext_lazy("Policy"),
        attrgetter("policy.name"),
    ),
    "rate": Column(
        gettext_lazy("Rate"),
        _per_second,
    ),
    "requests": Column(
        gettext_lazy("Requests"),
        attrgetter("counts.total"),
        highest_first=True,
    ),
    "allowed": Column(
        gettext_lazy("Allowed"),
        attrgetter("counts.allowed"),
        highest_first=True,
    ),
    "refused": Column(
        gettext_lazy("Refused"),
        attrgetter("counts.refused", "counts.over", "counts.total"),
        highest_first=True,
    ),
    "other": Column(
        gettext_lazy("Refused by another policy"),
        attrgetter("counts.other"),
        highest_first=True,
    ),
    "over": Column(
        gettext_lazy("Over the limit, not refused"),
        attrgetter("counts.over"),
        highest_first=True,
    ),
    "degraded": Column(
        gettext_lazy("Decided without Redis"),
        attrgetter("counts.degraded"),
        highest_first=True,
    ),
    "share": Column(
        gettext_lazy("Refused or over, of requests"),
        attrgetter("share"),
        highest_first=True,
    ),
}


def overview(request: HttpRequest) -> Context:
    """Show the whole site, its policies, and the state of Redis."""
    span = _span(request)
    text = request.GET.get("q", "").strip()
    sort = request.GET.get("sort", "")
    if sort.removeprefix("-") not in POLICIES:
        sort = "refused"

    table = usage.policy_table(span.name)
    rows = [row for row in table if text.lower() in row.policy.name.lower()]
    sort_rows(rows, POLICIES, sort)

    policies_total = total([row.counts for row in table])
    columns = dict(POLICIES)
    if not policies_total.degraded:
        del columns["degraded"]

    site = usage.series("hour")
    last_minutes = site[-DEGRADED_MINUTES:]
    identities, paths = reader.most_refused(TOP)

    return {
        "title": _("Rate limits"),
        "q": text,
        **_chart(span, _("the whole site"), SITE),
        "minute": site[-1],
        "hour": total(site),
        "rows": [(row, _sparkline(row, span)) for row in rows],
        "columns": heads(columns, sort),
        "policies_count": len(table),
        "policies_total": policies_total,
        "identities": _with_labels(identities),
        "paths": [(printable(path), number) for path, number in paths.items()],
        "server": usage.server_state(),
        "unavailable_servers": usage.unavailable_servers(),
        "degraded": total(last_minutes).degraded,
    }


def policy(request: HttpRequest) -> Context:
    """Show one policy: its numbers, and whom it refused most."""
    shown = usage.policies().get(request.GET.get("policy", ""))
    if shown is None:
        raise Http404

    name = shown.name
    hour = usage.series("hour", name)
    week = usage.series("week", name)
    refused, over = (
        reader.refused_identities([name], TOP_OF_POLICY, statistic)[name]
        for statistic in (schema.IDENTITIES, schema.OVER_LIMIT)
    )

    algorithm = ALGORITHMS[shown.algo or conf.config().algo]
    key = shown.key
    if not isinstance(key, str):
        key = getattr(key, "__name__", repr(key))

    return {
        "title": name,
        **_chart(_span(request), name, name),
        "row": PolicyRow(shown, week),
        "algorithm": _(algorithm.label),
        "key": key,
        "counts": [
            (_("this minute"), hour[-1]),
            (_("last hour"), total(hour)),
            (_("last day"), total(week[-24:])),
            (_("last week"), total(week)),
        ],
        "identities": _with_labels(refused),
        "over": _with_labels(over),
    }


def shadow(_request: HttpRequest) -> Context:
    """Show what each shadow policy would have refused in the last day."""
    table = [row for row in usage.policy_table("day") if row.policy.shadow]
    names = [row.policy.name for row in table]
    identities = reader.refused_identities(names, statistic=schema.OVER_LIMIT)
    rows = []
    for row in table:
        number = len(identities[row.policy.name])
        rows.append((row, _sparkline(row, DAY), number))

    return {"title": _("Shadow policies"), "rows": rows}


def _with_labels(identities: Mapping[str, int]) -> list[tuple[IdentityLabel, int]]:
    """Return identities and how often they were refused, as labels."""
    labels = describe(identities)
    return [(labels[identity], number) for identity, number in identities.items()]


def _span(request: HttpRequest) -> Span:
    return SPANS.get(request.GET.get("span", ""), HOUR)


def _sparkline(row: PolicyRow, span: Span) -> SafeString:
    series = charts.add_up(row.series, span.per_sparkline_bar)
    return charts.sparkline(series)


def _chart(span: Span, subject: str, name: str) -> Context:
    """Return a chart for the template: of the site or of a policy."""
    series = charts.add_up(usage.series(span.name, name), span.per_bar)
    bars = charts.bars(series, span.time_format)
    counts = total(series)

    text = _("%(span)s, %(subject)s: %(total)s requests, %(refused)s refused")
    label = text % {
        "span": span.label,
        "subject": subject,
        "total": grouped(counts.total),
        "refused": grouped(counts.refused),
    }

    return {
        "span": span,
        "spans": SPANS.values(),
        "chart": charts.chart(bars, label),
        "bars": [bar for bar in reversed(bars) if bar.counts.total],
        "total": counts,
    }
