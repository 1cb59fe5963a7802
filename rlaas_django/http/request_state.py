"""What was decided about a request so far, kept on the request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import HttpRequest

from ..core.decision import Decision, Outcome, combine

ATTRIBUTE = "_rate_limit_state"  # of the request


class RequestState:
    """What was decided about a request so far."""

    __slots__ = ("_decision", "_outcomes", "charges", "requests")

    def __init__(self, request: HttpRequest) -> None:
        self.requests: list[Any] = [request]  # Django REST framework wraps the request in one of its own
        self.charges: list[tuple[Decision, int]] = []  # with the cost
        self._decision: Decision | None = None
        self._outcomes: dict[str, Outcome] = {}

    @classmethod
    def of(cls, request: HttpRequest) -> RequestState:
        """Return a request's state, made when it is first asked for."""
        state: RequestState | None = getattr(request, ATTRIBUTE, None)
        if state is None:
            state = cls(request)
            setattr(request, ATTRIBUTE, state)
            request.rate_limit = None  # type: ignore[attr-defined]
        elif all(each is not request for each in state.requests):
            state.requests.append(request)
        return state

    def add(self, decision: Decision, cost: int) -> None:
        if self.charges:
            self.outcomes.update({outcome.policy.name: outcome for outcome in decision.outcomes})
        self._decision = None if self.charges else decision
        self.charges.append((decision, cost))
        self.annotate(self.decision())

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """By the policies' names; of a single decision nobody asks for them."""
        if not self._outcomes and self.charges:
            self._outcomes = {outcome.policy.name: outcome for outcome in self.charges[0][0].outcomes}
        return self._outcomes

    def decision(self, names: Collection[str] | None = None) -> Decision | None:
        """Return the decision of these policies, or of all, as one."""
        if names is not None and len(names) < len(self.outcomes):
            return combine(outcome for name, outcome in self.outcomes.items() if name in names)
        if self._decision is None:
            self._decision = combine(self.outcomes.values())
        return self._decision

    def refunded(self, decision: Decision, cost: int) -> None:
        """Update the figures that a client sees."""
        for outcome in decision.outcomes:
            restored = min(outcome.limit, outcome.remaining + cost) if outcome.allowed else 0
            self.outcomes[outcome.policy.name] = outcome._replace(remaining=max(outcome.remaining, restored))
        self._decision = None
        self.annotate(self.decision())

    def annotate(self, decision: Decision | None) -> None:
        """Let views read the decision as `request.rate_limit`."""
        for request in self.requests:
            request.rate_limit = decision
