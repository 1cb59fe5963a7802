"""A set of policies compiled once: keys, script arguments, and the command with only what varies left to fill in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import backend, conf
from ..backend.commands import Call, pack
from ..backend.scripts import for_algorithms
from ..conf import Config
from ..core import clock, process
from ..core.keys import GLOBAL, EncodedIdentity, Identity, counter_key, identify, is_plain, key_kind, override_key
from ..core.policy import DEFAULT, FIXED_WINDOW, Policies, Policy, PolicyError, script_arguments

MAX_COMPILED = 1024  # sets per process


class UniqueIds:
    """Ids that tell a request from all others, of all processes: two requests of one millisecond are two entries."""

    LENGTH = 20

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._process, self._numbers = os.urandom(5).hex(), iter(range(10**9, 10**10))

    def next(self) -> str:
        try:
            return f"{self._process}{next(self._numbers)}"
        except StopIteration:  # after nine billion requests
            self.reset()
            return self.next()


unique_ids = UniqueIds()
process.on_fork(unique_ids.reset)


class CompiledPolicySet:
    """Policies that are decided together."""

    def __init__(self, policies: tuple[Policy, ...], config: Config, topology: backend.Topology) -> None:
        self.policies, self.topology, self._clustered = policies, topology, topology.clustered
        self.enabled, self._encoding = config.enabled, config.encoding
        self.arguments = tuple(script_arguments(policy, config.algo) for policy in policies)
        self.ttls = tuple(0 if each.algo == FIXED_WINDOW else each.window // 1000 for each in self.arguments)
        self.script = for_algorithms({each.algo for each in self.arguments})
        self.names = frozenset(policy.name for policy in policies)
        self.shadows = tuple(policy.shadow for policy in policies)
        # A shadow policy's outcome may change while another one refuses, so such a refusal is not cached.
        self.cacheable = config.local_refusals and not topology.clustered and not any(self.shadows)
        self._all_by_user = all(key_kind(policy.key) in ("user", "user_or_ip") for policy in policies)
        self._counters = tuple(
            counter_key(policy.name, each.algo, each.window // 1000, hash_tag=topology.clustered)
            for policy, each in zip(policies, self.arguments, strict=True)
        )
        self._override = override_key(hash_tag=topology.clustered)
        self._words = [
            word
            for policy, each in zip(policies, self.arguments, strict=True)
            for word in (*each, int(policy.shadow), policy.name)
        ]
        self._templates: dict[int, tuple[list[str], str]] = {}  # by the length of the identity
        self._subsets: dict[tuple[int, ...], CompiledPolicySet] = {}

    def identify(self, identity: Identity) -> tuple[str, ...]:
        """Return the encoded identity that each policy counts."""
        if type(identity) is EncodedIdentity or (
            self._all_by_user and type(identity) is str and is_plain(identity) and identity != GLOBAL
        ):
            return (identity,) * len(self.policies)
        return tuple([identify(identity, policy, self._encoding) for policy in self.policies])

    def keys(self, identities: Sequence[str]) -> list[str]:
        """Return the counters' keys."""
        return [f"{before}{who}{after}" for (before, after), who in zip(self._counters, identities, strict=True)]

    def call(self, identities: Sequence[str], unique: str, cost: int, *, charge: bool) -> Call:
        """Return the call that decides all policies."""
        identity = identities[0]
        if cost == 1 and charge and clock.frozen is None and identities.count(identity) == len(identities):
            # Nearly every call. To fill a template takes a fifth of the time of packing (benchmarks/profile.py).
            before, after = self._templates.get(len(identity)) or self._make_template(len(identity))
            packed = f"{identity.join(before)}{unique}{after}".encode("ascii")
        else:
            packed = self._pack(identities, unique, cost, "check" if charge else "peek")
        return Call(self.script, self._counters[0].key(identity) if self._clustered else "", packed)

    def _pack(self, identities: Sequence[str], unique: str, cost: int, operation: str) -> bytes:
        """Return the command; identities are ASCII, or this raises."""
        same = identities.count(identities[0]) == len(identities)
        overrides = [self._override.key(identity) for identity in (identities[:1] if same else identities)]
        keys = [key.encode("ascii") for key in (*self.keys(identities), *overrides)]
        arguments = (clock.script_time(), operation, unique, cost, *self._words)
        return pack(("EVALSHA", self.script.sha, len(keys), *keys, *arguments))

    def _make_template(self, length: int) -> tuple[list[str], str]:
        """Return what is around an identity of this length, and what follows the unique id."""
        identity, unique = "\0" * length, "\1" * unique_ids.LENGTH
        packed = self._pack((identity,) * len(self.policies), unique, 1, "check").decode()
        before, after = packed.split(unique)
        self._templates[length] = template = before.split(identity), after
        return template

    def subset(self, part: Sequence[int]) -> CompiledPolicySet:
        """Return the policies whose counters are in one slot of a cluster."""
        if len(part) == len(self.policies):
            return self
        chosen = tuple(part)
        if chosen not in self._subsets:
            policies = tuple(self.policies[i] for i in chosen)
            self._subsets[chosen] = CompiledPolicySet(policies, conf.config(), self.topology)
        return self._subsets[chosen]


class CompiledSets:
    """The sets that were compiled under the same settings, by what they were asked for."""

    def __init__(self) -> None:
        # Apart, because a policy equals its name, which may be defined otherwise in the settings.
        self.by_name: dict[str | None, CompiledPolicySet] = {}
        self.by_policies: dict[Policy | tuple[Policy, ...], CompiledPolicySet] = {}


def compile_policies(policy: Policies) -> CompiledPolicySet:
    """Return the compiled set of a policy, of its name, or of several; None is the default policy."""
    config = conf.config()
    sets: CompiledSets = config.derived.get(CompiledSets) or config.derived.setdefault(CompiledSets, CompiledSets())
    if isinstance(policy, Policy):
        return sets.by_policies.get(policy) or _compile(sets.by_policies, policy, (policy,), config)
    if policy is None or isinstance(policy, str):
        return sets.by_name.get(policy) or _compile(sets.by_name, policy, (policy,), config)
    policies = tuple([each if isinstance(each, Policy) else config.policy(each) for each in policy])
    return sets.by_policies.get(policies) or _compile(sets.by_policies, policies, policies, config)


def _compile(
    sets: dict[Any, CompiledPolicySet], key: Any, policies: Sequence[str | Policy | None], config: Config
) -> CompiledPolicySet:
    if len(sets) >= MAX_COMPILED:
        sets.clear()
    sets[key] = found = CompiledPolicySet(choose(policies, config), config, backend.topology())
    return found


def choose(policies: Sequence[str | Policy | None], config: Config) -> tuple[Policy, ...]:
    """Return the policies that are meant, each once."""
    chosen: dict[str, Policy] = {}
    for each in policies:
        found = each if isinstance(each, Policy) else config.policy(each or DEFAULT)
        if chosen.setdefault(found.name, found) != found:
            raise PolicyError(f"Two different policies are named {found.name!r}; a policy's name is its counter.")
    if not chosen:
        raise ValueError("There is no policy to check; name one, or leave it out for the default.")
    return tuple(chosen.values())
