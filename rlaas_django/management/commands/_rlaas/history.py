"""manage.py rlaas history: what operators did."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....models import OperatorAction
from .arguments import identity_of
from .output import Output, local

HELP = (
    "List what operators did in the admin and by commands, and why; the latest first."
)
EXAMPLE = "manage.py rlaas history 203.0.113.9"
FIELDS = ("by", "via", "action", "identity", "policy", "amount", "reason")


def add_arguments(parser: ArgumentParser) -> None:
    """Add whose history, and how much of it."""
    parser.add_argument(
        "identity", nargs="?", help="Only what was done to this identity."
    )
    parser.add_argument("--number", type=int, default=20, help="How many entries; 20.")


def run(options: Namespace, output: Output) -> None:
    """List the actions."""
    found = OperatorAction.objects.all()
    if options.identity:
        found = found.filter(identity=identity_of(options.identity))
    actions = list(found[: max(1, options.number)])
    if output.as_json:
        output.json(
            [
                {
                    "at": action.at.isoformat(),
                    **{name: getattr(action, name) for name in FIELDS},
                    "until": action.until and action.until.isoformat(),
                }
                for action in actions
            ]
        )
    elif not actions:
        output.line("No operator has done anything yet.")
    else:
        rows = [
            (
                f"{local(action.at):%Y-%m-%d %H:%M}",
                action.by,
                action.via,
                f"{action.get_action_display()} {action.amount}".strip(),
                action.identity,
                action.policy or "all",
                f"{local(action.until):%Y-%m-%d %H:%M}" if action.until else "",
                action.reason,
            )
            for action in actions
        ]
        output.table(
            (
                "Time",
                "Operator",
                "Via",
                "Action",
                "Identity",
                "Policy",
                "Until",
                "Reason",
            ),
            rows,
        )
