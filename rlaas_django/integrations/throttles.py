"""What the throttles of Django REST framework and of django-ninja have in common."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from .. import conf, limiter, signals
from ..core import registry
from ..core.decision import Decision, combine
from ..core.keys import EncodedIdentity, encode_name
from ..core.policy import DEFAULT, SLIDING_WINDOW_COMPACT, Policy, Rate
from ..core.registry import Limits as LimitsInUse
from ..http.gate import Gate
from ..http.limits import Limits
from ..http.request_state import STATE, RequestState
from ..http.view_names import policy_name
from ..limiter.compiled import Check, plan

Identify = Callable[[Any, Any], tuple[str, Any]]  # of a throttle and a request: the kind of an identity, and its name


class RatePolicies:
    """The policies that adapters made of rates, by name; the system checks and the admin list them."""

    def __init__(self) -> None:
        self.used: dict[str, Policy] = {}
        registry.sources.add(self)

    def limits(self) -> list[LimitsInUse]:
        return [LimitsInUse("An adapter", (policy,), {}) for policy in self.used.values()]


rate_policies = RatePolicies()


@lru_cache(maxsize=1024)
def _rate_policy(name: str, limit: int, window: int, algo: str | None, on_failure: str) -> Policy:
    policy = Policy(policy_name(name, ""), (limit, window), algo=algo, on_failure=on_failure)
    rate_policies.used[policy.name] = policy
    return policy


@lru_cache(maxsize=1024)
def _parse_rate(rate: str) -> tuple[int, int]:
    parsed = Rate.parse(rate)
    return parsed.limit, parsed.window


class RateThrottle:
    """What a framework's SimpleRateThrottle gets: a policy for its rate, and a check for a request."""

    algo: str | None = SLIDING_WINDOW_COMPACT
    on_failure = "open"
    framework: ClassVar[str]
    # Whom the framework's own `get_cache_key` functions stand for, so that overrides of users and addresses apply.
    identities: ClassVar[Mapping[Any, Identify]]

    def parse_rate(self, rate: str | None) -> tuple[int | None, int | None]:
        return (None, None) if rate is None else _parse_rate(rate)

    def policy(self: Any) -> Policy:
        scope = self.scope or type(self).__name__
        if self.rate != self.THROTTLE_RATES.get(self.scope):
            scope += f"-{self.duration}s"  # throttles with rates of their own may have inherited the same scope
        name = f"{self.framework}.{scope}"
        return _rate_policy(name, self.num_requests, self.duration, self.algo, self.on_failure)

    def plan_rate(self: Any, request: Any, *view: Any) -> Check | None:
        """Return what to check; None for a request that is not throttled."""
        if self.rate is None:
            return None
        identify = self.identities.get(getattr(self.get_cache_key, "__func__", None))
        if identify is None or self.cache_format != "throttle_%(scope)s_%(ident)s":
            kind, name = "key", self.get_cache_key(request, *view)
        else:
            kind, name = identify(self, request)
        if name is None:
            return None
        return plan(EncodedIdentity(encode_name(kind, name, conf.config().encoding)), self.policy(), 1)


def user_or_address(throttle: Any, request: Any) -> tuple[str, Any]:
    user = request.user
    return ("user", user.pk) if user and user.is_authenticated else ("ip", throttle.get_ident(request))


class Policies:
    """What a PolicyThrottle checks: policies, the default one unless others are named."""

    def __init__(self, name: str, policies: Iterable[str | Policy]) -> None:
        self.name, self.checked = name, Limits(tuple(policies) or (DEFAULT,))
        self.names = set(map(str, self.checked.policies))
        registry.sources.add(self)

    def limits(self) -> list[LimitsInUse]:
        return [LimitsInUse(self.name, self.checked.policies, {})]

    def plan(self, request: Any, planned: Container[str]) -> Check | None:
        """Return the check of those that are not planned or checked already; None if none is left."""
        gate = Gate(self.checked, request)
        if gate.prepared is None:
            return None
        identity, policy_set, cost = gate.resolve(gate.prepared)
        left = [policy for policy in policy_set.policies if policy.name not in planned] if policy_set else []
        return plan(identity, left, cost) if left else None

    def decision(self, request: Any) -> Decision | None:
        """Return what they decided about a request, whoever checked them."""
        state = getattr(request, STATE, None)
        return state and combine(outcome for name, outcome in state.outcomes.items() if name in self.names)


def plan_all(throttles: Iterable[Any], *args: Any) -> dict[Any, Check]:
    """Return what each throttle plans to check; a policy that several name is planned once."""
    checks: dict[Any, Check] = {}
    for throttle in throttles:
        planned = {name for check in checks.values() for name in check.policy_set.names}
        if check := throttle.plan(*args, planned):
            checks[throttle] = check
    return checks


def decide(request: Any, checks: dict[Any, Check]) -> dict[Any, Decision]:
    """Decide the checks of throttles, in one round trip, and keep the decisions with the request."""
    decisions = dict(zip(checks, limiter.check_each([*checks.values()]) if checks else (), strict=True))
    for refusal in record(request, decisions.values()):
        signals.send(signals.rate_limited, request=request, decision=refusal)
    return decisions


async def adecide(request: Any, checks: dict[Any, Check]) -> dict[Any, Decision]:
    """As `decide`, natively async."""
    decisions = dict(zip(checks, await limiter.acheck_each([*checks.values()]), strict=True))
    for refusal in record(request, decisions.values()):
        await signals.asend(signals.rate_limited, request=request, decision=refusal)
    return decisions


def record(request: Any, decisions: Iterable[Decision]) -> list[Decision]:
    """Keep decisions as those of decorators and of the middleware are; return those that refuse."""
    state: RequestState = getattr(request, STATE, None) or RequestState(request)
    state.add_request(request)
    state.depth += 1
    refusals = [decision for decision in decisions if state.record(decision, 1, block=True)]
    state.leave()
    return refusals
