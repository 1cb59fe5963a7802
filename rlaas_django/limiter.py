"""Decisions: plan calls, let the backend run them, read the replies. The async twins differ in one `await`."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from typing import Any

from . import backend, conf, failure, plans, refusals, signals
from .answers import decide, outcomes_of
from .backend import UnavailableError
from .identity import Id, Identity, identify, redis_key
from .plans import Plan, Receipt
from .policy import ALGORITHMS, DEFAULT, Decision, Outcome, Policies, Policy
from .questions import PolicySet, chosen, listed, policy_set, terms_of
from .scripts import REFUND, RESET

Calls = Generator[backend.Call, Any, Any]  # is sent their replies


def check(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """Decide, and charge when allowed. All policies or none are charged, in one round trip.

    >>> check("alice").allowed
    >>> check("alice", "search", cost=3)
    >>> check({"user": "42", "ip": "203.0.113.9"}, ["burst", Policy("site", "1000/m", key="ip")])
    """
    if refusals.known and plans.frozen is None:
        told = refusals.again(identity, policy, cost) or _told_of_several(identity, policy, cost)
        if told is not None:
            return told
    plan = plans.make(identity, policy, cost)
    asked = time.monotonic()
    decision = _perform(plan)
    if not decision.allowed and plan.set.remembers:
        _remember(identity, policy, plan, decision, asked)
    return decision


async def acheck(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """As `check`, natively async."""
    if refusals.known and plans.frozen is None:
        told = refusals.again(identity, policy, cost) or _told_of_several(identity, policy, cost)
        if told is not None:
            return told
    plan = plans.make(identity, policy, cost)
    asked = time.monotonic()
    decision = await _aperform(plan)
    if not decision.allowed and plan.set.remembers:
        _remember(identity, policy, plan, decision, asked)
    return decision


def peek(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """What `check` would say now. Charges nothing, so `remaining` is what is left before the request."""
    return _perform(plans.make(identity, policy, cost, charge=False))


async def apeek(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """As `peek`, natively async."""
    return await _aperform(plans.make(identity, policy, cost, charge=False))


def peek_each(pairs: Sequence[tuple[Policy, str]]) -> tuple[Outcome, ...]:
    """Look at many counters at once, each a policy and an identity as it stands in a key; for pages that list them.

    UnavailableError, rather than an answer without Redis, when Redis cannot be asked.
    """
    outcomes: list[Outcome] = []
    for start in range(0, len(pairs), 500):  # a script that looks at more would keep the server from others
        policies, identities = zip(*pairs[start : start + 500], strict=True)
        asked = PolicySet(policies, conf.config(), backend.site())
        plan = plans.of(asked, identities, 1, charge=False)
        found: dict[int, Outcome] = {}
        for part in asked.site.parts(asked.keys(identities)):
            told, _ = outcomes_of(plan, part, backend.run(plan.call_part(part, charge=False), patient=True))
            found.update(zip(part, told, strict=True))
        outcomes += (found[i] for i in asked.whole)
    return tuple(outcomes)


def unlimited() -> Decision:
    """The decision where nothing was asked: rate limiting is off, or does not concern this request.

    Its outcome is the default policy's, of an identity '': nobody.
    """
    return Decision(True, (failure.unasked(conf.config().policy(DEFAULT), ""),))


def reset(identity: Identity, policy: Policies = None) -> int:
    """Forget what an identity used, whichever algorithm counted it; the number of keys that were there."""
    return int(_do(_reset(identity, policy)))


async def areset(identity: Identity, policy: Policies = None) -> int:
    """As `reset`, natively async."""
    return int(await _ado(_reset(identity, policy)))


def refund(decision: Decision) -> bool:
    """Give back what a decision charged, once: False when there is nothing (more) to give back.

    A unit that has left its window meanwhile is not given back a second time.
    """
    return bool(_do(_refund(decision)))


async def arefund(decision: Decision) -> bool:
    """As `refund`, natively async."""
    return bool(await _ado(_refund(decision)))


def _told_of_several(identity: Identity, policy: Policies, cost: int) -> Decision | None:
    """A refusal that still holds, of a question that is not remembered as it was asked."""
    if _is_kept_as_asked(identity, policy):
        return None
    asked = policy_set(policy)
    return refusals.again(asked.identities(identity), asked, cost)


def _remember(identity: Identity, policy: Policies, plan: Plan, decision: Decision, asked: float) -> None:
    if (
        plans.frozen is not None
        or not refusals.refundable.isdisjoint(plan.set.names)
        or decision.degraded
        or not 0 < decision.retry_after < math.inf
    ):
        return
    who, what = (identity, policy) if _is_kept_as_asked(identity, policy) else (plan.identities, plan.set)
    refusals.remember(who, what, plan.cost, decision, asked, plan.set.names)


def _is_kept_as_asked(identity: Identity, policy: Policies) -> bool:
    """Whether it is remembered as it was asked, before anything is made of it."""
    return type(identity) in (str, Id) and (policy is None or isinstance(policy, (Policy, str)))


def _perform(plan: Plan) -> Decision:
    decision: Decision
    if plan.set.in_one_call:
        try:
            return decide(plan, backend.run(plan))
        except UnavailableError as failed:
            decision, error = _decide_without(plan, failed)
    else:
        decision, error = _do(_ask(plan))
    if error is not None:
        signals.tell(signals.backend_failed, error=error, decision=decision)
        del error  # its traceback has this frame, and this frame would have it
    return decision


async def _aperform(plan: Plan) -> Decision:
    decision: Decision
    if plan.set.in_one_call:
        try:
            return decide(plan, await backend.arun(plan))
        except UnavailableError as failed:
            decision, error = _decide_without(plan, failed)
    else:
        decision, error = await _ado(_ask(plan))
    if error is not None:
        await signals.atell(signals.backend_failed, error=error, decision=decision)
        del error
    return decision


def _do(calls: Calls) -> Any:
    try:
        call = next(calls)
        while True:
            try:
                reply = backend.run(call)
            except UnavailableError as error:
                call = calls.throw(error)
            else:
                call = calls.send(reply)
    except StopIteration as done:
        return done.value


async def _ado(calls: Calls) -> Any:
    try:
        call = next(calls)
        while True:
            try:
                reply = await backend.arun(call)
            except UnavailableError as error:
                call = calls.throw(error)
            else:
                call = calls.send(reply)
    except StopIteration as done:
        return done.value


def give_back(identity: Identity, policy: Policies, amount: int) -> int:
    """Give back so many units of an identity's usage, the newest first; how many there were."""
    config = conf.config()
    given = [0]
    for each in chosen(listed(policy), config):
        term, who = terms_of(each, config.algo), identify(identity, each)
        limit = peek_each([(each, who)])[0].limit  # an operator may have set another
        term = term if limit == term.capacity else term._replace(limit=limit, capacity=limit)
        key = redis_key(each, who, term.algo, each.window, tagged=backend.site().clustered)
        given += backend.run(backend.call(REFUND[frozenset([term.algo])], (key,), (plans.now(), "", amount, *term, 0)))
        refusals.end([each.name])
    return int(max(given))


def _decide_without(plan: Plan, error: UnavailableError) -> tuple[Decision, UnavailableError]:
    outcomes, allowed, receipts = _fall_back(plan, plan.set.whole, plan.charge)
    return Decision(allowed, outcomes, receipts), error


def _fall_back(plan: Plan, part: Sequence[int], charge: bool) -> tuple[tuple[Outcome, ...], bool, list[Any]]:
    """What is decided without Redis, whether it passes, and what it charged."""
    cases = [failure.Case(*plan.who(i), plan.set.terms[i]) for i in part]
    outcomes, receipts = failure.decide(cases, plan.cost, None if plans.frozen is None else plans.frozen.ms, charge)
    return tuple(outcomes), all(outcome.allowed or outcome.policy.shadow for outcome in outcomes), receipts


def _ask(plan: Plan) -> Calls:
    """The decision where one call cannot make it, and why Redis could not be asked for all of it, if so.

    The identities of a request may be in different slots of a cluster. They are charged slot by slot: once one
    refuses, the rest is only looked at, and what was charged by then is given back.
    """
    asked = plan.set
    if not asked.enabled:
        return Decision(True, tuple([failure.unasked(*plan.who(i)) for i in plan.set.whole])), None
    outcomes: dict[int, Outcome] = {}
    receipts: list[Any] = []
    unasked: list[int] = []
    allowed, error = True, None
    ends = time.monotonic() + conf.config().timeout
    for part in asked.site.parts(asked.keys(plan.identities)):
        charge = plan.charge and allowed
        if error is not None and time.monotonic() >= ends:
            unasked += part  # one slot used up the time of all
            continue
        try:
            reply = yield plan.call_part(part, charge)
            told, passes = outcomes_of(plan, part, reply)
        except UnavailableError as failed:
            error = failed
            unasked += part
            continue
        outcomes.update(zip(part, told, strict=True))
        if charge and passes:
            receipts.append(Receipt(plan, part, reply))
        allowed = allowed and passes
    if unasked:
        told, passes, kept = _fall_back(plan, unasked, plan.charge and allowed)
        outcomes.update(zip(unasked, told, strict=True))
        allowed = allowed and passes
        receipts += kept
    if not allowed and receipts:
        yield from _undo(receipts, outcomes)
    return Decision(allowed, tuple([outcomes[i] for i in plan.set.whole]), receipts), error


def _undo(receipts: list[Any], outcomes: dict[int, Outcome]) -> Calls:
    """Give back, and look again at what is told to the client."""
    while receipts:
        receipt = receipts.pop()
        try:
            yield from _refund_call(receipt)
            reply = yield receipt.plan.call_part(receipt.part, charge=False)
            told, _ = outcomes_of(receipt.plan, receipt.part, reply)
            outcomes.update(zip(receipt.part, told, strict=True))
        except UnavailableError:
            continue  # what was charged ends with its window


def _refund(decision: Decision) -> Calls:
    given, error = 0, None
    while True:
        try:
            receipt = decision.receipts.pop()  # atomic: of two who ask at once, one gets it
        except IndexError:
            break
        if isinstance(receipt, failure.Receipt):
            given += failure.give_back(receipt, None if plans.frozen is None else plans.frozen.ms)
            continue
        try:
            given += yield from _refund_call(receipt)
        except UnavailableError as failed:
            error = failed  # of a cluster, other parts may be within reach
    if error is not None:
        raise error
    return given


def _refund_call(receipt: Receipt) -> Calls:
    plan, charged = receipt.plan, [*receipt.charged()]
    if not charged:
        return 0
    args: list[str | int] = [plans.now(), plan.unique, plan.cost]
    for _, term, charged_at in charged:
        args += (*term, charged_at)
    script, keys = REFUND[frozenset(term.algo for _, term, _ in charged)], plan.set.keys(plan.identities)
    given = yield backend.call(script, [keys[i] for i, *_ in charged], args)
    refusals.end(plan.set.names)
    return sum(given)


def _reset(identity: Identity, policy: Policies) -> Calls:
    asked, site = policy_set(policy), backend.site()
    places: list[list[str]] = []
    for each, who, term in zip(asked.policies, asked.identities(identity), asked.terms, strict=True):
        # The fixed window comes first: the script adds the window's index to the first key of each policy.
        keys = [redis_key(each, who, algo, term.window // 1000, tagged=site.clustered) for algo in ALGORITHMS]
        places.append([*dict.fromkeys(keys)])
    deleted = 0
    for part in site.parts([keys[0] for keys in places]):
        keys = [key for i in part for key in places[i]]
        windows = [asked.terms[i].window for i in part]
        deleted += yield backend.call(RESET, keys, (plans.now(), len(keys) // len(part), *windows))
    refusals.end(asked.names)
    return deleted
