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
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from typing import Any, ClassVar

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
from ..http.refusals import call_response, suppress_log
from ..http.request_state import Charge, decision_about, state_of
from ..limiter import Check
from ..runtime.clock import frozen_clock
from .throttles import (
    NO_LIMITS,
    ByAddress,
    PolicyLimits,
    RateThrottle,
    decide,
    plan_checks,
    user_or_address,
    wait_of,
)

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


class Unavailable(APIException):
    """Redis is unavailable, and a policy fails closed."""

    status_code = 503
    default_code = "unavailable"
    default_detail = _("Service temporarily unavailable")
    wait = 1


class WithoutBody:
    """A request whose body cannot be parsed, as limits see it.

    The framework may raise its error at every look at the body, but the client has to
    be counted, by its address.
    """

    data: Mapping[str, Any] = {}

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


# @rate_limit on a class


def limit_class(view_class: type, limits: Limits) -> type:
    """Have an APIView or ViewSet class check limits in its documented hooks."""
    inner: tuple[Limits, ...] = getattr(view_class, LIMITS, ())
    setattr(view_class, LIMITS, (limits, *inner))
    if inner:
        return view_class

    for name, hook in {**FIRST_HOOKS, **LAST_HOOKS}.items():
        method = getattr(view_class, name)
        setattr(view_class, name, partialmethod(hook, method))
    return view_class


def _initialize_request(
    view: Any, method: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Begin the state on Django's own request, where middleware finds it."""
    state_of(request)
    return method(view, request, *args, **kwargs)


def _initial(view: Any, method: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Check what needs no user, authenticate, then check what needs one.

    A request that fails in between is counted before the framework responds to it.
    """
    _gates(view).append(begin(NO_LIMITS, request))
    compiled = [compile_limits(limits) for limits in getattr(view, LIMITS)]
    by_user = [limits.by_user for limits in compiled if limits.by_user]

    counted = request
    error = _body_error(request, compiled)
    if error is not None:
        counted = WithoutBody(request)

    for limits in compiled:
        _check(view, limits.by_client, counted)
    try:
        method(view, request, *args, **kwargs)
    except Exception as failure:  # noqa: BLE001  (raised below)
        error = failure

    is_throttled = state_of(request).refusal is not None
    if by_user and not is_throttled:
        authentication_error = _authentication_error(request)
        error = error or authentication_error
        for part in by_user:
            _check(view, part, counted)

    if error is not None:
        raise error


def _body_error(request: Any, limits: Iterable[CompiledLimits]) -> Exception | None:
    """Parse a body that a policy reads; return the error, for the view to raise.

    The framework may raise it only once.
    """
    policies = [policy for compiled in limits for policy in compiled.policies]
    if not any(key_kind(policy.key) == "post" for policy in policies):
        return None

    return _error_of(request, "data")


def _authentication_error(request: Any) -> Exception | None:
    """Authenticate a request; return the error, for the view to raise.

    Its client is counted by address then.
    """
    error = _error_of(request, "user")
    if error is not None:
        request.user = AnonymousUser()
        request.auth = None
    return error


def _error_of(request: Any, attribute: str) -> Exception | None:
    """Return what the framework raises when an attribute is read first."""
    try:
        getattr(request, attribute)
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _check(view: Any, limits: Limits | None, request: Any) -> None:
    """Check limits within the hooks of a view; raise what it is refused with."""
    if limits is None:
        return

    gate = begin(limits, request)
    _gates(view).append(gate)

    refusal = check(gate)
    if refusal is None:
        return

    refund(gate, open_charges(gate))
    error: APIException = Throttled(whole_wait(refusal))
    if refusal.unavailable:
        error = Unavailable()

    if gate.compiled.response is not None:
        response = call_response(gate.compiled.response, request, refusal)
        setattr(error, SITE_RESPONSE, response)
    raise error


def _handle_exception(view: Any, method: Any, error: Exception) -> Any:
    """Respond with the site's own refusal; leave the limits if nothing responds."""
    response = getattr(error, SITE_RESPONSE, None)
    if response is not None:
        return response

    try:
        return method(view, error)
    except Exception:
        _leave_after_error(view)
        raise


def _finalize_response(
    view: Any, method: Any, request: Any, response: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refund what `charge_when` does not count, add the headers, leave the limits."""
    try:
        response = method(view, request, response, *args, **kwargs)
        _finish(view, request, response)
    except Exception:
        _leave_after_error(view)
        raise

    _leave(view)
    return response


Hooks = dict[str, Callable[..., Any]]
FIRST_HOOKS: Hooks = {
    "initialize_request": _initialize_request,
    "initial": _initial,
}
LAST_HOOKS: Hooks = {
    "handle_exception": _handle_exception,
    "finalize_response": _finalize_response,
}


def _finish(view: Any, request: Any, response: Any) -> None:
    gates = _gates(view)
    refusal = state_of(request).refusal
    if refusal is None:
        for gate in reversed(gates):
            _refund(gate, uncounted_charges(gate, response))

    add_headers(response.headers, decision_about(request))
    if refusal is not None:
        add_refusal_headers(response, refusal)
    if any(gate.log_suppressed for gate in gates):
        suppress_log(request, response)


def _gates(view: Any) -> list[Gate]:
    return vars(view).setdefault(GATES, [])  # type: ignore[no-any-return]


def _leave(view: Any) -> None:
    gates = _gates(view)
    while gates:
        leave(gates.pop())


def _leave_after_error(view: Any) -> None:
    for gate in _gates(view):
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

    _gates(view).append(begin(NO_LIMITS, request))
    for name, hook in LAST_HOOKS.items():
        method = getattr(type(view), name)
        setattr(view, name, partial(hook, view, method))


# Throttles


class BaseThrottle(ByAddress, throttling.BaseThrottle):
    """The framework's, with addresses by RATE_LIMITER['TRUSTED_PROXIES']."""

    framework_settings = api_settings
    decision: Decision | None = None

    def wait(self) -> float | None:
        """Return the seconds until the request would pass, if waiting helps."""
        return wait_of(self.decision)


def _anonymous(throttle: Any, request: Any) -> tuple[str, Any]:
    kind, name = user_or_address(throttle, request)
    if kind == "user":
        return kind, None
    return kind, name


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "drf"
    names: ClassVar = {
        throttling.AnonRateThrottle.get_cache_key: _anonymous,
        throttling.UserRateThrottle.get_cache_key: user_or_address,
        throttling.ScopedRateThrottle.get_cache_key: user_or_address,
    }

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


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients that are not logged in, by address."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""


class ScopedRateThrottle(SimpleRateThrottle, throttling.ScopedRateThrottle):
    """As UserRateThrottle, by the rate of the view's `throttle_scope`."""

    rate: str | None = None

    def plan_check(self, request: Any, checked: set[str], *view: Any) -> Check | None:
        self.scope = getattr(view[0], self.scope_attr, None)
        if not self.scope:
            return None

        self.rate = self.get_rate()
        self.num_requests, self.duration = self.parse_rate(self.rate)
        return super().plan_check(request, checked, *view)


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

    def plan_check(self, request: Any, checked: set[str], *_: Any) -> Check | None:
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

    pending = vars(request).setdefault(PENDING, defaultdict(list))
    decisions: list[Decision | None] = pending[type(throttle)]
    if not decisions:
        batch = _batch(throttle, view)
        decided = _decide_all(batch, request, view)
        for member in batch:
            pending[type(member)].append(decided.get(member))
    return decisions.pop(0)


def _batch(throttle: Any, view: Any) -> list[Any]:
    """Return the throttles of a view that are decided together with this one."""
    if not _is_batched(throttle) or not hasattr(view, "get_throttles"):
        return [throttle]

    batch = [member for member in view.get_throttles() if _is_batched(member)]
    if type(throttle) not in map(type, batch):
        return [throttle]
    return batch


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

    clock: Any = nullcontext()
    for throttle in throttles:
        timer = getattr(throttle, "timer", time.time)
        if timer is not time.time:
            clock = frozen_clock(round(timer() * 1000))
    with clock:
        decisions = decide(request, plan_checks(throttles, request, view))

    if hasattr(view, "headers"):
        # The framework copies the headers of a view to its response, whichever it is.
        add_headers(view.headers, decision_about(request))
    return decisions
