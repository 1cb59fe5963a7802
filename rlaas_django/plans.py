"""A check before it runs: who is counted by what, and what is sent to ask; and at what time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import backend
from .identity import Identity
from .policy import MAX_PRODUCT, Policies, Policy, Terms, shown
from .questions import PolicySet, policy_set, unique
from .scripts import Script
from .sites import Site

NEVER_FITS = 2 * MAX_PRODUCT  # beyond every limit; what is larger is as hopeless, and may be too long to send
new = tuple.__new__  # what a NamedTuple does in the end, without its own function on the way there


class Clock:
    """A clock that stands still; `tick` moves it."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def tick(self, ms: int) -> None:
        self.ms += ms


frozen: Clock | None = None  # set by `testing.frozen_clock`; None: the server's clock


def now() -> str | int:
    """What the scripts take for the time; '' is the server's clock."""
    return "" if frozen is None else frozen.ms


class Plan(NamedTuple):
    """A check before it runs: who is counted by what. It is the call that decides all of it, if one can."""

    site: Site
    script: Script
    key: str
    packed: bytes
    replies: int
    set: PolicySet
    identities: tuple[str, ...]
    unique: str
    cost: int
    charge: bool

    def who(self, i: int) -> tuple[Policy, str]:
        return self.set.policies[i], self.identities[i]

    def call_part(self, part: Sequence[int], charge: bool) -> backend.Call:
        """One for those that are in the same slot of a cluster."""
        asked, identities = self.set.subset(part), [self.identities[i] for i in part]
        packed = asked.pack(identities, now(), self.unique, self.cost, charge)
        return backend.Call(asked.site, asked.script, asked.keys(identities)[0], packed)


class Receipt(NamedTuple):
    """What one call may have charged."""

    plan: Plan
    part: Sequence[int]
    reply: Any

    def charged(self) -> Iterator[tuple[int, Terms, int]]:
        """Which, on which terms, and when."""
        for n, i in enumerate(self.part):
            limit, charged_at = self.reply[7 * n + 6], self.reply[7 * n + 7]
            if charged_at >= 0:
                term = self.plan.set.terms[i]
                # An operator's limit for this identity is what a refund has to reckon with.
                yield i, term if limit == term.capacity else term._replace(limit=limit, capacity=limit), charged_at


def make(identity: Identity, policy: Policies, cost: int, charge: bool = True) -> Plan:
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    asked = policy_set(policy)
    if cost != 1:
        cost, charge = min(cost, NEVER_FITS), charge and cost > 0
    elif charge and frozen is None and asked.in_one_call and (usual := asked.usual(identity)) is not None:
        who, name, packed = usual
        return new(Plan, (asked.site, asked.script, "", packed, 1, asked, who, name, 1, True))
    return of(asked, asked.identities(identity), cost, charge)


def of(asked: PolicySet, who: tuple[str, ...], cost: int, charge: bool) -> Plan:
    name = unique()
    packed = asked.pack(who, now(), name, cost, charge) if asked.in_one_call else b""
    return Plan(asked.site, asked.script, "", packed, 1, asked, who, name, cost, charge)
