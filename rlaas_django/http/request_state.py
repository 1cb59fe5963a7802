"""What was decided about a request so far, by all of its limits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import limiter
from ..backend import UnavailableError
from ..core.decision import Decision, Outcome, combine
from ..runtime import observers
from ..runtime.observers import MAX_METHOD, MAX_TEXT, REQUEST, Observation
from .proxies import client_address

STATE = "_rate_limit_state"  # the attribute of a request that has it


class Charge(NamedTuple):
    """What a check charged, for its refund."""

    decision: Decision
    cost: int


@dataclass(slots=True, eq=False)
class RequestState:
    """What was decided about a request so far."""

    request: Any  # the first that has it; a framework may wrap it
    unobserved: list[Decision] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)  # refunded if limits refuse
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by policy
    decision: Decision | None = None  # of all policies
    refusal: Decision | None = None  # of the limits that refused the request
    depth: int = 0  # how many limits, one inside the other, it is within
    view_reached: bool = False

    # What Django's `authenticate()` did (login.py).
    login_failed: bool = False
    login_succeeded: bool = False
    login_refusal: Decision | None = None  # of a password that was not compared

    def add(self, decision: Decision, cost: int | None = None) -> list[Outcome]:
        """Keep what was decided, for views as `request.rate_limit`.

        With a cost, a refusal by further limits refunds it. Return the outcomes that
        refuse, or would.
        """
        if cost is not None:
            self.charges.append(Charge(decision, cost))
        outcomes = decision.outcomes
        for outcome in outcomes:
            self.outcomes[outcome.policy.name] = outcome
        self.unobserved.append(decision)

        if self.decision is not None:
            decision = combine(self.outcomes.values())  # type: ignore[assignment]
        self.decision = decision
        self.request.rate_limit = decision
        return [outcome for outcome in outcomes if not outcome.allowed]

    def note_refund(self, charge: Charge) -> None:
        """Update the outcomes that a client sees."""
        for outcome in charge.decision.outcomes:
            if outcome.allowed:
                remaining = min(outcome.limit, outcome.remaining + charge.cost)
                # When there is more than that is not known; not after it is full.
                more_after = outcome.reset_after
                refunded = outcome._replace(remaining=remaining, more_after=more_after)
                self.outcomes[outcome.policy.name] = refunded
        self.decision = combine(self.outcomes.values())
        self.request.rate_limit = self.decision

    def refund_cancelled(self) -> None:
        """Refund what a cancelled request was charged, unless its view has begun."""
        if not self.view_reached:
            for charge in self.charges:
                limiter.refund_later(charge.decision.receipts)

    def observe(self) -> None:
        """Pass the decisions that were not observed yet to the observers, as one."""
        checked = self.unobserved
        if not checked or not observers.observers:
            return
        self.unobserved = []

        names: dict[str, None] = {}  # each once, in order
        for decided in checked:
            for outcome in decided.outcomes:
                names[outcome.policy.name] = None
        decision: Any = self.decision
        if len(names) < len(self.outcomes):  # other limits were observed before
            decision = combine(self.outcomes[name] for name in names)

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
    state: RequestState | None = getattr(request, STATE, None)
    if state is None:
        state = RequestState(request)
        setattr(request, STATE, state)
    return state


def refund(state: RequestState | None, charges: list[Charge]) -> None:
    """Refund charges, in a request or without one."""
    for charge in charges:
        with suppress(UnavailableError):  # what was charged ends with its window
            if limiter.refund(charge.decision) and state is not None:
                state.note_refund(charge)


async def arefund(state: RequestState | None, charges: list[Charge]) -> None:
    """As `refund`, natively async."""
    for charge in charges:
        with suppress(UnavailableError):
            if await limiter.arefund(charge.decision) and state is not None:
                state.note_refund(charge)


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
