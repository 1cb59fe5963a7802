"""What a reply of the deciding script says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .backend import UnavailableError
from .plans import Plan, Receipt, new
from .policy import Decision, Left, Outcome, Terms
from .questions import PolicySet


def decide(plan: Plan, reply: Any) -> Decision:
    whole = plan.set.whole
    if len(whole) > 1 and plan.charge and not plan.set.may_change and _all_pass(reply, len(whole)):
        return _Lazily(plan, reply)
    outcomes, allowed = outcomes_of(plan, whole, reply)
    receipts = [new(Receipt, (plan, whole, reply))] if allowed and plan.charge else None
    return Decision(allowed, outcomes, receipts)


def _all_pass(reply: Any, number: int) -> bool:
    """Whether it is an answer of our script by which every policy passes."""
    if type(reply) is not list or len(reply) != 7 * number + 1 or reply[1::7] != [1] * number:
        return False
    try:
        return sum(reply) > 0
    except TypeError:  # not all are numbers
        return False


class _Lazily(Decision):
    """Allowed by several policies, of which most who ask want to know no more than the strictest one's figures."""

    __slots__ = ("_plan", "_reply")

    degraded = False

    def __init__(self, plan: Plan, reply: Any) -> None:
        left = reply[3::7]
        i = left.index(min(left))
        self.allowed, self._plan, self._reply = True, plan, reply
        self.receipts = [new(Receipt, (plan, plan.set.whole, reply))]
        self._strictest = _outcome(plan.set, i, plan.identities, reply, 7 * i + 1)

    def __getattr__(self, name: str) -> Any:
        if name != "outcomes":
            raise AttributeError(name)
        self.outcomes, _ = outcomes_of(self._plan, self._plan.set.whole, self._reply)
        return self.outcomes


def outcomes_of(plan: Plan, part: Sequence[int], reply: Any) -> tuple[tuple[Outcome, ...], bool]:
    """What a reply says of each policy, and whether all pass that are to be heeded."""
    asked, who = plan.set, plan.identities
    try:
        if len(reply) != 7 * len(part) + 1:
            raise ValueError(f"{len(reply)} parts")
        if len(part) == 1:  # as it is nearly always
            only = _outcome(asked, part[0], who, reply, 1)
            return (only,), only.allowed or only.policy.shadow
        outcomes = tuple([_outcome(asked, i, who, reply, 7 * n + 1) for n, i in enumerate(part)])
    except (TypeError, ValueError) as error:
        odd = UnavailableError(f"Redis answered what no script of ours does: {error}")
        if server := asked.site.server(asked.keys(who)[part[0]]):
            server.breaker.complain(odd)
        raise odd from error
    return outcomes, False not in [each.allowed or each.policy.shadow for each in outcomes]


def _outcome(asked: PolicySet, i: int, who: Sequence[str], reply: Any, at: int) -> Outcome:
    passed, count, remaining, retry_after, reset_after, limit, _ = reply[at : at + 7]
    wait = 0.0 if retry_after == 0 else retry_after / 1000 if retry_after > 0 else math.inf
    ttl = asked.ttls[i] or _left_of_window(asked.terms[i], reply[0])
    figures = limit, count, remaining, wait, reset_after / 1000, ttl, False
    return new(Outcome, (asked.policies[i], who[i], passed == 1, *figures))


def _left_of_window(term: Terms, now: int) -> Left:
    """Whole seconds, as the source documents define the fixed window's TTL."""
    return Left(-(-(term.window - now % term.window) // 1000))
