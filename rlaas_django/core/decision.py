"""What was decided.

A check has a Decision, with an Outcome per policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .policy import Policy


class Outcome(NamedTuple):
    """The result of one policy."""

    policy: Policy
    identity: str  # encoded, as it stands in the Redis key
    allowed: bool
    limit: int
    current_count: int
    remaining: int
    retry_after: float
    reset_after: float
    ttl: int
    degraded: bool = False  # decided without Redis
    blocked: bool = False  # refused by an override, whatever was used
    # Seconds until more than `remaining` can be used: of a refusal, its wait.
    more_after: float = 0.0

    @property
    def failed_closed(self) -> bool:
        """Whether it was refused because Redis is unavailable, not by a limit."""
        return self.degraded and not self.allowed and self.policy.on_failure == "closed"


class Decision:
    """The result of one check.

    Its values are those of the strictest policy, and it has an outcome per policy.

    >>> decision = check("alice")
    >>> decision.allowed, decision.remaining, decision.retry_after
    (True, 4, 0.0)
    """

    __slots__ = (
        "age",
        "allowed",
        "current_count",
        "latency",
        "limit",
        "made_outcomes",
        "policy",
        "receipts",
        "remaining",
        "reply",
        "reset_after",
        "retry_after",
        "ttl",
    )

    allowed: bool
    # The strictest: the refusing one with the longest wait, or that with least left.
    policy: Policy
    # Units per window; for a token bucket its burst.
    limit: int
    # Units in the window before this request.
    current_count: int
    # Units left after this request.
    remaining: int
    # Exact seconds until this request would pass: 0.0 when it is allowed, infinite
    # when its cost can never fit.
    retry_after: float
    # Seconds until the quota is whole again.
    reset_after: float
    # Seconds: the window, or what is left of a fixed window, rounded up.
    ttl: int
    # What `refund` needs; popped from here, so that it is refunded once.
    receipts: list[Any]
    # Seconds that the call to Redis took; None unless an observer wants it measured.
    latency: float | None
    # The check and the script's reply to it; None where the outcomes were given.
    reply: Any
    # Seconds since the reply, where it is a cached refusal.
    age: float
    # None until they are read.
    made_outcomes: tuple[Outcome, ...] | None

    def __init__(
        self,
        allowed: bool,
        outcomes: tuple[Outcome, ...],
        receipts: list[Any] | None = None,
    ) -> None:
        strictest_outcome = strictest(outcomes)
        self.allowed = allowed
        self.policy = strictest_outcome.policy
        self.limit = strictest_outcome.limit
        self.current_count = strictest_outcome.current_count
        self.remaining = strictest_outcome.remaining
        self.retry_after = 0.0 if allowed else strictest_outcome.retry_after
        self.reset_after = strictest_outcome.reset_after
        self.ttl = strictest_outcome.ttl
        self.receipts = [] if receipts is None else receipts
        self.latency = None
        self.reply = None
        self.age = 0.0
        self.made_outcomes = outcomes

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The result of each policy.

        Those of a reply are made when they are read: a check in code needs none.
        """
        if self.made_outcomes is None:
            self.made_outcomes = self.read_outcomes()
        return self.made_outcomes

    def read_outcomes(self) -> tuple[Outcome, ...]:
        """Make the outcomes of a reply, for a decision that has one."""
        raise NotImplementedError

    @property
    def degraded(self) -> bool:
        """Whether a policy was decided without Redis."""
        if self.reply is not None:
            return False
        return any(outcome.degraded for outcome in self.outcomes)

    @property
    def is_cached(self) -> bool:
        """Whether it is a cached refusal."""
        return self.age > 0

    @property
    def unavailable(self) -> bool:
        """Whether it was refused only because Redis is unavailable, not by a limit."""
        refusing = [
            outcome
            for outcome in self.outcomes
            if not (outcome.allowed or outcome.policy.shadow)
        ]
        return bool(refusing) and all(outcome.failed_closed for outcome in refusing)

    def __reduce__(self) -> Any:
        """Copy the result without the receipts.

        So only the original can be refunded.
        """
        return Decision, (self.allowed, self.outcomes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return (self.allowed, self.outcomes) == (other.allowed, other.outcomes)

    def __hash__(self) -> int:
        return hash((self.allowed, self.outcomes))

    def __repr__(self) -> str:
        return f"Decision(allowed={self.allowed}, outcomes={self.outcomes})"


def passes(outcomes: Iterable[Outcome]) -> bool:
    """Return whether every enforced policy allows."""
    return all(outcome.allowed or outcome.policy.shadow for outcome in outcomes)


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the refusing outcome with the longest wait, or that with least left.

    A shadow policy is chosen only if all are.
    """
    return max(outcomes, key=_strictness)


def _strictness(outcome: Outcome) -> tuple[bool, bool, float]:
    enforced = not outcome.policy.shadow
    if outcome.allowed:
        return enforced, False, -outcome.remaining
    return enforced, True, outcome.retry_after


def combine(outcomes: Iterable[Outcome]) -> Decision | None:
    """Return several outcomes as one decision, which cannot be refunded.

    None when there are none.
    """
    combined = tuple(outcomes)
    if not combined:
        return None
    return Decision(passes(combined), combined)
