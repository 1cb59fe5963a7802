"""Django REST framework: `@rate_limit` on its classes, and throttles.

`@rate_limit` on an APIView or ViewSet class works by the framework's documented hooks.
Policies that need no user are checked before authentication, so that wrong credentials
count; those by user after it.

The throttles are drop-in replacements of the framework's own, and PolicyThrottle for
named policies. The framework makes the throttles of a view for each request, and calls
one after the other. The first of ours that is called has all of them decided, in one
round trip; the others find their decisions with the request.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.utils.translation import gettext_lazy as _
from rest_framework import throttling
from rest_framework.exceptions import APIException, Throttled
from rest_framework.settings import api_settings

from .. import conf, limiter
from ..core.decision import Decision
from ..core.keys import key_kind
from ..core.policy import Policy
from ..http.gate import (
    Gate,
    begin,
    charges_on_error,
    check,
    leave,
    open_charges,
    refund,
    uncounted_charges,
)
from ..http.headers import add_headers, add_refusal_headers, whole_wait
from ..http.limits import CompiledLimits, Limits, compile_limits
from ..http.proxies import client_address
from ..http.refusals import call_response, suppress_log
from ..http.request_state import Charge, decision_about, state_of
from ..limiter import Check
from ..runtime.clock import frozen_clock
from .throttles import PolicyLimits, RateThrottle, decide, plan_checks, user_or_address

__all__ = [
    "AnonRateThrottle",
    "BaseThrottle",
    "PolicyThrottle",
    "ScopedRateThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
]

LIMITS = "_rate_limits"  # the attribute of a class with its limits, the outermost first
GATES = "_rate_limit_gates"  # of a view with the gates that its request is within
PENDING = "_rate_limit_pending"  # of a request with decisions of throttles not called
SITE_RESPONSE = "_rate_limit_response"  # of an exception with the site's refusal

NO_LIMITS = Limits(())

Proceed = Callable[..., Any]  # the method of the framework, or of the site, itself


class Unavailable(APIException):
    """Redis is unavailable, and a policy fails closed."""

    status_code = 503
    default_code = "unavailable"
    default_detail = _("Service temporarily unavailable")
    wait = 1


# @rate_limit on a class


def limit_class(view_class: type, limits: Limits) -> type:
    """Have an APIView or ViewSet class check limits in its documented hooks."""
    inner: tuple[Limits, ...] = getattr(view_class, LIMITS, ())
    setattr(view_class, LIMITS, (limits, *inner))
    if not inner:
        _hook(view_class, "initialize_request", _initialize_request)
        _hook(view_class, "initial", _initial)
        _hook(view_class, "handle_exception", _handle_exception)
        _hook(view_class, "finalize_response", _finalize_response)
    return view_class


def _hook(target: Any, name: str, hook: Callable[..., Any]) -> None:
    """Have a method of a class, or of one view, called by way of a hook."""
    method = getattr(target, name)
    if not isinstance(target, type):
        setattr(target, name, functools.partial(hook, target, method))
        return

    @functools.wraps(method)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, functools.partial(method, self), *args, **kwargs)

    setattr(target, name, hooked)


def _initialize_request(
    _view: Any, proceed: Proceed, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Begin the state on Django's own request, where middleware finds it."""
    state_of(request)
    return proceed(request, *args, **kwargs)


def _initial(
    view: Any, proceed: Proceed, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Check what needs no user, authenticate, then check what needs one.

    A request that fails in between is counted before the framework responds to it.
    """
    compiled = [compile_limits(limits) for limits in getattr(type(view), LIMITS)]
    by_client = [limits.by_client for limits in compiled if limits.by_client]
    by_user = [limits.by_user for limits in compiled if limits.by_user]
    setattr(view, GATES, [begin(NO_LIMITS, request)])

    error = _body_error(request, compiled)
    for limits in by_client:
        _check(view, limits, request)
    try:
        proceed(request, *args, **kwargs)
    except Exception as failure:  # noqa: BLE001  (raised below)
        error = failure

    is_throttled = state_of(request).refusal is not None
    if by_user and not is_throttled:
        authentication_error = _authentication_error(request)
        error = error or authentication_error
        for limits in by_user:
            _check(view, limits, request)
    if error is not None:
        raise error


def _body_error(request: Any, limits: Iterable[CompiledLimits]) -> Exception | None:
    """Parse a body that a policy reads; return the error, for the view to raise.

    The framework raises it once: afterwards the body is empty.
    """
    policies = [policy for compiled in limits for policy in compiled.policies]
    if not any(key_kind(policy.key) == "post" for policy in policies):
        return None
    try:
        _ = request.data
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _authentication_error(request: Any) -> Exception | None:
    """Authenticate a request; return the error, for the view to raise.

    Its client is counted by address then.
    """
    try:
        _ = request.user
    except Exception as error:  # noqa: BLE001
        request.user = AnonymousUser()
        request.auth = None
        return error
    return None


def _check(view: Any, limits: Limits, request: Any) -> None:
    """Check limits within the hooks of a view; raise what it is refused with."""
    gate = begin(limits, request)
    getattr(view, GATES).append(gate)
    refusal = check(gate)
    if refusal is None:
        return

    refund(gate, open_charges(gate))
    error = refusal_error(refusal)
    if gate.compiled.response is not None:
        response = call_response(gate.compiled.response, request, refusal)
        setattr(error, SITE_RESPONSE, response)
    raise error


def refusal_error(refusal: Decision) -> APIException:
    """Return the exception of the framework for a refusal."""
    if refusal.unavailable:
        return Unavailable()
    return Throttled(whole_wait(refusal))


def _handle_exception(view: Any, proceed: Proceed, error: Exception) -> Any:
    """Respond with the site's own refusal; leave the limits if nothing responds."""
    response = getattr(error, SITE_RESPONSE, None)
    if response is not None:
        return response
    try:
        return proceed(error)
    except Exception:
        _leave_after_error(view)
        raise


def _finalize_response(
    view: Any, proceed: Proceed, request: Any, response: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refund what `charge_when` does not count, add the headers, leave the limits."""
    try:
        response = proceed(request, response, *args, **kwargs)
        _finish(view, request, response)
    except Exception:
        _leave_after_error(view)
        raise
    _leave(view)
    return response


def _finish(view: Any, request: Any, response: Any) -> None:
    gates: list[Gate] = getattr(view, GATES, [])
    refusal = state_of(request).refusal
    if refusal is None:
        for gate in reversed(gates):
            _refund(gate, uncounted_charges(gate, response))

    add_headers(response.headers, decision_about(request))
    if refusal is not None:
        add_refusal_headers(response, refusal)
    if any(gate.log_suppressed for gate in gates):
        suppress_log(request, response)


def _leave(view: Any) -> None:
    gates: list[Gate] = getattr(view, GATES, [])
    while gates:
        leave(gates.pop())


def _leave_after_error(view: Any) -> None:
    for gate in getattr(view, GATES, []):
        _refund(gate, charges_on_error(gate))
    _leave(view)


def _refund(gate: Gate, charges: list[Charge]) -> None:
    """Refund charges, in a task of its own where an async view has ended."""
    if not charges:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        refund(gate, charges)
        return
    for charge in charges:
        limiter.refund_later(charge.decision.receipts)
        gate.state.note_refund(charge)


def _observe_at_end(view: Any, request: Any) -> None:
    """Have what throttles decide observed once the view has responded.

    So a throttle and a decorator on one view are one request in the statistics. Within
    other limits, these have it observed.
    """
    if state_of(request).depth or not hasattr(view, "finalize_response"):
        return
    setattr(view, GATES, [begin(NO_LIMITS, request)])
    _hook(view, "handle_exception", _handle_exception)
    _hook(view, "finalize_response", _finalize_response)


# Throttles


class BaseThrottle(throttling.BaseThrottle):
    """The framework's, with addresses by RATE_LIMITER['TRUSTED_PROXIES'].

    Unless NUM_PROXIES of the framework is set.
    """

    decision: Decision | None = None

    def get_ident(self, request: Any) -> Any:
        if api_settings.NUM_PROXIES is None:
            return client_address(request)
        return super().get_ident(request)

    def wait(self) -> float | None:
        """Return the seconds until the request would pass, if waiting helps."""
        if self.decision is None or self.decision.retry_after == math.inf:
            return None
        return self.decision.retry_after


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "drf"

    def allow_request(self, request: Any, view: Any) -> bool:
        self.decision = _decide(self, request, view)
        if self.decision is None:
            return True
        if _allows(self.decision):
            return self.throttle_success()
        return self.throttle_failure()

    def throttle_success(self) -> bool:
        return True

    def throttle_failure(self) -> bool:
        return False


def _anonymous(throttle: Any, request: Any) -> tuple[str, Any]:
    kind, name = user_or_address(throttle, request)
    if kind == "user":
        return kind, None
    return kind, name


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients that are not logged in, by address."""

    usual_key = (throttling.AnonRateThrottle.get_cache_key, _anonymous)


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""

    usual_key = (throttling.UserRateThrottle.get_cache_key, user_or_address)


class ScopedRateThrottle(SimpleRateThrottle, throttling.ScopedRateThrottle):
    """As UserRateThrottle, by the rate of the view's `throttle_scope`."""

    rate: str | None = None
    usual_key = (throttling.ScopedRateThrottle.get_cache_key, user_or_address)

    def plan_check(self, request: Any, *args: Any) -> Check | None:
        view = args[0]
        self.scope = getattr(view, self.scope_attr, None)
        if not self.scope:
            return None
        self.rate = self.get_rate()
        self.num_requests, self.duration = self.parse_rate(self.rate)
        return super().plan_check(request, *args)


class PolicyThrottle(BaseThrottle):
    """Limits by policies, the default one unless others are named.

    All are charged or none.

    >>> class SearchThrottle(PolicyThrottle):
    ...     policies = ["search", Policy("site", "1000/m", key="global")]
    """

    policies: Sequence[str | Policy] = ()
    _limits = PolicyLimits("PolicyThrottle", ())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._limits = PolicyLimits(cls.__qualname__, cls.policies)

    def plan_check(
        self, request: Any, view: Any, checked: Container[str]
    ) -> Check | None:
        return self._limits.plan_check(request, checked)

    def allow_request(self, request: Any, view: Any) -> bool:
        _decide(self, request, view)
        self.decision = self._limits.decision(request)
        return self.decision is None or _allows(self.decision)


def _allows(decision: Decision) -> bool:
    if decision.unavailable:
        raise Unavailable
    return decision.allowed


def _decide(throttle: Any, request: Any, view: Any) -> Decision | None:
    """Return the decision for a throttle; None if there is nothing to check."""
    if not conf.config().enabled:
        return None
    if not _is_batched(throttle) or not hasattr(view, "get_throttles"):
        return _decide_all([throttle], request, view).get(throttle)

    pending: list[tuple[type, Decision | None]] = vars(request).setdefault(PENDING, [])
    kind = type(throttle)
    if kind not in [pending_kind for pending_kind, _ in pending]:
        throttles = list(filter(_is_batched, view.get_throttles()))
        decisions = _decide_all(throttles, request, view)
        pending[:] = [(type(each), decisions.get(each)) for each in throttles]

    for index, (pending_kind, decision) in enumerate(pending):
        if pending_kind is kind:
            del pending[index]
            return decision
    return _decide_all([throttle], request, view).get(throttle)


def _is_batched(throttle: Any) -> bool:
    """Return whether a throttle can be decided together with others.

    A subclass with an `allow_request` of its own may let a request pass without a
    check, so it is checked by itself.
    """
    method = getattr(type(throttle), "allow_request", None)
    return method in (SimpleRateThrottle.allow_request, PolicyThrottle.allow_request)


def _decide_all(
    throttles: Sequence[Any], request: Any, view: Any
) -> dict[Any, Decision]:
    """Decide for some throttles at the time of Redis, or of a test's `timer`."""
    _observe_at_end(view, request)
    timers = [getattr(throttle, "timer", time.time) for throttle in throttles]
    own_timers = [timer for timer in timers if timer is not time.time]
    clock: Any = nullcontext()
    if own_timers:
        clock = frozen_clock(round(own_timers[0]() * 1000))
    with clock:
        decisions = decide(request, plan_checks(throttles, request, view))

    if hasattr(view, "headers"):
        # The framework copies the headers of a view to its response, whichever it is.
        add_headers(view.headers, decision_about(request))
    return decisions
