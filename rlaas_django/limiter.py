"""Decisions: plan calls, let the backend run them, read the replies. The async twins differ in one `await`."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from . import backend, conf, failure, refusals, signals
from .backend import UnavailableError
from .identity import Id, Identity, identify, redis_key
from .policy import (
    ALGORITHMS,
    DEFAULT,
    MAX_PRODUCT,
    Decision,
    Outcome,
    Policy,
    PolicyError,
    Terms,
    shown,
)
from .questions import PolicySet, terms_of, unique
from .scripts import REFUND, RESET, Script
from .sites import Site

NEVER_FITS = 2 * MAX_PRODUCT  # beyond every limit; what is larger is as hopeless, and may be too long to send

Policies = str | Policy | Sequence[str | Policy] | None
Calls = Generator[backend.Call, Any, Any]  # is sent their replies


def check(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """Decide, and charge when allowed. All policies or none are charged, in one round trip.

    >>> check("alice").allowed
    >>> check("alice", "search", cost=3)
    >>> check({"user": "42", "ip": "203.0.113.9"}, ["burst", Policy("site", "1000/m", key="ip")])
    """
    if refusals.known and frozen is None:
        told = refusals.again(identity, policy, cost) or _told_of_several(identity, policy, cost)
        if told is not None:
            return told
    plan = _plan(identity, policy, cost)
    asked = time.monotonic()
    decision = _perform(plan)
    if not decision.allowed and plan.set.remembers:
        _remember(identity, policy, plan, decision, asked)
    return decision


async def acheck(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """As `check`, natively async."""
    if refusals.known and frozen is None:
        told = refusals.again(identity, policy, cost) or _told_of_several(identity, policy, cost)
        if told is not None:
            return told
    plan = _plan(identity, policy, cost)
    asked = time.monotonic()
    decision = await _aperform(plan)
    if not decision.allowed and plan.set.remembers:
        _remember(identity, policy, plan, decision, asked)
    return decision


def peek(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """What `check` would say now. Charges nothing, so `remaining` is what is left before the request."""
    return _perform(_plan(identity, policy, cost, charge=False))


async def apeek(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """As `peek`, natively async."""
    return await _aperform(_plan(identity, policy, cost, charge=False))


def peek_each(pairs: Sequence[tuple[Policy, str]]) -> tuple[Outcome, ...]:
    """Look at many counters at once, each a policy and an identity as it stands in a key; for pages that list them.

    UnavailableError, rather than an answer without Redis, when Redis cannot be asked.
    """
    outcomes: list[Outcome] = []
    for start in range(0, len(pairs), 500):  # a script that looks at more would keep the server from others
        policies, identities = zip(*pairs[start : start + 500], strict=True)
        asked = PolicySet(policies, conf.config(), backend.site())
        plan = _planned(asked, identities, 1, charge=False)
        found: dict[int, Outcome] = {}
        for part in asked.site.parts(asked.keys(identities)):
            told, _ = _outcomes(plan, part, backend.run(plan.call_part(part, charge=False), patient=True))
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
    if _is_plain(identity, policy):
        return None
    asked = _policy_set(policy)
    return refusals.again(asked.identities(identity), asked, cost)


def _remember(identity: Identity, policy: Policies, plan: Plan, decision: Decision, asked: float) -> None:
    if (
        frozen is not None
        or not refusals.refundable.isdisjoint(plan.set.names)
        or decision.degraded
        or not 0 < decision.retry_after < math.inf
    ):
        return
    who, what = (identity, policy) if _is_plain(identity, policy) else (plan.identities, plan.set)
    refusals.remember(who, what, plan.cost, decision, asked, plan.set.names)


def _is_plain(identity: Identity, policy: Policies) -> bool:
    """Whether it is remembered as it was asked, before anything is made of it."""
    return type(identity) in (str, Id) and (policy is None or isinstance(policy, (Policy, str)))


def _perform(plan: Plan) -> Decision:
    decision: Decision
    if plan.set.in_one_call:
        try:
            return _decide(plan, backend.run(plan))
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
            return _decide(plan, await backend.arun(plan))
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
    for each in _chosen(_listed(policy), config):
        term, who = terms_of(each, config.algo), identify(identity, each)
        limit = peek_each([(each, who)])[0].limit  # an operator may have set another
        term = term if limit == term.capacity else term._replace(limit=limit, capacity=limit)
        key = redis_key(each, who, term.algo, each.window, tagged=backend.site().clustered)
        given += backend.run(backend.call(REFUND[frozenset([term.algo])], (key,), (now(), "", amount, *term, 0)))
        refusals.end([each.name])
    return int(max(given))


class Clock:
    """A clock that stands still; `tick` moves it."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def tick(self, ms: int) -> None:
        self.ms += ms


frozen: Clock | None = None  # set by `testing.frozen_clock`; None: the server's clock


def now() -> str | int:
    """What the scripts take for the time; '' is the server's clock."""
    return "" if frozen is None else frozen.ms


class Plan(NamedTuple):
    """A check before it runs: who is counted by what. It is the call that decides all of it, if one can."""

    site: Site
    script: Script
    key: str
    packed: bytes
    replies: int
    set: PolicySet
    identities: tuple[str, ...]
    unique: str
    cost: int
    charge: bool

    def who(self, i: int) -> tuple[Policy, str]:
        return self.set.policies[i], self.identities[i]

    def call_part(self, part: Sequence[int], charge: bool) -> backend.Call:
        """One for those that are in the same slot of a cluster."""
        asked, identities = self.set.subset(part), [self.identities[i] for i in part]
        packed = asked.pack(identities, now(), self.unique, self.cost, charge)
        return backend.Call(asked.site, asked.script, asked.keys(identities)[0], packed)


class Receipt(NamedTuple):
    """What one call may have charged."""

    plan: Plan
    part: Sequence[int]
    reply: Any

    def charged(self) -> Iterator[tuple[int, Terms, int]]:
        """Which, on which terms, and when."""
        for n, i in enumerate(self.part):
            limit, charged_at = self.reply[7 * n + 6], self.reply[7 * n + 7]
            if charged_at >= 0:
                term = self.plan.set.terms[i]
                # An operator's limit for this identity is what a refund has to reckon with.
                yield i, term if limit == term.capacity else term._replace(limit=limit, capacity=limit), charged_at


def _plan(identity: Identity, policy: Policies, cost: int, charge: bool = True) -> Plan:
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    asked = _policy_set(policy)
    if cost != 1:
        cost, charge = min(cost, NEVER_FITS), charge and cost > 0
    elif charge and frozen is None and asked.in_one_call and (usual := asked.usual(identity)) is not None:
        who, name, packed = usual
        return _make(Plan, (asked.site, asked.script, "", packed, 1, asked, who, name, 1, True))
    return _planned(asked, asked.identities(identity), cost, charge)


def _planned(asked: PolicySet, who: tuple[str, ...], cost: int, charge: bool) -> Plan:
    name = unique()
    packed = asked.pack(who, now(), name, cost, charge) if asked.in_one_call else b""
    return Plan(asked.site, asked.script, "", packed, 1, asked, who, name, cost, charge)


MOST_SETS = 1024


class _Sets:
    """Policy sets that were made ready, for as long as the settings stay.

    By the identity of what was asked for, as to compare policies takes long; it is kept with its set, so that no other
    has that identity.
    """

    def __init__(self, config: conf.Config | None, caches: Any) -> None:
        self.config, self.caches = config, caches
        # Where there is none, `read_before` cannot tell whether there still is none.
        self.rate_limiter = conf.read_before.get("RATE_LIMITER") or self
        self.known: dict[Any, tuple[Any, PolicySet]] = {}


_sets = _Sets(None, None)


def _policy_set(policy: Policies) -> PolicySet:
    """The policies that are meant."""
    sets, settings = _sets, conf.read_before
    if settings.get("RATE_LIMITER") is not sets.rate_limiter or settings.get("CACHES") is not sets.caches:
        sets = _present_sets()
    known = sets.known.get(policy if policy is None or type(policy) is str else id(policy))
    return _made_ready(policy, sets.known) if known is None else known[1]


def _made_ready(policy: Policies, known: dict[Any, tuple[Any, PolicySet]]) -> PolicySet:
    """A set that was asked for by another object: a list may have changed since, and a text may be the same."""
    listed = _listed(policy)
    key = tuple([id(each) if isinstance(each, Policy) else each for each in listed])
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_SETS:
            known.clear()
        config = conf.config()
        found = known[key] = listed, PolicySet(_chosen(listed, config), config, backend.site())
    if policy is None or isinstance(policy, (str, Policy, tuple)):  # what is asked for so, is the same next time
        known[policy if policy is None or type(policy) is str else id(policy)] = policy, found[1]
    return found[1]


def _present_sets() -> _Sets:
    global _sets
    config, caches = conf.config(), conf.caches()
    if _sets.config is not config or _sets.caches is not caches:
        _sets = _Sets(config, caches)
    return _sets


def _listed(policy: Policies) -> tuple[str | Policy | None, ...]:
    return (policy,) if policy is None or isinstance(policy, (str, Policy)) else tuple(policy)


def _chosen(listed: Sequence[str | Policy | None], config: conf.Config) -> tuple[Policy, ...]:
    """The policies that are meant, each once."""
    chosen: dict[str, Policy] = {}
    for each in listed:
        found = each if isinstance(each, Policy) else config.policy(each or DEFAULT)
        if chosen.setdefault(found.name, found) != found:
            raise PolicyError(f"Two different policies are named {found.name!r}; a policy's name is its counter.")
    if not chosen:
        raise ValueError("There is no policy to decide by; name one, or leave it out for the default.")
    return tuple(chosen.values())


def _decide(plan: Plan, reply: Any) -> Decision:
    whole = plan.set.whole
    if len(whole) > 1 and plan.charge and not plan.set.may_change and _all_pass(reply, len(whole)):
        return _Lazily(plan, reply)
    outcomes, allowed = _outcomes(plan, whole, reply)
    receipts = [_make(Receipt, (plan, whole, reply))] if allowed and plan.charge else None
    return Decision(allowed, outcomes, receipts)


def _all_pass(reply: Any, number: int) -> bool:
    """Whether it is an answer of our script by which every policy passes."""
    if type(reply) is not list or len(reply) != 7 * number + 1:
        return False
    return reply[1::7] == [1] * number and set(map(type, reply)) == {int}


class _Lazily(Decision):
    """Allowed by several policies, of which most who ask want to know no more than the strictest one's figures."""

    __slots__ = ("_plan", "_reply")

    degraded = False

    def __init__(self, plan: Plan, reply: Any) -> None:
        left = reply[3::7]
        i = left.index(min(left))
        self.allowed, self._plan, self._reply = True, plan, reply
        self.receipts = [_make(Receipt, (plan, plan.set.whole, reply))]
        self._strictest = _outcome(plan.set, i, plan.identities, reply, 7 * i + 1)

    def __getattr__(self, name: str) -> Any:
        if name != "outcomes":
            raise AttributeError(name)
        self.outcomes, _ = _outcomes(self._plan, self._plan.set.whole, self._reply)
        return self.outcomes


def _decide_without(plan: Plan, error: UnavailableError) -> tuple[Decision, UnavailableError]:
    outcomes, allowed, receipts = _fall_back(plan, plan.set.whole, plan.charge)
    return Decision(allowed, outcomes, receipts), error


def _fall_back(plan: Plan, part: Sequence[int], charge: bool) -> tuple[tuple[Outcome, ...], bool, list[Any]]:
    """What is decided without Redis, whether it passes, and what it charged."""
    cases = [failure.Case(*plan.who(i), plan.set.terms[i]) for i in part]
    outcomes, receipts = failure.decide(cases, plan.cost, None if frozen is None else frozen.ms, charge)
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
            told, passes = _outcomes(plan, part, reply)
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
            told, _ = _outcomes(receipt.plan, receipt.part, reply)
            outcomes.update(zip(receipt.part, told, strict=True))
        except UnavailableError:
            continue  # what was charged ends with its window


def _outcomes(plan: Plan, part: Sequence[int], reply: Any) -> tuple[tuple[Outcome, ...], bool]:
    """What a reply says of each policy, and whether all pass that are to be heeded."""
    asked, who = plan.set, plan.identities
    try:
        if len(reply) != 7 * len(part) + 1:
            raise ValueError(f"{len(reply)} parts")
        if len(part) == 1:  # as it is nearly always
            only = _outcome(asked, part[0], who, reply, 1)
            return (only,), only.allowed or only.policy.shadow
        outcomes = tuple([_outcome(asked, i, who, reply, 7 * n + 1) for n, i in enumerate(part)])
    except (TypeError, ValueError) as error:
        odd = UnavailableError(f"Redis answered what no script of ours does: {error}")
        if server := asked.site.server(asked.keys(who)[part[0]]):
            server.breaker.complain(odd)
        raise odd from error
    return outcomes, False not in [each.allowed or each.policy.shadow for each in outcomes]


def _outcome(asked: PolicySet, i: int, who: Sequence[str], reply: Any, at: int) -> Outcome:
    passed, count, remaining, retry_after, reset_after, limit, _ = reply[at : at + 7]
    wait = 0.0 if retry_after == 0 else retry_after / 1000 if retry_after > 0 else math.inf
    ttl = asked.ttls[i] or _left_of_window(asked.terms[i], reply[0])
    figures = limit, count, remaining, wait, reset_after / 1000, ttl, False
    return _make(Outcome, (asked.policies[i], who[i], passed == 1, *figures))


_make = tuple.__new__  # what a NamedTuple does in the end, without its own function on the way there


def _left_of_window(term: Terms, now: int) -> int:
    """Whole seconds, as the source documents define the fixed window's TTL."""
    return -(-(term.window - now % term.window) // 1000)


def _refund(decision: Decision) -> Calls:
    given, error = 0, None
    while True:
        try:
            receipt = decision.receipts.pop()  # atomic: of two who ask at once, one gets it
        except IndexError:
            break
        if isinstance(receipt, failure.Receipt):
            given += failure.give_back(receipt, None if frozen is None else frozen.ms)
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
    args: list[str | int] = [now(), plan.unique, plan.cost]
    for _, term, charged_at in charged:
        args += (*term, charged_at)
    script, keys = REFUND[frozenset(term.algo for _, term, _ in charged)], plan.set.keys(plan.identities)
    given = yield backend.call(script, [keys[i] for i, *_ in charged], args)
    refusals.end(plan.set.names)
    return sum(given)


def _reset(identity: Identity, policy: Policies) -> Calls:
    asked, site = _policy_set(policy), backend.site()
    places: list[list[str]] = []
    for each, who, term in zip(asked.policies, asked.identities(identity), asked.terms, strict=True):
        # The fixed window comes first: the script adds the window's index to the first key of each policy.
        keys = [redis_key(each, who, algo, term.window // 1000, tagged=site.clustered) for algo in ALGORITHMS]
        places.append([*dict.fromkeys(keys)])
    deleted = 0
    for part in site.parts([keys[0] for keys in places]):
        keys = [key for i in part for key in places[i]]
        windows = [asked.terms[i].window for i in part]
        deleted += yield backend.call(RESET, keys, (now(), len(keys) // len(part), *windows))
    refusals.end(asked.names)
    return deleted
