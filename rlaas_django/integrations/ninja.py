"""Throttles for django-ninja: drop-in replacements of its own, and PolicyThrottle for named policies.

All requests share a throttle, so nothing about a request is kept on it. django-ninja calls throttles from the event
loop and does not await them; with `throttled`, a decorator for the API, async operations do.
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
from ..http.identity import client_address, load_user
from ..http.responses import in_thread
from ..http.throttles import PolicyLimits, adecide, decide, plan_all, with_headers
from ..runtime import log
from .throttles import RateThrottle, user_or_address

__all__ = [
    "AnonRateThrottle",
    "AuthRateThrottle",
    "PolicyThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
    "throttled",
]

# Of the request that a thread or a task is busy with: the wait of the last refusal, and the throttles to await.
_wait: ContextVar[float | None] = ContextVar("wait", default=None)
_to_await: ContextVar[list[Any] | None] = ContextVar("to_await", default=None)


class BaseThrottle(throttling.BaseThrottle):
    """Checks in Redis what a subclass plans for a request."""

    def refusal(self, request: Any, decision: Decision | None) -> Decision | None:
        """Return the decision of what was planned, if it refuses the request."""
        return None if decision is None or decision.allowed else decision

    def allow_request(self, request: Any) -> bool:
        if not conf.config().enabled:
            return True
        if (to_await := _to_await.get()) is not None:
            to_await.append(self)
            return True
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            _warn()
        refusal = self.refusal(
            request, decide(request, plan_all([self], request)).get(self)
        )
        _wait.set(_seconds(refusal))
        return refusal is None

    def wait(self) -> float | None:
        return _wait.get()

    def get_ident(self, request: Any) -> Any:
        """Return the address, by RATE_LIMITER['TRUSTED_PROXIES'] unless NINJA_NUM_PROXIES is set."""
        return (
            client_address(request)
            if settings.NUM_PROXIES is None
            else super().get_ident(request)
        )


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "ninja"


def _anonymous(throttle: Any, request: Any) -> tuple[str, Any]:
    return "ip", throttle.get_ident(request) if getattr(
        request, "auth", None
    ) is None else None


def _credential_or_address(throttle: Any, request: Any) -> tuple[str, Any]:
    auth = getattr(request, "auth", None)
    return (
        ("ip", throttle.get_ident(request)) if auth is None else ("token", str(auth))
    )  # kept as a keyed digest


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients without credentials, by address."""

    usual_key = throttling.AnonRateThrottle.get_cache_key, _anonymous


class AuthRateThrottle(SimpleRateThrottle, throttling.AuthRateThrottle):
    """Limits by `request.auth`, and clients without credentials by address."""

    usual_key = throttling.AuthRateThrottle.get_cache_key, _credential_or_address


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""

    usual_key = throttling.UserRateThrottle.get_cache_key, user_or_address


class PolicyThrottle(PolicyLimits, BaseThrottle):
    """Limits by policies, the default one unless others are named; all are charged or none.

    >>> @api.get("/search", throttle=PolicyThrottle("search", Policy("site", "1000/m", key="global")))
    """

    def __init__(self, *policies: str | Policy) -> None:
        super().__init__("A throttle of django-ninja", policies)

    def refusal(self, request: Any, decision: Decision | None) -> Decision | None:
        return super().refusal(request, self.decision(request))


def throttled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the headers to an operation's responses; have an async one await its throttles, in one round trip.

    >>> api.add_decorator(throttled, mode="view")
    """
    operation = getattr(inspect.unwrap(run), "__self__", None)
    if operation is None:
        raise TypeError(
            'throttled is for operations: write api.add_decorator(throttled, mode="view").'
        )
    view = operation.view_func
    if not inspect.iscoroutinefunction(
        view
    ):  # one that streams, too, whose view is not awaited
        return functools.wraps(run)(
            lambda request, **kwargs: with_headers(request, run(request, **kwargs))
        )

    @functools.wraps(view)
    async def checked_view(request: Any, *args: Any, **kwargs: Any) -> Any:
        await _check(request)
        return await view(request, *args, **kwargs)

    @functools.wraps(run)
    async def checked(request: Any, **kwargs: Any) -> Any:
        token = _to_await.set([])
        try:
            response = await run(request, **kwargs)
            await _check(
                request
            )  # where the view was not called, because the request is not valid
        except Throttled as refusal:
            response = operation.api.on_exception(request, refusal)
        finally:
            _to_await.reset(token)
        return with_headers(request, response)

    operation.view_func = checked_view
    return checked


async def _check(request: Any) -> None:
    """Check for the throttles that were called, and raise what django-ninja refuses with."""
    throttles = _to_await.get() or []
    called, throttles[:] = throttles[:], []
    if not called:
        return
    await load_user(request)
    calls_site = any(throttle.calls_site() for throttle in called)
    checks = (
        await in_thread(plan_all)(called, request)
        if calls_site
        else plan_all(called, request)
    )
    decisions = await adecide(request, checks)
    refusals = [
        each
        for throttle in called
        if (each := throttle.refusal(request, decisions.get(throttle)))
    ]
    if refusals:
        waits = [wait for wait in map(_seconds, refusals) if wait is not None]
        raise Throttled(math.ceil(max(waits)) if waits else None)


def _seconds(refusal: Decision | None) -> float | None:
    """Return the seconds until the request would pass; None where waiting does not help."""
    return (
        None
        if refusal is None or refusal.retry_after == math.inf
        else refusal.retry_after
    )


@functools.cache
def _warn() -> None:
    log.warning(
        'A throttle waits for Redis in the event loop; write api.add_decorator(throttled, mode="view").'
    )
