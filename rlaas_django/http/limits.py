"""The limits of a view or of a middleware rule, compiled once per Config."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import conf
from ..core.keys import key_kind
from ..core.policy import Policy, Rate
from ..limiter import PolicySet, compile_policies
from ..runtime import registry
from .identity import BY_USER
from .refusals import Respond
from .site_functions import call_rate, site_function


@dataclass(slots=True, eq=False)
class Limits:
    """What a decorator or a rule of the middleware applies to a request.

    `cost`, `response` and `charge_when` may be functions, or their dotted paths.
    """

    policies: tuple[str | Policy, ...]
    cost: Any = 1  # a whole number, or a function of the request
    methods: frozenset[str] | None = None
    block: bool = True
    response: Any = None
    charge_when: Any = None
    charge_on_error: bool = True
    # False for rules: other middleware runs between them and the view.
    before_view: bool = True

    def __post_init__(self) -> None:
        if self.charge_when is not None or not self.charge_on_error:
            registry.refundable.update(map(str, self.policies))


class CompiledLimits(NamedTuple):
    """Limits under the settings in force."""

    policies: tuple[Policy, ...]
    names: tuple[str, ...]
    policy_set: PolicySet | None  # None where a rate depends on the request
    cost: int | Callable[[HttpRequest], int]
    response: Respond | None
    charge_when: Callable[[HttpResponseBase], Any] | None
    calls_site_functions: bool  # one gives a key, a rate or the cost
    by_client: Limits | None  # the part that needs no user
    # The part that counts users, or calls functions that may read `request.user`.
    by_user: Limits | None


def compile_limits(limits: Limits) -> CompiledLimits:
    """Return limits under the settings in force, compiled at their first use."""
    compiled: dict[Limits, CompiledLimits] = conf.config().derived.limits
    if limits not in compiled:
        compiled[limits] = _compile(limits)
    return compiled[limits]


def _compile(limits: Limits) -> CompiledLimits:
    config = conf.config()
    policies = tuple(map(config.policy, limits.policies))
    cost = site_function(limits.cost)
    by_user = tuple([policy for policy in policies if _needs_user(policy)])
    if callable(cost):
        by_user = policies

    policy_set = None
    if policies and all(isinstance(policy.rate, Rate) for policy in policies):
        policy_set = compile_policies(policies)

    return CompiledLimits(
        policies=policies,
        names=tuple([policy.name for policy in policies]),
        policy_set=policy_set,
        cost=cost,
        response=site_function(limits.response) or config.response,
        charge_when=site_function(limits.charge_when),
        calls_site_functions=callable(cost) or any(map(_calls_function, policies)),
        by_client=_part(limits, policies, set(policies).difference(by_user)),
        by_user=_part(limits, policies, by_user),
    )


def _part(
    limits: Limits, policies: tuple[Policy, ...], chosen: Collection[Policy]
) -> Limits | None:
    """Return limits with only the chosen policies.

    None if none is chosen.
    """
    if not chosen:
        return None
    if len(chosen) == len(policies):
        return limits
    part = tuple([policy for policy in policies if policy in chosen])
    return replace(limits, policies=part)


def _calls_function(policy: Policy) -> bool:
    return key_kind(policy.key) == "key" or callable(policy.rate)


def _needs_user(policy: Policy) -> bool:
    return policy.key in BY_USER or _calls_function(policy)


def with_rates_for(
    request: HttpRequest, policies: tuple[Policy, ...]
) -> tuple[Policy, ...]:
    """Return the policies with their rates for a request.

    Those that have no limit for it are left out.
    """
    limiting = []
    for policy in policies:
        rate = call_rate(policy, request)
        if rate is not None:
            limiting.append(_with_rate(policy, rate))
    return tuple(limiting)


@lru_cache(maxsize=1024)
def _with_rate(policy: Policy, rate: Rate) -> Policy:
    return replace(policy, rate=rate)
