"""manage.py rlaas end: end the overrides of an identity."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ....models import Override
from ....operators import actions as operations
from .arguments import add_identity, add_policy, add_reason, identity_of
from .output import Output, Styled

HELP = "End the overrides of an identity or a network: its policies apply again."
EXAMPLE = "manage.py rlaas end 203.0.113.9"


def add_arguments(parser: ArgumentParser) -> None:
    """Add whose overrides end."""
    add_identity(parser)
    add_policy(parser, "Only the override under this policy; otherwise all of them.")
    add_reason(parser, required=False)


def run(options: Namespace, output: Output) -> int:
    """End the overrides; the exit code is 1 when there is none."""
    identity = identity_of(options.identity)
    found = Override.objects.active().filter(identity=identity)
    if options.policy:
        found = found.filter(policy=options.policy)
    ended = list(found)
    for override in ended:
        operations.end_override(
            operations.Operator.of_command(), override, options.reason
        )
    if output.as_json:
        output.json(
            [
                {"identity": each.identity, "policy": each.policy, "kind": each.kind}
                for each in ended
            ]
        )
    for override in () if output.as_json else ended:
        output.line(
            Styled("ended", "SUCCESS"),
            f": {override} under {override.policy or 'every policy'}.",
        )
    if not ended:
        output.warn(f"{identity} has no active override.")
    return 0 if ended else 1
