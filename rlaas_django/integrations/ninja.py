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
import math
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from ninja import throttling
from ninja.conf import settings
from ninja.errors import Throttled

from .. import conf
from ..core.decision import Decision
from ..core.policy import Policy
from ..http.gate import begin, leave
from ..http.identity import load_user
from ..http.limits import Limits
from ..http.proxies import client_address
from ..http.site_functions import in_thread
from ..limiter import Check
from ..runtime import log
from .throttles import (
    PolicyLimits,
    RateThrottle,
    adecide,
    decide,
    plan_checks,
    user_or_address,
    with_headers,
)

__all__ = [
    "AnonRateThrottle",
    "AuthRateThrottle",
    "PolicyThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
    "throttled",
]

NO_LIMITS = Limits(())

# Of the request that a thread or a task is busy with: the wait of the last refusal, and
# the throttles to await.
_wait: ContextVar[float | None] = ContextVar("wait", default=None)
_to_await: ContextVar[list[Any] | None] = ContextVar("to_await", default=None)


class BaseThrottle(throttling.BaseThrottle):
    """Checks in Redis what a subclass plans for a request."""

    def refusal(self, request: Any, decision: Decision | None) -> Decision | None:
        """Return the decision of the check, if it refuses the request."""
        if decision is None or decision.allowed:
            return None
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
        decisions = decide(request, plan_checks([self], request))
        refusal = self.refusal(request, decisions.get(self))
        _wait.set(_seconds(refusal))
        return refusal is None

    def wait(self) -> float | None:
        return _wait.get()

    def get_ident(self, request: Any) -> Any:
        """Return the address, by RATE_LIMITER['TRUSTED_PROXIES'].

        Unless NINJA_NUM_PROXIES is set.
        """
        if settings.NUM_PROXIES is None:
            return client_address(request)
        return super().get_ident(request)


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "ninja"


def _anonymous(throttle: Any, request: Any) -> tuple[str, Any]:
    if getattr(request, "auth", None) is not None:
        return "ip", None
    return "ip", throttle.get_ident(request)


def _credential_or_address(throttle: Any, request: Any) -> tuple[str, Any]:
    auth = getattr(request, "auth", None)
    if auth is None:
        return "ip", throttle.get_ident(request)
    return "token", str(auth)  # kept as a keyed digest


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients without credentials, by address."""

    usual_key = (throttling.AnonRateThrottle.get_cache_key, _anonymous)


class AuthRateThrottle(SimpleRateThrottle, throttling.AuthRateThrottle):
    """Limits by `request.auth`, and clients without credentials by address."""

    usual_key = (throttling.AuthRateThrottle.get_cache_key, _credential_or_address)


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""

    usual_key = (throttling.UserRateThrottle.get_cache_key, user_or_address)


class PolicyThrottle(PolicyLimits, BaseThrottle):
    """Limits by policies, the default one unless others are named.

    All are charged or none.

    >>> site = Policy("site", "1000/m", key="global")
    >>> @api.get("/search", throttle=PolicyThrottle("search", site))
    """

    def __init__(self, *policies: str | Policy) -> None:
        super().__init__("A throttle of django-ninja", policies)

    def refusal(self, request: Any, decision: Decision | None) -> Decision | None:
        return super().refusal(request, self.decision(request))


def throttled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the headers to an operation's responses, and await throttles in async ones.

    All throttles of an async operation are decided in one round trip.

    >>> api.add_decorator(throttled, mode="view")
    """
    operation = getattr(inspect.unwrap(run), "__self__", None)
    if operation is None:
        raise TypeError(
            "throttled is for operations: write "
            'api.add_decorator(throttled, mode="view").'
        )
    # The view of an operation that streams is not awaited, either.
    if inspect.iscoroutinefunction(operation.view_func):
        return _throttled_async(run, operation)

    @functools.wraps(run)
    def checked(request: Any, **kwargs: Any) -> Any:
        gate = begin(NO_LIMITS, request)
        try:
            return with_headers(request, run(request, **kwargs))
        finally:
            leave(gate)

    return checked


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
        return with_headers(request, response)

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
    decisions = await adecide(request, await _plan_checks(called, request))
    refusals = []
    for throttle in called:
        refusal = throttle.refusal(request, decisions.get(throttle))
        if refusal is not None:
            refusals.append(refusal)
    if refusals:
        raise Throttled(_longest_wait(refusals))


async def _plan_checks(throttles: list[Any], request: Any) -> dict[Any, Check]:
    """Plan checks, in a thread where functions of the site are called."""
    if any(throttle.calls_site() for throttle in throttles):
        checks: dict[Any, Check] = await in_thread(plan_checks)(throttles, request)
        return checks
    return plan_checks(throttles, request)


def _longest_wait(refusals: list[Decision]) -> int | None:
    waits = [_seconds(refusal) for refusal in refusals]
    known = [wait for wait in waits if wait is not None]
    if not known:
        return None
    return math.ceil(max(known))


def _seconds(refusal: Decision | None) -> float | None:
    """Return the seconds until the request would pass, if waiting helps."""
    if refusal is None or refusal.retry_after == math.inf:
        return None
    return refusal.retry_after


@functools.cache
def _warn() -> None:
    log.warning(
        "A throttle waits for Redis in the event loop; write "
        'api.add_decorator(throttled, mode="view").'
    )
