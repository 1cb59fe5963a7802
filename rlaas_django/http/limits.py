"""The limits of a view or of a middleware rule, compiled once per Config, and decided together where they can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from .. import conf
from ..core.keys import key_kind
from ..core.policy import Policy, Rate
from ..limiter import PolicySet, compile_policies
from ..runtime import registry
from .responses import Respond
from .site_functions import call_rate, site_function

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# The functions that @rate_limit returned, with their limits and the views below. By the function, not by an attribute
# of it: other decorators copy attributes, and they decide whether the limits below them apply.
decorated: WeakKeyDictionary[Callable[..., Any], tuple[Limits, Callable[..., Any]]] = (
    WeakKeyDictionary()
)


class Prepared(NamedTuple):
    """Limits under the present settings."""

    limits: Limits  # with the options that the settings give their policies
    inner: tuple[
        Limits, ...
    ]  # of the policies that have other options; each is decided by itself, inside these
    policies: tuple[Policy, ...]
    policy_set: PolicySet | None  # None where a rate depends on the request
    needs_user: bool  # a policy counts users, or a function of the site's may read `request.user`
    calls_site_functions: bool  # one gives a key, a rate or the cost


@dataclass(slots=True, eq=False)
class Limits:
    """What a decorator or a rule of the middleware applies to a request."""

    policies: tuple[str | Policy, ...]
    cost: Any = None  # a whole number, a function of the request, or its dotted path; None: 1, or the policy's
    methods: frozenset[str] | None = None
    block: bool = True
    response: Respond | None = (
        None  # or a dotted path, as `charge_when`, until they are prepared
    )
    charge_when: Callable[[HttpResponseBase], Any] | None = None
    charge_on_error: bool = True
    before_view: bool = True  # False for rules of the middleware: other middleware runs between them and the view
    with_options: bool = (
        True  # whether the options that the settings give a policy apply
    )
    own_cost: Any = field(
        init=False
    )  # None where `cost` is 1 only because none was given

    def __post_init__(self) -> None:
        self.own_cost = self.cost
        if self.cost is None:
            self.cost = 1
        if self.charge_when is not None or not self.charge_on_error:
            registry.refundable.update(str(policy) for policy in self.policies)

    def prepare(self) -> Prepared:
        """Compile the policies, once per Config."""
        config = conf.config()
        first, inner = self, ()
        first.cost, first.response = (
            site_function(first.cost),
            site_function(first.response),
        )
        first.charge_when = site_function(first.charge_when)
        policies = tuple(
            config.policy(each) if isinstance(each, str) else each
            for each in first.policies
        )
        fixed = bool(policies) and all(
            isinstance(policy.rate, Rate) for policy in policies
        )
        site = callable(first.cost) or any(
            key_kind(each.key) == "key" or callable(each.rate) for each in policies
        )
        user = site or any(policy.key in ("user", "user_or_ip") for policy in policies)
        compiled = compile_policies(policies) if fixed else None
        config.derived.limits[self] = prepared = Prepared(
            first, tuple(inner), policies, compiled, user, site
        )
        return prepared

    @property
    def joinable(self) -> bool:
        """Whether other limits can be decided in the same call.

        These block, with the default response, and are never refunded.
        """
        plain = (
            self.block
            and self.response is None
            and self.charge_when is None
            and self.charge_on_error
        )
        if not plain or not self.policies:
            return False
        prepared = self.prepare()
        return prepared.limits is self and not prepared.calls_site_functions


def with_limits_of_view(
    limits: Limits, view: Callable[..., Any], request: HttpRequest
) -> Limits:
    """Return the limits of a rule with those of the view's decorators, so that one call decides them all."""
    every, derived = (
        (limits, *_limits_of_view(view, request)),
        conf.config().derived.limits,
    )
    if len(every) == 1:
        return limits
    return derived.get(every) or derived.setdefault(every, _join(every))  # type: ignore[no-any-return]


def _limits_of_view(view: Callable[..., Any], request: HttpRequest) -> Iterator[Limits]:
    """Return the limits that are certain to apply: of decorators above all others."""
    if request.method not in SAFE_METHODS and not getattr(view, "csrf_exempt", False):
        return  # or another site could use up its visitors' limits, by requests that Django rejects before the view
    while isinstance(view, FunctionType) and (found := decorated.get(view)) is not None:
        limits, view = found
        if limits.methods is None or request.method in limits.methods:
            yield limits


def _join(every: tuple[Limits, ...]) -> Limits:
    """Return the first limits with the policies of the others, up to those that have to be decided by themselves."""
    policies: dict[str, str | Policy] = {}
    for limits in every:
        if not limits.joinable or limits.cost != every[0].cost:
            break
        for policy in limits.policies:
            policies.setdefault(str(policy), policy)
    return (
        replace(every[0], policies=tuple(policies.values())) if policies else every[0]
    )


def with_fixed_rates(
    policies: tuple[Policy, ...], request: HttpRequest
) -> tuple[Policy, ...]:
    """Return the policies with their rates for a request, without those that have no limit for it."""
    rates = [(policy, call_rate(policy, request)) for policy in policies]
    return tuple(
        [_with_rate(policy, rate) for policy, rate in rates if rate is not None]
    )


@lru_cache(maxsize=1024)
def _with_rate(policy: Policy, rate: Rate) -> Policy:
    return replace(policy, rate=rate)
