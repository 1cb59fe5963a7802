"""A set of policies compiled once: keys, script arguments, the packed command; and what a reply to it means. No I/O."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from .. import backend, conf
from ..backend.commands import Call, pack
from ..backend.scripts import for_algorithms
from ..conf import Config
from ..core import keys
from ..core.decision import Decision, Outcome
from ..core.keys import Identity
from ..core.policy import (
    DEFAULT,
    FIXED_WINDOW,
    MAX_COST,
    MAX_PRODUCT,
    SLIDING_WINDOW_COMPACT,
    Policies,
    Policy,
    PolicyError,
    script_arguments,
    shown,
)
from ..runtime import clock
from . import networks
from .refusal_cache import cached_refusals

MAX_COMPILED = 1024  # sets per process

# What the scripts reply for each policy, after the time of the decision:
# allowed, current_count, remaining, retry_after, reset_after, limit, charged_at (times in ms). Then, where an override
# changes the limit of a policy with a burst, the limit of each policy.
REPLY_SIZE = 7
ALLOWED, COUNT, REMAINING, RETRY_AFTER, RESET_AFTER, LIMIT, CHARGED_AT = range(
    1, 8
)  # of the first policy, by index
BLOCKED = -2  # in place of charged_at: an override refused the request
# Of the id that tells a check from all others: two of one millisecond are two entries. In bytes, and in hex digits.
UNIQUE_BYTES, UNIQUE_LENGTH = 10, 20
# The command of a check of one unit and one identity: what is around the identity, and what follows the unique id.
Template = tuple[list[str], str]
NEVER_FITS = (
    2 * MAX_PRODUCT
)  # beyond every limit; a larger cost may be too long to send


class CompiledPolicySet:
    """Policies that are decided together: all are charged or none."""

    def __init__(
        self,
        policies: tuple[Policy, ...],
        config: Config,
        topology: backend.Topology,
        *,
        least_ttl: int = 0,
    ) -> None:
        self.policies, self.topology, self._encoding = (
            policies,
            topology,
            config.encoding,
        )
        self._config, self._least_ttl = config, least_ttl
        self._parts: dict[tuple[int, ...], CompiledPolicySet] = {}
        self.enabled = config.enabled
        arguments = [script_arguments(policy, config.algo) for policy in policies]
        # In ms. State is judged by its stamps, so a longer TTL changes no decision. The replay of a log needs one: its
        # clock is not the server's.
        self.arguments = tuple(
            each._replace(ttl=max(each.ttl, least_ttl)) for each in arguments
        )
        self.script = for_algorithms({each.algo for each in self.arguments})
        size = REPLY_SIZE * len(policies) + 1
        self.reply_lengths = size, size + len(policies)
        self.rows = tuple(
            range(0, size - 1, REPLY_SIZE)
        )  # where the part of each policy begins in a reply
        self.has_shadow = any(policy.shadow for policy in policies)
        # The policies that decide: the enforced ones, or all where all are shadow policies. By index.
        self.deciding = tuple(
            [i for i, policy in enumerate(policies) if not policy.shadow]
        ) or tuple(range(len(policies)))
        self.names = frozenset(policy.name for policy in policies)
        # Whole seconds; 0 for the fixed window, whose ttl depends on the time of the decision.
        self.ttls = tuple(
            0 if each.algo == FIXED_WINDOW else each.window // 1000
            for each in self.arguments
        )
        self.in_one_call = config.enabled and not topology.clustered
        # A shadow policy's outcome may change while another one refuses, so such a refusal is not cached.
        self.cacheable = (
            config.local_refusals and self.in_one_call and not self.has_shadow
        )
        self.refusals = cached_refusals()
        self.all_by_user = all(
            keys.key_kind(policy.key) in ("user", "user_or_ip") for policy in policies
        )
        self._override = keys.override_key(hash_tag=topology.clustered)
        pairs, clustered = (
            [*zip(policies, self.arguments, strict=True)],
            topology.clustered,
        )
        self._counters = [
            keys.counter_key(p.name, a.algo, a.window // 1000, hash_tag=clustered)
            for p, a in pairs
        ]
        words = [(*each, int(policy.shadow), policy.name) for policy, each in pairs]
        self._words = [word for each in words for word in each]
        self.templates: dict[int, Template] = {}  # by the length of the identity

    def part(self, indexes: Sequence[int]) -> CompiledPolicySet:
        """Return the set of some of the policies: those whose counters are in one slot of a cluster."""
        key = tuple(indexes)
        if len(key) == len(self.policies):
            return self
        if key not in self._parts:
            policies = tuple([self.policies[i] for i in key])
            self._parts[key] = CompiledPolicySet(
                policies, self._config, self.topology, least_ttl=self._least_ttl
            )
        return self._parts[key]

    def identify(self, identity: Identity) -> tuple[str, ...]:
        """Return the encoded identity that each policy counts."""
        if self.all_by_user and type(identity) is str and identity:
            encoded = keys.encoded_users.get(identity) or keys.encode_user(identity)
        elif type(identity) is keys.EncodedIdentity:
            encoded = identity
        elif len(self.policies) == 1:
            encoded = keys.identify(identity, self.policies[0], self._encoding)
        else:
            return tuple(
                [
                    keys.identify(identity, policy, self._encoding)
                    for policy in self.policies
                ]
            )
        return (encoded,) * len(self.policies)

    def check_cost(self, cost: int) -> None:
        """Raise a ValueError for a cost that fits a limit, but is too large for its algorithm."""
        for policy, each in zip(self.policies, self.arguments, strict=True):
            if MAX_COST.get(each.algo, cost) < cost <= each.capacity:
                reason = f"the cost {cost} is over {MAX_COST[each.algo]}, the most that {each.algo!r} accepts"
                raise ValueError(
                    f"Policy {policy.name!r}: {reason}; use {SLIDING_WINDOW_COMPACT!r}."
                )

    def keys(self, identities: Sequence[str]) -> list[str]:
        """Return the counters' keys."""
        return [
            counter.key(identity)
            for counter, identity in zip(self._counters, identities, strict=True)
        ]

    def command(
        self,
        identities: Sequence[str],
        unique: str,
        cost: int,
        operation: str,
        network_overrides: Sequence[str] = (),
    ) -> bytes:
        """Return the command as it is sent; identities are ASCII, or this raises."""
        same = identities.count(identities[0]) == len(identities)
        overrides = [
            self._override.key(identity)
            for identity in (identities[:1] if same else identities)
        ]
        keys = [key.encode("ascii") for key in (*self.keys(identities), *overrides)]
        arguments = (clock.script_time(), operation, unique, cost, *self._words)
        last = (
            ("".join([f"{each}," for each in network_overrides]),)
            if network_overrides
            else ()
        )
        return pack(("EVALSHA", self.script.sha, len(keys), *keys, *arguments, *last))

    def make_template(self, length: int) -> Template:
        """Return the template for identities of this length."""
        identity, unique = "\0" * length, "\1" * UNIQUE_LENGTH
        packed = self.command(
            (identity,) * len(self.policies), unique, 1, "check"
        ).decode()
        before, after = packed.split(unique)
        self.templates[length] = template = before.split(identity), after
        return template


class Check:
    """A check: who is charged what, by which policies."""

    __slots__ = (
        "charge",
        "cost",
        "identities",
        "network_overrides",
        "policy_set",
        "unique",
    )

    def __init__(
        self,
        policy_set: CompiledPolicySet,
        identities: tuple[str, ...],
        cost: int,
        charge: bool,
    ) -> None:
        self.policy_set = policy_set
        self.identities = identities
        self.cost = cost
        self.charge = charge
        self.network_overrides: tuple[
            str, ...
        ] = ()  # per policy, those of the networks that the client is in

    def pack(self) -> Call:
        """Return the call that decides all policies."""
        policy_set, identities = self.policy_set, self.identities
        identity = identities[0]
        # Not a counter, which threads and forks would have to share.
        self.unique = unique = os.urandom(UNIQUE_BYTES).hex()
        if (
            self.cost == 1
            and self.charge
            and clock.frozen is None
            and not self.network_overrides
            and (len(identities) == 1 or identities.count(identity) == len(identities))
        ):
            # Nearly every check. To fill a template takes a fifth of the time of packing (benchmarks/profile.py).
            before, after = policy_set.templates.get(
                len(identity)
            ) or policy_set.make_template(len(identity))
            packed = f"{identity.join(before)}{unique}{after}".encode("ascii")
        else:
            operation = "check" if self.charge else "peek"
            packed = policy_set.command(
                identities, unique, self.cost, operation, self.network_overrides
            )
        key = policy_set.keys(identities)[0] if policy_set.topology.clustered else ""
        return Call(
            policy_set.script, key, packed, reply_lengths=policy_set.reply_lengths
        )

    @property
    def in_one_slot(self) -> bool:
        """Whether one call can decide it: all counters are in one hash slot. False while `ENABLED` is."""
        policy_set = self.policy_set
        if policy_set.in_one_call or not policy_set.enabled:
            return policy_set.in_one_call
        return (
            len(policy_set.topology.group_by_slot(policy_set.keys(self.identities)))
            == 1
        )

    def part(self, indexes: Sequence[int], *, charge: bool) -> Check:
        """Return the check of some of the policies."""
        identities = tuple([self.identities[i] for i in indexes])
        part = Check(self.policy_set.part(indexes), identities, self.cost, charge)
        if self.network_overrides:
            part.network_overrides = tuple([self.network_overrides[i] for i in indexes])
        return part

    def read(self, reply: Any) -> ReplyDecision:
        """Return the decision that a reply means."""
        policy_set, index, figures = self.policy_set, 0, reply
        if len(reply) == REPLY_SIZE + 1:
            allowed = reply[ALLOWED] == 1 or policy_set.has_shadow
        else:
            index, all_pass = _strictest(policy_set, reply)
            allowed = all_pass or policy_set.policies[index].shadow
            figures = reply[REPLY_SIZE * index : REPLY_SIZE * (index + 1) + 1]
        decision: ReplyDecision = ReplyDecision()
        decision.check, decision.reply, decision.index = self, reply, index
        decision.age, decision.made_outcomes = 0.0, ()
        decision.allowed, decision.degraded, decision.latency = allowed, False, None
        decision.receipts = [(self, reply)] if allowed and self.charge else []
        decision.policy = policy = policy_set.policies[index]
        (
            _,
            _,
            decision.current_count,
            decision.remaining,
            wait,
            reset_after,
            decision.limit,
            _,
        ) = figures
        decision.retry_after, decision.reset_after = (
            0.0 if allowed else _seconds(wait),
            reset_after / 1000,
        )
        decision.ttl = policy_set.ttls[index] or _left_of_window(policy, reply[0], 0.0)
        return decision


class ReplyDecision(Decision):
    """The decision of a reply, whose outcomes are made when they are read: a check in code may need none."""

    __slots__ = ("age", "check", "index", "made_outcomes", "reply")
    __init__ = object.__init__  # `read` and `after` set the attributes: a Python __init__ would take a third longer
    check: Check
    reply: list[Any]
    index: int  # of the strictest policy
    age: float  # seconds since the reply, where it is repeated
    made_outcomes: tuple[Outcome, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:  # type: ignore[override]
        if not self.made_outcomes:
            check, reply, age, made = self.check, self.reply, self.age, []
            policy_set, identities = check.policy_set, check.identities
            for i, at in enumerate(
                policy_set.rows
            ):  # not by zip(strict=True), which takes as long as the rest
                _, passed, count, remaining, wait, reset, limit, charged_at = reply[
                    at : at + REPLY_SIZE + 1
                ]
                policy, allowed = policy_set.policies[i], passed == 1
                wait, reset = 0.0 if allowed else _seconds(wait), reset / 1000
                if age:
                    wait, reset = max(0.0, wait - age), max(0.0, reset - age)
                ttl, blocked = (
                    policy_set.ttls[i] or _left_of_window(policy, reply[0], age),
                    charged_at == BLOCKED,
                )
                figures = (
                    policy,
                    identities[i],
                    allowed,
                    limit,
                    count,
                    remaining,
                    wait,
                    reset,
                    ttl,
                    False,
                    blocked,
                )
                made.append(Outcome._make(figures))
            self.made_outcomes = tuple(made)
        return self.made_outcomes

    @property
    def is_cached(self) -> bool:  # type: ignore[override]
        return self.age > 0

    def passes_below(self, percent: int) -> bool:
        """Return whether all policies pass, and after this request less than so much of each limit is used."""
        reply = self.reply
        for at in self.check.policy_set.rows:
            limit = reply[at + LIMIT]
            if (
                reply[at + ALLOWED] != 1
                or 100 * (limit - reply[at + REMAINING]) >= percent * limit
            ):
                return False
        return True

    def after(self, seconds: float) -> ReplyDecision:
        """Return this refusal, which is a new one, as it is some seconds later."""
        later: ReplyDecision = ReplyDecision()
        later.check, later.reply, later.index = self.check, self.reply, self.index
        later.age, later.made_outcomes = seconds, ()
        later.allowed, later.degraded, later.latency, later.receipts = (
            False,
            False,
            None,
            [],
        )
        later.policy, later.limit, later.current_count = (
            self.policy,
            self.limit,
            self.current_count,
        )
        later.remaining, later.retry_after = self.remaining, self.retry_after - seconds
        later.reset_after = max(0.0, self.reset_after - seconds)
        later.ttl = self.check.policy_set.ttls[self.index] or _left_of_window(
            self.policy, self.reply[0], seconds
        )
        return later


def _left_of_window(policy: Policy, at: int, age: float) -> int:
    """Return the seconds that are left of a fixed window some seconds after a time in ms, rounded up."""
    window = policy.window * 1000
    return math.ceil((window - (at + 1000 * age) % window) / 1000)


def _strictest(policy_set: CompiledPolicySet, reply: list[Any]) -> tuple[int, bool]:
    """Return which policy is the strictest, as `core.decision.strictest` chooses it, and whether all deciding pass."""
    strictest, index, all_pass = -NEVER_FITS, 0, True
    for i in policy_set.deciding:
        at = REPLY_SIZE * i
        strictness = -reply[at + REMAINING]
        if (
            reply[at + ALLOWED] != 1
        ):  # stricter than all that pass: by its wait, where -1 is never
            all_pass, wait = False, reply[at + RETRY_AFTER]
            strictness = wait + 1 if wait >= 0 else NEVER_FITS
        if strictness > strictest:
            strictest, index = strictness, i
    return index, all_pass


def _seconds(wait: float) -> float:
    """Return a wait in seconds; -1 is never."""
    return wait / 1000 if wait >= 0 else math.inf


def plan(
    identity: Identity,
    policy: Policies | CompiledPolicySet,
    cost: int,
    charge: bool = True,
) -> Check:
    """Return the check of an identity under these policies."""
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    policy_set = (
        policy if type(policy) is CompiledPolicySet else compile_policies(policy)
    )  # type: ignore[arg-type]
    if cost != 1:
        policy_set.check_cost(cost)
        cost, charge = min(cost, NEVER_FITS), charge and cost > 0
    check = Check(policy_set, policy_set.identify(identity), cost, charge)
    if (found := networks.current) is not None:
        check.network_overrides = networks.override_texts(
            found, identity, policy_set.policies, check.identities
        )
    return check


def plan_encoded(
    policy_set: CompiledPolicySet,
    identities: tuple[str, ...],
    cost: int,
    address: str = "",
) -> Check:
    """Return the check of encoded identities, one per policy.

    `address` is that of the client, for overrides of networks; it is needed only
    while there are some (`networks.current`).
    """
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    charge = True
    if cost != 1:
        policy_set.check_cost(cost)
        charge = cost > 0
        cost = min(cost, NEVER_FITS)
    check = Check(policy_set, identities, cost, charge)
    if networks.current is not None:
        check.network_overrides = networks.override_texts(
            networks.current, {"ip": address}, policy_set.policies, identities
        )
    return check


def compile_policies(policy: Policies) -> CompiledPolicySet:
    """Return the compiled set of a policy, of its name, or of several; None is the default policy."""
    config = conf.config()
    key: Any = policy
    if policy is None or type(policy) is str:
        key = (
            policy,
            str,
        )  # with the type: a policy equals its name, which the settings may define otherwise
    elif not isinstance(policy, Policy):
        policy = (policy,) if isinstance(policy, str) else tuple(policy)
        key = (*policy, *map(type, policy))
    found: CompiledPolicySet | None = config.derived.policy_sets.get(key)
    return found or _compile(policy, key, config)


def _compile(policy: Policies, key: Any, config: Config) -> CompiledPolicySet:
    chosen: dict[str, Policy] = {}
    for each in policy if isinstance(policy, tuple) else (policy or DEFAULT,):
        found = each if isinstance(each, Policy) else config.policy(each)
        if chosen.setdefault(found.name, found) != found:
            raise PolicyError(
                f"Two different policies are named {found.name!r}; a policy's name is its counter."
            )
    if not chosen:
        raise ValueError(
            "There is no policy to check; name one, or leave it out for the default."
        )
    if len(config.derived.policy_sets) >= MAX_COMPILED:
        config.derived.policy_sets.clear()
    config.derived.policy_sets[key] = policy_set = CompiledPolicySet(
        tuple(chosen.values()), config, backend.topology()
    )
    return policy_set
