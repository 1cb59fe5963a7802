"""Tables that are sorted by a click on the head of a column."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from django.utils.translation import gettext_lazy as _

from ..core.policy import Rate
from ..operators.usage import PolicyRow


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


def _per_second(row: PolicyRow) -> float:
    rate = row.policy.rate
    if not isinstance(rate, Rate):
        return 0
    return rate.limit / rate.window


Columns = dict[str, Column]

CLIENTS: Columns = {
    "identity": Column(_("Identity"), lambda row: row.identity.name.lower()),
    "policy": Column(_("Policy"), attrgetter("outcome.policy.name")),
    "count": Column(
        _("Count"), attrgetter("outcome.current_count"), highest_first=True
    ),
    "used": Column(_("Used"), attrgetter("percent"), highest_first=True),
    "remaining": Column(_("Remaining"), attrgetter("outcome.remaining")),
    "reset": Column(_("Resets in"), attrgetter("outcome.reset_after")),
    "refused": Column(
        _("Refused today"), attrgetter("refused_today"), highest_first=True
    ),
}
POLICIES: Columns = {
    "policy": Column(
        _("Policy"), lambda row: (row.policy.label.lower(), row.policy.name)
    ),
    "rate": Column(_("Rate"), _per_second),
    "requests": Column(_("Requests"), attrgetter("counts.total"), highest_first=True),
    "allowed": Column(_("Allowed"), attrgetter("counts.allowed"), highest_first=True),
    "refused": Column(
        _("Refused"),
        attrgetter("counts.refused", "counts.over"),
        highest_first=True,
    ),
    "share": Column(_("Share"), attrgetter("share"), highest_first=True),
}


def heads(columns: Columns, sort: str) -> list[dict[str, Any]]:
    """Return for each column its label, what a click sorts by, and its order."""
    table_heads = []
    for name, column in columns.items():
        order = ""
        if name == sort.removeprefix("-"):
            order = "descending" if column.is_descending(sort) else "ascending"
        table_heads.append(
            {
                "name": name,
                "label": column.label,
                "sort": f"-{name}" if sort == name else name,
                "order": order,
            }
        )
    return table_heads


def sort_rows(rows: list[Any], columns: Columns, sort: str) -> None:
    """Sort rows by a column; an unknown one leaves them as they are."""
    column = columns.get(sort.removeprefix("-"))
    if column is not None:
        rows.sort(key=column.key, reverse=column.is_descending(sort))
