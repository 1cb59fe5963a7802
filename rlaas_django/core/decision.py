"""What was decided: one Decision per check, one Outcome per policy. No Django, no Redis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .policy import Policy


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
    blocked: bool = False  # refused by an override, whatever was used

    @property
    def failed_closed(self) -> bool:
        """Whether it was refused because Redis is unavailable, not because of a limit."""
        return self.degraded and not self.allowed and self.policy.on_failure == "closed"


class Decision:
    """The result of one check: the strictest policy's figures, and an outcome per policy.

    >>> decision = check("alice")
    >>> decision.allowed, decision.remaining, decision.retry_after
    (True, 4, 0.0)
    """

    __slots__ = (
        *(
            "allowed",
            "policy",
            "limit",
            "current_count",
            "remaining",
            "retry_after",
            "reset_after",
            "ttl",
            "degraded",
        ),
        *("outcomes", "receipts", "latency"),
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
    outcomes: tuple[Outcome, ...]  # the result of each policy
    receipts: list[
        Any
    ]  # what `refund` needs; popped from here, so that it is refunded once
    latency: (
        float | None
    )  # seconds that the call to Redis took; None unless an observer wants it measured
    is_cached = False  # whether it is a refusal repeated from memory

    def __init__(
        self,
        allowed: bool,
        outcomes: tuple[Outcome, ...],
        receipts: list[Any] | None = None,
    ) -> None:
        self.allowed, self.outcomes, self.receipts = (
            allowed,
            outcomes,
            [] if receipts is None else receipts,
        )
        figures = outcomes[0] if len(outcomes) == 1 else strictest(outcomes)
        (
            self.policy,
            _,
            _,
            self.limit,
            self.current_count,
            self.remaining,
            wait,
            self.reset_after,
            self.ttl,
            *_,
        ) = figures
        self.retry_after, self.latency = 0.0 if allowed else wait, None
        self.degraded = (
            outcomes[0].degraded
            if len(outcomes) == 1
            else any(each.degraded for each in outcomes)
        )

    @property
    def unavailable(self) -> bool:
        """Whether it was refused only because Redis is unavailable: no limit was exceeded."""
        if not self.degraded:
            return False
        refusing = [
            each for each in self.outcomes if not (each.allowed or each.policy.shadow)
        ]
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


def passes(outcomes: Iterable[Outcome]) -> bool:
    """Return whether every enforced policy allows."""
    return all(each.allowed or each.policy.shadow for each in outcomes)


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the refusing outcome with the longest wait, else the one with least remaining.

    A shadow policy is chosen only if all are.
    """
    return max(outcomes, key=_strictness)


def _strictness(outcome: Outcome) -> tuple[bool, bool, float]:
    refused = not outcome.allowed
    return (
        not outcome.policy.shadow,
        refused,
        outcome.retry_after if refused else -outcome.remaining,
    )


def combine(outcomes: Iterable[Outcome]) -> Decision | None:
    """Return several outcomes as one decision, which cannot be refunded; None when there are none."""
    every = tuple(outcomes)
    return Decision(passes(every), every) if every else None
