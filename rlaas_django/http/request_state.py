"""What was decided about a request so far, by all of its limits."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpRequest

from .. import limiter
from ..core.decision import Decision, Outcome, combine
from ..runtime import observers
from ..runtime.observers import MAX_METHOD, MAX_TEXT, REQUEST, Observation
from .proxies import client_address

STATE = "_rate_limit_state"  # the attribute of a request that has it


class Charge(NamedTuple):
    """What a check charged, for its refund."""

    decision: Decision
    cost: int


class RequestState:
    """What was decided about a request so far."""

    __slots__ = (
        "charges",
        "checked",
        "decision",
        "depth",
        "outcomes",
        "refusal",
        "request",
        "view_reached",
    )

    def __init__(self, request: HttpRequest) -> None:
        self.request: Any = request  # the first that has it; a framework may wrap it
        self.checked: list[Decision] = []  # not observed yet
        self.charges: list[Charge] = []  # refunded if an inner limit refuses
        self.outcomes: dict[str, Outcome] = {}  # by policy
        self.decision: Decision | None = None  # of all policies
        self.refusal: Decision | None = None  # of the limits that refused the request
        self.depth = 0  # how many limits, one inside the other, it is within
        self.view_reached = False
        setattr(request, STATE, self)

    def add(self, decision: Decision, cost: int) -> None:
        """Keep what was decided, and let views read it as `request.rate_limit`."""
        for outcome in decision.outcomes:
            self.outcomes[outcome.policy.name] = outcome
        self.checked.append(decision)
        self.charges.append(Charge(decision, cost))

        if self.decision is None:
            self.annotate(decision)
        else:
            self.annotate(combine(self.outcomes.values()))

    def annotate(self, decision: Decision | None) -> None:
        self.decision = decision
        self.request.rate_limit = decision

    def note_refund(self, charge: Charge) -> None:
        """Update the figures that a client sees."""
        for outcome in charge.decision.outcomes:
            if outcome.allowed:
                remaining = min(outcome.limit, outcome.remaining + charge.cost)
                refunded = outcome._replace(remaining=remaining)
                self.outcomes[outcome.policy.name] = refunded
        self.annotate(combine(self.outcomes.values()))

    def refund_cancelled(self) -> None:
        """Refund what a cancelled request was charged, unless its view has begun."""
        if not self.view_reached:
            for charge in self.charges:
                limiter.refund_later(charge.decision.receipts)

    def observe(self) -> None:
        """Have the observers see what was decided since they saw it last, as one."""
        checked = self.checked
        if not checked or not observers.observers:
            return
        self.checked = []

        names = [
            outcome.policy.name for checks in checked for outcome in checks.outcomes
        ]
        decision: Any = self.decision
        if len(names) < len(self.outcomes):  # other limits were observed before
            decision = combine(self.outcomes[name] for name in dict.fromkeys(names))

        count = observers.only_count
        if count is not None and decision.allowed and count(decision):
            return
        observation = self._observation(decision, checked)
        for observer in [*observers.observers]:
            observer(observation)

    def _observation(self, decision: Decision, checked: list[Decision]) -> Observation:
        request = self.request
        address = ""
        user_agent = ""
        exceeded = any(map(exceeds_limit, decision.outcomes))
        if exceeded:
            address = client_address(request)
            user_agent = request.META.get("HTTP_USER_AGENT", "")

        latencies = [decision.latency for decision in checked]
        return Observation(
            decision,
            self.refusal,
            REQUEST,
            # The client chooses these, and they stay in memory.
            method=(request.method or "")[:MAX_METHOD],
            path=request.path[:MAX_TEXT],
            address=address,
            user_agent=user_agent[:MAX_TEXT],
            latencies=tuple([seconds for seconds in latencies if seconds is not None]),
            is_cached=exceeded and any(decision.is_cached for decision in checked),
        )


def state_of(request: Any) -> RequestState:
    """Return the state of a request, which begins here if it has none yet."""
    return getattr(request, STATE, None) or RequestState(request)


def decision_about(request: Any) -> Decision | None:
    """Return what limits decided about a request.

    None where nothing was checked, whatever `request.rate_limit` is.
    """
    state: RequestState | None = getattr(request, STATE, None)
    if state is None:
        return None
    return state.decision


def exceeds_limit(outcome: Outcome) -> bool:
    """Return whether a limit is exceeded; it is not where a policy fails closed."""
    return not outcome.allowed and not outcome.failed_closed
