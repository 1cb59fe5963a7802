"""Decisions: plan a check, have the backend execute it, read the reply. The async twins differ by `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from time import monotonic
from typing import Any

from .. import backend, conf, signals
from ..backend import ADMIN_TIMEOUT, Call, UnavailableError, script_call
from ..backend.scripts import ALL_ALGORITHMS
from ..core.decision import Decision, Outcome
from ..core.keys import Identity, counter_key
from ..core.policy import ALGORITHMS, DEFAULT, Policies, Policy
from ..runtime import observers
from ..runtime.clock import script_time
from ..runtime.observers import CODE
from . import fallback, networks
from .adjusting import (
    arefund,
    arefund_all,
    decided_arguments,
    refund,
    refund_all,
    refund_call,
    refund_later,
    refundable_call,
)
from .policy_set import Check, CompiledPolicySet, compile_policies, plan, plan_encoded
from .slots import SlotCheck

__all__ = [
    "acheck",
    "acheck_each",
    "adecide",
    "apeek",
    "arefund",
    "areset",
    "check",
    "check_each",
    "decide",
    "peek",
    "peek_each",
    "peek_encoded",
    "plan",
    "plan_encoded",
    "refund",
    "refund_later",
    "refund_units",
    "reset",
    "unlimited",
]


def check(
    identity: Identity,
    policy: Policies | CompiledPolicySet = None,
    *,
    cost: int = 1,
    source: str | None = CODE,
) -> Decision:
    """Decide, and charge when allowed. All policies are charged or none, in one round trip.

    `source` is the name under which the admin lists the refusals of this caller; None: the caller reports the decision
    to the observers itself, as views do.

    >>> check("alice").allowed
    >>> check("alice", "search", cost=3, source="nightly import")
    >>> check({"user": "42", "ip": "203.0.113.9"}, ["burst", Policy("site", "1000/m", key="ip")])
    """
    planned = plan(identity, policy, cost)
    decision = decide(planned)
    if observers.observers and source is not None and planned.policy_set.enabled:
        observers.observe(decision, source)
    return decision


def decide(planned: Check) -> Decision:
    """Decide a planned check, and charge when allowed; nobody observes it."""
    policy_set = planned.policy_set
    decision: Decision | None = (
        policy_set.refusals.find(planned) if policy_set.refusals.entries else None
    )
    if decision is None and policy_set.in_one_call:
        try:
            call = planned.pack()
            decision = planned.read(backend.execute(policy_set.topology, call))
        except UnavailableError as error:
            decision = fallback.decide_all(planned)
            signals.send(signals.backend_failed, error=error, decision=decision)
        else:
            if observers.measures_latency:
                decision.latency = monotonic() - call.sent_at
            if not decision.allowed:
                policy_set.refusals.store(planned, decision, call.sent_at)
    elif decision is None:
        decision = _decide_in_parts(planned)
    return decision


async def acheck(
    identity: Identity,
    policy: Policies | CompiledPolicySet = None,
    *,
    cost: int = 1,
    source: str | None = CODE,
) -> Decision:
    """As `check`, natively async. If the caller is cancelled, what was charged is refunded."""
    planned = plan(identity, policy, cost)
    decision = await adecide(planned)
    if observers.observers and source is not None and planned.policy_set.enabled:
        observers.observe(decision, source)
    return decision


async def adecide(planned: Check) -> Decision:
    """As `decide`, natively async. If the caller is cancelled, it is refunded."""
    policy_set = planned.policy_set
    decision: Decision | None = (
        policy_set.refusals.find(planned) if policy_set.refusals.entries else None
    )
    if decision is None and policy_set.in_one_call:
        try:
            call = refundable_call(planned)
            decision = planned.read(await backend.aexecute(policy_set.topology, call))
        except UnavailableError as error:
            decision = fallback.decide_all(planned)
            await _asend_failed(error, decision)
        else:
            if observers.measures_latency:
                decision.latency = monotonic() - call.sent_at
            if not decision.allowed:
                policy_set.refusals.store(planned, decision, call.sent_at)
    elif decision is None:
        decision = await _adecide_in_parts(planned)
    return decision


def check_each(checks: Sequence[Check]) -> list[Decision]:
    """Decide independent checks, each as `check` would by itself, in one round trip per server.

    >>> check_each([plan("alice", "search", 1), plan("bob", ["search", "site"], 3)])
    """
    started, decisions = (
        monotonic(),
        [
            each.policy_set.refusals.find(each) if each.charge else None
            for each in checks
        ],
    )
    pending = [
        i
        for i, check in enumerate(checks)
        if decisions[i] is None and check.in_one_slot
    ]
    calls = [checks[i].pack() for i in pending]
    for i, result in zip(
        pending, backend.execute_each(backend.topology(), calls), strict=True
    ):
        decisions[i] = _settle(checks[i], result, started)
        if isinstance(result, UnavailableError):
            signals.send(signals.backend_failed, error=result, decision=decisions[i])
    return [
        decision or _decide_in_parts(check)
        for check, decision in zip(checks, decisions, strict=True)
    ]


async def acheck_each(checks: Sequence[Check]) -> list[Decision]:
    """As `check_each`, natively async. If the caller is cancelled, what was charged is refunded."""
    started, decisions = (
        monotonic(),
        [
            each.policy_set.refusals.find(each) if each.charge else None
            for each in checks
        ],
    )
    pending = [
        i
        for i, check in enumerate(checks)
        if decisions[i] is None and check.in_one_slot
    ]
    calls = [refundable_call(checks[i]) for i in pending]
    results = await backend.aexecute_each(backend.topology(), calls)
    for i, result in zip(pending, results, strict=True):
        decisions[i] = _settle(checks[i], result, started)
    try:
        for i, result in zip(pending, results, strict=True):
            if isinstance(result, UnavailableError):
                await signals.asend(
                    signals.backend_failed, error=result, decision=decisions[i]
                )
        for i, check in enumerate(checks):
            decisions[i] = decisions[i] or await _adecide_in_parts(check)
    except asyncio.CancelledError:
        for decision in decisions:
            if decision is not None:
                refund_later(decision.receipts)
        raise
    return [decision for decision in decisions if decision is not None]


def peek(
    identity: Identity, policy: Policies | CompiledPolicySet = None, *, cost: int = 1
) -> Decision:
    """Return what `check` would decide now. Nothing is charged, so `remaining` is what is left before the request."""
    return _decide_in_parts(plan(identity, policy, cost, charge=False))


def peek_encoded(
    policy_set: CompiledPolicySet, identities: tuple[str, ...], address: str = ""
) -> Decision:
    """As `peek`, of encoded identities, one per policy."""
    planned = plan_encoded(policy_set, identities, 1, address)
    planned.charge = False
    return _decide_in_parts(planned)


async def apeek(
    identity: Identity, policy: Policies | CompiledPolicySet = None, *, cost: int = 1
) -> Decision:
    """As `peek`, natively async."""
    return await _adecide_in_parts(plan(identity, policy, cost, charge=False))


def reset(identity: Identity, policy: Policies = None) -> int:
    """Reset what an identity used, whichever algorithm counted it; return the number of keys deleted."""
    policy_set, deleted = compile_policies(policy), 0
    for call in _reset_calls(policy_set, identity):
        deleted += backend.execute(policy_set.topology, call)
    policy_set.refusals.invalidate(policy_set.names)
    return deleted


async def areset(identity: Identity, policy: Policies = None) -> int:
    """As `reset`, natively async."""
    policy_set, deleted = compile_policies(policy), 0
    for call in _reset_calls(policy_set, identity):
        deleted += await backend.aexecute(policy_set.topology, call)
    policy_set.refusals.invalidate(policy_set.names)
    return deleted


def unlimited() -> Decision:
    """Return the decision where nothing is checked: an outcome of the default policy, of an identity ''."""
    return Decision(True, (fallback.uncounted(conf.config().policy(DEFAULT), ""),))


def peek_each(pairs: Sequence[tuple[Policy, str]]) -> tuple[Outcome, ...]:
    """Return the outcomes of many counters, each a policy and an encoded identity; for pages that list them.

    UnavailableError, rather than a decision without Redis, when Redis is unavailable.
    """
    found: list[Outcome] = []
    for start in range(
        0, len(pairs), 500
    ):  # more at once would keep the server from other calls
        policies, identities = zip(*pairs[start : start + 500], strict=True)
        topology = backend.topology()
        whole = CompiledPolicySet(policies, conf.config(), topology)
        outcome_at: dict[int, Outcome] = {}
        for group in topology.group_by_slot(whole.keys(identities)):
            part = CompiledPolicySet(
                tuple([policies[i] for i in group]), conf.config(), topology
            )
            check = Check(part, tuple([identities[i] for i in group]), 1, charge=False)
            check.network_overrides = networks.override_texts_of_each(
                part.policies, check.identities
            )
            reply = backend.execute(
                topology, check.pack(), admin_timeout=backend.ADMIN_TIMEOUT
            )
            decision = check.read(reply)
            outcome_at.update(zip(group, decision.outcomes, strict=True))
        found += (outcome_at[i] for i in range(len(policies)))
    return tuple(found)


def refund_units(identity: Identity, policy: Policy, units: int) -> int:
    """Refund some units of an identity's usage, the newest first; return how many there were."""
    peeked = plan(identity, policy, 1, charge=False)
    policy_set, topology = peeked.policy_set, peeked.policy_set.topology
    reply = backend.execute(topology, peeked.pack(), admin_timeout=ADMIN_TIMEOUT)
    (arguments,) = decided_arguments(peeked, reply)
    call = refund_call(policy_set.keys(peeked.identities), ("", units, *arguments, 0))
    refunded = int(sum(backend.execute(topology, call)))
    policy_set.refusals.invalidate(policy_set.names)
    return refunded


def _settle(
    check: Check, reply: list[Any] | UnavailableError, started: float
) -> Decision:
    """Return a decision that one of several calls gave, or the one without Redis."""
    if isinstance(reply, UnavailableError):
        return fallback.decide_all(check)
    decision = check.read(reply)
    if observers.measures_latency:
        decision.latency = monotonic() - started
    if not decision.allowed and check.charge:
        check.policy_set.refusals.store(check, decision, started)
    return decision


def _decide_in_parts(planned: Check) -> Decision:
    """Decide slot by slot, as a cluster needs it; also a peek, and rate limiting that is turned off."""
    if not planned.policy_set.enabled:
        return fallback.decide_all(planned)
    progress, topology = SlotCheck(planned), planned.policy_set.topology
    for group in progress.groups:
        try:
            if (part := progress.part(group)) is not None:
                progress.add(part.read(backend.execute(topology, part.pack())))
        except UnavailableError as error:
            progress.fail(group, error)
    progress.decide_unreached()
    if not progress.allowed:
        parts = progress.peeks_after_refund()
        refund_all(progress.receipts)
        for part in parts:
            with suppress(UnavailableError):
                progress.add(part.read(backend.execute(topology, part.pack())))
    decision = progress.decision()
    if progress.error is not None:
        signals.send(signals.backend_failed, error=progress.error, decision=decision)
    return decision


async def _adecide_in_parts(planned: Check) -> Decision:
    if not planned.policy_set.enabled:
        return fallback.decide_all(planned)
    progress, topology = SlotCheck(planned), planned.policy_set.topology
    try:
        for group in progress.groups:
            try:
                if (part := progress.part(group)) is not None:
                    call = refundable_call(part)
                    progress.add(part.read(await backend.aexecute(topology, call)))
            except UnavailableError as error:
                progress.fail(group, error)
    except asyncio.CancelledError:
        refund_later(progress.receipts)
        raise
    progress.decide_unreached()
    if not progress.allowed:
        parts = progress.peeks_after_refund()
        await arefund_all(progress.receipts)
        for part in parts:
            with suppress(UnavailableError):
                reply = await backend.aexecute(topology, part.pack())
                progress.add(part.read(reply))
    decision = progress.decision()
    if progress.error is not None:
        await _asend_failed(progress.error, decision)
    return decision


async def _asend_failed(error: UnavailableError, decision: Decision) -> None:
    try:
        await signals.asend(signals.backend_failed, error=error, decision=decision)
    except asyncio.CancelledError:
        refund_later(decision.receipts)
        raise


def _reset_calls(policy_set: CompiledPolicySet, identity: Identity) -> list[Call]:
    """Return the calls that delete every key an algorithm may have written, one per slot."""
    identities, clustered, calls = (
        policy_set.identify(identity),
        policy_set.topology.clustered,
        [],
    )
    for group in policy_set.topology.group_by_slot(policy_set.keys(identities)):
        keys: list[str] = []
        words: list[str | int] = []
        for i, algo in product(group, ALGORITHMS):
            name, window = policy_set.policies[i].name, policy_set.arguments[i].window
            keys.append(
                counter_key(name, algo, window // 1000, hash_tag=clustered).key(
                    identities[i]
                )
            )
            words += (algo, window)
        calls.append(
            script_call(ALL_ALGORITHMS, keys, (script_time(), "reset", "", 0, *words))
        )
    return calls
