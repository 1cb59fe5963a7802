"""The pages about clients and what operators did: one function per page, which returns the context of its template."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import backend
from ..core.keys import NETWORK, EncodedIdentity
from ..limiter.overrides import BLOCK
from ..models import Override
from ..operators import usage
from ..operators.identities import describe, duration, search
from ..stats import reader
from .actions import ActionForm
from .history import entries
from .refusal_log import explain, find_blocks, group
from .tables import Column, heads, sort_rows
from .text import sees_users

Context = dict[str, Any]

MAX_WATCHED = 200
MAX_ENDED = 100
MAX_HISTORY = 20  # actions on the page of an identity
MAX_EXPLAINED = 50  # groups of refusals on the page of an identity
COLUMNS = {
    "identity": Column(gettext_lazy("Identity"), lambda row: row.identity.name.lower()),
    "policy": Column(gettext_lazy("Policy"), lambda row: row.outcome.policy.name),
    "count": Column(
        gettext_lazy("Count"),
        lambda row: -row.outcome.current_count,
        highest_first=True,
    ),
    "used": Column(gettext_lazy("Used"), lambda row: -row.percent, highest_first=True),
    "remaining": Column(gettext_lazy("Remaining"), lambda row: row.outcome.remaining),
    "reset": Column(gettext_lazy("Resets in"), lambda row: row.outcome.reset_after),
    "refused": Column(
        gettext_lazy("Refused today"),
        lambda row: -row.refused_today,
        highest_first=True,
    ),
}


def clients(request: HttpRequest) -> Context:
    """Show identities with their usage: the watch list, all active ones, or a search."""
    query, policies = request.GET, usage.policies()
    policy = query.get("policy") if query.get("policy") in policies else None
    text, sort = query.get("q", "").strip(), query.get("sort", "")
    context: Context = {
        "title": _("Clients"),
        "columns": heads(COLUMNS, sort),
        "q": text,
        "policy": policy,
        "policies": sorted(policies),
        "query": query,
    }
    if text:
        context |= {
            "tab": "search",
            **_search(text, policy, by_email=sees_users(request)),
        }
    elif query.get("tab") == "active":
        cursor = query.get("cursor", "0")
        page = usage.active(
            int(cursor) if cursor.isdecimal() and len(cursor) < 21 else 0, policy
        )
        context |= {
            "tab": "active",
            **dict(zip(("rows", "cursor", "scanned"), page, strict=True)),
        }
    else:
        context |= {"tab": "watch", "rows": usage.watch_list(policy)[:MAX_WATCHED]}
    sort_rows(context["rows"], COLUMNS, sort)
    return context


def _search(text: str, policy: str | None, *, by_email: bool) -> Context:
    found = search(text, by_email=by_email)
    rows = [
        row
        for row in usage.identity_rows(*found)
        if policy in (None, row.outcome.policy.name) and (_is_used(row) or row.override)
    ]
    others = describe(set(found) - {row.identity.encoded for row in rows}).values()
    unused = [label for label in others if label.user or not rows]
    return {
        "rows": rows,
        "unused": sorted(unused, key=lambda label: (label.user is None, label.name)),
    }


def identity(
    encoded: EncodedIdentity, form: ActionForm | None = None, action: str = ""
) -> Context:
    """Show the usage, refusals, overrides and history of one identity, with the form of actions; `action` is chosen."""
    every = sorted(
        usage.identity_rows(encoded),
        key=lambda row: (-row.percent, row.outcome.policy.name),
    )
    rows = [
        row
        for row in every
        if _is_used(row) or (row.override is not None and row.override.policy)
    ]
    refusals = [
        each
        for each in reader.refusals(row.outcome.policy.name for row in every)
        if each.identity == encoded
    ]
    groups = group(refusals)[:MAX_EXPLAINED]
    find_blocks(groups)
    active = Override.objects.active().matching([encoded])[encoded]
    labels = describe({encoded, *(override.identity for override in active)})
    is_network = labels[encoded].kind == NETWORK
    chosen = (
        action
        if action in dict(ActionForm.ACTIONS)
        else BLOCK
        if is_network
        else ActionForm.RESET
    )
    return {
        "title": labels[encoded].name,
        "identity": labels[encoded],
        "rows": rows,
        "unused": [row for row in every if row not in rows],
        "refusals": [(each, explain(each)) for each in groups],
        "active": [
            (override, labels[override.identity]) for override in reversed(active)
        ],
        "history": entries(encoded, MAX_HISTORY),
        "is_network": is_network,
        "form": form
        or ActionForm(
            policies=usage.policies(), initial={"identity": encoded, "action": chosen}
        ),
    }


def _is_used(row: usage.Row) -> bool:
    return bool(row.outcome.current_count or row.refused_today)


def overrides(_request: HttpRequest) -> Context:
    """Show the active overrides and those that ended, from the database, and whether Redis is available."""
    active = list(Override.objects.active())
    ended = list(
        Override.objects.exclude(pk__in=[override.pk for override in active])[
            :MAX_ENDED
        ]
    )
    labels = describe({override.identity for override in (*active, *ended)})
    now = timezone.now()
    try:
        usage.ping()
        available = True
    except backend.UnavailableError:
        available = False
    return {
        "title": _("Overrides"),
        "active": [
            (each, labels[each.identity], duration((each.until - now).total_seconds()))
            for each in active
        ],
        "ended": [(each, labels[each.identity]) for each in ended],
        "available": available,
    }


def add_override(request: HttpRequest) -> Context:
    """Find whom a new override is for: also those without usage, and networks."""
    text = request.GET.get("q", "").strip()
    labels = describe(search(text, by_email=sees_users(request))).values()
    found = sorted(
        labels,
        key=lambda label: (label.user is None and label.kind == "user", label.name),
    )
    return {"title": _("Add an override"), "q": text, "found": found}


def history(_request: HttpRequest) -> Context:
    """Show what operators did, from the database."""
    return {"title": _("History"), "entries": entries()}
