"""manage.py rlaas show: the usage of an identity, and what applies to it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ....models import Override
from ....operators import usage
from ....operators.identities import describe
from .arguments import add_identity, identity_of
from .output import Output, Styled, duration

HELP = "Show what an identity used under each policy, when it may go on, and which overrides apply."
EXAMPLE = "manage.py rlaas show alice"


def add_arguments(parser: ArgumentParser) -> None:
    """Add who is shown."""
    add_identity(parser)
    parser.add_argument(
        "--all", action="store_true", help="Policies without usage, too."
    )


def run(options: Namespace, output: Output) -> None:
    """Show the usage."""
    identity = identity_of(options.identity)
    rows = [
        row
        for row in usage.identity_rows(identity)
        if options.all or row.outcome.current_count or row.override
    ]
    overrides = Override.objects.active().matching([identity])[identity]
    if output.as_json:
        output.json(
            {
                "identity": identity,
                "policies": [_as_json(row) for row in rows],
                "overrides": [
                    {"kind": each.kind, "policy": each.policy, "reason": each.reason}
                    for each in overrides
                ],
            }
        )
        return
    label = describe([identity])[identity]
    output.line(
        Styled(label.name, "MIGRATE_HEADING"), f"  {label.kind_name}, {identity}"
    )
    if rows:
        output.table(
            ("Policy", ">Used", ">Limit", "", "Resets in", ">Refused today"),
            map(usage_cells, rows),
        )
    else:
        output.line("No current usage.")
    for override in overrides:
        where = f" under {override.policy or 'every policy'} until {override.until:%Y-%m-%d %H:%M %Z}: "
        output.line(
            Styled(override.get_kind_display(), "WARNING"), where, override.reason
        )


def usage_cells(row: usage.Row) -> tuple[object, ...]:
    """Return the cells that `show` and `top` have in common."""
    outcome, style = (
        row.outcome,
        {"full": "ERROR", "high": "WARNING"}.get(row.level, "SUCCESS"),
    )
    left = duration(outcome.reset_after) if outcome.current_count else ""
    used = Styled(outcome.current_count, style)
    return (
        outcome.policy.name,
        used,
        outcome.limit,
        f"{row.percent} %",
        left,
        row.refused_today,
    )


def _as_json(row: usage.Row) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "policy": outcome.policy.name,
        "used": outcome.current_count,
        "limit": outcome.limit,
        "allowed": outcome.allowed,
        "retryAfter": outcome.retry_after,
        "resetAfter": outcome.reset_after,
        "refusedToday": row.refused_today,
        "override": row.override and row.override.kind,
    }
