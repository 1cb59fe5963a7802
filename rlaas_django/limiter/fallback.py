"""Decisions without Redis, by each policy's `on_failure`.

Fail open, fail closed, or count in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .. import conf
from ..core.decision import Decision, Outcome, passes
from ..core.policy import Policy
from ..runtime.clock import local_time_ms
from .local import LocalLimit, LocalReply, local_limiter
from .plan import Check

# Retry-After in seconds when a policy fails closed.
RETRY_AFTER = 1.0


class LocalReceipt(NamedTuple):
    """What a check charged in this process, for its refund."""

    limit: LocalLimit
    cost: int
    charged_at: int

    def refund(self) -> int:
        now = local_time_ms()
        return local_limiter.refund(self.limit, now, self.cost, self.charged_at)


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
    config = conf.config()
    policies = [check.policy_set.policies[i] for i in indexes]
    identities = [check.identities[i] for i in indexes]
    fails_closed = any(
        policy.on_failure == "closed" and not policy.shadow for policy in policies
    )
    limits = [
        _local_limit(policy, identity, config.local_share)
        for policy, identity in zip(policies, identities, strict=True)
        if policy.on_failure == "local"
    ]
    replies = local_limiter.check(
        limits,
        local_time_ms(),
        check.cost,
        charge=charge and not fails_closed,
        max_identities=config.local_identities,
    )

    counted = {}
    receipts = []
    for limit, reply in zip(limits, replies, strict=True):
        counted[limit.policy] = (limit, reply)
        if reply.charged_at >= 0:
            receipts.append(LocalReceipt(limit, check.cost, reply.charged_at))

    outcomes = []
    for policy, identity in zip(policies, identities, strict=True):
        if policy.name in counted:
            outcomes.append(_counted(policy, *counted[policy.name]))
        else:
            outcomes.append(uncounted(policy, identity, degraded=True))
    return Decision(passes(outcomes), tuple(outcomes), receipts)


def _counted(policy: Policy, limit: LocalLimit, reply: LocalReply) -> Outcome:
    """Return the outcome of a policy that this process counts."""
    retry_after = reply.retry_after / 1000
    if retry_after < 0:
        retry_after = math.inf
    return Outcome(
        policy,
        limit.identity,
        reply.allowed,
        limit.capacity,
        reply.current_count,
        reply.remaining,
        retry_after,
        reply.reset_after / 1000,
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


def _local_limit(policy: Policy, identity: str, share: int) -> LocalLimit:
    """Return the share of one process, which is one unit at least."""
    burst = policy.burst
    if burst is not None:
        burst = max(1, burst // share)
    return LocalLimit(
        policy.name,
        identity,
        max(1, policy.fixed_rate.limit // share),
        policy.window * 1000,
        burst,
        policy.shadow,
    )
