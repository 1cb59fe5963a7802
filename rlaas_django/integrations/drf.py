"""Throttles for Django REST framework: drop-in replacements of its own, and PolicyThrottle for named policies.

DRF makes the throttles of a view for each request, and calls one after the other. The first of ours that is called
has all of them decided, in one round trip; the others find their decisions with the request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from contextlib import nullcontext
from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import throttling
from rest_framework.exceptions import APIException
from rest_framework.settings import api_settings

from .. import conf
from ..core.decision import Decision
from ..core.policy import Policy
from ..http.identity import client_address
from ..http.request_state import decision_about
from ..http.responses import add_headers
from ..http.throttles import Plan, PolicyLimits, decide, plan_all
from ..runtime.clock import frozen_clock
from .throttles import RateThrottle, user_or_address

__all__ = [
    "AnonRateThrottle",
    "BaseThrottle",
    "PolicyThrottle",
    "ScopedRateThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
]

PENDING = "_rlaas_pending"  # the attribute of a request with the decisions for throttles that were not called yet


class Unavailable(APIException):
    """Redis is unavailable, and a policy fails closed."""

    status_code, default_code, wait = 503, "unavailable", 1
    default_detail = _("Service temporarily unavailable")


class BaseThrottle(throttling.BaseThrottle):
    """DRF's, with the client's address as RATE_LIMITER['TRUSTED_PROXIES'] gives it, unless NUM_PROXIES is set."""

    decision: Decision | None = None

    def get_ident(self, request: Any) -> Any:
        return (
            client_address(request)
            if api_settings.NUM_PROXIES is None
            else super().get_ident(request)
        )

    def wait(self) -> float | None:
        """Return the seconds until the request would pass; None where waiting does not help."""
        wait = None if self.decision is None else self.decision.retry_after
        return None if wait == math.inf else wait


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "drf"

    def allow_request(self, request: Any, view: Any) -> bool:
        self.decision = _decide(self, request, view)
        if self.decision is None:
            return True
        return (
            self.throttle_success()
            if _allows(self.decision)
            else self.throttle_failure()
        )

    def throttle_success(self) -> bool:
        return True

    def throttle_failure(self) -> bool:
        return False


def _anonymous(throttle: Any, request: Any) -> tuple[str, Any]:
    kind, name = user_or_address(throttle, request)
    return kind, None if kind == "user" else name


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients that are not logged in, by address."""

    usual_key = throttling.AnonRateThrottle.get_cache_key, _anonymous


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""

    usual_key = throttling.UserRateThrottle.get_cache_key, user_or_address


class ScopedRateThrottle(SimpleRateThrottle, throttling.ScopedRateThrottle):
    """As UserRateThrottle, by the rate of the view's `throttle_scope`."""

    rate: str | None = None
    usual_key = throttling.ScopedRateThrottle.get_cache_key, user_or_address

    def plan(self, request: Any, *args: Any) -> Plan | None:
        self.scope = getattr(args[0], self.scope_attr, None)
        if self.scope:
            self.rate = self.get_rate()
            self.num_requests, self.duration = self.parse_rate(self.rate)
        return super().plan(request, *args) if self.scope else None


class PolicyThrottle(BaseThrottle):
    """Limits by policies, the default one unless others are named; all are charged or none.

    >>> class SearchThrottle(PolicyThrottle):
    ...     policies = ["search", Policy("site", "1000/m", key="global")]
    """

    policies: Sequence[str | Policy] = ()
    _limits = PolicyLimits("PolicyThrottle", ())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._limits = PolicyLimits(cls.__qualname__, cls.policies)

    def plan(self, request: Any, view: Any, planned: Container[str]) -> Plan | None:
        return self._limits.plan(request, planned)

    def allow_request(self, request: Any, view: Any) -> bool:
        _decide(self, request, view)
        self.decision = self._limits.decision(request)
        return self.decision is None or _allows(self.decision)


def _allows(decision: Decision) -> bool:
    if decision.degraded and decision.unavailable:
        raise Unavailable
    return decision.allowed


# A subclass with another one may let a request pass without a check, so it is checked by itself.
BATCHED = (SimpleRateThrottle.allow_request, PolicyThrottle.allow_request)


def _decide(throttle: Any, request: Any, view: Any) -> Decision | None:
    """Return the decision for a throttle, which may be pending; None if there is nothing to check."""
    kind = type(throttle)
    if not conf.config().enabled:
        return None
    if kind.allow_request in BATCHED and hasattr(view, "get_throttles"):
        pending: list[tuple[type, Decision | None]] = vars(request).setdefault(
            PENDING, []
        )
        if all(each is not kind for each, _ in pending):
            throttles = [
                each
                for each in view.get_throttles()
                if getattr(type(each), "allow_request", None) in BATCHED
            ]
            decisions = _decide_all(throttles, request, view)
            pending[:] = [(type(each), decisions.get(each)) for each in throttles]
        for i, (each, decision) in enumerate(pending):
            if each is kind:
                del pending[i]
                return decision
    return _decide_all([throttle], request, view).get(throttle)


def _decide_all(
    throttles: Sequence[Any], request: Any, view: Any
) -> dict[Any, Decision]:
    """Return the decisions for some throttles, made at the time of Redis or of the `timer` that a test gave one."""
    timers = [
        timer
        for throttle in throttles
        if (timer := getattr(throttle, "timer", time.time)) is not time.time
    ]
    with frozen_clock(round(timers[0]() * 1000)) if timers else nullcontext():
        decisions = decide(request, plan_all(throttles, request, view))
    if hasattr(view, "headers"):
        # DRF copies the headers of a view to its response, whichever it is
        add_headers(view.headers, decision_about(request))
    return decisions
