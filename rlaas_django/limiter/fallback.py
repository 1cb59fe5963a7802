"""Decisions without Redis, by each policy's `on_failure`: fail open, fail closed, or count in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .. import conf
from ..core.decision import Decision, Outcome, passes
from ..core.policy import Policy
from ..runtime.clock import local_time_ms
from .local import LocalLimit, LocalReply, local_limiter
from .policy_set import Check

RETRY_AFTER = 1.0  # seconds that a client is told to wait when a policy fails closed


class LocalReceipt(NamedTuple):
    """What a check charged in this process, for its refund."""

    limit: LocalLimit
    cost: int
    charged_at: int

    def refund(self) -> int:
        return local_limiter.refund(
            self.limit, local_time_ms(), self.cost, self.charged_at
        )


def decide(check: Check, indexes: Sequence[int], *, charge: bool) -> Decision:
    """Decide these policies of a check."""
    config = conf.config()
    policies = [(check.policy_set.policies[i], check.identities[i]) for i in indexes]
    fails_closed = any(
        policy.on_failure == "closed" and not policy.shadow for policy, _ in policies
    )
    limits = [
        _local_limit(policy, who, config.local_share)
        for policy, who in policies
        if policy.on_failure == "local"
    ]
    replies = local_limiter.check(
        limits,
        local_time_ms(),
        check.cost,
        charge=charge and not fails_closed,
        max_identities=config.local_identities,
    )
    counted = {
        limit.policy: (limit, reply)
        for limit, reply in zip(limits, replies, strict=True)
    }
    outcomes = tuple(
        _counted(policy, *counted[policy.name])
        if policy.name in counted
        else uncounted(policy, identity, degraded=True)
        for policy, identity in policies
    )
    charged = [
        (limit, reply.charged_at)
        for limit, reply in counted.values()
        if reply.charged_at >= 0
    ]
    receipts = [
        LocalReceipt(limit, check.cost, charged_at) for limit, charged_at in charged
    ]
    return Decision(passes(outcomes), outcomes, receipts)


def decide_all(check: Check) -> Decision:
    """Decide every policy of a check. A refusal that Redis has decided holds until its wait is over."""
    if not check.policy_set.enabled:
        return Decision(
            True, tuple(map(uncounted, check.policy_set.policies, check.identities))
        )
    if (
        check.charge
        and (refusal := check.policy_set.refusals.find(check, redis_unavailable=True))
        is not None
    ):
        return refusal
    return decide(check, range(len(check.identities)), charge=check.charge)


def _counted(policy: Policy, limit: LocalLimit, reply: LocalReply) -> Outcome:
    """Return the outcome of a policy that this process counts."""
    retry_after = math.inf if reply.retry_after < 0 else reply.retry_after / 1000
    figures = (
        limit.capacity,
        reply.current_count,
        reply.remaining,
        retry_after,
        reply.reset_after / 1000,
        policy.window,
    )
    return Outcome(policy, limit.identity, reply.allowed, *figures, degraded=True)


def uncounted(policy: Policy, identity: str, *, degraded: bool = False) -> Outcome:
    """Return an outcome without counting: unlimited, or by `on_failure` open or closed."""
    allowed, capacity = not degraded or policy.on_failure != "closed", policy.capacity
    wait = 0.0 if allowed else RETRY_AFTER
    return Outcome(
        policy,
        identity,
        allowed,
        capacity,
        0,
        capacity,
        wait,
        0.0,
        policy.window,
        degraded,
    )


def _local_limit(policy: Policy, identity: str, share: int) -> LocalLimit:
    """Return the share of one process, which is one unit at least."""
    burst = None if policy.burst is None else max(1, policy.burst // share)
    limit = max(1, policy.fixed_rate.limit // share)
    return LocalLimit(
        policy.name, identity, limit, policy.window * 1000, burst, policy.shadow
    )
