"""What `block`, `exempt` and `limit` have in common: set an override, and say what it does to others."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.utils import timezone

from ....core.policy import PolicyError
from ....models import Override
from ....operators import actions as operations
from .arguments import (
    add_identity,
    add_policy,
    add_reason,
    duration,
    identity_of,
    policies_named,
)
from .output import Output, Styled

DAY = timedelta(days=1)


def add_arguments(parser: ArgumentParser) -> None:
    """Add whom it is for, under which policy, for how long, and why."""
    add_identity(parser)
    add_policy(parser, "Under this policy only; otherwise under every one.")
    parser.add_argument(
        "--for",
        dest="duration",
        type=duration,
        default=DAY,
        metavar="DURATION",
        help="30m, 12h, 7d; a day.",
    )
    add_reason(parser, required=True)
    parser.add_argument(
        "--every-client",
        action="store_true",
        help="Of an address or network: logged-in users, too, not only visitors.",
    )


def set_override(
    options: Namespace,
    output: Output,
    kind: str,
    *,
    limit: int | None = None,
    factor: Decimal | None = None,
) -> None:
    """Set the override, and print what was done and which others it concerns."""
    identity, until = identity_of(options.identity), timezone.now() + options.duration
    policies_named(options.policy)
    fields: dict[str, Any] = {
        "limit": limit,
        "factor": factor,
        "every_client": options.every_client,
    }
    new = Override(
        identity=identity,
        policy=options.policy,
        kind=kind,
        until=until,
        reason=options.reason,
        **fields,
    )
    try:
        effect = operations.effect_of(new)
        by = operations.Operator.of_command()
        operations.set_override(
            by, identity, options.policy, kind, until, options.reason, **fields
        )
    except ValidationError as error:
        raise PolicyError(" ".join(error.messages)) from error
    if output.as_json:
        output.json(
            {
                "identity": identity,
                "policy": options.policy,
                "kind": kind,
                "until": until.isoformat(),
                **fields,
            }
        )
        return
    scope = options.policy or "every policy"
    words = Override(kind=kind, **fields)
    amount = f" {words.amount_text}" if words.amount_text else ""
    output.line(
        Styled(f"{words.get_kind_display()}{amount}", "SUCCESS"),
        f": {identity} under {scope} until {until:%Y-%m-%d %H:%M %Z}.",
    )
    for text, others in (
        ("Ended", effect.ends),
        ("Outranked meanwhile", effect.replaces),
        ("Does not apply where there is", effect.outranked_by),
    ):
        for other in others:
            output.line(f"{text}: {other} under {other.policy or 'every policy'}.")
