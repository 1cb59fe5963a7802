"""Every limit in use: decorators add theirs, the system checks, the admin and the commands read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..core.policy import Policy


class LimitedView(NamedTuple):
    """What limits one view or throttle."""

    name: str  # of the view or throttle
    policies: tuple[str | Policy, ...]
    options: Mapping[str, Any]  # `cost`, `charge_when`, `response`, as they are written
    unnamed: tuple[
        Policy, ...
    ] = ()  # of a view that is not known yet, so that they have no name of their own
    views: frozenset[int] = (
        frozenset()
    )  # the ids of the views that share the counters named after the view
    before_authentication: bool = (
        False  # whether the framework of the view authenticates after the check
    )


# Decorators, whose `limits()` are the views that they limit. Weak, so that the views of a test are gone with the test.
sources: weakref.WeakSet[Any] = weakref.WeakSet()

# Policies of adapters, by name, made of the rates of other packages' throttles when these are first used. Where rates
# are functions, there may be any number.
adapter_policies: dict[str, Policy] = {}
MAX_ADAPTER_POLICIES = 1_000

# Names of the views with @rate_limit_exempt.
exempt_views: set[str] = set()

# Names of policies that are charged before it is known whether the request counts (`charge_when`): a refusal by one of
# them may end early, so it is not cached.
refundable: set[str] = set()


def add_adapter_policy(policy: Policy) -> Policy:
    """Add a policy that an adapter uses, if it is not there yet; return it."""
    if (
        adapter_policies.get(policy.name) is not policy
        and len(adapter_policies) < MAX_ADAPTER_POLICIES
    ):
        adapter_policies[policy.name] = policy
    return policy


def limited_views() -> Iterator[LimitedView]:
    """Yield what limits each view and throttle of this process."""
    for source in list(sources):
        yield from source.limits()
    for policy in list(adapter_policies.values()):
        yield LimitedView("An adapter", (policy,), {})
