"""A check across hash slots of a cluster: charged slot by slot, and refunded when a later slot refuses. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..backend import UnavailableError
from ..core.decision import Decision, Outcome
from ..runtime import observers
from . import fallback
from .fallback import LocalReceipt
from .policy_set import Check


class SlotCheck:
    """A check over several hash slots. Once a slot refuses, the others are peeked, not charged."""

    def __init__(self, check: Check) -> None:
        self.check, policy_set = check, check.policy_set
        self.groups = policy_set.topology.group_by_slot(
            policy_set.keys(check.identities)
        )
        self.allowed = True
        self.error: UnavailableError | None = None
        self.receipts: list[Any] = []
        self._outcomes: dict[str, Outcome] = {}  # by policy
        self._undecided: list[int] = []
        self._started = time.monotonic()
        self._deadline = self._started + policy_set.topology.timeout

    def part(self, group: Sequence[int]) -> Check | None:
        """Return the check of one slot; None when unreachable slots have used up the time of all."""
        if self.error is not None and time.monotonic() >= self._deadline:
            self._undecided += group
            return None
        return self.check.part(group, charge=self.check.charge and self.allowed)

    def add(self, decision: Decision) -> None:
        """Add the decision of a slot; a later one replaces the figures."""
        self._outcomes.update(
            {outcome.policy.name: outcome for outcome in decision.outcomes}
        )
        self.allowed = self.allowed and decision.allowed
        self.receipts += decision.receipts

    def fail(self, group: Sequence[int], error: UnavailableError) -> None:
        """Note that a slot has no reply; its policies are decided without Redis."""
        self.error = error
        self._undecided += group

    def decide_unreached(self) -> None:
        """Decide the policies of the slots that have no reply, without Redis."""
        if self._undecided:
            self.add(
                fallback.decide(
                    self.check,
                    self._undecided,
                    charge=self.check.charge and self.allowed,
                )
            )

    def peeks_after_refund(self) -> list[Check]:
        """Return the checks, without charge, that get the figures after what was charged is refunded."""
        charged = [
            receipt[0]
            for receipt in self.receipts
            if not isinstance(receipt, LocalReceipt)
        ]
        return [
            check.part(range(len(check.identities)), charge=False) for check in charged
        ]

    def decision(self) -> Decision:
        ordered = tuple(
            [self._outcomes[policy.name] for policy in self.check.policy_set.policies]
        )
        decision = Decision(self.allowed, ordered, self.receipts)
        if observers.measures_latency and self.error is None:
            decision.latency = time.monotonic() - self._started
        return decision
