"""Throttles for django-ninja.

Drop-in replacements of its own, and PolicyThrottle for named policies. All requests
share a throttle, so nothing about a request is kept on it. django-ninja calls throttles
from the event loop and does not await them; with `throttled`, a decorator for the API,
async operations do.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, ClassVar

from django.http.response import HttpResponseBase
from ninja import conf as ninja_conf
from ninja import throttling
from ninja.errors import Throttled
from ninja.operation import Operation

from .. import conf
from ..core.decision import Decision, Outcome, combine
from ..core.policy import Policy
from ..http.gate import begin, leave
from ..http.headers import add_headers, add_refusal_headers, whole_wait
from ..http.identity import load_user
from ..http.request_state import decision_about
from ..http.site_functions import in_thread
from ..runtime import log
from .throttles import (
    NO_LIMITS,
    CommonThrottle,
    PolicyLimits,
    RateThrottle,
    adecide,
    anonymous_address,
    decide,
    plan_checks,
    user_or_address,
)

__all__ = [
    "AnonRateThrottle",
    "AuthRateThrottle",
    "BaseThrottle",
    "PolicyThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
    "throttled",
]

# Of the request that a thread or a task is busy with: the last decisions, and the
# throttles to await.
_decisions: ContextVar[dict[Any, Decision | None]] = ContextVar("decisions")
_to_await: ContextVar[list[Any] | None] = ContextVar("to_await", default=None)


class BaseThrottle(CommonThrottle, throttling.BaseThrottle):
    """The framework's, with addresses by RATE_LIMITER['TRUSTED_PROXIES']."""

    @property
    def framework_settings(self) -> Any:
        return ninja_conf.settings

    @property
    def decision(self) -> Decision | None:
        """The decision about the request that the thread or task is busy with."""
        return _decisions.get({}).get(self)


class CheckedThrottle(BaseThrottle):
    """Checks in Redis what a subclass plans for a request."""

    def final_decision(
        self, request: Any, decision: Decision | None
    ) -> Decision | None:
        """Return the decision about a request by that of the check."""
        return decision

    def allow_request(self, request: Any) -> bool:
        if not conf.config().enabled:
            return True

        to_await = _to_await.get()
        if to_await is not None:
            to_await.append(self)
            return True

        with suppress(RuntimeError):
            asyncio.get_running_loop()
            _warn()
        decided = decide(request, plan_checks([self], request))
        decision = self.final_decision(request, decided.get(self))
        _decisions.set({self: decision})
        return decision is None or decision.allowed


def _credential_or_address(throttle: Any, request: Any) -> tuple[str, Any]:
    auth = getattr(request, "auth", None)
    if auth is None:
        return "ip", throttle.get_ident(request)
    return "token", str(auth)  # kept as a keyed digest


class SimpleRateThrottle(RateThrottle, CheckedThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "ninja"
    names: ClassVar = {
        throttling.AnonRateThrottle.get_cache_key: anonymous_address,
        throttling.AuthRateThrottle.get_cache_key: _credential_or_address,
        throttling.UserRateThrottle.get_cache_key: user_or_address,
    }


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients without credentials, by address."""


class AuthRateThrottle(SimpleRateThrottle, throttling.AuthRateThrottle):
    """Limits by `request.auth`, and clients without credentials by address."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""


class PolicyThrottle(PolicyLimits, CheckedThrottle):
    """Limits by policies, the default one unless others are named.

    All are charged or none.

    >>> site = Policy("site", "1000/m", key="global")
    >>> @api.get("/search", throttle=PolicyThrottle("search", site))
    """

    def __init__(self, *policies: str | Policy) -> None:
        super().__init__("A throttle of django-ninja", policies)

    def final_decision(
        self, request: Any, decision: Decision | None
    ) -> Decision | None:
        return self.decision_about(request)


def throttled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the headers to an operation's responses, and await throttles in async ones.

    All throttles of an async operation are decided in one round trip.

    >>> api.add_decorator(throttled, mode="view")
    """
    operation = _operation_of(run)

    # The view of an operation that streams is not awaited, either.
    if inspect.iscoroutinefunction(operation.view_func):
        return _throttled_async(run, operation)

    @functools.wraps(run)
    def checked(request: Any, **kwargs: Any) -> Any:
        gate = begin(NO_LIMITS, request)
        try:
            return _with_headers(request, run(request, **kwargs))
        finally:
            leave(gate)

    return checked


def _operation_of(run: Any) -> Any:
    """Return the operation that runs, whatever decorators there are around it.

    Those without `functools.wraps` have it among their variables or attributes.
    """
    functions = [run]
    for function in functions:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Operation):
            return owner

        inner = {**getattr(function, "__dict__", {})}
        if inspect.isfunction(function):
            inner |= inspect.getclosurevars(function).nonlocals
        for value in inner.values():
            if callable(value) and value not in functions:
                functions.append(value)

    raise TypeError(
        'throttled is for operations: write api.add_decorator(throttled, mode="view").'
    )


def _throttled_async(run: Callable[..., Any], operation: Any) -> Callable[..., Any]:
    view = operation.view_func

    @functools.wraps(view)
    async def checked_view(request: Any, *args: Any, **kwargs: Any) -> Any:
        await _check(request)
        return await view(request, *args, **kwargs)

    @functools.wraps(run)
    async def checked(request: Any, **kwargs: Any) -> Any:
        gate = begin(NO_LIMITS, request)
        token = _to_await.set([])
        try:
            response = await run(request, **kwargs)
            # Where the view was not called, because the request is not valid.
            await _check(request)
        except Throttled as refusal:
            response = operation.api.on_exception(request, refusal)
        finally:
            _to_await.reset(token)
            leave(gate)
        return _with_headers(request, response)

    operation.view_func = checked_view
    return checked


async def _check(request: Any) -> None:
    """Check for the throttles that were called, and raise as django-ninja refuses."""
    throttles = _to_await.get() or []
    called = [*throttles]
    throttles.clear()
    if not called:
        return

    await load_user(request)
    if any(throttle.calls_site() for throttle in called):
        checks = await in_thread(plan_checks)(called, request)
    else:
        checks = plan_checks(called, request)

    decided = await adecide(request, checks)
    decisions = {
        throttle: throttle.final_decision(request, decided.get(throttle))
        for throttle in called
    }
    _decisions.set(decisions)

    outcomes: list[Outcome] = []
    for decision in decisions.values():
        if decision is not None and not decision.allowed:
            outcomes += decision.outcomes

    refused = combine(outcomes)
    if refused is not None:
        raise Throttled(whole_wait(refused))


def _with_headers(request: Any, response: Any) -> Any:
    """Return a response with the headers of what was decided about the request."""
    decision = decision_about(request)
    if decision is not None and isinstance(response, HttpResponseBase):
        add_headers(response.headers, decision)
        if not decision.allowed:
            add_refusal_headers(response, decision)
    return response


@functools.cache
def _warn() -> None:
    log.warning(
        "A throttle waits for Redis in the event loop; write "
        'api.add_decorator(throttled, mode="view").'
    )
