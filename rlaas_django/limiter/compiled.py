"""A set of policies compiled once: keys, script arguments, and the command with only what varies left to fill in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from .. import backend, conf
from ..backend.commands import Call, Command
from ..backend.scripts import for_algorithms
from ..conf import Config
from ..core import process
from ..core.clock import script_time
from ..core.keys import EncodedIdentity, Identity, counter_key, identify, is_plain_user, key_kind, override_key
from ..core.policy import DEFAULT, FIXED_WINDOW, Policies, Policy, PolicyError, script_arguments

MAX_COMPILED = 1024  # sets per process


class UniqueIds:
    """Ids that tell a request from all others, of all processes: two requests of one millisecond are two entries."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._process, self._number = os.urandom(5).hex(), itertools.count(10**9)

    def next(self) -> str:
        return f"{self._process}{next(self._number)}"


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
        words = [
            word
            for policy, each in zip(policies, self.arguments, strict=True)
            for word in (*each, int(policy.shadow), policy.name)
        ]
        # Everything in the command that does not vary: before the keys, for one override key or one for each policy,
        # and after the cost.
        size = len(policies)
        self._head, self._head_each = (self._opening(size + 1, len(words)), self._opening(2 * size, len(words)))
        self._tail = _bulk(words)
        self._subsets: dict[tuple[int, ...], CompiledPolicySet] = {}

    def _opening(self, keys: int, words: int) -> str:
        return f"*{3 + keys + 4 + words}\r\n{_bulk(['EVALSHA', self.script.sha, keys])}"

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
        """Return the call that decides all policies.

        Packed by hand from parts that are compiled: hiredis' packer takes 1.6 times as long (benchmarks/profile.py).
        Encoded identities are ASCII, so a length in characters is a length in bytes.
        """
        keys, (before, after) = self.keys(identities), self._override
        key, operation = keys[0], "check" if charge else "peek"
        if identities.count(identities[0]) == len(identities):  # as it is mostly
            head = self._head
            keys.append(f"{before}{identities[0]}{after}")
        else:
            head = self._head_each
            keys += [f"{before}{identity}{after}" for identity in identities]
        packed = f"{head}{_bulk([*keys, script_time(), operation, unique, cost])}{self._tail}"
        return Call(self.script, key, Command(packed.encode("ascii")))

    def subset(self, part: Sequence[int]) -> CompiledPolicySet:
        """Return the policies whose counters are in one slot of a cluster."""
        if len(part) == len(self.policies):
            return self
        chosen = tuple(part)
        if chosen not in self._subsets:
            policies = tuple(self.policies[i] for i in chosen)
            self._subsets[chosen] = CompiledPolicySet(policies, conf.config(), self.topology)
        return self._subsets[chosen]


def _bulk(words: Sequence[object]) -> str:
    """Return words in Redis' protocol."""
    return "".join([f"${len(text)}\r\n{text}\r\n" for text in map(str, words)])


def compile_policies(policy: Policies) -> CompiledPolicySet:
    """Return the compiled set of a policy, of its name, or of several; None is the default policy."""
    config, compiled = conf.config(), compiled_sets()
    if policy is None or isinstance(policy, str):
        found = compiled.get(policy)
        return found or _compile(compiled, policy, (config.policy(policy or DEFAULT),), config)
    # In a tuple, because a policy equals its name, which may have another meaning in the settings.
    policies = (policy,) if isinstance(policy, Policy) else choose(tuple(policy), config)
    return compiled.get(policies) or _compile(compiled, policies, policies, config)


def compiled_sets() -> dict[object, CompiledPolicySet]:
    """Return the sets that were compiled under the present settings."""
    found: dict[object, CompiledPolicySet] = conf.config().derived.setdefault(CompiledPolicySet, {})
    return found


def _compile(
    compiled: dict[object, CompiledPolicySet], key: object, policies: tuple[Policy, ...], config: Config
) -> CompiledPolicySet:
    if len(compiled) >= MAX_COMPILED:
        compiled.clear()
    compiled[key] = found = CompiledPolicySet(policies, config, backend.topology())
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
