"""Throttles for Django REST framework.

Drop-in replacements of the framework's own, and PolicyThrottle for named policies. The
framework makes the throttles of a view for each request, and calls one after the other.
The first of ours that is called has all of them decided, in one round trip; the others
find their decisions with the request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from rest_framework import throttling
from rest_framework.settings import api_settings

from .. import conf
from ..core.decision import Decision
from ..core.policy import Policy
from ..limiter import Check
from .drf_views import Unavailable, observe_at_end
from .throttles import (
    CommonThrottle,
    PolicyLimits,
    RateThrottle,
    anonymous_address,
    decide,
    plan_checks,
    user_or_address,
)

__all__ = [
    "AnonRateThrottle",
    "BaseThrottle",
    "PolicyThrottle",
    "ScopedRateThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
]

# Attribute of a request: the decisions for throttles that were not called yet.
PENDING = "_rate_limit_pending"


class BaseThrottle(CommonThrottle, throttling.BaseThrottle):
    """The framework's, with addresses by RATE_LIMITER['TRUSTED_PROXIES']."""

    framework_settings = api_settings
    decision: Decision | None = None


class SimpleRateThrottle(RateThrottle, BaseThrottle, throttling.SimpleRateThrottle):
    """Counts requests in Redis, exactly; a subclass says by `get_cache_key` whose."""

    framework = "drf"
    names: ClassVar = {
        throttling.AnonRateThrottle.get_cache_key: anonymous_address,
        throttling.UserRateThrottle.get_cache_key: user_or_address,
        throttling.ScopedRateThrottle.get_cache_key: user_or_address,
    }

    def allow_request(self, request: Any, view: Any) -> bool:
        self.decision = _decide(self, request, view)
        if self.decision is None:
            return True
        if _allows(self.decision):
            return self.throttle_success()
        return self.throttle_failure()  # type: ignore[no-any-return]

    def throttle_success(self) -> bool:
        return True


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """Limits clients that are not logged in, by address."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """Limits users, and clients that are not logged in by address."""


class ScopedRateThrottle(SimpleRateThrottle, throttling.ScopedRateThrottle):
    """As UserRateThrottle, by the rate of the view's `throttle_scope`."""

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
    _limits = PolicyLimits("", ())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._limits = PolicyLimits(cls.__qualname__, cls.policies)

    def plan_check(self, request: Any, checked: set[str], *_: Any) -> Check | None:
        return self._limits.plan_check(request, checked)

    def allow_request(self, request: Any, view: Any) -> bool:
        _decide(self, request, view)
        self.decision = self._limits.decision_about(request)
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

    pending = vars(request).setdefault(PENDING, defaultdict(list))
    decisions: list[Decision | None] = pending[type(throttle)]
    if not decisions:
        batch = [member for member in view.get_throttles() if _is_batched(member)]
        if type(throttle) not in map(type, batch):
            batch = [throttle]

        decided = _decide_all(batch, request, view)
        for member in batch:
            pending[type(member)].append(decided.get(member))

    return decisions.pop(0)


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
    observe_at_end(view, request)
    checks = plan_checks(throttles, request, view)
    return decide(request, checks)
