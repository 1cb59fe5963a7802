"""Act: block, exempt, limit, end, overrides, reset, restore."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.utils import timezone

from ..core.policy import PolicyError, Rate
from ..limiter.overrides import BLOCK, EXEMPT, FACTOR, LIMIT
from ..models import Override
from ..operators import actions, usage
from ..operators.actions import Operator
from ..operators.identities import describe
from .base import (
    IDENTITY,
    POLICY,
    REASON,
    Output,
    Styled,
    argument,
    find_policy,
    identity_of,
    minute,
    parse_duration,
    subcommand,
)

# The arguments that `block`, `exempt` and `limit` have in common.
OVERRIDE = (
    IDENTITY,
    POLICY,
    argument(
        "--for",
        dest="duration",
        type=parse_duration,
        default="1d",
        metavar="DURATION",
        help="30m, 12h, 7d; a day.",
    ),
    argument("--reason", required=True, help="Why; it is in the history."),
    argument(
        "--every-client",
        action="store_true",
        help="Of an address or network: also logged-in users, not only visitors.",
    ),
)


def add_amount(parser: ArgumentParser) -> None:
    """Add the limit and the factor, of which one is required."""
    amounts = parser.add_mutually_exclusive_group(required=True)
    amounts.add_argument(
        "--limit", type=int, help="The units per window, under one policy."
    )
    amounts.add_argument(
        "--factor", help="By which limits are multiplied, such as 2 or 0.5."
    )


@subcommand(
    *OVERRIDE,
    example='manage.py rlaas block 203.0.113.0/24 --for 7d --reason "scraping"',
)
def block(options: Namespace, output: Output) -> None:
    """Block an identity or a network.

    All of its requests are refused, on all servers, until the block ends.
    """
    set_override(options, output, kind=BLOCK)


@subcommand(
    *OVERRIDE,
    example='manage.py rlaas exempt 203.0.113.9 --for 30d --reason "monitoring"',
)
def exempt(options: Namespace, output: Output) -> None:
    """Exempt an identity or a network (allowlist).

    Nothing is refused and nothing charged until the exemption ends.
    """
    set_override(options, output, kind=EXEMPT)


@subcommand(
    *OVERRIDE,
    add_amount,
    example="manage.py rlaas limit alice --policy search --limit 500 --for 7d "
    '--reason "migration"',
)
def limit(options: Namespace, output: Output) -> None:
    """Give an identity a custom limit: a number under one policy, or a factor."""
    kind = LIMIT
    if options.limit is None:
        kind = FACTOR
    set_override(options, output, kind=kind, limit=options.limit, factor=options.factor)


def set_override(options: Namespace, output: Output, **kind_and_amount: Any) -> None:
    """Set an override, and print which others it concerns."""
    policy = find_policy(options.policy)
    override = Override(
        identity=identity_of(options.identity),
        policy=options.policy,
        until=timezone.now() + options.duration,
        every_client=options.every_client,
        reason=options.reason,
        **kind_and_amount,
    )

    if override.limit is not None and policy and isinstance(policy.rate, Rate):
        # Raises PolicyError where it cannot be counted exactly.
        Rate(override.limit, policy.window)

    try:
        effect = actions.effect_of(override)
        actions.set_override(Operator.of_command(), override)
    except ValidationError as error:
        raise PolicyError(" ".join(error.messages)) from error

    if output.as_json:
        output.json(override_json(override))
        return

    output.line(
        Styled(kind_and_amount_of(override), "SUCCESS"),
        f": {override.identity} under {scope(override)}"
        f" until {override.until:%Y-%m-%d %H:%M %Z}.",
    )

    for text, others in (
        ("Ended", effect.ends),
        ("Outranked meanwhile", effect.replaces),
        ("Does not apply where there is", effect.outranked_by),
    ):
        for other in others:
            output.line(f"{text}: {other} under {scope(other)}.")


def override_json(override: Override) -> dict[str, object]:
    """Return an override as JSON has it."""
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


def kind_and_amount_of(override: Override) -> str:
    return f"{override.get_kind_display()} {override.amount_text}".strip()


def scope(override: Override) -> str:
    return override.policy or "every policy"


@subcommand(IDENTITY, POLICY, REASON, example="manage.py rlaas end 203.0.113.9")
def end(options: Namespace, output: Output) -> None:
    """End the overrides of an identity or a network: its policies apply again."""
    identity = identity_of(options.identity)
    overrides = Override.objects.active().filter(identity=identity)
    if options.policy:
        overrides = overrides.filter(policy=options.policy)

    ended = list(overrides)
    for override in ended:
        actions.end_override(Operator.of_command(), override, options.reason)

    if output.as_json:
        output.json([override_json(override) for override in ended])
    else:
        for override in ended:
            text = f": {override} under {scope(override)}."
            output.line(Styled("ended", "SUCCESS"), text)

    if not ended:
        raise CommandError(f"{identity} has no active override.")


@subcommand(
    argument(
        "--kind", choices=Override.Kind.values, help="Only overrides of this kind."
    ),
    example="manage.py rlaas overrides --kind block",
)
def overrides(options: Namespace, output: Output) -> None:
    """List who is blocked, exempt, or has a custom limit, until when, and why."""
    active = Override.objects.active()
    if options.kind:
        active = active.filter(kind=options.kind)

    if output.as_json:
        output.json([override_json(override) for override in active])
    elif not active:
        output.line("No override is active.")
    else:
        labels = describe({override.identity for override in active})
        rows = [
            (
                labels[override.identity].argument,
                kind_and_amount_of(override),
                override.policy or "all",
                minute(override.until),
                override.created_by,
                override.reason,
            )
            for override in active
        ]
        output.table(
            ("Identity", "Override", "Policy", "Until", "Operator", "Reason"), rows
        )


@subcommand(
    IDENTITY,
    POLICY,
    REASON,
    example="manage.py rlaas reset alice --policy login",
)
def reset(options: Namespace, output: Output) -> None:
    """Reset what an identity used, under every policy: it starts from zero."""
    identity = identity_of(options.identity)
    find_policy(options.policy)
    rows = usage.identity_rows(identity, policy=options.policy or None)

    actions.reset_usage(
        Operator.of_command(),
        identity,
        [row.outcome.policy for row in rows],
        scope=options.policy,
        reason=options.reason,
    )

    used = [row.outcome.policy.name for row in rows if row.outcome.current_count]
    if output.as_json:
        output.json({"identity": identity, "policies": used})
    elif used:
        text = f": {identity} under {', '.join(used)}."
        output.line(Styled("reset", "SUCCESS"), text)
    else:
        output.line(
            Styled("nothing to reset", "WARNING"),
            f": {identity} has no usage under {options.policy or 'any policy'}. "
            "`manage.py rlaas top` lists who is counted, as this command takes it.",
        )


@subcommand(example="manage.py rlaas restore")
def restore(_options: Namespace, output: Output) -> None:
    """Write the active overrides to Redis again, after it was emptied."""
    number = Override.restore()
    if output.as_json:
        output.json({"identities": number})
    else:
        output.line(f"Restored the overrides of {number} identities.")
