"""Act: block, exempt, limit, end, overrides, reset, restore; and the history."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.utils import timezone

from ..core.policy import PolicyError, Rate
from ..limiter.overrides import BLOCK, EXEMPT, FACTOR, LIMIT
from ..models import OperatorAction, Override
from ..operators import actions, usage
from ..operators.actions import NOT_PUBLISHED, Operator
from ..operators.identities import describe
from .base import (
    IDENTITY,
    NUMBER,
    POLICY,
    REASON,
    Output,
    Styled,
    argument,
    find_policy,
    identity_of,
    minute,
    named,
    parse_duration,
    require_user,
    subcommand,
)

HISTORY_FIELDS = ("by", "via", "action", "identity", "policy", "amount", "reason")
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
        help="Of an address or network: also logged-in users, not only visitors. "
        "0.0.0.0/0 and ::/0 need it.",
    ),
    argument(
        "--anyway",
        action="store_true",
        help="Also where there is no such user: a key of your own.",
    ),
)
ANYWAY = " With --anyway it is taken as a key of your own."


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
    identity = identity_of(options.identity)
    if not options.anyway:
        require_user(options.identity, identity, ANYWAY)
    override = Override(
        identity=identity,
        policy=options.policy,
        until=timezone.now() + options.duration,
        every_client=options.every_client,
        reason=options.reason,
        **kind_and_amount,
    )

    network = override.network
    if network is not None and not (network.prefixlen or options.every_client):
        raise PolicyError(f"{network} is every client; confirm it by --every-client.")
    if override.limit is not None and policy and isinstance(policy.rate, Rate):
        # Raises PolicyError where it cannot be counted exactly.
        Rate(override.limit, policy.window)

    try:
        effect = actions.effect_of(override)
        actions.set_override(Operator.of_command(), override)
    except ValidationError as error:
        raise PolicyError(" ".join(error.messages)) from error

    require_published(override)
    if output.as_json:
        output.json(override_json(override))
        return

    output.line(Styled(in_words(override), "SUCCESS"))
    for text, others in (
        ("Ended", effect.ends),
        ("Outranked meanwhile", effect.replaces),
        ("Does not apply where there is", effect.outranked_by),
    ):
        for other in others:
            output.line(f"{text}: {in_words(other)}")


def require_published(*overrides: Override) -> None:
    """Raise CommandError where Redis does not have yet what was saved."""
    if not all(override.is_published for override in overrides):
        raise CommandError(NOT_PUBLISHED)


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


def in_words(override: Override) -> str:
    """Return an override such as `alice: blocked under search until <time>`."""
    return (
        f"{named(override.identity)}: {kind_and_amount_of(override)}"
        f" under {override.policy or 'every policy'} until {minute(override.until)}"
    )


@subcommand(IDENTITY, POLICY, REASON, example="manage.py rlaas end 203.0.113.9")
def end(options: Namespace, output: Output) -> None:
    """End the overrides of an identity or a network: its policies apply again."""
    identity = identity_of(options.identity)
    overrides = Override.objects.active().filter(identity=identity)
    if options.policy:
        overrides = overrides.filter(policy=options.policy)

    ended = list(overrides)
    if not ended:
        require_user(options.identity, identity)
        raise CommandError(f"{named(identity)} has no active override.")
    for override in ended:
        actions.end_override(Operator.of_command(), override, options.reason)

    require_published(*ended)
    if output.as_json:
        output.json([override_json(override) for override in ended])
        return
    for override in ended:
        output.line(Styled("Ended", "SUCCESS"), f": {in_words(override)}")


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

    action = actions.reset_usage(
        Operator.of_command(),
        identity,
        [row.outcome.policy for row in rows],
        scope=options.policy,
        reason=options.reason,
    )
    if action.pk is None:
        require_user(options.identity, identity)

    used = [row.outcome.policy.name for row in rows if row.outcome.current_count]
    if output.as_json:
        output.json({"identity": identity, "policies": used})
    elif used:
        text = f": {named(identity)} under {', '.join(used)}."
        output.line(Styled("reset", "SUCCESS"), text)
    else:
        output.line(
            Styled("nothing to reset", "WARNING"),
            f": {named(identity)} has no usage under {options.policy or 'any policy'}. "
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


@subcommand(
    argument("identity", nargs="?", help="Only what was done to this identity."),
    NUMBER,
    example="manage.py rlaas history 203.0.113.9",
)
def history(options: Namespace, output: Output) -> None:
    """List what operators did in the admin and by commands, and why.

    The latest is first.
    """
    actions = OperatorAction.objects.all()
    if options.identity:
        actions = actions.filter(identity=identity_of(options.identity))
    actions = actions[: max(1, options.number)]

    if output.as_json:
        output.json([_action_json(action) for action in actions])
    elif not actions:
        output.line("No operator has done anything yet.")
    else:
        columns = "Time Operator Via Action Identity Policy Until Reason"
        labels = describe({action.identity for action in actions})
        rows = [
            _action_cells(action, labels[action.identity].argument)
            for action in actions
        ]
        output.table(columns.split(), rows)


def _action_json(action: OperatorAction) -> dict[str, Any]:
    return {
        "at": action.at.isoformat(),
        **{name: getattr(action, name) for name in HISTORY_FIELDS},
        "until": action.until and action.until.isoformat(),
    }


def _action_cells(action: OperatorAction, identity: str) -> tuple[str, ...]:
    return (
        minute(action.at),
        action.by,
        action.via,
        f"{action.get_action_display()} {action.amount}".strip(),
        identity,
        action.policy or "all",
        minute(action.until),
        action.reason,
    )
