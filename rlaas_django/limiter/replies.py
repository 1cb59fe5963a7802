"""What the scripts' replies mean. No I/O.

For each policy, after the time of the decision, a script replies with a row: allowed,
current_count, remaining, retry_after, reset_after, limit, charged_at (times in ms).
Where a policy allows, retry_after is the time until more than `remaining` can be used.
Where an override changes the limit of a policy with a burst, the limit of each policy
follows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..core.decision import Decision, Outcome
from ..core.policy import Policy, ScriptArguments

if TYPE_CHECKING:
    from .plan import Check
    from .policy_set import PolicySet

ROW = 7  # numbers per policy
ONE_ROW = 1 + ROW  # numbers in the reply of one policy

# The places of the first policy's numbers.
ALLOWED = 1
REMAINING = 3
RETRY_AFTER = 4
LIMIT = 6
CHARGED_AT = 7

NOT_CHARGED = -1  # in place of charged_at
BLOCKED = -2  # in place of charged_at: an override refused the request


class ReadDecision(Decision):
    """A decision whose attributes `read` sets, as `pack` does those of CheckCall."""

    __slots__ = ()
    __init__ = object.__init__

    def read_outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcome of each policy, some seconds after the reply came."""
        check, reply = self.reply
        policy_set = check.policy_set
        age = self.age
        outcomes = []
        for index, policy in enumerate(policy_set.policies):
            row = reply[ROW * index : ROW * index + ROW + 1]
            _, passed, count, remaining, wait, reset, limit, charged_at = row
            retry_after = 0.0
            if not passed:
                retry_after = _seconds(wait, age)
            more = reset
            if wait > 0:
                more = min(wait, reset)

            outcome = Outcome(
                policy,
                check.identities[index],
                passed == 1,
                limit,
                count,
                remaining,
                retry_after=max(0.0, retry_after),
                reset_after=max(0.0, reset / 1000 - age),
                ttl=policy_set.ttls[index] or _left_of_window(policy, reply, age),
                blocked=charged_at == BLOCKED,
                more_after=max(0.0, more / 1000 - age),
            )
            outcomes.append(outcome)
        return tuple(outcomes)


def reply_lengths(policies: int) -> tuple[int, int]:
    """Return the numbers in a reply, without limits after the rows and with them."""
    rows = 1 + ROW * policies
    return rows, rows + policies


def read(check: Check, reply: list[int], age: float = 0.0) -> Decision:
    """Make a Decision from a reply that is `age` seconds old.

    It sets the attributes itself, and leaves the outcomes until they are read: to make
    them here takes 5,000 instructions more, of 45,000 for a check in code.
    """
    policy_set = check.policy_set
    index = 0
    row = reply
    if len(reply) != ONE_ROW:
        index = _strictest(policy_set, reply)
        row = reply[ROW * index : ROW * index + ROW + 1]
    _, passed, count, remaining, wait, reset, limit, _ = row

    # The strictest policy refuses if any does, and is a shadow policy if all are.
    policy = policy_set.policies[index]
    allowed = passed == 1 or policy.shadow
    replied = (check, reply)
    retry_after = 0.0
    if not allowed:
        retry_after = _seconds(wait, age)

    decision: Decision = ReadDecision()
    decision.allowed = allowed
    decision.policy = policy
    decision.limit = limit
    decision.current_count = count
    decision.remaining = remaining
    decision.retry_after = retry_after
    decision.reset_after = reset / 1000 - age
    decision.ttl = policy_set.ttls[index] or _left_of_window(policy, reply, age)
    decision.receipts = [replied] if allowed and check.charge else []
    decision.latency = None
    decision.reply = replied
    decision.age = age
    decision.made_outcomes = None
    return decision


def _seconds(wait: int, age: float) -> float:
    """Return the seconds that are left of a wait in ms, of which -1 is infinite."""
    return wait / 1000 - age if wait >= 0 else math.inf


def _left_of_window(policy: Policy, reply: list[int], age: float) -> int:
    """Return the seconds that are left of a fixed window, rounded up."""
    window = 1000 * policy.window
    now = reply[0] + 1000 * age
    return math.ceil((window - now % window) / 1000)


def _strictest(policy_set: PolicySet, reply: list[int]) -> int:
    """Return which policy is the strictest, as `core.decision.strictest` chooses it."""
    strictest = -math.inf
    index = 0
    for i in policy_set.deciding:
        row = ROW * i
        strictness: float = -reply[row + REMAINING]
        if reply[row + ALLOWED] != 1:  # stricter than all that pass
            wait = reply[row + RETRY_AFTER]
            strictness = wait + 1 if wait >= 0 else math.inf
        if strictness > strictest:
            strictest = strictness
            index = i
    return index


def passed_policies(check: Check, reply: list[int]) -> list[Policy]:
    """Return the policies that allow the request."""
    policies = check.policy_set.policies
    return [policy for i, policy in enumerate(policies) if reply[ROW * i + ALLOWED]]


def charge_stamps(check: Check, reply: list[int]) -> dict[int, int]:
    """Return the numbers by which a refund finds what was charged, by policy."""
    stamps = {i: reply[ROW * i + CHARGED_AT] for i in range(len(check.identities))}
    return {i: stamp for i, stamp in stamps.items() if stamp > NOT_CHARGED}


def charged_counters(check: Check, reply: list[int]) -> list[tuple[str, str]]:
    """Return the names and identities of the policies that were charged."""
    policies = check.policy_set.policies
    return [
        (policies[i].name, check.identities[i]) for i in charge_stamps(check, reply)
    ]


def decided_arguments(check: Check, reply: list[int], index: int) -> ScriptArguments:
    """Return a policy's arguments with the limit that it was decided with.

    An override may change it.
    """
    capacity = reply[ROW * index + LIMIT]
    limits = reply[1 + ROW * len(check.identities) :]
    arguments = check.policy_set.arguments[index]
    if limits:
        return arguments._replace(limit=limits[index], capacity=capacity)
    if capacity != arguments.capacity:
        return arguments._replace(limit=capacity, capacity=capacity)
    return arguments


def refund_arguments(check: Check, reply: list[int]) -> tuple[list[str], list[Any]]:
    """Return the arguments of the refund of what a check charged.

    The keys of the counters, and the words that follow.
    """
    all_keys = check.policy_set.keys(check.identities)
    keys = []
    words: list[Any] = [check.unique, check.cost]
    for index, stamp in charge_stamps(check, reply).items():
        keys.append(all_keys[index])
        words += decided_arguments(check, reply, index)
        words.append(stamp)
    return keys, words


def passes_below(decision: Decision, percent: int) -> bool:
    """Return whether all policies pass with less than `percent` of each limit used."""
    check, reply = decision.reply
    for index in range(len(check.identities)):
        row = ROW * index
        limit = reply[row + LIMIT]
        used = limit - reply[row + REMAINING]
        if reply[row + ALLOWED] != 1 or 100 * used >= percent * limit:
            return False
    return True
