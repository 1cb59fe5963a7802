"""Policies that are checked together, compiled once per Config. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import NoneType
from typing import Any

from .. import backend, conf
from ..backend.scripts import for_algorithms
from ..conf import Config
from ..core import keys
from ..core.algorithms import ALGORITHMS
from ..core.keys import MAX_LENGTH, Identity
from ..core.policy import (
    DEFAULT,
    Policies,
    Policy,
    PolicyError,
    ScriptArguments,
    script_arguments,
)
from ..core.rules import excessive_cost
from .refusal_cache import cached_refusals
from .replies import reply_lengths

MAX_COMPILED = 1024  # sets per process and cache
MAX_KNOWN_USERS = 1024  # per set

# The command of a check of one unit and one identity: what is around the identity,
# and what follows the unique id.
Template = tuple[list[str], str]


class PolicySet:
    """Policies that are checked together.

    All are charged or none.
    """

    def __init__(
        self,
        policies: tuple[Policy, ...],
        config: Config,
        topology: backend.Topology,
        processes: int = 1,
    ) -> None:
        self.policies = policies
        self.names = frozenset(policy.name for policy in policies)
        self.topology = topology
        self.enabled = config.enabled
        self.in_one_call = config.enabled and not topology.clustered
        self.refusals = cached_refusals()
        self._config = config
        self._parts: dict[tuple[int, ...], PolicySet] = {}

        self.arguments = tuple(
            [script_arguments(policy, config.algo, processes) for policy in policies]
        )
        self.script = for_algorithms({arguments.algo for arguments in self.arguments})
        self.reply_lengths = reply_lengths(len(policies))

        # The policies that decide, by index: the enforced ones, or all shadow policies
        # where there are no others.
        enforced = [i for i, policy in enumerate(policies) if not policy.shadow]
        self.deciding = tuple(enforced or range(len(policies)))
        # A shadow policy's outcome may change while another policy refuses, so such a
        # refusal is not cached.
        self.cacheable = (
            config.local_refusals
            and self.in_one_call
            and len(enforced) == len(policies)
        )

        # Users by name, where nothing else is counted: names repeat, and encoding one
        # takes ten times as long as a look-up.
        self._known_users: dict[str, str] = {}
        self._all_by_user = all(
            keys.key_kind(policy.key) in ("user", "user_or_ip") for policy in policies
        )

        self.templates: dict[int, Template] = {}  # by the length of the identity
        self.override_key = keys.override_key(hash_tag=topology.clustered)
        # In seconds; 0 where it depends on the time of the decision.
        self.ttls: list[int] = []
        self._counter_keys: list[keys.KeyTemplate] = []
        self.words: list[Any] = []  # what the script takes for all policies
        for policy, arguments in zip(policies, self.arguments, strict=True):
            self._add(policy, arguments)

    def _add(self, policy: Policy, arguments: ScriptArguments) -> None:
        """Add the key, the ttl and the words of a policy."""
        algo = arguments.algo
        window = arguments.window // 1000
        clustered = self.topology.clustered
        key = keys.counter_key(policy.name, algo, window, hash_tag=clustered)
        self._counter_keys.append(key)
        self.ttls.append(0 if ALGORITHMS[algo].is_aligned else window)
        self.words += (*arguments, int(policy.shadow), policy.name)

    def part(self, indexes: Sequence[int]) -> PolicySet:
        """Return the set of some of the policies.

        They are those of one slot of a cluster.
        """
        key = tuple(indexes)
        if len(key) == len(self.policies):
            return self
        if key not in self._parts:
            policies = tuple([self.policies[i] for i in key])
            self._parts[key] = PolicySet(policies, self._config, self.topology)
        return self._parts[key]

    @cached_property
    def share(self) -> PolicySet:
        """The same policies with this process' share of the limits, by LOCAL_SHARE."""
        processes = self._config.local_share
        return PolicySet(self.policies, self._config, self.topology, processes)

    def identify(self, identity: Identity) -> tuple[str, ...]:
        """Return the encoded identity that each policy counts."""
        if not self._all_by_user or type(identity) is not str or not identity:
            encoding = self._config.encoding
            return tuple(
                [keys.identify(identity, policy, encoding) for policy in self.policies]
            )

        known_users = self._known_users
        encoded = known_users.get(identity)
        if encoded is None:
            encoded = keys.encode_user(identity)
            if len(known_users) >= MAX_KNOWN_USERS:
                known_users.clear()
            if len(identity) <= MAX_LENGTH:
                known_users[identity] = encoded
        return (encoded,) * len(self.policies)

    def keys(self, identities: Sequence[str]) -> list[str]:
        """Return the counters' keys."""
        return [
            counter_key.key(identity)
            for counter_key, identity in zip(
                self._counter_keys, identities, strict=True
            )
        ]

    def check_cost(self, cost: int) -> None:
        """Raise a ValueError for a cost that fits a limit, but not its algorithm."""
        for policy, arguments in zip(self.policies, self.arguments, strict=True):
            problem = excessive_cost(cost, arguments.algo)
            if problem is not None and cost <= arguments.capacity:
                raise ValueError(f"Policy {policy.name!r}: {problem}")


_SINGLE = (Policy, str, NoneType)


def compile_policies(policies: Policies, alias: str | None = None) -> PolicySet:
    """Return the compiled set of one or several policies, or of their names.

    None is the default policy. `alias` names another cache than
    RATE_LIMITER['CACHE'].
    """
    config = conf.config()
    policy_sets = config.derived.policy_sets
    if alias is not None:
        policy_sets = config.derived.other_policy_sets[alias]

    key: Any = policies
    if not isinstance(policies, _SINGLE):
        key = tuple(policies)

    policy_set: PolicySet | None = policy_sets.get(key)
    if policy_set is None:
        if len(policy_sets) >= MAX_COMPILED:
            policy_sets.clear()
        policy_set = PolicySet(_find(key, config), config, backend.topology(alias))
        policy_sets[key] = policy_set
    return policy_set


def _find(policies: Any, config: Config) -> tuple[Policy, ...]:
    """Return the policies that are given as such, or by their names."""
    if not isinstance(policies, tuple):
        policies = (policies or DEFAULT,)

    by_name: dict[str, Policy] = {}
    for named in policies:
        policy = config.policy(named)
        if by_name.setdefault(policy.name, policy) != policy:
            raise PolicyError(
                f"Two different policies are named {policy.name!r}; "
                "a policy's name is its counter."
            )
    if not by_name:
        raise ValueError(
            "There is no policy to check; name one, or leave it out for the default."
        )
    return tuple(by_name.values())
