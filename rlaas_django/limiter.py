"""Decisions: plan a call, let the backend run it, read the reply. The async twins differ in one `await`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from . import backend, conf, failure, signals
from .identity import Identity, identify, override_key, redis_key
from .policy import (
    ALGORITHMS,
    DEFAULT,
    FIXED_WINDOW,
    MAX_PRODUCT,
    TOKEN_BUCKET,
    Decision,
    Outcome,
    Policy,
    PolicyError,
    seconds,
    shown,
)
from .scripts import CHECK, REFUND, RESET

NEVER_FITS = 2 * MAX_PRODUCT  # beyond every limit; what is larger is as hopeless, and may be too long to send

Policies = str | Policy | Sequence[str | Policy] | None


def check(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """Decide, and charge when allowed. All policies or none are charged, in one round trip.

    >>> check("alice").allowed
    >>> check("alice", "search", cost=3)
    >>> check({"user": "42", "ip": "203.0.113.9"}, ["burst", Policy("site", "1000/m", key="ip")])
    """
    return _perform(_plan(identity, policy, cost))


async def acheck(identity: Identity, policy: Policies = None, *, cost: int = 1) -> Decision:
    """As `check`, natively async."""
    return await _aperform(_plan(identity, policy, cost))


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
        plan = _plan_pairs(policies, identities, 1, charge=False)
        outcomes += _decide(plan, plan.call and backend.run(plan.call)).outcomes
    return tuple(outcomes)


def unlimited() -> Decision:
    """The decision where nothing was asked: rate limiting is off, or does not concern this request.

    Its outcome is the default policy's, of an identity '': nobody.
    """
    return Decision(True, (failure.unasked(conf.config().policy(DEFAULT), ""),))


def reset(identity: Identity, policy: Policies = None) -> int:
    """Forget what an identity used, whichever algorithm counted it; the number of keys that were there."""
    return int(backend.run(_plan_reset(identity, policy)))


async def areset(identity: Identity, policy: Policies = None) -> int:
    """As `reset`, natively async."""
    return int(await backend.arun(_plan_reset(identity, policy)))


def refund(decision: Decision) -> bool:
    """Give back what a decision charged, once: False when there is nothing (more) to give back.

    A unit that has left its window meanwhile is not given back a second time.
    """
    call = _plan_refund(decision)
    return call is not None and any(backend.run(call))


async def arefund(decision: Decision) -> bool:
    """As `refund`, natively async."""
    call = _plan_refund(decision)
    return call is not None and any(await backend.arun(call))


def _perform(plan: Plan) -> Decision:
    try:
        return _decide(plan, plan.call and backend.run(plan.call))
    except backend.UnavailableError as error:
        decision = failure.decide(plan.policies, plan.identities, error)
        signals.tell(signals.backend_failed, error=error, decision=decision)
        return decision


async def _aperform(plan: Plan) -> Decision:
    try:
        return _decide(plan, plan.call and await backend.arun(plan.call))
    except backend.UnavailableError as error:
        decision = failure.decide(plan.policies, plan.identities, error)
        await signals.atell(signals.backend_failed, error=error, decision=decision)
        return decision


def give_back(identity: Identity, policy: Policies, amount: int) -> int:
    """Give back so many units of an identity's usage, the newest first; how many there were."""
    config = conf.config()
    args: list[str | int] = [now(), "", amount]
    keys, algos = [], set()
    for each in _chosen(policy, config):
        term, who = _terms(each, config.algo), identify(identity, each)
        limit = peek_each([(each, who)])[0].limit  # an operator may have set another
        term = term if limit == term.capacity else term._replace(limit=limit, capacity=limit)
        keys.append(redis_key(each, who, term.algo, each.window))
        algos.add(term.algo)
        args += (*term, 0)
    return int(max(backend.run(backend.Call(REFUND[frozenset(algos)], tuple(keys), tuple(args)))))


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
    """A check before it runs: who is counted by what, and the call that asks."""

    call: backend.Call | None  # None: rate limiting is off
    policies: tuple[Policy, ...]
    identities: tuple[str, ...]
    terms: tuple[Terms, ...]
    unique: str
    cost: int


class Terms(NamedTuple):
    """A policy in the scripts' words."""

    algo: str
    limit: int
    window: int  # ms
    capacity: int


@lru_cache(maxsize=1024)
def _terms(policy: Policy, default_algo: str) -> Terms:
    algo = policy.algo or default_algo
    if policy.burst is not None and algo != TOKEN_BUCKET:
        raise PolicyError(f"Policy {policy.name!r}: burst goes with {TOKEN_BUCKET!r}, not with {algo!r}.")
    return Terms(algo, policy.fixed_rate.limit, policy.window * 1000, policy.capacity)


def _plan(identity: Identity, policy: Policies, cost: int, charge: bool = True) -> Plan:
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    cost = min(cost, NEVER_FITS)
    policies = _chosen(policy, conf.config())
    identities = tuple(identify(identity, each) for each in policies)
    return _plan_pairs(policies, identities, cost, charge)


def _plan_pairs(policies: tuple[Policy, ...], identities: tuple[str, ...], cost: int, charge: bool) -> Plan:
    config = conf.config()
    terms = tuple(_terms(each, config.algo) for each in policies)
    unique = os.urandom(6).hex()
    args: list[str | int] = [now(), unique, cost, 1 if charge and cost else 0]
    for each, term in zip(policies, terms, strict=True):
        args += (*term, int(each.shadow), each.name)
    script = CHECK[frozenset(term.algo for term in terms)]
    keys = (*_keys(policies, identities, terms), *map(override_key, identities))
    call = backend.Call(script, keys, tuple(args)) if config.enabled else None
    return Plan(call, policies, identities, terms, unique, cost)


def _chosen(policy: Policies, config: conf.Config) -> tuple[Policy, ...]:
    """The policies that are meant, each once."""
    listed = [policy] if policy is None or isinstance(policy, (str, Policy)) else policy
    chosen: dict[str, Policy] = {}
    for each in listed:
        found = each if isinstance(each, Policy) else config.policy(each or DEFAULT)
        if chosen.setdefault(found.name, found) != found:
            raise PolicyError(f"Two different policies are named {found.name!r}; a policy's name is its counter.")
    if not chosen:
        raise ValueError("There is no policy to decide by; name one, or leave it out for the default.")
    return tuple(chosen.values())


def _keys(policies: Sequence[Policy], identities: Sequence[str], terms: Sequence[Terms]) -> tuple[str, ...]:
    return tuple(
        redis_key(policy, identity, term.algo, term.window // 1000)
        for policy, identity, term in zip(policies, identities, terms, strict=True)
    )


def _decide(plan: Plan, reply: list[Any] | None) -> Decision:
    if reply is None:
        return Decision(True, tuple(map(failure.unasked, plan.policies, plan.identities)))
    now, *replies = reply
    outcomes = []
    allowed = True
    charged = []
    for i, (passed, count, remaining, retry_after, reset_after, limit, charged_at) in enumerate(replies):
        policy, term = plan.policies[i], plan.terms[i]
        allowed = allowed and (passed == 1 or policy.shadow)
        if charged_at >= 0:
            # An operator's limit for this identity is what a refund has to reckon with.
            held = term if limit == term.capacity else term._replace(limit=limit, capacity=limit)
            charged.append((i, held, charged_at))
        outcomes.append(
            Outcome(
                policy,
                plan.identities[i],
                passed == 1,
                limit,
                count,
                remaining,
                seconds(retry_after),
                seconds(reset_after),
                _ttl(term, now),
            )
        )
    return Decision(allowed, tuple(outcomes), receipts=[(plan, charged)] if charged else [])


def _ttl(term: Terms, now: int) -> int:
    """Whole seconds, as the source documents define it."""
    left = term.window - now % term.window if term.algo == FIXED_WINDOW else term.window
    return -(-left // 1000)


def _plan_refund(decision: Decision) -> backend.Call | None:
    try:
        plan, charged = decision.receipts.pop()  # atomic: of two who ask at once, one gets it
    except IndexError:
        return None
    args: list[str | int] = [now(), plan.unique, plan.cost]
    for _, term, charged_at in charged:
        args += (*term, charged_at)
    script = REFUND[frozenset(term.algo for _, term, _ in charged)]
    return backend.Call(script, tuple(plan.call.keys[i] for i, *_ in charged), tuple(args))


def _plan_reset(identity: Identity, policy: Policies) -> backend.Call:
    config = conf.config()
    keys: list[str] = []
    windows = []
    for each in _chosen(policy, config):
        window = _terms(each, config.algo).window
        # The fixed window comes first: the script adds the window's index to the first key of each policy.
        places = [redis_key(each, identify(identity, each), algo, window // 1000) for algo in ALGORITHMS]
        keys += dict.fromkeys(places)
        windows.append(window)
    return backend.Call(RESET, tuple(keys), (now(), len(keys) // len(windows), *windows))
