"""What was decided: one Decision per check, one Outcome per policy. No Django, no Redis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .policy import Policy

# What the scripts reply for each policy, after the time of the decision:
# allowed, current_count, remaining, retry_after, reset_after, limit, charged_at (times in ms)
REPLY_SIZE = 7


class Outcome(NamedTuple):
    """The result of one policy. `identity` is the encoded identity, as it stands in the Redis key."""

    policy: Policy
    identity: str
    allowed: bool
    limit: int
    current_count: int
    remaining: int
    retry_after: float
    reset_after: float
    ttl: int
    degraded: bool = False  # decided without Redis

    @property
    def failed_closed(self) -> bool:
        """Whether it was refused because Redis is unavailable, not because of a limit."""
        return self.degraded and not self.allowed and self.policy.on_failure == "closed"


class PolicySet(Protocol):
    """What a reply is read with."""

    policies: tuple[Policy, ...]
    ttls: tuple[int, ...]  # seconds; 0 for the fixed window, whose ttl depends on the time of the decision


class Decision:
    """The result of one check: the strictest policy's figures, and an outcome per policy.

    >>> decision = check("alice")
    >>> decision.allowed, decision.remaining, decision.retry_after
    (True, 4, 0.0)
    """

    __slots__ = (
        *("allowed", "policy", "limit", "current_count", "remaining", "retry_after", "reset_after", "ttl", "degraded"),
        *("_identities", "_outcomes", "_policy_set", "_reply", "receipts"),
    )

    allowed: bool
    policy: Policy  # the strictest: the refusing one with the longest wait, else the one with least remaining
    limit: int  # units per window; for a token bucket its burst
    current_count: int  # units in the window before this request
    remaining: int  # units left after this request
    retry_after: float  # exact seconds until this request would pass; 0.0 when allowed, inf when its cost can never fit
    reset_after: float  # seconds until the quota is whole again
    ttl: int  # seconds: the window size, and for the fixed window what is left of it, rounded up
    degraded: bool  # whether a policy was decided without Redis
    _policy_set: PolicySet
    _identities: Sequence[str]
    _reply: list[Any]
    receipts: list[Any]  # what `refund` needs; popped from here, so that it is refunded once

    def __init__(self, allowed: bool, outcomes: Iterable[Outcome], receipts: list[Any] | None = None) -> None:
        self.allowed, self.receipts = allowed, [] if receipts is None else receipts
        self._outcomes: tuple[Outcome, ...] | None = tuple(outcomes)
        self.degraded = any(outcome.degraded for outcome in self._outcomes)
        (self.policy, _, _, self.limit, self.current_count, self.remaining, wait, self.reset_after, self.ttl, _) = (
            strictest(self._outcomes)
        )
        self.retry_after = 0.0 if allowed else wait

    @classmethod
    def from_reply(
        cls, policy_set: PolicySet, identities: Sequence[str], reply: list[Any], allowed: bool, receipts: list[Any]
    ) -> Decision:
        """Return the decision of a script's reply; its outcomes are made when they are read."""
        self = cls.__new__(cls)
        if len(identities) > 1:
            self.__init__(allowed, read_outcomes(policy_set, identities, reply), receipts)  # type: ignore[misc]
        else:
            now, _, self.current_count, self.remaining, wait, reset_after, self.limit, _ = reply
            self.policy = policy = policy_set.policies[0]
            self.ttl = policy_set.ttls[0] or _left_of_window(policy, now)
            self.retry_after = 0.0 if allowed else wait / 1000 if wait >= 0 else math.inf
            self.reset_after, self.allowed, self.degraded = reset_after / 1000, allowed, False
            self.receipts, self._outcomes = receipts, None
        self._policy_set, self._identities, self._reply = policy_set, identities, reply
        return self

    def later(self, seconds: float) -> Decision:
        """Return this refusal as it is some seconds later: what there was to wait is that much shorter."""
        ms, reply = seconds * 1000, self._reply[:]
        reply[0] += ms
        for at in range(4, len(reply), REPLY_SIZE):
            if reply[at] > 0:
                reply[at] = max(0, reply[at] - ms)
            reply[at + 1] = max(0, reply[at + 1] - ms)
        return Decision.from_reply(self._policy_set, self._identities, reply, False, [])

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The result of each policy."""
        if self._outcomes is None:
            self._outcomes = read_outcomes(self._policy_set, self._identities, self._reply)
        return self._outcomes

    @property
    def unavailable(self) -> bool:
        """Whether it was refused only because Redis is unavailable: no limit was exceeded."""
        refusing = [each for each in self.outcomes if not (each.allowed or each.policy.shadow)] if self.degraded else []
        return bool(refusing) and all(each.failed_closed for each in refusing)

    def __reduce__(self) -> Any:
        """Copy the result without the receipts: only the decision itself can be refunded."""
        return Decision, (self.allowed, self.outcomes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return (self.allowed, self.outcomes) == (other.allowed, other.outcomes)

    def __hash__(self) -> int:
        return hash((self.allowed, self.outcomes))

    def __repr__(self) -> str:
        return f"Decision(allowed={self.allowed}, outcomes={self.outcomes})"


def read_outcomes(policy_set: PolicySet, identities: Sequence[str], reply: list[Any]) -> tuple[Outcome, ...]:
    """Return what a script's reply says of each policy."""
    outcomes, at = [], 1
    for policy, identity, window in zip(policy_set.policies, identities, policy_set.ttls, strict=True):
        passed, count, remaining, wait, reset_after, limit, _ = reply[at : at + REPLY_SIZE]
        retry_after, ttl = wait / 1000 if wait >= 0 else math.inf, window or _left_of_window(policy, reply[0])
        figures = limit, count, remaining, retry_after, reset_after / 1000, ttl
        outcomes.append(Outcome(policy, identity, passed == 1, *figures))
        at += REPLY_SIZE
    return tuple(outcomes)


def _left_of_window(policy: Policy, now: float) -> int:
    window = policy.window * 1000
    return math.ceil((window - now % window) / 1000)


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the refusing outcome with the longest wait, else the one with least remaining.

    A shadow policy is chosen only if all are.
    """
    every = tuple(outcomes)
    return every[0] if len(every) == 1 else max(every, key=_strictness)


def _strictness(outcome: Outcome) -> tuple[bool, bool, float]:
    refused = not outcome.allowed
    return not outcome.policy.shadow, refused, outcome.retry_after if refused else -outcome.remaining


def combine(outcomes: Iterable[Outcome]) -> Decision | None:
    """Return several outcomes as one decision, which cannot be refunded; None when there are none."""
    every = tuple(outcomes)
    return Decision(all(each.allowed or each.policy.shadow for each in every), every) if every else None
