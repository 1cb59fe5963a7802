"""Decisions without Redis, by each policy's `on_failure`.

Fail open, fail closed, or count in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .. import conf
from ..backend.process_store import Charge, Limit, ProcessStore, Row
from ..core.decision import Decision, Outcome, passes
from ..core.policy import Policy
from ..runtime import process
from ..runtime.clock import local_time_ms
from .plan import Check

# Retry-After in seconds when a policy fails closed.
RETRY_AFTER = 1.0
# Of one log, so that an outage takes a bounded memory: under a larger limit, units are
# counted in hundredths of the window.
MAX_ENTRIES = 100

local_store = ProcessStore(MAX_ENTRIES)
process.on_fork(local_store.reset)


class LocalReceipt(NamedTuple):
    """What a check charged in this process, for its refund."""

    charge: Charge
    cost: int

    def refund(self) -> int:
        return sum(local_store.refund([self.charge], local_time_ms(), self.cost))


def decide_all(check: Check) -> Decision:
    """Decide every policy of a check.

    A refusal that Redis has decided holds until its wait is over.
    """
    policy_set = check.policy_set
    if not policy_set.enabled:
        return Decision(
            True, tuple(map(uncounted, policy_set.policies, check.identities))
        )
    refusal = policy_set.refusals.find(check, redis_unavailable=True)
    if refusal is not None:
        return refusal
    return decide(check, range(len(check.identities)), charge=check.charge)


def decide(check: Check, indexes: Sequence[int], *, charge: bool) -> Decision:
    """Decide these policies of a check."""
    policies = [check.policy_set.policies[i] for i in indexes]
    fails_closed = any(
        policy.on_failure == "closed" and not policy.shadow for policy in policies
    )
    counted = [
        i
        for i, policy in zip(indexes, policies, strict=True)
        if policy.on_failure == "local"
    ]
    limits = _local_limits(check, counted)
    charge = charge and not fails_closed
    rows = local_store.check(limits, local_time_ms(), check.cost, charge=charge)

    receipts = []
    for limit, row in zip(limits, rows, strict=True):
        if row.charged_at >= 0:
            charged = Charge(limit.key, limit.arguments, row.charged_at)
            receipts.append(LocalReceipt(charged, check.cost))

    rows_by_index = dict(zip(counted, rows, strict=True))
    outcomes = []
    for i, policy in zip(indexes, policies, strict=True):
        identity = check.identities[i]
        if i in rows_by_index:
            outcomes.append(_counted(policy, identity, rows_by_index[i]))
        else:
            outcomes.append(uncounted(policy, identity, degraded=True))
    return Decision(passes(outcomes), tuple(outcomes), receipts)


def _counted(policy: Policy, identity: str, row: Row) -> Outcome:
    """Return the outcome of a policy that this process counts."""
    retry_after = row.retry_after / 1000
    if retry_after < 0:
        retry_after = math.inf
    return Outcome(
        policy,
        identity,
        row.allowed == 1,
        row.capacity,
        row.current_count,
        row.remaining,
        retry_after,
        row.reset_after / 1000,
        policy.window,
        degraded=True,
    )


def uncounted(policy: Policy, identity: str, *, degraded: bool = False) -> Outcome:
    """Return an outcome without counting.

    It is unlimited, or as `on_failure` says.
    """
    refused = degraded and policy.on_failure == "closed"
    capacity = policy.capacity
    return Outcome(
        policy,
        identity,
        not refused,
        limit=capacity,
        current_count=0,
        remaining=capacity,
        retry_after=RETRY_AFTER if refused else 0.0,
        reset_after=0.0,
        ttl=policy.window,
        degraded=degraded,
    )


def _local_limits(check: Check, indexes: Sequence[int]) -> list[Limit]:
    """Return the share of one process of these policies, one unit at least."""
    share = conf.config().local_share
    keys = check.policy_set.keys(check.identities)
    limits = []
    for i in indexes:
        arguments = check.policy_set.arguments[i]
        of_process = arguments._replace(
            limit=max(1, arguments.limit // share),
            capacity=max(1, arguments.capacity // share),
        )
        shadow = check.policy_set.policies[i].shadow
        limits.append(Limit(keys[i], of_process, shadow))
    return limits
