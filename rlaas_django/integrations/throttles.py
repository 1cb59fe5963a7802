"""What the throttles of Django REST framework and of django-ninja have in common."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from .. import conf, signals
from ..core import registry
from ..core.decision import Decision, combine
from ..core.keys import EncodedIdentity, encode_name
from ..core.policy import SLIDING_WINDOW_COMPACT, Policy, PolicyError, Rate
from ..core.registry import Limits as LimitsInUse
from ..http.gate import STATE, Gate, RequestState
from ..http.limits import Limits
from ..http.view_names import policy_name
from ..limiter.compiled import Check, plan


class RatePolicies:
    """The policies of throttles with a rate, named `<prefix>.<scope>`; the system checks and the admin list them."""

    def __init__(self, prefix: str, rates: Callable[[], Mapping[str, str | None]] = dict) -> None:
        self.prefix, self.rates = prefix, rates  # of scopes, in the settings
        self.used: dict[str, Policy] = {}  # by name
        registry.sources.add(self)

    def get(self, scope: str, limit: int, window: int, algo: str | None, on_failure: str) -> Policy:
        policy = _policy(f"{self.prefix}.{scope}", limit, window, algo, on_failure)
        self.used[policy.name] = policy
        return policy

    def limits(self) -> list[LimitsInUse]:
        """Return them for the registry, also those of scopes that no request had yet."""
        known = {}
        for scope, rate in self.rates().items():
            with suppress(PolicyError):
                policy = _policy(f"{self.prefix}.{scope}", *parse_rate(rate or ""), SLIDING_WINDOW_COMPACT, "open")
                known[policy.name] = policy
        return [LimitsInUse(f"A throttle of {self.prefix}", tuple({**known, **self.used}.values()), {})]


@lru_cache(maxsize=1024)
def _policy(name: str, limit: int, window: int, algo: str | None, on_failure: str) -> Policy:
    return Policy(policy_name(name, ""), (limit, window), algo=algo, on_failure=on_failure)


@lru_cache(maxsize=1024)
def parse_rate(rate: str) -> tuple[int, int]:
    """Return the requests and the seconds of a rate."""
    parsed = Rate.parse(rate)
    return parsed.limit, parsed.window


def plan_rate(policy: Policy, kind: str, name: Any) -> Check:
    """Return the check of one policy for a user, an address, or whatever else a throttle counts ("key")."""
    return plan(EncodedIdentity(encode_name(kind, name, conf.config().encoding)), policy, 1)


def plan_policies(limits: Limits, request: Any, planned: Container[str] = ()) -> Check | None:
    """Return the check of named policies, without those that are planned or checked already; None if none is left."""
    gate = Gate(limits, request)
    identity, policy_set, cost = gate.resolve(gate.prepared) if gate.prepared else (None, None, 0)
    if policy_set is None or identity is None:
        return None
    left = tuple(policy for policy in policy_set.policies if policy.name not in planned)
    return plan(identity, policy_set if left == policy_set.policies else left, cost) if left else None


def decision_by(limits: Limits, request: Any) -> Decision | None:
    """Return what the policies of these limits decided about a request, whoever checked them."""
    state, names = getattr(request, STATE, None), set(map(str, limits.policies))
    return combine(outcome for name, outcome in state.outcomes.items() if name in names) if state else None


def record(request: Any, checks: Iterable[Check], decisions: Iterable[Decision]) -> RequestState:
    """Keep decisions with the request, as those of decorators and of the middleware are."""
    state: RequestState = getattr(request, STATE, None) or RequestState(request)
    state.add_request(request)
    state.depth += 1
    for check, decision in zip(checks, decisions, strict=True):
        if state.record(decision, check.cost, block=True):
            signals.send(signals.rate_limited, request=request, decision=decision)
    state.leave()
    return state
