"""What is found, and how it is told: on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .chart import Chart
from .contender import Failed
from .measure import Spread, figure

Cell = str | Spread | Failed


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


class Goal(NamedTuple):
    """A figure that the project wants to reach."""

    measure: str
    bound: float
    at_most: bool
    measured: Spread | Failed
    best_peer: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        if isinstance(self.measured, Failed):
            return "not measured"
        missed_by = (self.measured.median / self.bound - 1) * (1 if self.at_most else -1)
        return "met" if missed_by <= 0 else f"missed by {missed_by:.1%}"

    def row(self) -> list[str]:
        bound = f"{'≤' if self.at_most else '≥'} {self.bound:g}"
        measured = f"{self.measured}{f'; {self.note}' if self.note else ''}"
        return [self.measure, bound, measured, self.verdict, self.best_peer]


@dataclass
class Findings:
    """What a measurement has found."""

    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


def best(results: Mapping[str, Spread | Failed], most: bool = False) -> str:
    """Of several by name, the best, as a cell says it."""
    known = {name: spread for name, spread in results.items() if isinstance(spread, Spread)}
    if not known:
        return ""
    name = (max if most else min)(known, key=lambda name: known[name].median)
    return f"{figure(known[name].median)} ({name})"


def goals_table(goals: Iterable[Goal]) -> Table:
    columns = ("measure", "goal", "measured", "", "best peer")
    return Table("The goals", columns, [goal.row() for goal in goals])


def text(table: Table) -> str:
    """A table for the terminal."""
    rows = [[_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([table.title, "", *(f"  {line}" for line in lines), *_notes(table)]) + "\n"


def markdown(table: Table, level: int = 3) -> str:
    rule = ["---", *("---:" if _is_number(table, i) else "---" for i in range(1, len(table.columns)))]
    rows = [[_cell(cell).replace("|", "/") for cell in row] for row in (table.columns, rule, *table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"{'#' * level} {table.title}", "", *lines, *_notes(table)]) + "\n"


def _cell(cell: Cell) -> str:
    return "failed" if isinstance(cell, Failed) else str(cell)


def _notes(table: Table) -> list[str]:
    """What is to be said below: the note, and each failure once, with those that it befell."""
    befell: dict[Failed, dict[str, None]] = {}
    for row in table.rows:
        for cell in row:
            if isinstance(cell, Failed):
                befell.setdefault(cell, {})[str(row[0])] = None
    failures = [f"{'; '.join(names)}: {failed}" for failed, names in befell.items()]
    return [line for each in (table.note, *failures) if each for line in ("", each)]


def _is_number(table: Table, column: int) -> bool:
    return all(str(row[column])[:1].isdigit() or isinstance(row[column], Failed) for row in table.rows)


def document(facts: Mapping[str, str], parts: Mapping[str, tuple[str, Findings]]) -> str:
    """RESULTS.md: the machine, the goals, then each part with its tables and charts."""
    goals = [goal for _, findings in parts.values() for goal in findings.goals]
    lines = ["# Results", "", "Written by `make bench`; [how it is measured](README.md).", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", markdown(goals_table(goals), level=2)]
    for name, (meaning, findings) in parts.items():
        lines += [f"## {name}", "", f"{meaning}.", ""]
        lines += [f"![{chart.title}](charts/{chart.name}.svg)\n" for chart in findings.charts]
        lines += map(markdown, findings.tables)
    return "\n".join(lines)
