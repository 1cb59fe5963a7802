"""Throttles for Django REST framework: drop-in replacements of its own, and PolicyThrottle for named policies.

DRF makes the throttles of a view for each request, and calls them one after the other. The first of ours checks for
all of them, so that a request takes one round trip; what it found for the others is kept with the request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import throttling
from rest_framework.exceptions import APIException
from rest_framework.settings import api_settings

from .. import conf, limiter
from ..core import clock, registry
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.policy import DEFAULT, SLIDING_WINDOW_COMPACT, Policy
from ..core.registry import Limits as LimitsInUse
from ..http.identity import client_address
from ..http.limits import Limits
from ..http.responses import add_headers
from ..limiter.compiled import Check
from .throttles import RatePolicies, decision_by, parse_rate, plan_policies, plan_rate, record

PENDING = "_rlaas_pending"  # the attribute of a request with the decisions for throttles that were not called yet

policies = RatePolicies("drf", lambda: SimpleRateThrottle.THROTTLE_RATES)


class Unavailable(APIException):
    """Redis is unavailable, and a policy fails closed."""

    status_code = 503
    default_detail = _("Service temporarily unavailable")
    default_code = "unavailable"

    def __init__(self, wait: float) -> None:
        super().__init__()
        self.wait = math.ceil(wait)


class BaseThrottle(throttling.BaseThrottle):
    """DRF's, with the client's address as RATE_LIMITER['TRUSTED_PROXIES'] gives it, unless NUM_PROXIES is set."""

    decision: Decision | None = None

    def get_ident(self, request: Any) -> Any:
        return client_address(request) if api_settings.NUM_PROXIES is None else super().get_ident(request)

    def allowed(self) -> bool:
        """Return whether the decision allows the request; raise a 503 where it fails closed without Redis."""
        if self.decision is not None and self.decision.unavailable:
            raise Unavailable(self.decision.retry_after)
        return self.decision is None or self.decision.allowed

    def wait(self) -> float | None:
        """Return the seconds until the request would pass; None where waiting does not help."""
        wait = None if self.decision is None else self.decision.retry_after
        return None if wait == math.inf else wait


# Of these keys it is known whom they stand for, so that overrides of a user or an address apply.
KNOWN_KEYS = [
    throttling.AnonRateThrottle.get_cache_key,
    throttling.UserRateThrottle.get_cache_key,
    throttling.ScopedRateThrottle.get_cache_key,
]


class SimpleRateThrottle(BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    algo: str | None = SLIDING_WINDOW_COMPACT
    on_failure = "open"

    def parse_rate(self, rate: str | None) -> tuple[int | None, int | None]:
        return (None, None) if rate is None else parse_rate(rate)

    def plan(self, request: Any, view: Any, planned: Container[str] = ()) -> Check | None:
        """Return what to check; None for a request that is not throttled."""
        kind, name = ("", None) if self.rate is None else self._identity(request, view)
        if name is None:
            return None
        scope = self.scope or type(self).__name__
        if self.rate != self.THROTTLE_RATES.get(self.scope):
            scope = f"{scope}-{self.duration}s"  # throttles with rates of their own may have inherited the same scope
        return plan_rate(policies.get(scope, self.num_requests, self.duration, self.algo, self.on_failure), kind, name)

    def _identity(self, request: Any, view: Any) -> tuple[str, Any]:
        """Return who is counted: a user or an address where DRF's own key stands for one, else the key."""
        get_cache_key = getattr(self.get_cache_key, "__func__", None)
        if get_cache_key not in KNOWN_KEYS or self.cache_format != throttling.SimpleRateThrottle.cache_format:
            return "key", self.get_cache_key(request, view)
        if not (request.user and request.user.is_authenticated):
            return "ip", self.get_ident(request)
        return "user", None if get_cache_key is KNOWN_KEYS[0] else request.user.pk

    def allow_request(self, request: Any, view: Any) -> bool:
        self.decision = _decide(self, request, view)
        if self.decision is None:
            return True
        return self.throttle_success() if self.allowed() else self.throttle_failure()

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

    def plan(self, request: Any, view: Any, planned: Container[str] = ()) -> Check | None:
        self.scope = getattr(view, self.scope_attr, None)
        if not self.scope:
            return None
        self.rate = self.get_rate()
        self.num_requests, self.duration = self.parse_rate(self.rate)
        return super().plan(request, view)


class PolicyThrottle(BaseThrottle):
    """Limits by policies, the default one unless others are named; all are charged or none.

    >>> class SearchThrottle(PolicyThrottle):
    ...     policies = ["search", Policy("site", "1000/m", key="global")]
    """

    policies: Sequence[str | Policy] = (DEFAULT,)
    _limits = Limits((DEFAULT,))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._limits = Limits(tuple(cls.policies))
        registry.sources.add(cls)

    @classmethod
    def limits(cls) -> list[LimitsInUse]:
        """Return them for the registry."""
        return [LimitsInUse(cls.__qualname__, cls._limits.policies, {})]

    def plan(self, request: Any, view: Any, planned: Container[str] = ()) -> Check | None:
        """Return what to check: the policies that nobody else checks."""
        return plan_policies(self._limits, request, planned)

    def allow_request(self, request: Any, view: Any) -> bool:
        _decide(self, request, view)
        self.decision = decision_by(self._limits, request)
        return self.allowed()


# A subclass with another one may let a request pass without a check, so it is checked by itself.
BATCHED = (SimpleRateThrottle.allow_request, PolicyThrottle.allow_request)


def _decide(throttle: Any, request: Any, view: Any) -> Decision | None:
    """Return the decision for a throttle, None if there is nothing to check.

    The first of a view's throttles to be called has all of them decided; the others find their decisions pending.
    """
    kind = type(throttle)
    if not conf.config().enabled:
        return None
    if kind.allow_request in BATCHED and hasattr(view, "get_throttles"):
        pending: list[tuple[type, Decision | None]] = vars(request).setdefault(PENDING, [])
        if all(each is not kind for each, _ in pending):
            throttles = [each for each in view.get_throttles() if getattr(type(each), "allow_request", None) in BATCHED]
            pending[:] = zip(map(type, throttles), _decide_each(throttles, request, view), strict=True)
        for i, (each, decision) in enumerate(pending):
            if each is kind:
                del pending[i]
                return decision
    return _decide_each([throttle], request, view)[0]


def _decide_each(throttles: Sequence[Any], request: Any, view: Any) -> list[Decision | None]:
    """Return the decisions for some throttles, in one round trip."""
    checks: list[Check | None] = []
    planned: set[str] = set()
    for throttle in throttles:
        checks.append(check := throttle.plan(request, view, planned))
        planned |= check.policy_set.names if check else set()
    needed = [check for check in checks if check]
    if not needed:
        return [None for _ in checks]
    decisions = _check_each(needed, [getattr(throttle, "timer", time.time) for throttle in throttles])
    state = record(request, needed, decisions)
    if hasattr(view, "headers"):
        add_headers(view, state.decision)  # DRF copies them to the response, whichever it is
    found = iter(decisions)
    return [next(found) if check else None for check in checks]


def _check_each(checks: Sequence[Check], timers: Iterable[Callable[[], float]]) -> list[Decision]:
    """Decide at the time of Redis, or of the `timer` that a test has given a throttle."""
    of_test = [timer for timer in timers if timer is not time.time]
    if not of_test:
        return limiter.check_each(checks)
    before, clock.frozen = clock.frozen, Clock(round(of_test[0]() * 1000))
    try:
        return limiter.check_each(checks)
    finally:
        clock.frozen = before
