"""What operators do, in the admin or by a command. Each function acts and writes the history, in one transaction."""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from django.db import transaction

from .. import limiter
from ..core.keys import EncodedIdentity
from ..core.policy import Policy
from ..limiter.overrides import in_force
from ..models import OperatorAction, Override, contains

ADMIN, COMMAND = "admin", "command"
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
    *,
    limit: int | None = None,
    factor: Decimal | None = None,
    every_client: bool = False,
) -> OperatorAction:
    """Set an override, which ends the one of the same identity and policy; ValidationError for one that cannot be."""
    amounts: Any = {"limit": limit, "factor": factor, "every_client": every_client}
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
    """Delete what an identity used under some policies; `scope` is the name of the one, or empty for all."""
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
    """Take units off the usage under each of some policies, the newest first; `amount` is how many there were."""
    with transaction.atomic():
        action = _write(by, "refund", identity, scope, reason=reason)
        action.amount = str(
            sum(limiter.refund_units(identity, policy, units) for policy in policies)
        )
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

    ends: list[Override]  # of the same identity and policy
    replaces: list[
        Override
    ]  # those that do not apply where the new one does: wider ones, and limits of what it blocks
    outranked_by: list[
        Override
    ]  # narrower ones, and blocks, which a custom limit does not lift


def effect_of(new: Override) -> Effect:
    """Return what an override that is not saved yet would do to the active ones."""
    effect, related = Effect([], [], []), list(_related(new))
    wider = [each for each in related if each.narrowness < new.narrowness]
    for other in related:
        if (other.identity, other.policy) == (new.identity, new.policy):
            effect.ends.append(other)
        elif new.policy == other.policy or "" in (new.policy, other.policy):
            scope = {"", new.policy or other.policy}  # where both apply
            chain = {
                id(each): each
                for each in (*wider, new, other)
                if each is new or each.policy in scope
            }
            applies = in_force(sorted(chain.values(), key=lambda each: each.narrowness))
            if applies is new:
                effect.replaces.append(other)
            elif applies is other:
                effect.outranked_by.append(other)
    return effect


def _related(new: Override) -> Iterable[Override]:
    """Return the active overrides of the identity, of the networks that it is in, and of what is in the network."""
    active, network = Override.objects.active(), new.network
    if network is None:
        return active.filter(identity=new.identity)
    return [
        each
        for each in active.of_addresses()[:MAX_RELATED]
        if contains(network, each.network) or contains(each.network, network)
    ]
