"""Refusals repeated from memory, so that an attack costs Redis nothing.

A refusal with an exact wait stays true until the wait is over; only a refund, a reset or an override ends it earlier.
In this process these invalidate it; those of other processes are seen within a second, which is as long as it is
repeated while Redis is available. While it is not, a refusal holds until its wait is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, cast

from .. import conf
from ..core.decision import Decision
from ..core.policy import EVERY_POLICY, Policy
from ..runtime import clock, registry

if TYPE_CHECKING:
    from .policy_set import Check, ReplyDecision

MAX_AGE = 1.0  # seconds, while Redis is available
MAX_AGE_MIXED = 0.1  # where other policies passed: one of them may refuse meanwhile, with a longer wait
MAX_ENTRIES = 10_000


class _Entry(NamedTuple):
    decision: ReplyDecision
    # By this process' clock: when Redis was called, and when it had replied. The wait begins between the two.
    checked_at: float
    decided_at: float
    max_age: float


class RefusalCache:
    """The latest refusals of one process."""

    def __init__(self) -> None:
        self.entries: OrderedDict[object, _Entry] = OrderedDict()  # the oldest first
        self._changed = {
            EVERY_POLICY: 0.0
        }  # by policy: when units of it were refunded or reset last

    def find(self, check: Check, redis_unavailable: bool = False) -> Decision | None:
        """Return the refusal of an equal check, if it still holds; its wait is shorter by its age."""
        entry = self.entries.get(_key(check))
        if entry is None or clock.frozen is not None:
            return None
        (refusal, checked_at, decided_at, max_age), now = entry, monotonic()
        age = now - checked_at
        if (
            age >= refusal.retry_after
            or (age >= max_age and not redis_unavailable)
            or self._is_invalid(check, checked_at)
        ):
            return None
        return refusal.after(now - decided_at)

    def store(self, check: Check, decision: Decision, checked_at: float) -> None:
        """Keep a refusal for as long as it holds."""
        policy_set = check.policy_set
        if (
            not policy_set.cacheable
            or clock.frozen is not None
            or not 0 < decision.retry_after < math.inf
            or not registry.refundable.isdisjoint(policy_set.names)
            or self._is_invalid(check, checked_at)
        ):
            return
        key = _key(check)
        self.entries.pop(key, None)
        self.entries[key] = _Entry(
            cast("ReplyDecision", decision), checked_at, monotonic(), _max_age(decision)
        )
        if len(self.entries) > MAX_ENTRIES:
            self.entries.popitem(last=False)

    def invalidate(self, policies: Iterable[str] = (EVERY_POLICY,)) -> None:
        """Drop the refusals by these policies that were checked before now."""
        self._changed.update(dict.fromkeys(policies, monotonic()))

    def _is_invalid(self, check: Check, checked_at: float) -> bool:
        changed = self._changed
        if len(changed) == 1:  # nothing but EVERY_POLICY
            return changed[EVERY_POLICY] >= checked_at
        return any(
            changed.get(name, 0.0) >= checked_at
            for name in (EVERY_POLICY, *check.policy_set.names)
        )


def _key(check: Check) -> object:
    return check.policy_set, check.identities, check.cost, check.network_overrides


def _max_age(refusal: Decision) -> float:
    """Return for how long a refusal is repeated: a policy that passed may refuse meanwhile, with a longer wait."""
    passed = [outcome.policy for outcome in refusal.outcomes if outcome.allowed]
    longest = max((_longest_wait(policy) for policy in passed), default=0)
    return (
        MAX_AGE
        if refusal.retry_after >= longest + MAX_AGE or not passed
        else MAX_AGE_MIXED
    )


def _longest_wait(policy: Policy) -> float:
    """Return a bound of the seconds that any request can have to wait under a policy."""
    return 2 * policy.window * max(1.0, policy.capacity / policy.fixed_rate.limit)


def cached_refusals() -> RefusalCache:
    """Return the cache of this process under the present settings."""
    derived = conf.config().derived
    if derived.refusals is None:
        derived.refusals = RefusalCache()
    return derived.refusals  # type: ignore[no-any-return]
