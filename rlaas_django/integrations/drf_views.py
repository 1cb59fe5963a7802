"""Django REST framework: `@rate_limit` on an APIView or ViewSet class.

It works by the framework's documented hooks. Policies that need no user are checked
before authentication, so that wrong credentials count; those by user after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial, partialmethod
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import RequestDataTooBig
from django.http import UnreadablePostError
from django.utils.translation import gettext_lazy as _
from rest_framework.exceptions import APIException, Throttled

from .. import limiter
from ..core.decision import Decision
from ..core.keys import key_kind
from ..http.gate import (
    Gate,
    begin,
    charges_on_error,
    check,
    leave,
    login_refusal,
    open_charges,
    uncounted_charges,
)
from ..http.headers import add_headers, add_refusal_headers, whole_wait
from ..http.limits import CompiledLimits, Limits, compile_limits
from ..http.refusals import call_response, suppress_log
from ..http.request_state import Charge, decision_about, refund, state_of
from .throttles import NO_LIMITS

LIMITS = "_rate_limits"  # attribute of a class: its limits, the outermost first
GATES = "_rate_limit_gates"  # attribute of a view: the gates that it is within
SITE_RESPONSE = "_rate_limit_response"  # attribute of an exception: the site's refusal


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
        _check(view, limits.by_client, request, counted)
    try:
        method(view, request, *args, **kwargs)
    except Exception as failure:  # noqa: BLE001  (raised below)
        error = failure

    is_throttled = state_of(request).refusal is not None
    if by_user and not is_throttled:
        authentication_error = _authentication_error(request)
        error = error or authentication_error
        for part in by_user:
            _check(view, part, request, counted)

    if error is not None:
        raise error


def _body_error(request: Any, limits: Iterable[CompiledLimits]) -> Exception | None:
    """Return the error of a body that a policy reads, for the view to raise.

    The framework may raise it only once.
    """
    policies = [policy for compiled in limits for policy in compiled.policies]
    if not any(key_kind(policy.key) == "post" for policy in policies):
        return None

    # So that the view can still read it in its own way.
    error = _error_of(request, "body")
    if isinstance(error, RequestDataTooBig):
        return None
    if isinstance(error, UnreadablePostError):
        return error
    return _error_of(request, "data")


def _authentication_error(request: Any) -> Exception | None:
    """Return the error of the authentication, for the view to raise.

    The client is counted by its address then.
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


def _check(view: Any, limits: Limits | None, request: Any, counted: Any) -> None:
    """Check limits within the hooks of a view, and raise a refusal.

    `counted` is the request as limits see it, to find out who is counted.
    """
    if limits is None:
        return

    gate = begin(limits, counted)
    gate.request = request
    _gates(view).append(gate)

    refusal = check(gate)
    if refusal is None:
        return

    refund(gate.state, open_charges(gate))
    raise _error_for(gate, request, refusal)


def _error_for(gate: Gate, request: Any, refusal: Decision) -> APIException:
    """Return the exception that has the framework respond to a refusal."""
    error: APIException = Throttled(whole_wait(refusal))
    if refusal.unavailable:
        error = Unavailable()

    if gate.compiled.response is not None:
        response = call_response(gate.compiled.response, request, refusal)
        setattr(error, SITE_RESPONSE, response)
    return error


def _handle_exception(view: Any, method: Any, error: Exception) -> Any:
    """Return the site's own refusal, or what the framework makes of an error.

    Where it makes nothing of it, the limits are left.
    """
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
        response = _refuse_login(view, request) or response
        response = method(view, request, response, *args, **kwargs)
        _finish(view, request, response)
    except Exception:
        _leave_after_error(view)
        raise

    _leave(view)
    return response


def _refuse_login(view: Any, request: Any) -> Any:
    """Return the refusal where too many passwords were wrong (auth.py)."""
    gates = _gates(view)
    for gate in gates:
        refusal = login_refusal(gate)
        if refusal is not None:
            # The first gate has no limits, and so no response of their own.
            return view.handle_exception(_error_for(gates[-1], request, refusal))
    return None


FIRST_HOOKS: dict[str, Any] = {
    "initialize_request": _initialize_request,
    "initial": _initial,
}
LAST_HOOKS: dict[str, Any] = {
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
        refund(gate.state, charges)
        return

    for charge in charges:
        limiter.refund_later(charge.decision.receipts)
        gate.state.note_refund(charge)


def observe_at_end(view: Any, request: Any) -> None:
    """Have what throttles decide observed once the view has responded.

    So a throttle and a decorator on one view are one request in the statistics. Within
    other limits, these have it observed.
    """
    if not hasattr(view, "finalize_response") or state_of(request).depth:
        return

    _gates(view).append(begin(NO_LIMITS, request))
    for name, hook in LAST_HOOKS.items():
        method = getattr(type(view), name)
        setattr(view, name, partial(hook, view, method))
