"""The pages about clients, overrides and history.

One function per page, which returns the context of its template.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _

from .. import backend
from ..core.keys import NETWORK, EncodedIdentity
from ..limiter.overrides import BLOCK
from ..models import OperatorAction, Override
from ..operators import usage
from ..operators.formatting import duration
from ..operators.identities import IdentityLabel, describe, search
from ..stats import reader
from .forms import RESET, ActionForm
from .refusal_log import explain, find_blocks, group_refusals
from .tables import CLIENTS, heads, sort_rows
from .wording import action_in_words

Context = dict[str, Any]

MAX_WATCHED = 200
MAX_ENDED = 100
MAX_ENTRIES = 200  # of the history
MAX_HISTORY = 20  # entries on the page of an identity
MAX_EXPLAINED = 50  # groups of refusals on the page of an identity


def clients(request: HttpRequest) -> Context:
    """Show identities with their usage: the watch list, all active, or a search."""
    query = request.GET
    policies = usage.policies()
    policy = query.get("policy")
    if policy not in policies:
        policy = None
    text = query.get("q", "").strip()
    sort = query.get("sort", "")

    if text:
        context = _search(request, text, policy)
    elif query.get("tab") == "active":
        context = _active(query.get("cursor", ""), policy)
    else:
        context = {"tab": "watch", "rows": usage.watch_list(policy)[:MAX_WATCHED]}
    sort_rows(context["rows"], CLIENTS, sort)
    return {
        "title": _("Clients"),
        "columns": heads(CLIENTS, sort),
        "q": text,
        "policy": policy,
        "policies": sorted(policies),
        "query": query,
        **context,
    }


def _active(cursor: str, policy: str | None) -> Context:
    position = 0
    if cursor.isdecimal() and len(cursor) < 21:
        position = int(cursor)
    rows, following, scanned = usage.active(position, policy)
    return {"tab": "active", "rows": rows, "cursor": following, "scanned": scanned}


def _search(request: HttpRequest, text: str, policy: str | None) -> Context:
    identities = search(text, request.user)
    table = usage.identity_rows(*identities, policy=policy)
    rows = [row for row in table if row.is_used or row.override]
    shown = {row.identity.encoded for row in rows}
    others = describe(set(identities) - shown).values()
    unused = [label for label in others if label.user or not rows]
    unused.sort(key=lambda label: (label.user is None, label.name))
    return {"tab": "search", "rows": rows, "unused": unused}


def identity(
    encoded: EncodedIdentity, form: ActionForm | None = None, action: str = ""
) -> Context:
    """Show the usage, refusals, overrides and history of one identity.

    With a form of actions, of which `action` is preselected.
    """
    rows = usage.identity_rows(encoded)
    rows.sort(key=lambda row: (-row.percent, row.outcome.policy.name))
    shown = []
    unused = []
    for row in rows:
        if row.is_used or (row.override and row.override.policy):
            shown.append(row)
        else:
            unused.append(row)

    active = Override.objects.active().matching([encoded])[encoded]
    labels = describe({encoded, *(override.identity for override in active)})
    is_network = labels[encoded].kind == NETWORK
    if action not in dict(ActionForm.ACTIONS):
        action = BLOCK if is_network else RESET
    if form is None:
        initial = {"identity": encoded, "action": action}
        form = ActionForm(policies=usage.policies(), initial=initial)

    policies = [row.outcome.policy.name for row in rows]
    return {
        "title": labels[encoded].name,
        "identity": labels[encoded],
        "rows": shown,
        "unused": unused,
        "refusals": _explained_refusals(encoded, policies),
        "active": [(override, labels[override.identity]) for override in active[::-1]],
        "history": entries(encoded, MAX_HISTORY),
        "is_network": is_network,
        "form": form,
    }


def _explained_refusals(encoded: str, policies: Iterable[str]) -> list[Any]:
    refusals = reader.refusals(policies)
    groups = group_refusals(
        refusal for refusal in refusals if refusal.identity == encoded
    )
    groups = groups[:MAX_EXPLAINED]
    find_blocks(groups)
    return [(group, explain(group)) for group in groups]


def overrides(_request: HttpRequest) -> Context:
    """Show the active overrides and those that ended, and whether Redis is available.

    They are read from the database.
    """
    active = list(Override.objects.active())
    keys = [override.pk for override in active]
    ended = list(Override.objects.exclude(pk__in=keys)[:MAX_ENDED])
    labels = describe({override.identity for override in (*active, *ended)})
    now = timezone.now()
    available = True
    try:
        usage.ping()
    except backend.UnavailableError:
        available = False
    return {
        "title": _("Overrides"),
        "active": [
            (
                override,
                labels[override.identity],
                duration((override.until - now).total_seconds()),
            )
            for override in active
        ],
        "ended": [(override, labels[override.identity]) for override in ended],
        "available": available,
    }


def add_override(request: HttpRequest) -> Context:
    """Find whom a new override is for: also those without usage, and networks."""
    text = request.GET.get("q", "").strip()
    labels = describe(search(text, request.user)).values()
    # Text that is not the name of a user comes last.
    found = sorted(
        labels,
        key=lambda label: (label.user is None and label.kind == "user", label.name),
    )
    return {"title": _("Add an override"), "q": text, "found": found}


def history(_request: HttpRequest) -> Context:
    """Show what operators did, from the database."""
    return {"title": _("History"), "entries": entries()}


class Entry(NamedTuple):
    """An entry of the history."""

    action: OperatorAction  # who, when, by way of what, and why
    identity: IdentityLabel
    words: str  # what was done


def entries(identity: str = "", limit: int = MAX_ENTRIES) -> list[Entry]:
    """Return what operators did, to one identity or to any, the latest first."""
    actions = OperatorAction.objects.all()
    if identity:
        actions = actions.filter(identity=identity)
    latest = list(actions[:limit])
    labels = describe({action.identity for action in latest})

    history_entries = []
    for action in latest:
        label = labels[action.identity]
        history_entries.append(Entry(action, label, action_in_words(action, label)))
    return history_entries
