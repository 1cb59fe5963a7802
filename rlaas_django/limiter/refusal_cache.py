"""Cache refusals in memory, so that an attack costs Redis nothing.

A refusal with an exact wait stays true until the wait is over; only a refund, a reset
or an override ends it earlier. In this process these invalidate it; those of other
processes are seen within a second, which is as long as it is repeated while Redis is
available. While it is not, a refusal holds until its wait is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from .. import conf
from ..core.decision import Decision
from ..core.policy import Policy
from ..runtime import clock, registry
from .replies import passed_policies, read

if TYPE_CHECKING:
    from .plan import Check

MAX_AGE = 1.0  # seconds, while Redis is available
# Where other policies passed: one of them may refuse meanwhile, with a longer wait.
MAX_AGE_MIXED = 0.1
MAX_ENTRIES = 10_000
MAX_CHANGES = 10_000

Counter = tuple[str, str]  # the name of a policy, and an encoded identity


class _Entry(NamedTuple):
    reply: list[int]
    retry_after: float
    # By this process' clock: when Redis was called, and when it had replied. The wait
    # begins between the two.
    checked_at: float
    decided_at: float
    max_age: float


class RefusalCache:
    """The latest refusals of one process."""

    def __init__(self) -> None:
        self.entries: OrderedDict[object, _Entry] = OrderedDict()  # the oldest first
        # When a policy or a counter was reset or refunded last, the oldest first.
        self._changes: OrderedDict[str | Counter, float] = OrderedDict()
        self._all_changed = 0.0

    def find(self, check: Check, redis_unavailable: bool = False) -> Decision | None:
        """Return the refusal of an equal check, if it still holds.

        Its wait is shorter by its age.
        """
        entry = self.entries.get(_key(check))
        if entry is None or clock.frozen is not None:
            return None

        reply, retry_after, checked_at, decided_at, max_age = entry
        now = monotonic()
        age = now - checked_at
        if age >= retry_after or (age >= max_age and not redis_unavailable):
            return None
        if self._has_changed(check, checked_at):
            return None
        return read(check, reply, now - decided_at)

    def store(self, check: Check, refusal: Decision, checked_at: float) -> None:
        """Keep a refusal of a cacheable set, for as long as it holds."""
        policy_set = check.policy_set
        if not check.charge or clock.frozen is not None:
            return
        if refusal.reply is None or not 0 < refusal.retry_after < math.inf:
            return
        if not registry.refundable.isdisjoint(policy_set.names):
            return
        if self._has_changed(check, checked_at):
            return

        key = _key(check)
        self.entries.pop(key, None)
        self.entries[key] = _Entry(
            refusal.reply[1],
            refusal.retry_after,
            checked_at,
            monotonic(),
            _max_age(check, refusal),
        )
        if len(self.entries) > MAX_ENTRIES:
            self.entries.popitem(last=False)

    def invalidate_all(self) -> None:
        """Drop the refusals that were checked before now."""
        self._all_changed = monotonic()

    def invalidate(self, changed: Iterable[str | Counter]) -> None:
        """Drop the refusals by policies, or by counters, that were checked before now.

        Beyond MAX_CHANGES, the oldest is dropped, and everything checked before it
        counts as changed.
        """
        now = monotonic()
        for change in changed:
            self._changes.pop(change, None)
            self._changes[change] = now
        while len(self._changes) > MAX_CHANGES:
            _, changed_at = self._changes.popitem(last=False)
            self._all_changed = max(self._all_changed, changed_at)

    def _has_changed(self, check: Check, checked_at: float) -> bool:
        if self._all_changed >= checked_at:
            return True
        changes = self._changes
        if not changes:
            return False

        names = [policy.name for policy in check.policy_set.policies]
        for name, identity in zip(names, check.identities, strict=True):
            changed_at = max(changes.get(name, 0.0), changes.get((name, identity), 0.0))
            if changed_at >= checked_at:
                return True
        return False


def _key(check: Check) -> object:
    return check.policy_set, check.identities, check.cost, check.network_overrides


def _max_age(check: Check, refusal: Decision) -> float:
    """Return for how long a refusal is repeated.

    A policy that passed may refuse meanwhile, with a longer wait.
    """
    passed = passed_policies(check, refusal.reply[1])
    if not passed:
        return MAX_AGE
    if refusal.retry_after >= MAX_AGE + max(map(_longest_wait, passed)):
        return MAX_AGE
    return MAX_AGE_MIXED


def _longest_wait(policy: Policy) -> float:
    """Return a bound of the seconds that any request can have to wait for a policy."""
    return 2 * policy.window * max(1.0, policy.capacity / policy.fixed_rate.limit)


def cached_refusals() -> RefusalCache:
    """Return the cache of this process under the present settings."""
    derived = conf.config().derived
    if derived.refusals is None:
        derived.refusals = RefusalCache()
    return derived.refusals  # type: ignore[no-any-return]
