"""What operators do, in the admin or by a command.

Each function acts and writes the history, in one transaction. A background job
restores the overrides that Redis has lost.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from django.db import DatabaseError, connections, transaction
from django.utils.translation import gettext_lazy

from .. import limiter
from ..core.keys import EncodedIdentity
from ..core.policy import Policy
from ..limiter.overrides import in_force, is_lost
from ..models import OperatorAction, Override
from ..runtime import process
from . import logins

ADMIN = "admin"
COMMAND = "command"
MAX_RELATED = 1_000  # overrides that a new one is compared with
INTERVAL = 30.0  # seconds between two comparisons
# What to say of an override that is not published.
NOT_PUBLISHED = gettext_lazy(
    "Saved, but Redis is unavailable: not in force yet; it will be once Redis is back."
)
NO_DATABASE = "django.db.backends.dummy"  # what Django makes of DATABASES = {}


class Operator(NamedTuple):
    """Who acts, and by way of what."""

    name: str
    via: str

    @classmethod
    def of_command(cls) -> Operator:
        """Return the user of the operating system."""
        return cls(getpass.getuser(), COMMAND)


def set_override(by: Operator, override: Override) -> OperatorAction:
    """Set a new override, which ends that of the same identity and policy.

    Raise ValidationError for fields that do not fit together.
    """
    with transaction.atomic():
        override.activate(by.name)
        return _write(
            by,
            override.kind,
            override.identity,
            override.policy,
            amount=override.amount_text,
            until=override.until,
            reason=override.reason,
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

    `scope` is the name of the policy, or empty for all. The returned action has no
    primary key where there was nothing to delete.
    """
    with transaction.atomic():
        action = _write(by, "reset", identity, scope, reason=reason)
        deleted = logins.reset(identity, scope)
        if policies:
            deleted += limiter.reset(identity, policies)
        if not deleted:
            action.delete()
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
    wider = [other for other in related if other.narrowness < new.narrowness]

    for other in related:
        if (other.identity, other.policy) == (new.identity, new.policy):
            effect.ends.append(other)
            continue
        if new.policy and other.policy and new.policy != other.policy:
            continue

        # Of the requests that both apply to: a third one may be in force.
        policies = ("", new.policy or other.policy)
        matching = [
            override for override in (*wider, other, new) if override.policy in policies
        ]
        applying = in_force(sorted(matching, key=attrgetter("narrowness")))
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
        if override.network is not None and override.network.overlaps(network)
    ]


# The background job


class State:
    """When to compare next (by `time.monotonic`), and where to go on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.next_comparison = 0.0
        self.compared = ""  # the last identity that was compared


state = State()
process.on_fork(state.reset)


def restore_lost_overrides() -> None:
    """Write to Redis what it lacks of the overrides in the database.

    All of them at once after Redis was emptied. Every 30 seconds they are also
    compared: Redis may have evicted some, or was unavailable when they were set or
    ended.
    """
    if not _has_database():
        return
    try:
        _restore_lost()
    except DatabaseError:
        if _has_table():
            raise


def _restore_lost() -> None:
    if is_lost():  # raises while Redis is unavailable: a comparison stays due
        Override.restore()

    now = time.monotonic()
    if now < state.next_comparison:
        return

    after = state.compared
    # Should this fail, the next comparison begins anew, and not at once.
    state.compared = ""
    state.next_comparison = now + INTERVAL

    state.compared = Override.publish_missing(after)
    if state.compared:  # in the next round some more
        state.next_comparison = now


def _has_table() -> bool:
    """Return whether the migrations have run; without them there are no overrides."""
    database = connections[Override.objects.db]
    return Override._meta.db_table in database.introspection.table_names()


def _has_database() -> bool:
    databases = connections.settings.values()
    return any(database["ENGINE"] != NO_DATABASE for database in databases)
