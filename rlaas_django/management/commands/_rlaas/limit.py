"""manage.py rlaas limit: give an identity a custom limit."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from decimal import Decimal, InvalidOperation

from ....core.policy import PolicyError, Rate
from ....limiter import overrides
from . import overriding
from .arguments import policies_named
from .output import Output

HELP = "Give an identity a custom limit: a number under one policy, or a factor."
EXAMPLE = 'manage.py rlaas limit alice --policy search --limit 500 --for 7d --reason "migration"'


def add_arguments(parser: ArgumentParser) -> None:
    """Add the limit or the factor."""
    overriding.add_arguments(parser)
    amounts = parser.add_mutually_exclusive_group(required=True)
    amounts.add_argument(
        "--limit", type=int, help="The units per window, under one policy."
    )
    amounts.add_argument(
        "--factor", help="By which limits are multiplied, such as 2 or 0.5."
    )


def run(options: Namespace, output: Output) -> None:
    """Set the custom limit."""
    if options.limit is not None:
        policy = policies_named(options.policy).get(options.policy)
        if policy is not None and isinstance(policy.rate, Rate):
            Rate(
                options.limit, policy.window
            )  # PolicyError where it cannot be counted exactly
        overriding.set_override(options, output, overrides.LIMIT, limit=options.limit)
        return
    try:
        factor = Decimal(options.factor)
    except InvalidOperation as error:
        raise PolicyError(
            f"{options.factor!r} is not a factor; write 2 or 0.5."
        ) from error
    overriding.set_override(options, output, overrides.FACTOR, factor=factor)
