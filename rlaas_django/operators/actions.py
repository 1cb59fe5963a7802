"""What operators do, in the admin or by a command.

Each function acts and writes the history, in one transaction.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import transaction

from .. import limiter
from ..core.keys import EncodedIdentity
from ..core.policy import Policy
from ..limiter.overrides import in_force
from ..models import OperatorAction, Override, contains

ADMIN = "admin"
COMMAND = "command"
MAX_RELATED = 1_000  # overrides that a new one is compared with


class Operator(NamedTuple):
    """Who acts, and by way of what."""

    name: str
    via: str

    @classmethod
    def of_command(cls) -> Operator:
        """Return the user of the operating system."""
        return cls(getpass.getuser(), COMMAND)


def set_override(
    by: Operator,
    identity: str,
    policy: str,
    kind: str,
    until: datetime,
    reason: str,
    **amounts: Any,
) -> OperatorAction:
    """Set an override, which ends that of the same identity and policy.

    `amounts` are `limit`, `factor` and `every_client`. Raise ValidationError for
    fields that do not fit together.
    """
    with transaction.atomic():
        override = Override.set(
            identity, policy, kind, until, by=by.name, reason=reason, **amounts
        )
        return _write(
            by,
            kind,
            identity,
            policy,
            amount=override.amount_text,
            until=until,
            reason=reason,
        )


def end_override(by: Operator, override: Override, reason: str = "") -> OperatorAction:
    """End an override now."""
    with transaction.atomic():
        override.end(by=by.name)
        return _write(
            by,
            "end",
            override.identity,
            override.policy,
            amount=override.kind,
            reason=reason,
        )


def reset_usage(
    by: Operator,
    identity: EncodedIdentity,
    policies: Sequence[Policy],
    *,
    scope: str = "",
    reason: str = "",
) -> OperatorAction:
    """Delete what an identity used under some policies.

    `scope` is the name of the policy, or empty for all.
    """
    with transaction.atomic():
        action = _write(by, "reset", identity, scope, reason=reason)
        if policies:
            limiter.reset(identity, policies)
        return action


def refund_units(
    by: Operator,
    identity: EncodedIdentity,
    policies: Iterable[Policy],
    units: int,
    *,
    scope: str = "",
    reason: str = "",
) -> OperatorAction:
    """Take units off the usage under each of some policies, the newest first.

    The `amount` of the returned action is how many there were to take off.
    """
    with transaction.atomic():
        action = _write(by, "refund", identity, scope, reason=reason)
        refunded = [
            limiter.refund_units(identity, policy, units) for policy in policies
        ]
        action.amount = str(sum(refunded))
        action.save(update_fields=["amount"])
        return action


def _write(
    by: Operator, action: str, identity: str, policy: str, **fields: Any
) -> OperatorAction:
    return OperatorAction.objects.create(
        by=by.name,
        via=by.via,
        action=action,
        identity=identity,
        policy=policy,
        **fields,
    )


class Effect(NamedTuple):
    """What a new override does to others that apply to some of the same requests."""

    # Of the same identity and policy.
    ends: list[Override]
    # Wider ones, and custom limits of what it blocks.
    replaces: list[Override]
    # Narrower ones, and blocks, which a custom limit does not lift.
    outranked_by: list[Override]


def effect_of(new: Override) -> Effect:
    """Return what an override that is not saved yet would do to the active ones."""
    effect = Effect([], [], [])
    related = _related(new)
    for other in related:
        if (other.identity, other.policy) == (new.identity, new.policy):
            effect.ends.append(other)
            continue
        if new.policy and other.policy and new.policy != other.policy:
            continue

        applying = _in_force_for_both(new, other, related)
        if applying is new:
            effect.replaces.append(other)
        elif applying is other:
            effect.outranked_by.append(other)
    return effect


def _related(new: Override) -> list[Override]:
    """Return the active overrides that may apply to a request that a new one does.

    Those of the identity; of an address or a network also those of the networks
    that it is in, and of what is in it.
    """
    active = Override.objects.active()
    network = new.network
    if network is None:
        return list(active.filter(identity=new.identity))
    return [
        override
        for override in active.of_addresses()[:MAX_RELATED]
        if contains(network, override.network) or contains(override.network, network)
    ]


def _in_force_for_both(
    new: Override, other: Override, related: Iterable[Override]
) -> Override | None:
    """Return which override is in force for requests that two apply to."""
    policies = ("", new.policy or other.policy)
    applying = [
        override
        for override in related
        if override.policy in policies and override.narrowness < new.narrowness
    ]
    applying.append(new)
    if other not in applying:
        applying.append(other)
    applying.sort(key=lambda override: override.narrowness)
    return in_force(applying)
