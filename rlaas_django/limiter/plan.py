"""Plan a check: its policies, identities and cost. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from os import urandom
from typing import Any

from ..backend.commands import Call, pack
from ..core.keys import Identity
from ..core.policy import MAX_PRODUCT, Policies, shown
from ..runtime import clock
from . import networks
from .policy_set import PolicySet, Template, compile_policies

# Beyond every limit; a larger cost may be too long to send.
NEVER_FITS = 2 * MAX_PRODUCT
# Bytes of a check's unique id, so that two checks in one millisecond are two entries.
UNIQUE_BYTES = 10


class CheckCall(Call):
    """The call of a check, whose attributes `pack` sets.

    A Python __init__ takes 1,200 instructions more, of 45,000 per check.
    """

    __init__ = object.__init__


class Check:
    """A check: its policies, identities and cost.

    `plan_encoded` sets the attributes; see CheckCall.
    """

    __slots__ = (
        "charge",
        "cost",
        "identities",
        "network_overrides",
        "policy_set",
        "unique",
    )

    policy_set: PolicySet
    identities: tuple[str, ...]  # encoded, one per policy
    cost: int
    charge: bool
    # Per policy, those of the networks that the client is in; () for none.
    network_overrides: tuple[str, ...]
    unique: str  # set with the command

    def pack(self) -> Call:
        """Return the call that decides all policies."""
        policy_set = self.policy_set
        identities = self.identities
        identity = identities[0]
        # Not a counter, which threads and forks would have to share.
        self.unique = unique = urandom(UNIQUE_BYTES).hex()
        if (
            self.cost == 1
            and self.charge
            and clock.frozen is None
            and not self.network_overrides
            and (len(identities) == 1 or identities.count(identity) == len(identities))
        ):
            # Nearly every check. Filling a template takes a fifth of the time of
            # packing (benchmarks/profile.py).
            template = policy_set.templates.get(len(identity))
            before, after = template or _make_template(policy_set, len(identity))
            packed = f"{identity.join(before)}{unique}{after}".encode("ascii")
        else:
            packed = pack_command(self)

        call: Call = CheckCall()
        call.script = policy_set.script
        call.packed = packed
        call.reply_lengths = policy_set.reply_lengths
        if not policy_set.in_one_call:
            call.key = policy_set.keys(identities)[0]
        return call

    @property
    def in_one_slot(self) -> bool:
        """Whether one call can decide the check.

        False if `ENABLED` is False.
        """
        policy_set = self.policy_set
        if not policy_set.enabled:
            return False
        keys = policy_set.keys(self.identities)
        return len(policy_set.topology.group_by_slot(keys)) == 1

    def part(self, indexes: Sequence[int], *, charge: bool) -> Check:
        """Return the check of some of the policies."""
        identities = tuple([self.identities[i] for i in indexes])
        part_set = self.policy_set.part(indexes)
        part = plan_encoded(part_set, identities, self.cost, charge=charge)
        if self.network_overrides:
            part.network_overrides = tuple([self.network_overrides[i] for i in indexes])
        return part


def pack_command(check: Check) -> bytes:
    """Return the command as it is sent.

    UnicodeEncodeError when an identity is not ASCII.
    """
    policy_set = check.policy_set
    identities: Sequence[str] = check.identities
    keys = policy_set.keys(identities)
    if identities.count(identities[0]) == len(identities):
        identities = identities[:1]
    keys += [policy_set.override_key.key(identity) for identity in identities]

    words = [
        "EVALSHA",
        policy_set.script.sha,
        len(keys),
        *[key.encode("ascii") for key in keys],
        clock.script_time(),
        "check" if check.charge else "peek",
        check.unique,
        check.cost,
        *policy_set.words,
    ]
    if check.network_overrides:
        words.append("".join([f"{text}," for text in check.network_overrides]))
    return pack(words)


def _make_template(policy_set: PolicySet, length: int) -> Template:
    identity = "\0" * length
    check = plan_encoded(policy_set, (identity,) * len(policy_set.policies), 1)
    check.unique = "\1" * 2 * UNIQUE_BYTES
    before, after = pack_command(check).decode().split(check.unique)
    template = before.split(identity), after
    policy_set.templates[length] = template
    return template


def plan(
    identity: Identity,
    policies: Policies | PolicySet,
    cost: int,
    charge: bool = True,
) -> Check:
    """Return the check of an identity under these policies."""
    policy_set: Any = policies
    if type(policies) is not PolicySet:
        policy_set = compile_policies(policies)  # type: ignore[arg-type]
    identities = policy_set.identify(identity)

    address = ""
    if networks.current is not None:
        address = networks.address_of(identity, identities)
    return plan_encoded(policy_set, identities, cost, address, charge)


def plan_encoded(
    policy_set: PolicySet,
    identities: tuple[str, ...],
    cost: int,
    address: str = "",
    charge: bool = True,
) -> Check:
    """Return the check of encoded identities, one per policy.

    `address` is that of the client, for overrides of networks; it is needed only
    while there are some (`networks.current`).
    """
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    if cost != 1:
        policy_set.check_cost(cost)
        charge = charge and cost > 0
        cost = min(cost, NEVER_FITS)

    check = Check()
    check.policy_set = policy_set
    check.identities = identities
    check.cost = cost
    check.charge = charge
    check.network_overrides = ()
    if networks.current is not None:
        check.network_overrides = networks.current.override_texts(
            address, policy_set.policies, identities
        )
    return check
