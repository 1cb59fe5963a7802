"""One request before one set of limits: `begin`, check, `decide`, the view, `leave`.

A decorator has limits, and so has a rule of the middleware. What was decided is kept on
the request (request_state.py), so that a policy that several of them name is charged
once, and a refusal refunds what limits before it charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import conf, limiter, signals
from ..core.decision import Decision, Outcome, combine, strictest
from ..core.policy import DEFAULT
from ..limiter import Check, compile_policies, networks
from ..runtime import log
from . import login
from .headers import add_headers
from .identity import identify, load_user
from .limits import CompiledLimits, Limits, compile_limits, with_rates_for
from .proxies import client_address
from .refusals import arespond, respond, suppress_log
from .request_state import STATE, Charge, RequestState, arefund, refund, state_of
from .site_functions import call_cost, in_thread, is_charged

View = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Gate:
    """One request before one set of limits; what sync and async have in common."""

    limits: Limits
    compiled: CompiledLimits
    request: Any
    state: RequestState
    outer_charges: int  # how many limits around these have charged
    outer_depth: int
    check: Check | None = None  # None where there is nothing left to check
    names: tuple[str, ...] = ()  # of policies that other limits may have checked
    decision: Decision | None = None  # what these limits checked
    exceeded: bool = False
    log_suppressed: bool = False


def enter(
    limits: Limits, request: Any, view: View, /, *args: Any, **kwargs: Any
) -> Any:
    """Return the view's response, or a refusal."""
    gate = begin(limits, request)
    try:
        refusal = check(gate)
        if refusal is not None:
            return _refuse(gate, refusal)
        return finish(gate, view(*args, **kwargs))
    except Exception as error:
        refund(gate.state, charges_on_error(gate))
        refusal = denied_login(gate, error)
        if refusal is None:
            raise
        response = respond(gate.compiled.response, gate.request, refusal)
        return _complete(gate, response)
    finally:
        leave(gate)


async def aenter(
    limits: Limits, request: Any, view: View, /, *args: Any, **kwargs: Any
) -> Any:
    """As `enter`, natively async."""
    gate = await _abegin(limits, request)
    try:
        refusal = await _acheck(gate)
        if refusal is not None:
            return await _arefuse(gate, refusal)
        return await _afinish(gate, await view(*args, **kwargs))
    except BaseException as error:
        await _afail(gate, error)
        refusal = denied_login(gate, error)
        if refusal is None:
            raise
        response = await arespond(gate.compiled.response, gate.request, refusal)
        return _complete(gate, response)
    finally:
        leave(gate)


def begin(limits: Limits, request: Any) -> Gate:
    """Plan what these limits check for a request."""
    # Most requests find them compiled (tests/http/test_request_path.py counts).
    compiled = conf.config().derived.limits.get(limits) or compile_limits(limits)
    state = state_of(request)
    gate = Gate(limits, compiled, request, state, len(state.charges), state.depth)

    if _applies(limits, request):
        gate.check = plan_check(compiled, request, state.outcomes)
        if state.outcomes:  # other limits may have checked some of these policies
            gate.names = compiled.names
    state.depth += 1
    state.view_reached = False
    return gate


async def _abegin(limits: Limits, request: Any) -> Gate:
    """As `begin`, without reaching the database from the event loop."""
    compiled = compile_limits(limits)
    applies = _applies(limits, request)
    if applies and compiled.by_user is not None:
        await load_user(request)
    if applies and compiled.calls_site_functions:
        return await in_thread(begin)(limits, request)  # type: ignore[no-any-return]
    return begin(limits, request)


def _applies(limits: Limits, request: HttpRequest) -> bool:
    """Return whether these limits concern a request at all."""
    if not limits.policies or not conf.config().enabled:
        return False
    return limits.methods is None or request.method in limits.methods


def plan_check(
    compiled: CompiledLimits, request: HttpRequest, checked: Container[str]
) -> Check | None:
    """Plan the check of the policies that are not among those checked already."""
    policies = compiled.policies
    unchecked = tuple([policy for policy in policies if policy.name not in checked])
    policy_set = compiled.policy_set
    if policy_set is None:
        unchecked = with_rates_for(request, unchecked)
    if not unchecked:
        return None

    if policy_set is None or len(unchecked) < len(policies):
        policy_set = compile_policies(unchecked)
    keys = dict.fromkeys([policy.key for policy in unchecked])
    identities = {key: identify(request, key) for key in keys}

    cost = compiled.cost
    if callable(cost):
        cost = call_cost(cost, request, policy_set)
    address = ""
    if networks.current is not None:
        address = client_address(request)
    encoded = tuple([identities[policy.key] for policy in unchecked])
    return limiter.plan_encoded(policy_set, encoded, cost, address)


def check(gate: Gate) -> Decision | None:
    """Check what is left to check, and return the refusal, if any."""
    decision = None
    if gate.check is not None:
        decision = limiter.decide(gate.check)
    refusal = decide(gate, decision)
    if gate.exceeded:
        signals.send(signals.rate_limited, request=gate.request, decision=decision)
    return refusal


async def _acheck(gate: Gate) -> Decision | None:
    """As `check`, natively async."""
    decision = None
    if gate.check is not None:
        decision = await limiter.adecide(gate.check)
    refusal = decide(gate, decision)
    if gate.exceeded:
        request = gate.request
        await signals.asend(signals.rate_limited, request=request, decision=decision)
    # From here on a request that is cancelled stays charged.
    gate.state.view_reached = refusal is None and gate.limits.before_view
    return refusal


def decide(gate: Gate, decision: Decision | None) -> Decision | None:
    """Keep a decision on the request, and return the refusal, if these limits refuse.

    A policy of these limits also refuses where other limits have checked it.
    """
    state = gate.state
    if decision is not None:
        gate.decision = decision
        refusing = state.add(decision, gate.check.cost)  # type: ignore[union-attr]
        if refusing:
            _note_exceeded(gate, refusing)
    elif state.decision is None:
        state.request.rate_limit = limiter.unlimited()

    if gate.names:
        checked = [name for name in gate.names if name in state.outcomes]
        decision = combine(state.outcomes[name] for name in checked)
    login.current.set(state)

    if decision is None or decision.allowed or not gate.limits.block:
        return None
    state.refusal = decision
    return decision


def _note_exceeded(gate: Gate, refusing: list[Outcome]) -> None:
    """Log exceeded limits; a policy that fails closed has not exceeded one."""
    exceeding = [outcome for outcome in refusing if not outcome.failed_closed]
    if exceeding:
        gate.exceeded = True
        gate.log_suppressed = log.refusal(
            strictest(exceeding),
            gate.request.method or "",
            gate.request.path,
            block=gate.limits.block,
        )


def finish(gate: Gate, response: Any) -> Any:
    """Refund what `charge_when` does not count, and add the headers to a response.

    The outermost limits add the headers, for all limits of the request.
    """
    if not isinstance(response, HttpResponseBase):  # Django tells the view's author
        return response
    if gate.compiled.charge_when is not None:
        refund(gate.state, uncounted_charges(gate, response))
    refusal = login_refusal(gate)
    if refusal is not None:
        response = respond(gate.compiled.response, gate.request, refusal)
    if gate.state.depth == 1:
        add_headers(response.headers, gate.state.decision)
    return response


async def _afinish(gate: Gate, response: Any) -> Any:
    """As `finish`, natively async."""
    if not isinstance(response, HttpResponseBase):
        return response
    if gate.compiled.charge_when is not None:
        await arefund(gate.state, uncounted_charges(gate, response))
    refusal = login_refusal(gate)
    if refusal is not None:
        response = await arespond(gate.compiled.response, gate.request, refusal)
    if gate.state.depth == 1:
        add_headers(response.headers, gate.state.decision)
    return response


def _refuse(gate: Gate, refusal: Decision) -> HttpResponseBase:
    """Refund what was charged, and return the response to a refused request."""
    refund(gate.state, open_charges(gate))
    response = respond(gate.compiled.response, gate.request, refusal)
    return _complete(gate, response)


async def _arefuse(gate: Gate, refusal: Decision) -> HttpResponseBase:
    """As `_refuse`, natively async."""
    await arefund(gate.state, open_charges(gate))
    response = await arespond(gate.compiled.response, gate.request, refusal)
    return _complete(gate, response)


def _complete(gate: Gate, response: HttpResponseBase) -> HttpResponseBase:
    """Add the headers, and keep Django from logging what our log suppressed."""
    if gate.state.depth == 1:
        add_headers(response.headers, gate.state.decision)
    if gate.log_suppressed and gate.compiled.response is None:
        suppress_log(gate.request, response)
    return response


async def _afail(gate: Gate, error: BaseException) -> None:
    """Refund what a request that fails, or is cancelled, is not charged for."""
    if isinstance(error, asyncio.CancelledError):
        gate.state.refund_cancelled()
    elif isinstance(error, Exception):
        await arefund(gate.state, charges_on_error(gate))


def leave(gate: Gate) -> None:
    """Leave the limits.

    Their charges are final now. The outermost limits pass the decisions to the
    observers.
    """
    state = gate.state
    del state.charges[gate.outer_charges :]
    # Limits inside may not have been left: a framework's view was cancelled.
    state.depth = gate.outer_depth
    if state.depth == 0:
        login.current.set(None)
        state.observe()


def login_refusal(gate: Gate) -> Decision | None:
    """Return why a request is refused, if too many passwords were wrong (auth.py).

    The outermost limits refuse it.
    """
    state = gate.state
    if gate.outer_depth or state.login_succeeded or state.login_refusal is None:
        return None
    state.refusal = state.login_refusal
    return state.refusal


def denied_login(gate: Gate, error: BaseException) -> Decision | None:
    """Return why `authenticate()` refused, where its view denies permission for it."""
    if not isinstance(error, PermissionDenied):
        return None
    return login_refusal(gate)


def open_charges(gate: Gate) -> list[Charge]:
    """Return what was charged so far: a refused request costs nothing."""
    return [charge for charge in gate.state.charges if charge.decision.allowed]


def uncounted_charges(gate: Gate, response: HttpResponseBase) -> list[Charge]:
    """Return what these limits charged, if `charge_when` does not count a response."""
    charge_when = gate.compiled.charge_when
    if charge_when is None or is_charged(charge_when, response):
        return []
    return _own_charges(gate)


def charges_on_error(gate: Gate) -> list[Charge]:
    """Return what these limits charged, if a view that raises is not charged."""
    if gate.limits.charge_on_error:
        return []
    return _own_charges(gate)


def _own_charges(gate: Gate) -> list[Charge]:
    charges = gate.state.charges
    return [charge for charge in charges if charge.decision is gate.decision]


async def reach_view(request: HttpRequest, *_: Any) -> None:
    """Note that the view of a request begins.

    This is the middleware's `process_view` under ASGI.
    """
    state: RequestState | None = getattr(request, STATE, None)
    if state is not None:
        state.view_reached = True


def peek(request: HttpRequest, *names: str) -> Decision | None:
    """Return the decision of policies about a request, without a charge.

    Without names it is the default policy; None where no policy limits the request.
    """
    names = names or (DEFAULT,)
    state: RequestState | None = getattr(request, STATE, None)
    if state is not None and state.outcomes.keys() >= set(names):
        return combine(state.outcomes[name] for name in names)

    check = plan_check(compile_limits(Limits(names)), request, checked=())
    if check is None:
        return None
    return limiter.peek_planned(check)
