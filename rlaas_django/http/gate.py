"""One request before its limits: check what was not checked yet, refuse or call the view, add the headers.

A decorator has limits, and so has a rule of the middleware. What was decided is kept on the request, so that a policy
that several of them name is charged once, and a refusal refunds what limits before it charged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.functional import SimpleLazyObject

from .. import conf, limiter, log, signals, stats
from ..backend import UnavailableError
from ..core.decision import Decision, Outcome, strictest
from ..limiter.compiled import CompiledPolicySet
from . import responses
from .identity import RequestIdentity
from .limits import Limits
from .request_state import RequestState


def enter(
    limits: Limits, request: HttpRequest, view: Callable[..., HttpResponseBase], /, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """Return the view's response, or a refusal."""
    gate = Gate(limits, request)
    if gate.applies():
        identity, policy_set, cost = gate.resolve()
        if policy_set is not None and gate.record(limiter.check(identity, policy_set, cost=cost), cost):
            signals.send(signals.rate_limited, request=request, decision=gate.decision)
    if gate.refuses():
        for decision, cost in gate.earlier_charges():
            gate.refunded(decision, cost, _refund(decision))
        return gate.finish(gate.plain_refusal() or _respond(gate))
    try:
        response = view(*args, **kwargs)
    except Exception:
        if not limits.charge_on_error and gate.decision is not None:
            _refund(gate.decision)
        raise
    if gate.is_free(response):
        for decision, cost in gate.own_charges():
            gate.refunded(decision, cost, _refund(decision))
    gate.add_headers(response)
    return response


async def aenter(
    limits: Limits, request: HttpRequest, view: Callable[..., Awaitable[HttpResponseBase]], /, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """As `enter`, natively async."""
    gate = Gate(limits, request)
    if gate.applies():
        if gate.prepared.needs_user:
            await _load_user(request)
        in_thread = gate.prepared.calls_site_functions
        identity, policy_set, cost = await _in_thread(gate.resolve)() if in_thread else gate.resolve()
        if policy_set is not None and gate.record(await limiter.acheck(identity, policy_set, cost=cost), cost):
            await signals.asend(signals.rate_limited, request=request, decision=gate.decision)
    if gate.refuses():
        for decision, cost in gate.earlier_charges():
            gate.refunded(decision, cost, await _arefund(decision))
        return gate.finish(gate.plain_refusal() or await _arespond(gate))
    try:
        response = await view(*args, **kwargs)
    except Exception:
        if not limits.charge_on_error and gate.decision is not None:
            await _arefund(gate.decision)
        raise
    if gate.is_free(response):
        for decision, cost in gate.own_charges():
            gate.refunded(decision, cost, await _arefund(decision))
    gate.add_headers(response)
    return response


class Gate:
    """One request before one set of limits; what sync and async have in common."""

    __slots__ = ("_log_suppressed", "_names", "decision", "limits", "prepared", "request", "state")

    def __init__(self, limits: Limits, request: HttpRequest) -> None:
        self.limits, self.request = limits, request
        self.state = RequestState.of(request)
        self.prepared = limits.prepared()
        self.decision: Decision | None = None  # what these limits decided
        self._names: set[str] = set()  # of the policies that apply to this request
        self._log_suppressed = False

    def applies(self) -> bool:
        """Return whether these limits are checked for this request."""
        methods = self.limits.methods
        return conf.config().enabled and (methods is None or self.request.method in methods)

    def resolve(self) -> tuple[RequestIdentity, CompiledPolicySet | None, int]:
        """Return who is charged what under which policies: those that were not checked yet, or None."""
        identity = RequestIdentity(self.request)
        policies, cost = self.prepared.resolve(identity), self.limits.cost_of(self.request)
        if self.state.charges:
            self._names = {policy.name for policy in policies}
            policies = tuple(policy for policy in policies if policy.name not in self.state.outcomes)
        return identity, self.prepared.compiled(policies), cost

    def record(self, decision: Decision, cost: int) -> bool:
        """Keep a decision; return whether a policy refused, or a shadow policy would have."""
        request = self.request
        self.decision = decision
        self.state.add(decision, cost)
        stats.record(decision, request.method or "", request.path)
        refusing = [each for each in decision.outcomes if not each.allowed and not each.failed_closed]
        if not refusing:
            return False
        if log.admits(logging.WARNING):
            _log(request, strictest(refusing), self.limits.block)
        else:
            self._log_suppressed = log.logger.isEnabledFor(logging.WARNING)
        return True

    def refuses(self) -> bool:
        """Return whether the request is refused."""
        if not self.state.charges:
            self.state.annotate(limiter.unlimited())
            return False
        return self.limits.block and not self.own_decision.allowed

    @property
    def own_decision(self) -> Decision:
        """The decision of these limits' policies, also of those that other limits checked."""
        own = self.decision if self._is_alone() else self.state.decision(self._names)
        return limiter.unlimited() if own is None else own

    def _is_alone(self) -> bool:
        return self.decision is not None and len(self.state.charges) == 1

    def earlier_charges(self) -> list[tuple[Decision, int]]:
        """Return what limits before these charged: a refused request costs nothing."""
        return [] if self._is_alone() else [each for each in self.state.charges if each[0].allowed]

    def own_charges(self) -> list[tuple[Decision, int]]:
        return [each for each in self.state.charges if each[0] is self.decision]

    def refunded(self, decision: Decision, cost: int, done: bool) -> None:
        if done:
            self.state.refunded(decision, cost)

    def plain_refusal(self) -> HttpResponseBase | None:
        """Return a refusal that needs no database; None where the site's function or a template makes it."""
        if self.respond is not responses.page:
            return None
        return responses.plain_refusal(self.request, self.own_decision)

    @property
    def respond(self) -> Callable[..., Any]:
        """What makes the response of a refusal: the site's function, or our page."""
        return self.limits.response or conf.config().response or responses.page

    def finish(self, response: HttpResponseBase) -> HttpResponseBase:
        """Add the headers of a refusal."""
        responses.add_refusal_headers(response, self.own_decision)
        responses.add_headers(response, self.state.decision())
        if self._log_suppressed and self.respond is responses.page:
            responses.suppress_log(self.request, response)
        return response

    def is_free(self, response: HttpResponseBase) -> bool:
        """Return whether `charge_when` says that this response costs nothing."""
        charge_when = self.limits.charge_when
        if charge_when is None or self.decision is None or not isinstance(response, HttpResponseBase):
            return False
        return not charge_when(response)

    def add_headers(self, response: HttpResponseBase) -> None:
        if isinstance(response, HttpResponseBase):  # otherwise Django tells the view's author
            responses.add_headers(response, self.state.decision())


async def _load_user(request: HttpRequest) -> None:
    """Load `request.user`: async code must not reach the database through a lazy one."""
    if isinstance(getattr(request, "user", None), SimpleLazyObject) and hasattr(request, "auser"):
        request.user = await request.auser()


def _refund(decision: Decision) -> bool:
    try:
        return limiter.refund(decision)
    except UnavailableError:
        return False  # what was charged ends with its window


async def _arefund(decision: Decision) -> bool:
    try:
        return await limiter.arefund(decision)
    except UnavailableError:
        return False


def _respond(gate: Gate) -> HttpResponseBase:
    respond = gate.respond
    if iscoroutinefunction(respond):
        respond = async_to_sync(respond)
    response: Any = respond(gate.request, gate.own_decision)
    # Django renders the template response of a view, not that of a middleware.
    rendered: HttpResponseBase = response if getattr(response, "is_rendered", True) else response.render()
    return rendered


async def _arespond(gate: Gate) -> HttpResponseBase:
    respond = gate.respond
    call = respond if iscoroutinefunction(respond) else _in_thread(respond)
    response: Any = await call(gate.request, gate.own_decision)
    rendered = getattr(response, "is_rendered", True)
    finished: HttpResponseBase = response if rendered else await _in_thread(response.render)()
    return finished


def _in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a function that runs the site's code, which may use the database, in Django's thread for sync code."""

    @sync_to_async
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:  # a future cannot carry one, and would never end
            raise RuntimeError(f"{function!r} raised StopIteration.") from error

    return run


def _log(request: HttpRequest, outcome: Outcome, block: bool) -> None:
    refused = "refused" if block else "over the limit"
    log.logger.warning(
        "%s policy=%s identity=%s count=%d/%d retry_after=%.3f %s %s",
        "would be refused" if outcome.policy.shadow else refused,
        outcome.policy,
        outcome.identity,
        outcome.current_count,
        outcome.limit,
        outcome.retry_after,
        log.escaped(request.method or ""),
        log.escaped(request.path),
    )
