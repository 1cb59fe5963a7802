"""A set of policies compiled once: keys, script arguments, and the command with only what varies left to fill in."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import backend, conf
from ..backend.commands import Call, Command, pack
from ..backend.scripts import for_algorithms
from ..conf import Config
from ..core import clock, process
from ..core.keys import EncodedIdentity, Identity, counter_key, identify, is_plain_user, key_kind, override_key
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
        self.policies, self.topology = policies, topology
        self.enabled, self._encoding = config.enabled, config.encoding
        self.arguments = tuple(script_arguments(policy, config.algo) for policy in policies)
        self.fixed_windows = tuple(each.window if each.algo == FIXED_WINDOW else 0 for each in self.arguments)
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
        if self._all_by_user and type(identity) is str and is_plain_user(identity):
            return (identity,) * len(self.policies)
        if type(identity) is EncodedIdentity:
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
            length = len(identity)
            before, after = self._templates.get(length) or self._make_template(length)
            packed = f"{identity.join(before)}{unique}{after}".encode("ascii")
        else:
            packed = self._pack(identities, unique, cost, "check" if charge else "peek")
        return Call(self.script, self._counters[0].key(identity), Command(packed))

    def _pack(self, identities: Sequence[str], unique: str, cost: int, operation: str) -> bytes:
        """Return the command; identities are ASCII, or this raises."""
        same = identities.count(identities[0]) == len(identities)
        overrides = [self._override.key(identity) for identity in (identities[:1] if same else identities)]
        keys = [key.encode("ascii") for key in (*self.keys(identities), *overrides)]
        arguments = (clock.script_time(), operation, unique, cost, *self._words)
        return pack(("EVALSHA", self.script.sha, len(keys), *keys, *arguments)).packed

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


def compile_policies(policy: Policies) -> CompiledPolicySet:
    """Return the compiled set of a policy, of its name, or of several; None is the default policy."""
    compiled = compiled_sets()
    if policy is None or isinstance(policy, (str, Policy)):
        key: object = (type(policy), policy)
        return compiled.get(key) or _compile(compiled, key, (policy,))
    policies = tuple(policy)
    key = (*map(type, policies), *policies)
    return compiled.get(key) or _compile(compiled, key, policies)


def compiled_sets() -> dict[object, CompiledPolicySet]:
    """Return the sets that were compiled under the present settings.

    The types of the policies are part of the key: a policy equals its name, which may be defined otherwise.
    """
    found: dict[object, CompiledPolicySet] = conf.config().derived.setdefault(CompiledPolicySet, {})
    return found


def _compile(
    compiled: dict[object, CompiledPolicySet], key: object, policies: Sequence[str | Policy | None]
) -> CompiledPolicySet:
    if len(compiled) >= MAX_COMPILED:
        compiled.clear()
    config = conf.config()
    compiled[key] = found = CompiledPolicySet(choose(policies, config), config, backend.topology())
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
