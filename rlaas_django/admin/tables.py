"""Tables that are sorted by a click on the head of a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column that rows can be sorted by; a minus before its name in the query reverses the order."""

    label: Any
    key: Callable[[Any], Any]  # what rows are sorted by
    highest_first: bool = False  # then the key is negative


Columns = Mapping[str, Column]


def heads(columns: Columns, sort: str) -> list[dict[str, Any]]:
    """Return the head of each column: its label, what a click sorts by, and the present order."""
    return [
        {
            "name": name,
            "label": column.label,
            "sort": f"-{name}" if sort == name else name,
            "order": _order(column, sort) if name == sort.removeprefix("-") else "",
        }
        for name, column in columns.items()
    ]


def sort_rows(rows: list[Any], columns: Columns, sort: str) -> None:
    """Sort rows by a column; an unknown one leaves them as they are."""
    if column := columns.get(sort.removeprefix("-")):
        rows.sort(key=column.key, reverse=sort.startswith("-"))


def _order(column: Column, sort: str) -> str:
    return "descending" if column.highest_first != sort.startswith("-") else "ascending"
