"""What is decided without Redis."""

from __future__ import annotations

from . import log
from .policy import Decision, Outcome, Policy

RETRY_AFTER = 1.0  # seconds; what a client is told when a closed policy cannot be decided


def decide(policies: tuple[Policy, ...], identities: tuple[str, ...], error: Exception) -> Decision:
    """Open policies let the request pass, closed ones refuse it."""
    outcomes = tuple(
        unasked(policy, identity, allowed=policy.on_failure != "closed")
        for policy, identity in zip(policies, identities, strict=True)
    )
    allowed = all(outcome.allowed or outcome.policy.shadow for outcome in outcomes)
    decision = Decision(allowed, outcomes, degraded=True)
    log.error("Redis could not be asked; the request was %s: %s", "let through" if allowed else "refused", error)
    return decision


def unasked(policy: Policy, identity: str, allowed: bool = True) -> Outcome:
    """An outcome that nobody counted."""
    limit, window = policy.capacity, policy.window
    return Outcome(policy, identity, allowed, limit, 0, limit, 0.0 if allowed else RETRY_AFTER, 0.0, window)
