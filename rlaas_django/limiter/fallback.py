"""Decisions without Redis, by each policy's `on_failure`.

Fail open, fail closed, or count in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import conf
from ..backend.process_store import ProcessStore
from ..core.decision import Decision, Outcome, passes
from ..core.policy import Policy, ScriptArguments
from ..runtime import process
from .plan import Check
from .replies import NOT_CHARGED, ROW

# Retry-After in seconds when a policy fails closed.
RETRY_AFTER = 1.0
# Of one log, so that an outage takes a bounded memory: under a larger limit, units are
# counted in hundredths of the window.
MAX_ENTRIES = 100

local_store = ProcessStore(MAX_ENTRIES)
process.on_fork(local_store.reset)


class LocalReceipt(NamedTuple):
    """What a check charged in this process, for its refund."""

    key: str
    arguments: ScriptArguments
    cost: int
    charged_at: int

    def refund(self) -> int:
        words = ("", "refund", "a check", self.cost, *self.arguments, self.charged_at)
        return sum(local_store.run([self.key], words))


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
    charge = charge and not fails_closed
    rows, receipts = _count(check, counted, charge=charge)
    outcomes = []
    for i, policy in zip(indexes, policies, strict=True):
        identity = check.identities[i]
        if i in rows:
            outcomes.append(_counted(policy, identity, rows[i]))
        else:
            outcomes.append(uncounted(policy, identity, degraded=True))
    return Decision(passes(outcomes), tuple(outcomes), receipts)


def _count(
    check: Check, indexes: Sequence[int], *, charge: bool
) -> tuple[dict[int, list[int]], list[LocalReceipt]]:
    """Count policies in this process; return the row of each, and the receipts."""
    share = conf.config().local_share
    all_keys = check.policy_set.keys(check.identities)
    keys = [all_keys[i] for i in indexes]
    shares = [_share(check.policy_set.arguments[i], share) for i in indexes]

    words: list[Any] = ["", "check" if charge else "peek", "", check.cost]
    for i, arguments in zip(indexes, shares, strict=True):
        policy = check.policy_set.policies[i]
        words += (*arguments, int(policy.shadow), policy.name)
    reply = local_store.run(keys, words)

    rows = {}
    receipts = []
    for n, (i, arguments) in enumerate(zip(indexes, shares, strict=True)):
        row = reply[ROW * n + 1 : ROW * n + ROW + 1]
        rows[i] = row
        charged_at = row[-1]
        if charged_at != NOT_CHARGED:
            receipts.append(LocalReceipt(keys[n], arguments, check.cost, charged_at))
    return rows, receipts


def _share(arguments: ScriptArguments, processes: int) -> ScriptArguments:
    """Return the share of one process, which is one unit at least."""
    return arguments._replace(
        limit=max(1, arguments.limit // processes),
        capacity=max(1, arguments.capacity // processes),
    )


def _counted(policy: Policy, identity: str, row: Sequence[int]) -> Outcome:
    """Return the outcome of a policy that this process counts."""
    allowed, count, remaining, wait, reset_after, capacity, _ = row
    retry_after = wait / 1000
    if wait < 0:
        retry_after = math.inf
    return Outcome(
        policy,
        identity,
        allowed == 1,
        capacity,
        count,
        remaining,
        retry_after,
        reset_after / 1000,
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
