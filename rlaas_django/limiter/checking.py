"""Plan a check, have the backend execute it, and read the reply.

The async twins differ by `await`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from .. import backend, conf, signals
from ..backend import Call, UnavailableError, script_call
from ..backend.scripts import for_algorithms
from ..core.algorithms import ALGORITHMS
from ..core.decision import Decision, Outcome
from ..core.keys import Identity, counter_key
from ..core.policy import DEFAULT, Policies, Policy
from ..runtime import clock, observers
from ..runtime.observers import CODE
from . import fallback, networks
from .adjusting import arefund_all, refund_all, refund_later, refundable_call
from .plan import Check, plan, plan_encoded
from .policy_set import PolicySet, compile_policies
from .replies import read
from .slots import SlotCheck

# More at once would keep the server from other calls.
MAX_PEEKS = 500
MAX_WAIT = 60.0  # seconds that `acquire` waits


def check(
    identity: Identity,
    policy: Policies | PolicySet = None,
    *,
    cost: int = 1,
    source: str | None = CODE,
) -> Decision:
    """Decide, and charge when allowed.

    All policies are charged or none, in one round trip. `source` is the name under
    which the admin lists the refusals of this caller; None: the caller reports the
    decision to the observers itself, as views do.

    >>> check("alice").allowed
    >>> check("alice", "search", cost=3, source="nightly import")
    >>> by_address = Policy("site", "1000/m", key="ip")
    >>> check({"user": "42", "ip": "203.0.113.9"}, ["burst", by_address])
    """
    planned = plan(identity, policy, cost)
    decision = decide(planned)
    if observers.observers and source is not None and planned.policy_set.enabled:
        observers.observe(decision, source)
    return decision


async def acheck(
    identity: Identity,
    policy: Policies | PolicySet = None,
    *,
    cost: int = 1,
    source: str | None = CODE,
) -> Decision:
    """As `check`, natively async. If the caller is cancelled, it is refunded."""
    planned = plan(identity, policy, cost)
    decision = await adecide(planned)
    if observers.observers and source is not None and planned.policy_set.enabled:
        observers.observe(decision, source)
    return decision


def decide(planned: Check) -> Decision:
    """Decide a planned check, and charge when allowed.

    The caller passes the decision to the observers.
    """
    policy_set = planned.policy_set
    refusals = policy_set.refusals
    if refusals.entries and (refusal := refusals.find(planned)) is not None:
        return refusal
    if not policy_set.in_one_call:
        return _decide_by_slots(planned)

    call = planned.pack()
    try:
        reply = backend.execute(policy_set.topology, call)
    except UnavailableError as error:
        decision = fallback.decide_all(planned)
        signals.send(signals.backend_failed, error=error, decision=decision)
        return decision
    decision = read(planned, reply)
    if not decision.allowed or observers.timed:
        _measure_and_cache(planned, decision, call.sent_at)
    return decision


async def adecide(planned: Check) -> Decision:
    """As `decide`, natively async. If the caller is cancelled, it is refunded."""
    policy_set = planned.policy_set
    refusals = policy_set.refusals
    if refusals.entries and (refusal := refusals.find(planned)) is not None:
        return refusal
    if not policy_set.in_one_call:
        return await _adecide_by_slots(planned)

    call = refundable_call(planned)
    try:
        reply = await backend.aexecute(policy_set.topology, call)
    except UnavailableError as error:
        decision = fallback.decide_all(planned)
        await _asend_failed(error, decision)
        return decision
    decision = read(planned, reply)
    if not decision.allowed or observers.timed:
        _measure_and_cache(planned, decision, call.sent_at)
    return decision


def _measure_and_cache(planned: Check, decision: Decision, sent_at: float) -> None:
    """Measure a decision by Redis, and cache it if it is a refusal."""
    if observers.timed:
        decision.latency = time.monotonic() - sent_at
    if not decision.allowed and planned.policy_set.cacheable:
        planned.policy_set.refusals.store(planned, decision, sent_at)


async def _asend_failed(error: UnavailableError, decision: Decision) -> None:
    try:
        await signals.asend(signals.backend_failed, error=error, decision=decision)
    except asyncio.CancelledError:
        refund_later(decision.receipts)
        raise


def check_each(checks: Sequence[Check]) -> list[Decision]:
    """Decide independent checks, each as by itself, in one round trip per server.

    >>> check_each([plan("alice", "search", 1), plan("bob", ["search", "site"], 3)])
    """
    batch = _Batch(checks, Check.pack)
    batch.add_replies(backend.execute_each(backend.topology(), batch.calls))
    for error, decision in batch.failures:
        signals.send(signals.backend_failed, error=error, decision=decision)
    for index in batch.undecided():
        batch.decisions[index] = _decide_by_slots(checks[index])
    return [batch.decisions[index] for index in range(len(checks))]


async def acheck_each(checks: Sequence[Check]) -> list[Decision]:
    """As `check_each`, natively async. If the caller is cancelled, it is refunded."""
    batch = _Batch(checks, refundable_call)
    batch.add_replies(await backend.aexecute_each(backend.topology(), batch.calls))
    try:
        for error, decision in batch.failures:
            await signals.asend(signals.backend_failed, error=error, decision=decision)
        for index in batch.undecided():
            batch.decisions[index] = await _adecide_by_slots(checks[index])
    except asyncio.CancelledError:
        for decision in batch.decisions.values():
            refund_later(decision.receipts)
        raise
    return [batch.decisions[index] for index in range(len(checks))]


class _Batch:
    """Checks that are decided together.

    Those with a cached refusal need no call, and those over several slots are decided
    afterwards, each by itself.
    """

    def __init__(self, checks: Sequence[Check], pack: Callable[[Check], Call]) -> None:
        self._checks = checks
        self._started = time.monotonic()
        self.decisions: dict[int, Decision] = {}  # by index
        self.failures: list[tuple[UnavailableError, Decision]] = []

        for index, planned in enumerate(checks):
            refusal = planned.policy_set.refusals.find(planned)
            if refusal is not None:
                self.decisions[index] = refusal
        self._called = [i for i in self.undecided() if checks[i].in_one_slot]
        self.calls = [pack(checks[i]) for i in self._called]

    def undecided(self) -> list[int]:
        """Return the indexes of the checks that have no decision yet."""
        return [i for i in range(len(self._checks)) if i not in self.decisions]

    def add_replies(self, replies: Sequence[Any]) -> None:
        """Decide by the replies to the calls, and without Redis where there is none."""
        for index, reply in zip(self._called, replies, strict=True):
            planned = self._checks[index]
            if isinstance(reply, UnavailableError):
                decision = fallback.decide_all(planned)
                self.failures.append((reply, decision))
            else:
                decision = read(planned, reply)
                _measure_and_cache(planned, decision, self._started)
            self.decisions[index] = decision


def peek(
    identity: Identity, policy: Policies | PolicySet = None, *, cost: int = 1
) -> Decision:
    """Return what `check` would decide now.

    Nothing is charged, so `remaining` is what is left before the request.
    """
    return _decide_by_slots(plan(identity, policy, cost, charge=False))


async def apeek(
    identity: Identity, policy: Policies | PolicySet = None, *, cost: int = 1
) -> Decision:
    """As `peek`, natively async."""
    return await _adecide_by_slots(plan(identity, policy, cost, charge=False))


def peek_planned(planned: Check) -> Decision:
    """As `peek`, of a check that is planned."""
    planned.charge = False
    return _decide_by_slots(planned)


def _decide_by_slots(planned: Check) -> Decision:
    """Decide slot by slot, as a cluster requires. A peek also uses this."""
    slots = SlotCheck(planned)
    for group in slots.groups:
        part = slots.part(group)
        if part is not None:
            slots.add_reply(group, part, _execute(part))

    slots.decide_unreached()
    if not slots.allowed:
        _refund_slots(slots)
    decision = slots.decision()
    if slots.error is not None:
        signals.send(signals.backend_failed, error=slots.error, decision=decision)
    return decision


async def _adecide_by_slots(planned: Check) -> Decision:
    slots = SlotCheck(planned)
    try:
        for group in slots.groups:
            part = slots.part(group)
            if part is not None:
                slots.add_reply(group, part, await _aexecute(part))
    except asyncio.CancelledError:
        refund_later(slots.receipts)
        raise

    slots.decide_unreached()
    if not slots.allowed:
        await _arefund_slots(slots)
    decision = slots.decision()
    if slots.error is not None:
        await _asend_failed(slots.error, decision)
    return decision


def _refund_slots(slots: SlotCheck) -> None:
    """Refund what a refused check charged, and get the outcomes after it."""
    peeks = slots.peeks_after_refund()
    refund_all(slots.receipts)
    for part in peeks:
        slots.refresh(part, _execute(part))


async def _arefund_slots(slots: SlotCheck) -> None:
    peeks = slots.peeks_after_refund()
    await arefund_all(slots.receipts)
    for part in peeks:
        slots.refresh(part, await _aexecute(part))


def _execute(part: Check) -> Any:
    """Return the reply to a check, or the error why there is none."""
    try:
        return backend.execute(part.policy_set.topology, part.pack())
    except UnavailableError as error:
        return error


async def _aexecute(part: Check) -> Any:
    try:
        call = refundable_call(part)
        return await backend.aexecute(part.policy_set.topology, call)
    except UnavailableError as error:
        return error


def decide_by_redis(planned: Check) -> Decision:
    """Decide for a page or a command, or raise UnavailableError."""
    call = planned.pack()
    call.for_page = True
    return read(planned, backend.execute(planned.policy_set.topology, call))


def peek_each(pairs: Sequence[tuple[Policy, str]]) -> tuple[Outcome, ...]:
    """Return the outcomes of many counters, for pages that list them.

    A counter is a policy and an encoded identity. UnavailableError, rather than a
    decision without Redis, when Redis is unavailable.
    """
    outcomes: list[Outcome] = []
    for start in range(0, len(pairs), MAX_PEEKS):
        outcomes += _peek_together(pairs[start : start + MAX_PEEKS])
    return tuple(outcomes)


def _peek_together(pairs: Sequence[tuple[Policy, str]]) -> list[Outcome]:
    policies, identities = zip(*pairs, strict=True)
    topology = backend.topology()
    policy_set = PolicySet(policies, conf.config(), topology)
    planned = plan_encoded(policy_set, identities, 1, charge=False)
    overrides = networks.override_texts_of_each(policies, identities)
    planned.network_overrides = overrides

    outcomes: dict[int, Outcome] = {}
    for group in topology.group_by_slot(policy_set.keys(identities)):
        decision = decide_by_redis(planned.part(group, charge=False))
        outcomes.update(zip(group, decision.outcomes, strict=True))
    return [outcomes[index] for index in range(len(pairs))]


def unlimited() -> Decision:
    """Return the decision where nothing is checked.

    It has one outcome: that of the default policy for an empty identity.
    """
    return Decision(True, (fallback.uncounted(conf.config().policy(DEFAULT), ""),))


def reset(
    identity: Identity, policy: Policies = None, *, may_refund: bool = True
) -> int:
    """Reset what an identity used, whichever algorithm counted it.

    Return the number of counters deleted. Charges from before are not refunded: Redis
    keeps the time of the reset, but for `may_refund=False`, where nobody will try.
    """
    policy_set = compile_policies(policy)
    deleted = 0
    for call in _reset_calls(policy_set, identity, may_refund):
        deleted += backend.execute(policy_set.topology, call)
    policy_set.refusals.invalidate(policy_set.names)
    return deleted


async def areset(
    identity: Identity, policy: Policies = None, *, may_refund: bool = True
) -> int:
    """As `reset`, natively async."""
    policy_set = compile_policies(policy)
    deleted = 0
    for call in _reset_calls(policy_set, identity, may_refund):
        deleted += await backend.aexecute(policy_set.topology, call)
    policy_set.refusals.invalidate(policy_set.names)
    return deleted


def _reset_calls(
    policy_set: PolicySet, identity: Identity, may_refund: bool
) -> list[Call]:
    """Return the calls that delete every key an algorithm may have written."""
    topology = policy_set.topology
    identities = policy_set.identify(identity)
    calls = []
    for group in topology.group_by_slot(policy_set.keys(identities)):
        keys: list[str] = []
        words: list[str | int] = []
        for i, algo in product(group, ALGORITHMS):
            name = policy_set.policies[i].name
            window = policy_set.arguments[i].window
            template = counter_key(
                name, algo, window // 1000, hash_tag=topology.clustered
            )
            keys.append(template.key(identities[i]))
            words += (algo, window)
        args = (clock.script_time(), "reset", int(may_refund), 0, *words)
        calls.append(script_call(for_algorithms(ALGORITHMS), keys, args))
    return calls


def acquire(
    identity: Identity,
    policy: Policies = None,
    *,
    cost: int = 1,
    timeout: float = MAX_WAIT,
    source: str = CODE,
) -> Decision:
    """Check, and while it is refused wait as long as the decision says.

    Return the first allowed decision; or the refusal, where its wait would end after
    `timeout` seconds. Under the frozen clock of tests, the clock is moved and nobody
    waits.

    >>> if acquire("payments", "partner-api", timeout=30).allowed:
    ...     call_partner()
    """
    deadline = time.monotonic() + timeout
    while True:
        decision = check(identity, policy, cost=cost, source=source)
        wait = _wait(decision, deadline)
        if wait is None:
            return decision
        time.sleep(wait)


async def aacquire(
    identity: Identity,
    policy: Policies = None,
    *,
    cost: int = 1,
    timeout: float = MAX_WAIT,  # noqa: ASYNC109  (of the waits, not of the calls)
    source: str = CODE,
) -> Decision:
    """As `acquire`, without blocking the event loop."""
    deadline = time.monotonic() + timeout
    while True:
        decision = await acheck(identity, policy, cost=cost, source=source)
        wait = _wait(decision, deadline)
        if wait is None:
            return decision
        await asyncio.sleep(wait)


def _wait(decision: Decision, deadline: float) -> float | None:
    """Return the seconds to wait, or None if it is allowed or they are too many."""
    wait = decision.retry_after
    if decision.allowed or wait == math.inf or time.monotonic() + wait > deadline:
        return None
    if clock.frozen is None:
        return wait
    # Under the frozen clock of tests, move time instead of waiting.
    clock.frozen.tick(max(1, round(wait * 1000)))
    return 0.0
