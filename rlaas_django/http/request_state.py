"""What was decided about a request so far, by all of its limits."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from .. import limiter
from ..core.decision import Decision, Outcome, combine, strictest
from ..runtime import log, observers
from ..runtime.observers import MAX_METHOD, MAX_TEXT, REQUEST, Observation
from .identity import client_address

STATE = "_rate_limit_state"  # the attribute of a request with what was decided about it
Charge = tuple[Decision, int]  # what was decided, and its cost


def decision_about(request: Any) -> Decision | None:
    """Return what limits decided about a request; None where none was checked, whatever `request.rate_limit` is."""
    state: RequestState | None = getattr(request, STATE, None)
    return None if state is None else state.decision


class RequestState:
    """What was decided about a request so far."""

    __slots__ = (
        *("_requests", "checked", "decision", "depth", "exceeded", "log_suppressed"),
        *("observed", "open", "outcomes", "refusal", "view_reached"),
    )

    def __init__(self, request: HttpRequest) -> None:
        self._requests: list[Any] = [
            request
        ]  # Django REST framework wraps the request in one of its own
        self.checked: list[Charge] = []
        self.open: list[
            Charge
        ] = []  # of limits whose view has not returned yet; they are refunded if another refuses
        self.outcomes: dict[str, Outcome] = {}  # by policy
        self.decision: Decision | None = None  # of all policies
        self.refusal: Decision | None = None  # of the limits that refused the request
        self.exceeded = False  # whether it is over a limit, refused or not
        self.depth = 0  # how many limits, one inside the other, the request is within
        self.observed = 0  # of `checked`
        self.log_suppressed = self.view_reached = False
        setattr(request, STATE, self)

    def add_request(self, request: HttpRequest) -> None:
        if all(each is not request for each in self._requests):
            self._requests.append(request)

    def annotate(self, decision: Decision | None) -> None:
        """Let views read the decision as `request.rate_limit`."""
        for request in self._requests:
            request.rate_limit = decision

    def record(self, decision: Decision, cost: int, *, block: bool) -> bool:
        """Keep a decision; return whether a policy refused, or a shadow policy would have."""
        request, refusing = self._requests[-1], []
        for outcome in decision.outcomes:
            self.outcomes[outcome.policy.name] = outcome
            if not outcome.allowed and not outcome.failed_closed:
                refusing.append(outcome)
        self.checked.append((decision, cost))
        self.open.append((decision, cost))
        self.decision = (
            decision if len(self.checked) == 1 else combine(self.outcomes.values())
        )
        for each in self._requests:
            each.rate_limit = self.decision
        self.exceeded = self.exceeded or bool(refusing)
        if block and not decision.allowed:
            self.refusal = decision
        if refusing:
            self.log_suppressed = log.refusal(
                strictest(refusing), request.method or "", request.path, block=block
            )
        return bool(refusing)

    def refund_cancelled(self) -> None:
        """Refund what a cancelled request was charged, unless its view has begun."""
        if not self.view_reached:
            for decision, _ in self.open:
                limiter.refund_later(decision.receipts)

    def refunded(self, decision: Decision, cost: int) -> None:
        """Update the figures that a client sees."""
        for outcome in decision.outcomes:
            if outcome.allowed:
                remaining = min(outcome.limit, outcome.remaining + cost)
                self.outcomes[outcome.policy.name] = outcome._replace(
                    remaining=remaining
                )
        self.decision = combine(self.outcomes.values())
        self.annotate(self.decision)

    def leave(self, left: Decision | None) -> None:
        """Make the charge of the limits that are left final; have the request observed after the outermost."""
        self.depth -= 1
        while left is not None and self.open and self.open.pop()[0] is not left:
            pass  # what throttles inside of them charged is final, too
        if self.depth or self.observed == len(self.checked) or not observers.observers:
            return
        observed, self.observed = self.observed, len(self.checked)
        request, decision, exceeded = self._requests[0], self.decision, self.exceeded
        latencies: tuple[float, ...] = ()
        if (
            observed
        ):  # limits one after the other, such as of the resolvers of a GraphQL request
            decision = combine(
                outcome
                for each, _ in self.checked[observed:]
                for outcome in each.outcomes
            )
        elif (
            decision is not None
            and decision.allowed
            and (count := observers.only_count)
            and count(decision)
        ):
            return
        if observers.measures_latency:
            latencies = tuple(
                [
                    each.latency
                    for each, _ in self.checked[observed:]
                    if each.latency is not None
                ]
            )
        observation = Observation(
            decision,  # type: ignore[arg-type]  # there is one, as something was checked
            self.refusal,
            REQUEST,
            (request.method or "")[
                :MAX_METHOD
            ],  # the client chooses both, and they stay in memory
            request.path[:MAX_TEXT],
            client_address(request) if exceeded else "",
            request.META.get("HTTP_USER_AGENT", "")[:MAX_TEXT]
            if exceeded
            else "",  # `headers` reads all of META
            latencies,
            is_continued=observed > 0,
            is_cached=exceeded
            and any(each.is_cached for each, _ in self.checked[observed:]),
        )
        for observer in [*observers.observers]:
            observer(observation)
