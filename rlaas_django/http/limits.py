"""The limits of a view or of a middleware rule, compiled once per Config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import conf, log
from ..core import registry
from ..core.decision import Decision
from ..core.policy import DEFAULT, Policy, PolicyError, Rate, shown
from ..limiter.compiled import CompiledPolicySet, compile_policies
from .identity import RequestIdentity, calls_site_functions, needs_user

Respond = Callable[[HttpRequest, Decision], Any]


class Prepared(NamedTuple):
    """Limits under the present settings."""

    policies: tuple[Policy, ...]
    policy_set: CompiledPolicySet | None  # None where a rate depends on the request
    needs_user: bool
    calls_site_functions: bool

    def resolve(self, identity: RequestIdentity) -> tuple[Policy, ...]:
        """Return the policies that apply to a request; the site's functions are called here."""
        policies = self.policies
        if self.policy_set is None:
            policies = tuple(found for each in policies if (found := _with_fixed_rate(each, identity.request)))
        if self.calls_site_functions:
            for policy in policies:
                identity.call_key_function(policy.key)
        return policies

    def compiled(self, policies: tuple[Policy, ...]) -> CompiledPolicySet | None:
        """Return the compiled set of some of the policies; None for none."""
        if policies is self.policies:
            return self.policy_set
        return compile_policies(policies) if policies else None


@dataclass(slots=True, eq=False)
class Limits:
    """What a decorator or a rule of the middleware applies to a request."""

    policies: tuple[str | Policy, ...]
    cost: int | Callable[[HttpRequest], int] = 1
    methods: frozenset[str] | None = None
    block: bool = True
    response: Respond | None = None
    charge_when: Callable[[HttpResponseBase], Any] | None = None
    charge_on_error: bool = True

    def __post_init__(self) -> None:
        if self.charge_when is not None or not self.charge_on_error:
            registry.refundable.update(str(policy) for policy in self.policies)

    def cost_of(self, request: HttpRequest) -> int:
        """Return what a request costs."""
        cost = self.cost(request) if callable(self.cost) else self.cost
        if type(cost) is int and cost >= 0:
            return cost
        log.error("The cost %s is not a whole number of at least 0; 1 is used instead.", shown(cost))
        return 1

    def prepared(self) -> Prepared:
        """Return the compiled policies, made once per Config."""
        config = conf.config()
        found: Prepared | None = config.derived.get(self)
        if found is None:
            policies = tuple(config.policy(each) if isinstance(each, str) else each for each in self.policies)
            fixed = bool(policies) and all(isinstance(policy.rate, Rate) for policy in policies)
            site = callable(self.cost) or any(map(calls_site_functions, policies))
            user = site or any(map(needs_user, policies))
            found = Prepared(policies, compile_policies(policies) if fixed else None, user, site)
            config.derived[self] = found
        return found


def _with_fixed_rate(policy: Policy, request: HttpRequest) -> Policy | None:
    """Return the policy with its rate for this request; None when there is no limit."""
    if not callable(policy.rate):
        return policy
    rate = policy.rate(request)
    if rate is None:
        return None
    try:
        return _with_rate(policy, Rate.parse(rate))
    except PolicyError as error:
        log.error("The rate of policy %s: %s The default policy's rate is used instead.", policy, error)
        return _with_rate(policy, conf.config().policy(DEFAULT).fixed_rate)


@lru_cache(maxsize=1024)
def _with_rate(policy: Policy, rate: Rate) -> Policy:
    return replace(policy, rate=rate)
