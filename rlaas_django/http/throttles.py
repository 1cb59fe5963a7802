"""The throttles of other packages: the checks of several for one request, decided in one round trip.

A throttle has `plan(request, ..., planned)`, which returns a Plan, or None where it does not limit the request.
`planned` has the names of the policies that others of them check.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from django.http.response import HttpResponseBase

from .. import conf, limiter, signals
from ..core.decision import Decision, combine, passes
from ..core.keys import Identity
from ..core.policy import DEFAULT, Policy
from ..limiter import Check, plan
from ..runtime import registry
from .gate import Gate
from .limits import Limits
from .request_state import STATE, RequestState, decision_about
from .responses import SUPPRESSED, add_headers, add_refusal_headers


class Plan(NamedTuple):
    """What a throttle checks: who is charged how much, by which policies, all or none."""

    identity: Identity
    policies: tuple[Policy, ...]
    cost: int = 1


class PolicyLimits:
    """What a throttle checks that names policies; the default one unless others are named."""

    def __init__(self, name: str, policies: Iterable[str | Policy]) -> None:
        self.name, self._limits = (
            name,
            Limits(tuple(policies) or (DEFAULT,), with_options=False),
        )
        self._names = set(map(str, self._limits.policies))
        registry.sources.add(self)

    def limits(self) -> list[registry.LimitedView]:
        """Return them for the registry."""
        return [registry.LimitedView(self.name, self._limits.policies, {})]

    def plan(self, request: Any, planned: Container[str]) -> Plan | None:
        """Return what to check: those that are not planned or checked already; None if none is left."""
        gate = Gate(self._limits, request)
        if gate.prepared is None:
            return None
        identity, policy_set, cost = gate.resolve(gate.prepared)
        left = (
            [policy for policy in policy_set.policies if policy.name not in planned]
            if policy_set
            else []
        )
        return Plan(identity, tuple(left), cost) if left else None

    def calls_site(self) -> bool:
        """Return whether planning calls functions of the site, which may use the database."""
        return (
            conf.config().derived.limits.get(self._limits) or self._limits.prepare()
        ).calls_site_functions

    def decision(self, request: Any) -> Decision | None:
        """Return what they decided about a request, whichever limits checked them."""
        state: RequestState | None = getattr(request, STATE, None)
        outcomes = {} if state is None else state.outcomes
        return combine(
            outcome for name, outcome in outcomes.items() if name in self._names
        )


def plan_all(throttles: Iterable[Any], *args: Any) -> dict[Any, Plan]:
    """Return what each throttle plans to check; a policy that several name is planned once."""
    plans: dict[Any, Plan] = {}
    planned: set[str] = set()
    for throttle in throttles:
        if (plan := throttle.plan(*args, planned)) is not None:
            plans[throttle] = plan
            planned.update([policy.name for policy in plan.policies])
    return plans


def decide(request: Any, plans: dict[Any, Plan]) -> dict[Any, Decision]:
    """Decide what throttles plan, in one round trip, and keep the decisions with the request."""
    if not plans:
        return {}
    decisions = limiter.check_each(_checks(plans))
    record(request, decisions)
    return dict(zip(plans, decisions, strict=True))


async def adecide(request: Any, plans: dict[Any, Plan]) -> dict[Any, Decision]:
    """As `decide`, natively async."""
    if not plans:
        return {}
    decisions = await limiter.acheck_each(_checks(plans))
    if (refusal := _keep(request, decisions)) is not None:
        await signals.asend(signals.rate_limited, request=request, decision=refusal)
    return dict(zip(plans, decisions, strict=True))


def _checks(plans: dict[Any, Plan]) -> list[Check]:
    return [plan(*each) for each in plans.values()]


def record(request: Any, decisions: Sequence[Decision]) -> None:
    """Keep decisions with the request, and signal if one refuses."""
    if (refusal := _keep(request, decisions)) is not None:
        signals.send(signals.rate_limited, request=request, decision=refusal)


def _keep(request: Any, decisions: Sequence[Decision]) -> Decision | None:
    """Keep decisions, as one, as those of decorators and of the middleware are; return it if a policy refuses."""
    state: RequestState = getattr(request, STATE, None) or RequestState(request)
    state.add_request(request)
    decision = decisions[0]
    if len(decisions) > 1:
        outcomes = tuple([outcome for each in decisions for outcome in each.outcomes])
        decision = Decision(passes(outcomes), outcomes)
    state.depth += 1
    refuses = state.record(decision, 1, block=True)
    # With what `decision` lacks: receipts, latency, is_cached.
    state.checked[-1:] = state.open[-1:] = [(each, 1) for each in decisions]
    state.leave(None)  # a throttle runs before its view, which other limits may refuse
    if state.log_suppressed:
        request.META[SUPPRESSED] = True
    return decision if refuses else None


def with_headers(request: Any, response: Any) -> Any:
    """Return a response with the headers of what was decided about the request."""
    decision = decision_about(request)
    if decision is not None and isinstance(response, HttpResponseBase):
        add_headers(response.headers, decision)
        if not decision.allowed:
            add_refusal_headers(response, decision)
    return response
