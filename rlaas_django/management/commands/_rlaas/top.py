"""manage.py rlaas top: the identities that use most of their limits."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....operators import usage
from .arguments import add_policy, policies_named
from .output import Output
from .show import usage_cells

HELP = "List the identities that are over a limit or near it, the highest usage first."
EXAMPLE = "manage.py rlaas top --policy login"


def add_arguments(parser: ArgumentParser) -> None:
    """Add which ones, and how many."""
    add_policy(parser, "Under this policy only.")
    parser.add_argument("--number", type=int, default=20, help="How many; 20.")


def run(options: Namespace, output: Output) -> None:
    """List them once."""
    policies_named(options.policy)
    rows = usage.watch_list(options.policy or None)[: max(1, options.number)]
    if output.as_json:
        output.json([as_json(row) for row in rows])
    elif rows:
        print_rows(rows, output)
    else:
        output.line("No identity is near a limit.")


def as_json(row: usage.Row) -> dict[str, object]:
    """Return a row as JSON."""
    outcome = row.outcome
    return {
        "identity": outcome.identity,
        "policy": outcome.policy.name,
        "used": outcome.current_count,
        "limit": outcome.limit,
        "refusedToday": row.refused_today,
        "override": row.override and row.override.kind,
    }


def print_rows(rows: list[usage.Row], output: Output) -> None:
    """Print a table."""
    cells = [(row.identity.argument, *usage_cells(row)) for row in rows]
    output.table(
        ("Identity", "Policy", ">Used", ">Limit", "", "Resets in", ">Refused today"),
        cells,
    )
