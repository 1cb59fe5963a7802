"""manage.py rlaas overrides: who is blocked, exempt, or has a custom limit."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....models import Override
from ....operators.identities import describe
from .output import Output, local

HELP = "List the active overrides: who is blocked, exempt, or has a custom limit, until when, and why."
EXAMPLE = "manage.py rlaas overrides --kind block"


def add_arguments(parser: ArgumentParser) -> None:
    """Add which ones."""
    parser.add_argument(
        "--kind", choices=Override.Kind.values, help="Only overrides of this kind."
    )


def run(options: Namespace, output: Output) -> None:
    """List the overrides, the latest first."""
    active = Override.objects.active()
    found = list(active.filter(kind=options.kind) if options.kind else active)
    if output.as_json:
        output.json([_as_json(each) for each in found])
    elif not found:
        output.line("No override is active.")
    else:
        labels = describe({each.identity for each in found})
        rows = [
            (
                labels[each.identity].argument,
                f"{each.get_kind_display()} {each.amount_text}".strip(),
                each.policy or "all",
                f"{local(each.until):%Y-%m-%d %H:%M}",
                each.created_by,
                each.reason,
            )
            for each in found
        ]
        output.table(
            ("Identity", "Override", "Policy", "Until", "Operator", "Reason"), rows
        )


def _as_json(override: Override) -> dict[str, object]:
    return {
        "identity": override.identity,
        "kind": override.kind,
        "policy": override.policy,
        "amount": override.amount_text,
        "everyClient": override.every_client,
        "until": override.until.isoformat(),
        "by": override.created_by,
        "reason": override.reason,
    }
