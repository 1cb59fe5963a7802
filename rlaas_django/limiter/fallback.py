"""Decisions without Redis, by each policy's `on_failure`.

Fail open, fail closed, or count in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backend.process_store import ProcessStore
from ..core.decision import Decision, Outcome, passes
from ..core.policy import Policy
from ..runtime import process
from .plan import Check
from .replies import read

# Retry-After in seconds when a policy fails closed.
RETRY_AFTER = 1.0
# Of one log, so that an outage takes a bounded memory: under a larger limit, units are
# counted in hundredths of the window.
MAX_ENTRIES = 100
# In place of the unique id of a check: this process counted it.
LOCAL = "local"

local_store = ProcessStore(MAX_ENTRIES)
process.on_fork(local_store.reset)


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
    policies = check.policy_set.policies
    outcomes = {
        i: uncounted(policies[i], check.identities[i], degraded=True) for i in indexes
    }
    charge = charge and passes(outcomes.values())

    receipts: list[Any] = []
    counted = [i for i in indexes if policies[i].on_failure == "local"]
    if counted:
        part = check.part(counted, charge=charge)
        decision = read(part, _count(part))
        receipts = decision.receipts
        for i, outcome in zip(counted, decision.outcomes, strict=True):
            outcomes[i] = outcome._replace(degraded=True)
    return Decision(passes(outcomes.values()), tuple(outcomes.values()), receipts)


def _count(check: Check) -> list[int]:
    """Count a check in this process, which has a share of each limit."""
    policy_set = check.policy_set.share
    check.policy_set = policy_set
    check.unique = LOCAL
    operation = "check" if check.charge else "peek"
    words = ("", operation, LOCAL, check.cost, *policy_set.words)
    reply: list[int] = local_store.run(policy_set.keys(check.identities), words)
    return reply


def refund(keys: list[str], words: list[Any]) -> int:
    """Take back what a check charged in this process."""
    return sum(local_store.run(keys, ("", "refund", *words)))


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
