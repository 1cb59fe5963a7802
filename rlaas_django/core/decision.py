"""What was decided: one Decision per check, one Outcome per policy. No Django, no Redis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .policy import Policy

# What the scripts reply for each policy, after the time of the decision:
# allowed, current_count, remaining, retry_after, reset_after, limit, charged_at (times in ms)
REPLY_SIZE = 7
LIMIT, CHARGED_AT = 6, 7  # where these stand in the reply of a single policy


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
    fixed_windows: tuple[int, ...]  # ms; 0 where the algorithm is not the fixed window


class Decision:
    """The result of one check: the strictest policy's figures, and an outcome per policy.

    >>> decision = check("alice")
    >>> decision.allowed, decision.remaining, decision.retry_after
    (True, 4, 0.0)

    It is a view of the script's reply; outcomes are made when they are read, which takes a third of the time that a
    frozen dataclass takes (benchmarks/decision.py).
    """

    __slots__ = ("_identities", "_outcomes", "_policy_set", "_reply", "_strictest", "allowed", "receipts")

    _policy_set: PolicySet
    _identities: Sequence[str]
    _reply: list[Any]

    def __init__(self, allowed: bool, outcomes: Sequence[Outcome], receipts: list[Any] | None = None) -> None:
        self.allowed = allowed
        # What `refund` sends. Each is popped by whoever refunds it, so that it is refunded once.
        self.receipts: list[Any] = [] if receipts is None else receipts
        self._outcomes: tuple[Outcome, ...] | None = tuple(outcomes)
        self._strictest: Outcome | None = None

    @classmethod
    def from_reply(
        cls, policy_set: PolicySet, identities: Sequence[str], reply: list[Any], allowed: bool, receipts: list[Any]
    ) -> Decision:
        self = cls.__new__(cls)
        self.allowed, self.receipts = allowed, receipts
        self._policy_set, self._identities, self._reply = policy_set, identities, reply
        self._outcomes = self._strictest = None
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
    def strictest(self) -> Outcome:
        """The outcome whose figures are the decision's."""
        if self._strictest is None:
            self._strictest = strictest(self.outcomes)
        return self._strictest

    @property
    def policy(self) -> Policy:
        return self.strictest.policy

    @property
    def limit(self) -> int:
        """Units per window; for a token bucket its burst."""
        return self.strictest.limit

    @property
    def current_count(self) -> int:
        """Units in the window before this request."""
        return self.strictest.current_count

    @property
    def remaining(self) -> int:
        """Units left after this request."""
        return self.strictest.remaining

    @property
    def retry_after(self) -> float:
        """Exact seconds until this request would pass; 0.0 when allowed, inf when its cost can never fit."""
        return 0.0 if self.allowed else self.strictest.retry_after

    @property
    def reset_after(self) -> float:
        """Seconds until the quota is whole again."""
        return self.strictest.reset_after

    @property
    def ttl(self) -> int:
        """Seconds: the window size, and for the fixed window what is left of it, rounded up."""
        return self.strictest.ttl

    @property
    def degraded(self) -> bool:
        """Whether a policy was decided without Redis."""
        return any(outcome.degraded for outcome in self.outcomes)

    @property
    def unavailable(self) -> bool:
        """Whether it was refused only because Redis is unavailable: no limit was exceeded."""
        refusing = [each for each in self.outcomes if not (each.allowed or each.policy.shadow)]
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
    for policy, identity, fixed_window in zip(policy_set.policies, identities, policy_set.fixed_windows, strict=True):
        passed, count, remaining, retry_after, reset_after, limit, _ = reply[at : at + REPLY_SIZE]
        wait = retry_after / 1000 if retry_after >= 0 else math.inf
        ttl = math.ceil((fixed_window - reply[0] % fixed_window) / 1000) if fixed_window else policy.window
        outcomes.append(Outcome(policy, identity, passed == 1, limit, count, remaining, wait, reset_after / 1000, ttl))
        at += REPLY_SIZE
    return tuple(outcomes)


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
