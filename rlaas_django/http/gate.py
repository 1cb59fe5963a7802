"""One request before its limits: check what was not checked yet, refuse or call the view, add the headers.

A decorator has limits, and so has a rule of the middleware. What was decided is kept on the request, so that a policy
that several of them name is charged once, and a refusal refunds what limits before it charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import conf, limiter, signals
from ..backend import UnavailableError
from ..core.decision import Decision, combine
from ..limiter import PolicySet, compile_policies
from . import login, responses
from .identity import RequestIdentity, load_user
from .limits import Limits, Prepared, with_fixed_rates
from .request_state import STATE, Charge, RequestState
from .site_functions import call_cost, is_charged

View = Callable[..., Any]
Resolved = tuple[RequestIdentity, PolicySet | None, int]


class Gate:
    """One request before one set of limits; what sync and async have in common."""

    __slots__ = (
        "cost",
        "decision",
        "inner",
        "limits",
        "names",
        "prepared",
        "request",
        "state",
    )

    def __init__(self, limits: Limits, request: HttpRequest) -> None:
        self.limits, self.request, config = limits, request, conf.config()
        state: RequestState | None = getattr(request, STATE, None)
        if state is not None:
            state.add_request(request)
        self.state = state or RequestState(request)
        # None where these limits do not apply.
        self.prepared: Prepared | None = None
        self.inner: tuple[Limits, ...] = ()
        if config.enabled:
            prepared: Prepared = config.derived.limits.get(limits) or limits.prepare()
            self.limits, self.inner, methods = (
                prepared.limits,
                prepared.inner,
                prepared.limits.methods,
            )
            if methods is None or request.method in methods:
                self.prepared = prepared
        self.decision: Decision | None = None  # what these limits checked
        self.names: list[
            str
        ] = []  # of the policies that apply, where other limits have checked some
        self.cost = 0  # known once resolved

    def resolve(self, prepared: Prepared) -> Resolved:
        """Return the identity, the policies not yet checked (None if all were), and the cost; keep names and cost."""
        request, identity, policies = (
            self.request,
            RequestIdentity(self.request),
            prepared.policies,
        )
        policy_set = prepared.policy_set
        if policy_set is None:
            policies = with_fixed_rates(policies, request)
        if prepared.calls_site_functions:
            for policy in policies:
                identity.call_key_function(policy.key)
        if self.state.checked:
            self.names = [policy.name for policy in policies]
            fresh = tuple(
                [
                    policy
                    for policy in policies
                    if policy.name not in self.state.outcomes
                ]
            )
            if len(fresh) < len(policies):
                policies, policy_set = fresh, None
        if policy_set is None and policies:
            policy_set = compile_policies(policies)
        cost = self.limits.cost
        self.cost = call_cost(cost, request, policy_set) if callable(cost) else cost
        return identity, policy_set, self.cost

    def note_result(self) -> Decision | None:
        """Note on the request that nothing limits it, or that these limits refuse it; return the refusal, if any.

        A policy of these limits refuses also where other limits have checked it.
        """
        state, own = self.state, self.decision
        if state.decision is None:
            state.annotate(limiter.unlimited())
            return None
        if own is None or len(state.checked) > 1:
            own = combine(
                outcome
                for name, outcome in state.outcomes.items()
                if name in self.names
            )
        if own is None or own.allowed or not self.limits.block:
            return None
        state.refusal = own
        return own

    def to_refund(self) -> list[Charge]:
        """Return what these limits and those around them charged: a refused request costs nothing."""
        return [each for each in self.state.open if each[0].allowed]

    def uncharged(self, response: HttpResponseBase, decision: Decision) -> list[Charge]:
        """Return what these limits charged, if their `charge_when` does not count the response."""
        charge_when = self.limits.charge_when
        return (
            []
            if charge_when is None or is_charged(charge_when, response)
            else [(decision, self.cost)]
        )

    @property
    def response(self) -> responses.Respond | None:
        """The site's function for refusals; None for our own."""
        return self.limits.response or conf.config().response

    def suppress_log(self, response: HttpResponseBase) -> HttpResponseBase:
        """Keep Django from logging a refusal of ours whose line was suppressed; return the response."""
        is_ours = self.state.log_suppressed and self.response is None
        return responses.suppress_log(self.request, response) if is_ours else response


def enter(
    limits: Limits,
    request: HttpRequest,
    view: Callable[..., HttpResponseBase],
    /,
    *args: Any,
    **kwargs: Any,
) -> HttpResponseBase:
    """Return the view's response, or a refusal."""
    gate = Gate(limits, request)
    limits = gate.limits
    if gate.inner or limits.charge_when is not None:
        view = _wrap(gate, view, enter, _watch)
    gate.state.depth += 1
    try:
        if gate.prepared is not None:
            identity, policy_set, cost = gate.resolve(gate.prepared)
            if policy_set is not None:
                gate.decision = limiter.check(
                    identity, policy_set, cost=cost, source=None
                )
                if gate.state.record(gate.decision, cost, block=limits.block):
                    signals.send(
                        signals.rate_limited, request=request, decision=gate.decision
                    )
        decided = gate.state.decision
        refusal = (
            None if decided is not None and decided.allowed else gate.note_result()
        )
        if refusal is not None:
            return _refuse(gate, refusal)
        response = view(*args, **kwargs)
        if isinstance(
            response, HttpResponseBase
        ):  # otherwise Django tells the view's author
            responses.add_headers(response.headers, gate.state.decision)
        return response
    except Exception:
        if not limits.charge_on_error and gate.decision is not None:
            _refund(gate, [(gate.decision, cost)])
        raise
    finally:
        gate.state.leave(gate.decision)


async def aenter(
    limits: Limits,
    request: HttpRequest,
    view: Callable[..., Awaitable[HttpResponseBase]],
    /,
    *args: Any,
    **kwargs: Any,
) -> HttpResponseBase:
    """As `enter`, natively async."""
    gate = Gate(limits, request)
    limits = gate.limits
    if gate.inner or limits.charge_when is not None:
        view = _wrap(gate, view, aenter, _awatch)
    gate.state.depth += 1
    gate.state.view_reached = (
        False  # other limits before these may have called us as their view
    )
    try:
        if gate.prepared is not None:
            identity, policy_set, cost = await _aresolve(gate, gate.prepared)
            if policy_set is not None:
                gate.decision = await limiter.acheck(
                    identity, policy_set, cost=cost, source=None
                )
                if gate.state.record(gate.decision, cost, block=limits.block):
                    await signals.asend(
                        signals.rate_limited, request=request, decision=gate.decision
                    )
        decided = gate.state.decision
        refusal = (
            None if decided is not None and decided.allowed else gate.note_result()
        )
        if refusal is not None:
            return await _arefuse(gate, refusal)
        gate.state.view_reached = limits.before_view
        response = await view(*args, **kwargs)
        if isinstance(response, HttpResponseBase):
            responses.add_headers(response.headers, gate.state.decision)
        return response
    except asyncio.CancelledError:
        gate.state.refund_cancelled()
        raise
    except Exception:
        if not limits.charge_on_error and gate.decision is not None:
            await _arefund(gate, [(gate.decision, cost)])
        raise
    finally:
        gate.state.leave(gate.decision)


def _wrap(gate: Gate, view: View, run: View, watch: View) -> View:
    """Put what else applies around a view: limits that are decided by themselves, and `charge_when`."""
    for part in reversed(gate.inner):
        view = partial(run, part, gate.request, view)
    return view if gate.limits.charge_when is None else partial(watch, gate, view)


def _watch(gate: Gate, view: View, /, *args: Any, **kwargs: Any) -> Any:
    """Call a view, and refund what `charge_when` does not count."""
    with login.watched():
        response = view(*args, **kwargs)
        if gate.decision is not None and isinstance(response, HttpResponseBase):
            _refund(gate, gate.uncharged(response, gate.decision))
        return response


async def _awatch(gate: Gate, view: View, /, *args: Any, **kwargs: Any) -> Any:
    with login.watched():
        response = await view(*args, **kwargs)
        if gate.decision is not None and isinstance(response, HttpResponseBase):
            await _arefund(gate, gate.uncharged(response, gate.decision))
        return response


async def reach_view(request: HttpRequest, *_: Any) -> None:
    """Note that the view of a request begins: the middleware's `process_view`, under ASGI."""
    if (state := getattr(request, STATE, None)) is not None:
        state.view_reached = True


async def _aresolve(gate: Gate, prepared: Prepared) -> Resolved:
    """As `Gate.resolve`, without reaching the database from the event loop."""
    if prepared.needs_user:
        await load_user(gate.request)
    if prepared.calls_site_functions:
        return await responses.in_thread(gate.resolve)(prepared)  # type: ignore[no-any-return]
    return gate.resolve(prepared)


def _refuse(gate: Gate, refusal: Decision) -> HttpResponseBase:
    _refund(gate, gate.to_refund())
    return gate.suppress_log(
        responses.respond(gate.response, gate.request, refusal, gate.state.decision)
    )


async def _arefuse(gate: Gate, refusal: Decision) -> HttpResponseBase:
    await _arefund(gate, gate.to_refund())
    return gate.suppress_log(
        await responses.arespond(
            gate.response, gate.request, refusal, gate.state.decision
        )
    )


def _refund(gate: Gate, charges: list[Charge]) -> None:
    for decision, cost in charges:
        with suppress(UnavailableError):  # what was charged ends with its window
            if limiter.refund(decision):
                gate.state.refunded(decision, cost)


async def _arefund(gate: Gate, charges: list[Charge]) -> None:
    for decision, cost in charges:
        with suppress(UnavailableError):
            if await limiter.arefund(decision):
                gate.state.refunded(decision, cost)
