"""What decorators and integrations register: limits in use, and adapters.

The system checks, the admin and the commands read the limits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ..core.policy import Policy


class LimitedView(NamedTuple):
    """What limits one view or throttle."""

    name: str  # of the view or throttle
    policies: tuple[str | Policy, ...]
    options: Mapping[str, Any]  # `cost`, `charge_when`, `response`, as they are written
    # Of a view that is not known yet, so that they have no name of their own.
    unnamed: tuple[Policy, ...] = ()
    # The ids of the views that share the counters named after the view.
    views: frozenset[int] = frozenset()
    # Whether the framework of the view authenticates after the check.
    before_authentication: bool = False


# Decorators, whose `limits()` are the views that they limit.
# Weak, so that the views of a test are gone with the test.
sources: weakref.WeakSet[Any] = weakref.WeakSet()

# Policies of adapters, by name, made of the rates of other packages' throttles when
# these are first used. Where rates are functions, there may be any number.
adapter_policies: dict[str, Policy] = {}
MAX_ADAPTER_POLICIES = 1_000

# Names of policies that are charged before it is known whether the request counts
# (`charge_when`): a refusal by one of them may end early, so it is not cached.
refundable: set[str] = set()

# What limits classes of other frameworks, by what recognises such a class.
_adapters: dict[Callable[[type], bool], str] = {}


def register_adapter(matches: Callable[[type], bool], module: str) -> None:
    """Have the classes of another framework that match limited by a module.

    It has a function `limit_class(view_class, limits)`.
    """
    _adapters[matches] = module


def adapter_for(view_class: type) -> Any | None:
    """Return the module for a class; None for a class of no other framework."""
    for matches, module in _adapters.items():
        if matches(view_class):
            return import_module(module)
    return None


def add_adapter_policy(policy: Policy) -> Policy:
    """Add a policy that an adapter uses, if it is not there yet; return it."""
    is_known = adapter_policies.get(policy.name) is policy
    if not is_known and len(adapter_policies) < MAX_ADAPTER_POLICIES:
        adapter_policies[policy.name] = policy
    return policy


def limited_views() -> Iterator[LimitedView]:
    """Yield what limits each view and throttle of this process."""
    for source in list(sources):
        yield from source.limits()
    for policy in list(adapter_policies.values()):
        yield LimitedView("An adapter", (policy,), {})
