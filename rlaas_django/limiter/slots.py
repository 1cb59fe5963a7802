"""A check across hash slots of a cluster. No I/O.

It is charged slot by slot, and refunded when a later slot refuses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..backend import UnavailableError
from ..core.decision import Decision, Outcome
from ..runtime import observers
from . import fallback
from .plan import Check
from .replies import read


class SlotCheck:
    """A check over several hash slots.

    Once a slot refuses, the others are peeked, not charged.
    """

    def __init__(self, check: Check) -> None:
        policy_set = check.policy_set
        self.check = check
        keys = policy_set.keys(check.identities)
        self.groups = policy_set.topology.group_by_slot(keys)
        self.allowed = True
        self.error: UnavailableError | None = None
        self.receipts: list[Any] = []
        self._outcomes: dict[str, Outcome] = {}  # by policy
        self._undecided: list[int] = []
        self._started = time.monotonic()
        self._deadline = self._started + policy_set.topology.timeout
        if not policy_set.enabled:
            self.groups = []
            self._add(fallback.decide_all(check))

    @property
    def _charges(self) -> bool:
        return self.check.charge and self.allowed

    def part(self, group: Sequence[int]) -> Check | None:
        """Return the check of one slot.

        None when unreachable slots have used up the time of all.
        """
        if self.error is not None and time.monotonic() >= self._deadline:
            self._undecided += group
            return None
        return self.check.part(group, charge=self._charges)

    def add_reply(self, group: Sequence[int], part: Check, reply: Any) -> None:
        """Add the reply of a slot, or the error why there is none."""
        if isinstance(reply, UnavailableError):
            self.error = reply
            self._undecided += group
        else:
            self._add(read(part, reply))

    def refresh(self, part: Check, reply: Any) -> None:
        """Take the outcomes after the refund, if there is a reply."""
        if not isinstance(reply, UnavailableError):
            self._add(read(part, reply))

    def _add(self, decision: Decision) -> None:
        """Add a decision, whose outcomes replace earlier ones."""
        for outcome in decision.outcomes:
            self._outcomes[outcome.policy.name] = outcome
        self.allowed = self.allowed and decision.allowed
        self.receipts += decision.receipts

    def decide_unreached(self) -> None:
        """Decide the policies of the slots that have no reply, without Redis."""
        if self._undecided:
            self._add(
                fallback.decide(self.check, self._undecided, charge=self._charges)
            )

    def peeks_after_refund(self) -> list[Check]:
        """Return the checks, without charge, that get the outcomes after the refund."""
        return [
            check.part(range(len(check.identities)), charge=False)
            for check, _ in self.receipts
            if check.unique != fallback.LOCAL
        ]

    def decision(self) -> Decision:
        outcomes = tuple(
            [self._outcomes[policy.name] for policy in self.check.policy_set.policies]
        )
        decision = Decision(self.allowed, outcomes, self.receipts)
        if observers.timed and self.error is None:
            decision.latency = time.monotonic() - self._started
        return decision
