"""Act: block, exempt, limit, end, overrides, reset, restore."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
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
    Subcommand,
    argument,
    find_policy,
    identity_of,
    minute,
    parse_duration,
)

DAY = timedelta(days=1)


class SetOverride(Subcommand):
    """What `block`, `exempt` and `limit` have in common."""

    kind: str

    arguments = (
        IDENTITY,
        POLICY,
        argument(
            "--for",
            dest="duration",
            type=parse_duration,
            default=DAY,
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

    def kind_and_amounts(self, _options: Namespace) -> dict[str, Any]:
        """Return the kind, and the limit or the factor."""
        return {"kind": self.kind}

    def run(self, options: Namespace, output: Output) -> None:
        """Set the override, and print which others it concerns."""
        find_policy(options.policy)
        fields = {
            "identity": identity_of(options.identity),
            "policy": options.policy,
            "until": timezone.now() + options.duration,
            "every_client": options.every_client,
            "reason": options.reason,
            **self.kind_and_amounts(options),
        }
        override = Override(**fields)

        try:
            effect = actions.effect_of(override)
            actions.set_override(Operator.of_command(), override)
        except ValidationError as error:
            raise PolicyError(" ".join(error.messages)) from error

        if output.as_json:
            output.json(override_json(override))
            return

        output.line(
            Styled(_kind_and_amount(override), "SUCCESS"),
            f": {override.identity} under {_scope(override)}"
            f" until {override.until:%Y-%m-%d %H:%M %Z}.",
        )

        for text, others in (
            ("Ended", effect.ends),
            ("Outranked meanwhile", effect.replaces),
            ("Does not apply where there is", effect.outranked_by),
        ):
            for other in others:
                output.line(f"{text}: {other} under {_scope(other)}.")


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


def _kind_and_amount(override: Override) -> str:
    return f"{override.get_kind_display()} {override.amount_text}".strip()


def _scope(override: Override) -> str:
    return override.policy or "every policy"


class Block(SetOverride):
    """Refuse all requests of an identity or a network."""

    kind = BLOCK
    help = (
        "Block an identity or a network: all of its requests are refused, on all "
        "servers, until the block ends."
    )
    example = 'manage.py rlaas block 203.0.113.0/24 --for 7d --reason "scraping"'


class Exempt(SetOverride):
    """Allow all requests of an identity or a network."""

    kind = EXEMPT
    help = (
        "Exempt an identity or a network (allowlist): nothing is refused and nothing "
        "charged until the exemption ends."
    )
    example = 'manage.py rlaas exempt 203.0.113.9 --for 30d --reason "monitoring"'


class Limit(SetOverride):
    """Give an identity a custom limit."""

    help = "Give an identity a custom limit: a number under one policy, or a factor."
    example = (
        "manage.py rlaas limit alice --policy search --limit 500 --for 7d "
        '--reason "migration"'
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        amounts = parser.add_mutually_exclusive_group(required=True)
        amounts.add_argument(
            "--limit", type=int, help="The units per window, under one policy."
        )
        amounts.add_argument(
            "--factor", help="By which limits are multiplied, such as 2 or 0.5."
        )

    def kind_and_amounts(self, options: Namespace) -> dict[str, Any]:
        if options.factor is not None:
            try:
                factor = Decimal(options.factor)
            except InvalidOperation as error:
                raise PolicyError(
                    f"{options.factor!r} is not a factor; write 2 or 0.5."
                ) from error
            return {"kind": FACTOR, "factor": factor}

        policy = find_policy(options.policy)
        if policy is not None and isinstance(policy.rate, Rate):
            # Raises PolicyError where it cannot be counted exactly.
            Rate(options.limit, policy.window)
        return {"kind": LIMIT, "limit": options.limit}


class End(Subcommand):
    """End the overrides of an identity."""

    help = "End the overrides of an identity or a network: its policies apply again."
    example = "manage.py rlaas end 203.0.113.9"

    arguments = (IDENTITY, POLICY, REASON)

    def run(self, options: Namespace, output: Output) -> int:
        """End the overrides; the exit code is 1 when there is none."""
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
                text = f": {override} under {_scope(override)}."
                output.line(Styled("ended", "SUCCESS"), text)

        if not ended:
            output.warn(f"{identity} has no active override.")
            return 1
        return 0


class List(Subcommand):
    """List who is blocked, exempt, or has a custom limit."""

    help = (
        "List the active overrides: who is blocked, exempt, or has a custom limit, "
        "until when, and why."
    )
    example = "manage.py rlaas overrides --kind block"

    arguments = (
        argument(
            "--kind", choices=Override.Kind.values, help="Only overrides of this kind."
        ),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """List the overrides, the latest first."""
        overrides = Override.objects.active()
        if options.kind:
            overrides = overrides.filter(kind=options.kind)

        if output.as_json:
            output.json([override_json(override) for override in overrides])
        elif not overrides:
            output.line("No override is active.")
        else:
            labels = describe({override.identity for override in overrides})
            rows = [
                (
                    labels[override.identity].argument,
                    _kind_and_amount(override),
                    override.policy or "all",
                    minute(override.until),
                    override.created_by,
                    override.reason,
                )
                for override in overrides
            ]
            output.table(
                ("Identity", "Override", "Policy", "Until", "Operator", "Reason"), rows
            )


class Reset(Subcommand):
    """Delete what an identity used."""

    help = "Reset what an identity used, under every policy: it starts from zero."
    example = "manage.py rlaas reset alice --policy login"

    arguments = (IDENTITY, POLICY, REASON)

    def run(self, options: Namespace, output: Output) -> None:
        """Reset the usage, and print under which policies there was some."""
        identity = identity_of(options.identity)
        find_policy(options.policy)

        if options.policy:
            rows = usage.rows([(options.policy, identity)])
        else:
            rows = usage.identity_rows(identity)

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


class Restore(Subcommand):
    """Write the overrides of the database to Redis again."""

    help = "Write the active overrides to Redis again, after it was emptied."
    example = "manage.py rlaas restore"

    def run(self, _options: Namespace, output: Output) -> None:
        """Restore them, and print of how many identities."""
        number = Override.restore()
        if output.as_json:
            output.json({"identities": number})
        else:
            output.line(f"Restored the overrides of {number} identities.")
