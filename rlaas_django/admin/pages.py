"""The pages about clients, overrides and history, and sorted tables for all pages.

One function per page, which returns the context of its template.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import backend
from ..core.keys import NETWORK, EncodedIdentity
from ..limiter.overrides import BLOCK
from ..models import OperatorAction, Override
from ..operators import usage
from ..operators.identities import (
    MAX_SEARCH,
    IdentityLabel,
    describe,
    nearest_users,
    search,
)
from .forms import RESET, ActionForm, action_in_words
from .refusal_log import explained_refusals

Context = dict[str, Any]
Entry = tuple[OperatorAction, IdentityLabel, str]  # what was done, to whom, in words

OVERRIDES_PER_PAGE = 100
CLIENTS_PER_PAGE = 50
MAX_ENTRIES = 200  # of the history
MAX_HISTORY = 20  # entries on the page of an identity


class Column(NamedTuple):
    """A column that rows can be sorted by, under its name in the query.

    A minus before the name reverses the order.
    """

    label: Any
    key: Callable[[Any], Any]  # what rows are sorted by
    highest_first: bool = False

    def is_descending(self, sort: str) -> bool:
        """Return whether the query sorts the highest first."""
        return self.highest_first != sort.startswith("-")


Columns = dict[str, Column]  # by their name in the query

CLIENTS: Columns = {
    "identity": Column(
        gettext_lazy("Identity"),
        lambda row: row.identity.name.lower(),
    ),
    "policy": Column(
        gettext_lazy("Policy"),
        attrgetter("outcome.policy.name"),
    ),
    "count": Column(
        gettext_lazy("Count"),
        attrgetter("outcome.current_count"),
        highest_first=True,
    ),
    "used": Column(
        gettext_lazy("Used"),
        attrgetter("percent"),
        highest_first=True,
    ),
    "remaining": Column(
        gettext_lazy("Remaining"),
        attrgetter("outcome.remaining"),
    ),
    "reset": Column(
        gettext_lazy("Resets in"),
        attrgetter("outcome.reset_after"),
    ),
    "refused": Column(
        gettext_lazy("Refused today"),
        attrgetter("refused_today", "over_today"),
        highest_first=True,
    ),
}


def heads(columns: Columns, sort: str) -> list[dict[str, Any]]:
    """Return for each column its label, what a click sorts by, and its order."""
    return [_head(name, column, sort) for name, column in columns.items()]


def _head(name: str, column: Column, sort: str) -> dict[str, Any]:
    order = ""
    if name == sort.removeprefix("-"):
        order = "ascending"
        if column.is_descending(sort):
            order = "descending"

    next_sort = name
    if name == sort:
        next_sort = f"-{name}"

    return {
        "name": name,
        "label": column.label,
        "sort": next_sort,
        "order": order,
    }


def sort_rows(rows: list[Any], columns: Columns, sort: str) -> None:
    """Sort rows by a column; an unknown one leaves them as they are."""
    column = columns.get(sort.removeprefix("-"))
    if column is not None:
        rows.sort(key=column.key, reverse=column.is_descending(sort))


def clients(request: HttpRequest) -> Context:
    """Show identities with their usage: the watch list, all active, or a search."""
    query = request.GET
    text = query.get("q", "").strip()
    sort = query.get("sort", "")
    policies = usage.policies()
    policy = query.get("policy")
    if policy not in policies:
        policy = None

    if text:
        context = _search(request, text, policy)
    elif query.get("tab") == "active":
        context = _active(query.get("cursor", ""), policy)
    else:
        context = {"tab": "watch", "rows": usage.watch_list(policy)}

    sort_rows(context["rows"], CLIENTS, sort)
    groups = _by_identity(context["rows"])
    per_page = CLIENTS_PER_PAGE
    if context["tab"] == "active":  # which has pages of its own, by SCAN
        per_page = usage.SCAN_COUNT

    return {
        "title": _("Clients"),
        "columns": heads(CLIENTS, sort),
        "q": text,
        "policy": policy,
        "policies": sorted(policies),
        "page_of": Paginator(groups, per_page).get_page(query.get("page")),
        **context,
    }


def _by_identity(rows: list[usage.Row]) -> list[list[usage.Row]]:
    """Return the rows of each identity, in the order of their first ones."""
    groups: dict[str, list[usage.Row]] = {}
    for row in rows:
        groups.setdefault(row.identity.encoded, []).append(row)

    return list(groups.values())


def _active(cursor: str, policy: str | None) -> Context:
    """Show a page of all active counters; a cursor that is not one starts over."""
    position = 0
    if cursor.isdecimal() and len(cursor) < 21:
        position = int(cursor)

    rows, following, scanned = usage.active(position, policy)

    return {
        "tab": "active",
        "rows": rows,
        "cursor": following,
        "scanned": scanned,
    }


def _search(request: HttpRequest, text: str, policy: str | None) -> Context:
    """Show the usage of the identities that match, and those without usage apart."""
    identities = search(text, request.user)
    table = usage.identity_rows(*identities, policy=policy)
    rows = [row for row in table if row.is_used or row.override]

    shown = {row.identity.encoded for row in rows}
    labels = describe(identities).values()
    unused = [
        label
        for label in labels
        if label.encoded not in shown and (label.user or not rows)
    ]

    return {"tab": "search", "rows": rows, "unused": unused, **unknown_user(*labels)}


def unknown_user(*labels: IdentityLabel) -> Context:
    """Return the name of which there is no user, and the names that are like it.

    Nothing where one of the identities is anything else.
    """
    if not labels or not all(label.is_unknown_user for label in labels):
        return {}

    name = labels[0].text
    return {"unknown_user": name, "nearest": nearest_users(name)}


def identity(
    encoded: EncodedIdentity,
    form: ActionForm | None = None,
    action: str = "",
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
    label = labels[encoded]

    is_network = label.kind == NETWORK
    if action not in dict(ActionForm.ACTIONS):
        action = BLOCK if is_network else RESET
    if form is None:
        form = ActionForm(initial={"identity": encoded, "action": action})

    policies = {row.outcome.policy.name for row in rows}
    counted = {encoded, *(row.outcome.identity for row in rows)}

    return {
        "title": label.name,
        "identity": label,
        "rows": shown,
        "unused": unused,
        "refusals": explained_refusals(counted, policies),
        "active": [(override, labels[override.identity]) for override in active[::-1]],
        "history": entries(encoded, MAX_HISTORY),
        "is_network": is_network,
        "form": form,
        **unknown_user(label),
    }


def overrides(request: HttpRequest) -> Context:
    """Show a page of the overrides, and whether Redis is available.

    The active ones, or those that ended; they are read from the database.
    """
    query = request.GET
    text = query.get("q", "").strip()[:MAX_SEARCH]
    tab = "active"
    found = Override.objects.active()
    if query.get("tab") == "ended":
        tab = "ended"
        found = Override.objects.inactive()
    if text:
        found = found.mentioning(text, search(text, request.user))

    page = Paginator(found, OVERRIDES_PER_PAGE).get_page(query.get("page"))
    labels = describe({override.identity for override in page})

    available = True
    try:
        usage.ping()
    except backend.UnavailableError:
        available = False

    return {
        "title": _("Overrides"),
        "tab": tab,
        "q": text,
        "page_of": page,
        "overrides": [(override, labels[override.identity]) for override in page],
        "available": available,
    }


def add_override(request: HttpRequest) -> Context:
    """Find whom a new override is for: also those without usage, and networks."""
    text = request.GET.get("q", "").strip()
    labels = describe(search(text, request.user))

    return {
        "title": _("Add an override"),
        "q": text,
        "found": [*labels.values()],
        **unknown_user(*labels.values()),
    }


def history(_request: HttpRequest) -> Context:
    """Show what operators did, from the database."""
    return {"title": _("History"), "entries": entries()}


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
        history_entries.append((action, label, action_in_words(action, label)))

    return history_entries
