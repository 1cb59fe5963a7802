"""What each page of the panel shows: one function per page, which returns the context of its template."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..core.keys import EncodedIdentity
from ..core.policy import (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    Policy,
)
from ..models import Override
from ..stats import reader
from . import charts, panel, refusals, servers
from .actions import ActionForm
from .formats import duration, grouped, local_time, printable
from .identities import IdentityLabel, describe, describe_one, search

Context = dict[str, Any]
Query = Mapping[str, str]  # the parameters of a GET request

TOP = 10  # identities with the most refusals
MAX_WATCHED = 200
MAX_REFUSALS = 200
MAX_ENDED = 100
DEGRADED_MINUTES = 5


def overview() -> Context:
    """Show the policies with their charts, the identities refused most, and the state of Redis."""
    policies = panel.policies()
    series = reader.minutes(policies)
    summaries = [_summary(policies[name], series[name]) for name in sorted(policies)]
    summaries.sort(key=lambda each: (-each["hour_refused"], -each["hour_shadowed"], -each["hour_total"]))
    return {
        "title": _("Rate limits"),
        "summaries": summaries,
        "used": [each for each in summaries if each["day_total"]],
        "unused": [each for each in summaries if not each["day_total"]],
        "minute_total": sum(each["minute_total"] for each in summaries),
        "hour_total": sum(each["hour_total"] for each in summaries),
        "hour_refused": sum(each["hour_refused"] for each in summaries),
        "top": _most_refused([name for name, policy in policies.items() if not policy.shadow]),
        "server": servers.server_state(),
        "breakers": servers.open_breakers(),
        "degraded": sum(minute.degraded for name in policies for minute in series[name][-DEGRADED_MINUTES:]),
    }


def _most_refused(policies: list[str]) -> list[tuple[IdentityLabel, str, int]]:
    top = sorted(reader.refused_today(policies).items(), key=lambda item: -item[1])[:TOP]
    labels = describe({identity for (_policy, identity), _number in top})
    return [(labels[identity], policy, number) for (policy, identity), number in top]


class Listing(NamedTuple):
    """The rows of the page of users, from one of its three tabs."""

    tab: str
    rows: list[panel.Row]
    cursor: int = 0
    scanned: int = 0
    unused: Sequence[IdentityLabel] = ()  # matches without usage


def users(query: Query) -> Context:
    """Show identities with their usage: the watch list, all active ones, or a search."""
    policies = panel.policies()
    policy = query.get("policy") if query.get("policy") in policies else None
    text, sort = query.get("q", "").strip(), query.get("sort", "")
    if text:
        listing = _search(text, policy)
    elif query.get("tab") == "active":
        cursor = query.get("cursor", "0")
        page = panel.active(int(cursor) if cursor.isdecimal() and len(cursor) < 21 else 0, policy)
        listing = Listing("active", *page)
    else:
        listing = Listing("watch", panel.watch_list(policy)[:MAX_WATCHED])
    return {
        **listing._asdict(),
        "title": _("Users"),
        "rows": _sorted(listing.rows, sort),
        "columns": _columns(sort),
        "q": text,
        "policy": policy,
        "policies": sorted(policies),
        "query": query,
    }


def _search(text: str, policy: str | None) -> Listing:
    found = search(text)
    rows = [
        row
        for row in panel.identity_rows(*found)
        if policy in (None, row.outcome.policy.name)
        and (row.outcome.current_count or row.refused_today or row.override)
    ]
    others = describe(set(found) - {row.identity.encoded for row in rows}).values()
    unused = [label for label in others if label.user or not rows]
    return Listing("search", rows, unused=sorted(unused, key=lambda label: (label.user is None, label.name)))


def identity(encoded: EncodedIdentity, form: ActionForm | None = None) -> Context:
    """Show the usage, refusals and overrides of one identity, with the form of actions."""
    policies = panel.policies()
    rows = sorted(panel.identity_rows(encoded), key=lambda row: (-row.percent, row.outcome.policy.name))
    found = [each for each in reader.refusals([row.outcome.policy.name for row in rows]) if each.identity == encoded]
    history = list(Override.objects.filter(identity=encoded)[:20])
    label = describe_one(encoded)
    return {
        "title": label.name,
        "identity": label,
        "rows": rows,
        "refusals": [(refusal, refusals.explain(refusal, history)) for refusal in found[:100]],
        "active": [override for override in history if override.is_active()],
        "ended": [override for override in history if not override.is_active()],
        "form": form or ActionForm(policies=policies, initial={"identity": encoded}),
    }


def refusal_log(query: Query) -> Context:
    """Show the refusal log, filtered."""
    policies = panel.policies()
    found = list(refusals.filtered(query, policies))
    shown = found[:MAX_REFUSALS]
    labels = describe({refusal.identity for refusal in shown})
    return {
        "title": _("Refusals"),
        "refusals": [
            {
                "refusal": refusal,
                "identity": labels[refusal.identity],
                "at": local_time(refusal.at),
                "path": printable(refusal.path),
                "retry_after": duration(math.inf if refusal.retry_after is None else refusal.retry_after),
            }
            for refusal in shown
        ],
        "found": len(found),
        "unlogged": sum(minute.unlogged for series in reader.minutes(policies).values() for minute in series),
        "policies": sorted(policies),
        "filters": {name: query.get(name, "") for name in ("policy", "identity", "path", "since")},
        "spans": [("5", _("the last 5 minutes")), ("60", _("the last hour")), ("1440", _("the last day"))],
        "query": query,
    }


def shadow() -> Context:
    """Show what each shadow policy would have refused."""
    policies = {name: policy for name, policy in panel.policies().items() if policy.shadow}
    if not policies:
        servers.ping()  # raises if Redis is unavailable, as the reads below do
    series = reader.minutes(policies)
    ranked: dict[str, list[tuple[int, str]]] = {name: [] for name in sorted(policies)}
    for (name, encoded), number in reader.refused_today(policies).items():
        ranked[name].append((-number, encoded))
    top = {name: sorted(found)[:TOP] for name, found in ranked.items()}
    labels = describe({encoded for found in top.values() for _number, encoded in found})
    summaries = []
    for name, found in ranked.items():
        summary = _summary(policies[name], series[name])
        requests = summary["day_allowed"] + summary["day_shadowed"]
        summary["share"] = 100 * summary["day_shadowed"] / requests if requests else 0
        summary["identities"] = [(labels[encoded], -number) for number, encoded in top[name]]
        summary["identities_count"] = len(found)
        summaries.append(summary)
    return {"title": _("Shadow policies"), "summaries": summaries}


def overrides() -> Context:
    """Show the active overrides and those that ended."""
    active = list(Override.objects.active())
    ended = list(Override.objects.exclude(pk__in=[override.pk for override in active])[:MAX_ENDED])
    labels = describe({override.identity for override in (*active, *ended)})
    now = timezone.now()
    return {
        "title": _("Overrides"),
        "active": [
            (override, labels[override.identity], duration((override.until - now).total_seconds()))
            for override in active
        ],
        "ended": [(override, labels[override.identity]) for override in ended],
        "available": servers.is_available(),
    }


def unavailable(error: Exception, *, acted: bool) -> Context:
    """Show that Redis is unavailable, and that an action was not performed."""
    return {
        "title": _("Redis is unavailable"),
        "error": error,
        "acted": acted,
        "breakers": servers.open_breakers(),
    }


def _summary(policy: Policy, minutes: list[reader.Minute]) -> Context:
    """Return the counts and charts of a policy."""
    hour, day = charts.bars(minutes[-60:], 1), charts.bars(minutes, 15)
    summary: Context = {
        "policy": policy,
        "algo": _algorithm(policy),
        "key": policy.key if isinstance(policy.key, str) else getattr(policy.key, "__name__", repr(policy.key)),
        "hour_bars": [bar for bar in reversed(hour) if bar.total],
        "day_bars": [bar for bar in reversed(charts.bars(minutes, 60)) if bar.total],
    }
    for span, bars in (("minute", hour[-1:]), ("hour", hour), ("day", day)):
        for kind in ("allowed", "refused", "shadowed", "total"):
            summary[f"{span}_{kind}"] = sum(getattr(bar, kind) for bar in bars)
    for span, bars, title in (("hour", hour, _("Last hour")), ("day", day, _("Last day"))):
        label = _("%(span)s, %(policy)s: %(total)s requests, %(refused)s refused") % {
            "span": title,
            "policy": policy,
            "total": grouped(summary[f"{span}_total"]),
            "refused": grouped(summary[f"{span}_refused"]),
        }
        summary[f"{span}_chart"] = charts.chart(bars, label)
        summary[f"{span}_axis"] = charts.axis(bars)
        summary[f"{span}_peak"] = max(bar.total for bar in bars)
    return summary


def _algorithm(policy: Policy) -> str:
    names = {
        FIXED_WINDOW: _("fixed window"),
        SLIDING_WINDOW: _("sliding window"),
        SLIDING_WINDOW_COMPACT: _("sliding window, compact"),
        SLIDING_WINDOW_COUNTER: _("sliding window counter"),
        TOKEN_BUCKET: _("token bucket"),
    }
    return names[policy.algo or conf.config().algo]


class Column(NamedTuple):
    """A column of the page of users: how to sort by it, and whether the highest values come first."""

    label: Any
    key: Callable[[panel.Row], Any]
    descending: bool = False


COLUMNS = {
    "identity": Column(gettext_lazy("Identity"), lambda row: row.identity.name.lower()),
    "policy": Column(gettext_lazy("Policy"), lambda row: row.outcome.policy.name),
    "count": Column(gettext_lazy("Count"), lambda row: -row.outcome.current_count, descending=True),
    "used": Column(gettext_lazy("Used"), lambda row: -row.percent, descending=True),
    "remaining": Column(gettext_lazy("Remaining"), lambda row: row.outcome.remaining),
    "reset": Column(gettext_lazy("Resets in"), lambda row: row.outcome.reset_after),
    "refused": Column(gettext_lazy("Refused today"), lambda row: -row.refused_today, descending=True),
}


def _sorted(rows: list[panel.Row], sort: str) -> list[panel.Row]:
    """Sort by a column; a minus before its name reverses the order."""
    column = COLUMNS.get(sort.removeprefix("-"))
    return sorted(rows, key=column.key, reverse=sort.startswith("-")) if column else rows


def _columns(sort: str) -> list[Context]:
    """Return the column headers: label, what a click sorts by, and the present order."""
    columns = []
    for name, column in COLUMNS.items():
        is_sorted = name == sort.removeprefix("-")
        order = "descending" if column.descending != sort.startswith("-") else "ascending"
        columns.append(
            {
                "name": name,
                "label": column.label,
                "sort": f"-{name}" if sort == name else name,
                "order": order if is_sorted else "",
            }
        )
    return columns
