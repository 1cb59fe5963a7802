"""What each page of the panel shows: one function per page, which returns the context of its template."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, cast

from django.contrib.auth import get_permission_codename, get_user_model
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import backend, conf
from ..core import policy as algorithms
from ..core.keys import EncodedIdentity
from ..core.policy import Policy
from ..core.text import printable
from ..models import Override
from ..stats import reader, schema
from ..stats.schema import Refusal
from ..templatetags.rlaas_panel import with_zone
from . import charts, panel
from .actions import ActionForm
from .text import describe, duration, grouped, local_time, search

Context = dict[str, Any]

TOP = 10  # identities with the most refusals
MAX_WATCHED = 200
MAX_REFUSALS = 200
MAX_FILTERED = 5_000
MAX_ENDED = 100
DEGRADED_MINUTES = 5
CSV_COLUMNS = ("time", "policy", "identity", "method", "path", "count", "limit", "retry_after", "over")
ALGORITHM_NAMES = {
    algorithms.FIXED_WINDOW: gettext_lazy("fixed window"),
    algorithms.SLIDING_WINDOW: gettext_lazy("sliding window"),
    algorithms.SLIDING_WINDOW_COMPACT: gettext_lazy("sliding window, compact"),
    algorithms.SLIDING_WINDOW_COUNTER: gettext_lazy("sliding window counter"),
    algorithms.TOKEN_BUCKET: gettext_lazy("token bucket"),
}


def sees_users(request: HttpRequest) -> bool:
    """Return whether staff may see the names and e-mail addresses of users, and find users by them."""
    options, user = get_user_model()._meta, cast("Any", request.user)
    names = [get_permission_codename(verb, options) for verb in ("view", "change")]
    return any(user.has_perm(f"{options.app_label}.{name}") for name in names)


def overview(_request: HttpRequest) -> Context:
    """Show the policies with their charts, the identities refused most, and the state of Redis."""
    policies = panel.policies()
    series = reader.minutes([schema.SITE, *policies])
    site = series[schema.SITE]
    summaries = [_summary(policies[name], series[name]) for name in sorted(policies)]
    summaries.sort(key=lambda each: (-each["hour_refused"], -each["hour_shadowed"], -each["hour_total"]))
    identities, paths = reader.most_refused(TOP)
    labels = describe(identities)
    return {
        "title": _("Rate limits"),
        "summaries": summaries,
        "used": [each for each in summaries if each["day_total"]],
        "unused": [each for each in summaries if not each["day_total"]],
        "minute_total": site[-1].total,
        "hour_total": sum(minute.total for minute in site[-60:]),
        "hour_refused": sum(minute.refused for minute in site[-60:]),
        "top": [(labels[identity], number) for identity, number in identities.items()],
        "top_paths": [(printable(path), number) for path, number in paths.items()],
        "server": panel.server_state(),
        "breakers": panel.open_breakers(),
        "degraded": sum(minute.degraded for minute in site[-DEGRADED_MINUTES:]),
    }


def clients(request: HttpRequest) -> Context:
    """Show identities with their usage: the watch list, all active ones, or a search."""
    query, policies = request.GET, panel.policies()
    policy = query.get("policy") if query.get("policy") in policies else None
    text, sort = query.get("q", "").strip(), query.get("sort", "")
    context: Context = {
        "title": _("Clients"),
        "columns": [_column(name, label, sort) for name, (label, _key) in COLUMNS.items()],
        "q": text,
        "policy": policy,
        "policies": sorted(policies),
        "query": query,
    }
    if text:
        context |= {"tab": "search", **_search(text, policy, by_email=sees_users(request))}
    elif query.get("tab") == "active":
        cursor = query.get("cursor", "0")
        page = panel.active(int(cursor) if cursor.isdecimal() and len(cursor) < 21 else 0, policy)
        context |= {"tab": "active", **dict(zip(("rows", "cursor", "scanned"), page, strict=True))}
    else:
        context |= {"tab": "watch", "rows": panel.watch_list(policy)[:MAX_WATCHED]}
    if column := COLUMNS.get(sort.removeprefix("-")):
        context["rows"].sort(key=column[1], reverse=sort.startswith("-"))
    return context


def _search(text: str, policy: str | None, *, by_email: bool) -> Context:
    found = search(text, by_email=by_email)
    rows = [
        row
        for row in panel.identity_rows(*found)
        if policy in (None, row.outcome.policy.name)
        and (row.outcome.current_count or row.refused_today or row.override)
    ]
    others = describe(set(found) - {row.identity.encoded for row in rows}).values()
    unused = [label for label in others if label.user or not rows]
    return {"rows": rows, "unused": sorted(unused, key=lambda label: (label.user is None, label.name))}


def identity(encoded: EncodedIdentity, form: ActionForm | None = None) -> Context:
    """Show the usage, refusals and overrides of one identity, with the form of actions."""
    every = sorted(panel.identity_rows(encoded), key=lambda row: (-row.percent, row.outcome.policy.name))
    rows = [row for row in every if row.outcome.current_count or row.refused_today or row.override]
    found = [each for each in reader.refusals([row.outcome.policy.name for row in every]) if each.identity == encoded]
    history = list(Override.objects.filter(identity=encoded)[:20])
    label = describe([encoded])[encoded]
    return {
        "title": label.name,
        "identity": label,
        "rows": rows,
        "unused": [row for row in every if row not in rows],
        "refusals": [(refusal, _explain(refusal, history)) for refusal in found[:100]],
        "active": [override for override in history if override.is_active()],
        "ended": [override for override in history if not override.is_active()],
        "form": form or ActionForm(policies=panel.policies(), initial={"identity": encoded}),
    }


def _explain(refusal: Refusal, history: list[Override]) -> str:
    """Return why a request was refused: by usage, or by one of the identity's overrides.

    >>> "5 of 5 in 1 min, refused at 10:31:09 on POST /login/, allowed again in 38 s"
    """
    at = local_time(refusal.at)
    words = {
        "count": refusal.count,
        "limit": refusal.limit,
        "window": duration(refusal.window),
        "time": with_zone(at),
        "request": f"{printable(refusal.method)} {printable(refusal.path)}",
    }
    for override in history:
        blocks = override.kind == Override.Kind.BLOCK and override.policy in ("", refusal.policy)
        if blocks and override.is_active(at):
            words["reason"] = override.reason
            return _("Blocked (%(reason)s), refused at %(time)s on %(request)s") % words
    if refusal.over:
        return _("%(count)d of %(limit)d in %(window)s, would have been refused at %(time)s on %(request)s") % words
    words["refusal"] = _("%(count)d of %(limit)d in %(window)s, refused at %(time)s on %(request)s") % words
    if refusal.retry_after is None:
        return _("%(refusal)s: the cost exceeds the limit") % words
    if (left := refusal.at + refusal.retry_after - timezone.now().timestamp()) > 0:
        return _("%(refusal)s, allowed again in %(wait)s") % {**words, "wait": duration(left)}
    return _("%(refusal)s, allowed again after %(wait)s") % {**words, "wait": duration(refusal.retry_after)}


def refusal_log(request: HttpRequest) -> Context:
    """Show the refusal log, filtered."""
    query, policies = request.GET, panel.policies()
    found = _filtered(request, policies)
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
        "unlogged": sum(hour.unlogged for hour in reader.hours([schema.SITE], days=1)[schema.SITE]),
        "policies": sorted(policies),
        "filters": {name: query.get(name, "") for name in ("policy", "identity", "path", "since")},
        "spans": [("5", _("the last 5 minutes")), ("60", _("the last hour")), ("1440", _("the last day"))],
        "query": query,
    }


def _filtered(request: HttpRequest, policies: Iterable[str]) -> list[Refusal]:
    """Return the refusals that match `policy`, `identity`, `path` and `since` (minutes) of the query, newest first."""
    query = request.GET
    policy, path, since = (query.get(name, "") for name in ("policy", "path", "since"))
    oldest = timezone.now().timestamp() - 60 * int(since) if since.isdecimal() and len(since) < 9 else 0
    text = query.get("identity", "").strip()
    identities = set(search(text, by_email=sees_users(request)))
    return [
        refusal
        for refusal in reader.refusals([policy] if policy in policies else [schema.SITE], limit=MAX_FILTERED)
        if policy in ("", refusal.policy)
        and (text in refusal.identity or refusal.identity in identities)
        and path in refusal.path
        and refusal.at >= oldest
    ]


def write_csv(file: Any, request: HttpRequest) -> None:
    """Write the refusal log as CSV, filtered like the page."""
    writer = csv.writer(file)
    writer.writerow(CSV_COLUMNS)
    for refusal in _filtered(request, panel.policies()):
        wait = "" if refusal.retry_after is None else math.ceil(refusal.retry_after)  # as in the header Retry-After
        time = local_time(refusal.at).isoformat(timespec="seconds")
        values = {**asdict(refusal), "time": time, "retry_after": wait}
        writer.writerow([_cell(values[column]) for column in CSV_COLUMNS])


def _cell(value: object) -> str:
    """Return the text of a cell, quoted if a spreadsheet would run it as a formula: a client chooses the path."""
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def shadow(_request: HttpRequest) -> Context:
    """Show what each shadow policy would have refused."""
    policies = {name: policy for name, policy in panel.policies().items() if policy.shadow}
    if not policies:
        panel.ping()  # raises if Redis is unavailable, as the reads below do
    series = reader.minutes(policies)
    ranked = reader.refused_identities(sorted(policies))
    labels = describe({encoded for found in ranked.values() for encoded in list(found)[:TOP]})
    summaries = []
    for name, found in ranked.items():
        summary = _summary(policies[name], series[name])
        summary["share"] = 100 * summary["day_shadowed"] / ((summary["day_allowed"] + summary["day_shadowed"]) or 1)
        summary["identities"] = [(labels[encoded], number) for encoded, number in list(found.items())[:TOP]]
        summary["identities_count"] = len(found)
        summaries.append(summary)
    return {"title": _("Shadow policies"), "summaries": summaries}


def overrides(_request: HttpRequest) -> Context:
    """Show the active overrides and those that ended, from the database, and whether Redis is available."""
    active = list(Override.objects.active())
    ended = list(Override.objects.exclude(pk__in=[override.pk for override in active])[:MAX_ENDED])
    labels = describe({override.identity for override in (*active, *ended)})
    now = timezone.now()
    try:
        panel.ping()
        available = True
    except backend.UnavailableError:
        available = False
    return {
        "title": _("Overrides"),
        "active": [(each, labels[each.identity], duration((each.until - now).total_seconds())) for each in active],
        "ended": [(each, labels[each.identity]) for each in ended],
        "available": available,
    }


def _summary(policy: Policy, minutes: list[reader.Counts]) -> Context:
    """Return the counts and charts of a policy."""
    hour, day = charts.bars(minutes[-60:], 1), charts.bars(minutes, 15)
    summary: Context = {
        "policy": policy,
        "rate": panel.PolicyRow(policy, []).rate or _("depends on the request"),
        "algo": ALGORITHM_NAMES[policy.algo or conf.config().algo],
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
        summary[f"{span}_peak"] = max(bar.total for bar in bars)
    return summary


COLUMNS: dict[str, tuple[Any, Callable[[panel.Row], Any]]] = {  # label, and what the page of users is sorted by
    "identity": (gettext_lazy("Identity"), lambda row: row.identity.name.lower()),
    "policy": (gettext_lazy("Policy"), lambda row: row.outcome.policy.name),
    "count": (gettext_lazy("Count"), lambda row: -row.outcome.current_count),
    "used": (gettext_lazy("Used"), lambda row: -row.percent),
    "remaining": (gettext_lazy("Remaining"), lambda row: row.outcome.remaining),
    "reset": (gettext_lazy("Resets in"), lambda row: row.outcome.reset_after),
    "refused": (gettext_lazy("Refused today"), lambda row: -row.refused_today),
}
HIGHEST_FIRST = ("count", "used", "refused")


def _column(name: str, label: str, sort: str) -> Context:
    """Return a column header: its label, what a click sorts by, and the present order; a minus reverses it."""
    order = "descending" if (name in HIGHEST_FIRST) != sort.startswith("-") else "ascending"
    return {
        "name": name,
        "label": label,
        "sort": f"-{name}" if sort == name else name,
        "order": order if name == sort.removeprefix("-") else "",
    }
