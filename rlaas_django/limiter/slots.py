"""A check across hash slots of a cluster: charged slot by slot, and refunded when a later slot refuses. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..backend import Call, UnavailableError
from ..core.decision import Decision, Outcome
from . import fallback
from .replies import Check, outcomes


class SlotCheck:
    """The progress of such a check. Once a slot refuses, the others are only looked at."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.groups = check.policy_set.topology.group_by_slot(check.policy_set.keys(check.identities))
        self.allowed = True
        self.error: UnavailableError | None = None
        self.receipts: list[Any] = []
        self._outcomes: dict[int, Outcome] = {}
        self._undecided: list[int] = []
        self._deadline = time.monotonic() + check.policy_set.topology.timeout

    def call(self, group: Sequence[int]) -> Call | None:
        """Return the call for one slot; None when unreachable slots have used up the time of all."""
        if self.error is not None and time.monotonic() >= self._deadline:
            self._undecided += group
            return None
        self._part = self.check.part(group, charge=self.check.charge and self.allowed)
        return self._part.call()

    def add(self, group: Sequence[int], reply: Any) -> None:
        """Add the reply for a slot."""
        part = self._part
        found = outcomes(part, reply)
        self._outcomes.update(zip(group, found, strict=True))
        passes = all(each.allowed or each.policy.shadow for each in found)
        if part.charge and passes:
            self.receipts.append((part, reply))
        self.allowed = self.allowed and passes

    def fail(self, group: Sequence[int], error: UnavailableError) -> None:
        """Note that a slot has no reply; its policies are decided without Redis."""
        self.error = error
        self._undecided += group

    def fall_back(self) -> None:
        """Decide what has no reply."""
        if not self._undecided:
            return
        charge = self.check.charge and self.allowed
        found, passes, receipts = fallback.decide(self.check, self._undecided, charge=charge)
        self._outcomes.update(zip(self._undecided, found, strict=True))
        self.allowed = self.allowed and passes
        self.receipts += receipts

    def refunds(self) -> list[Any]:
        """Return what was charged before a slot refused, and is to be refunded."""
        if self.allowed:
            return []
        receipts, self.receipts = self.receipts, []
        return receipts

    def look_again(self, part: Check) -> Call:
        """Return the call for the figures after a refund."""
        self._part = part._replace(charge=False)
        return self._part.call()

    def update(self, reply: Any) -> None:
        """Replace the figures of policies that were refunded."""
        for outcome in outcomes(self._part, reply):
            i = self.check.policy_set.policies.index(outcome.policy)
            self._outcomes[i] = outcome

    def decision(self) -> Decision:
        ordered = [self._outcomes[i] for i in range(len(self.check.policy_set.policies))]
        return Decision(self.allowed, ordered, self.receipts)
