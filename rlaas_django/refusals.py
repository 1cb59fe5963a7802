"""Refusals told again from memory, so that an attack costs Redis nothing.

A refusal whose wait is exact stays true until the wait is over: nothing but an operator or a refund can end it earlier.
So it is told again without asking, for a second at most, within which what ends it in another process is seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from . import conf
from .policy import Decision, Repeated

LONGEST = 1.0  # seconds
MOST = 10_000
EVERY_POLICY = "*"


class _Refusal(NamedTuple):
    decision: Decision
    asked: float  # by this process' clock: the wait begins at some moment between this
    told: float  # and this
    until: float
    rules: Any  # the settings
    caches: Any
    policy: Any  # kept, so that nothing else has its id
    names: Iterable[str]
    ended: int  # how often units had come back by then


_setting = conf.read_before.get

known: dict[Hashable, _Refusal] = {}
ended = 0
changed: dict[str, float] = {EVERY_POLICY: 0.0}  # by policy: when units of it came back last
refundable: set[str] = set()  # policies whose units come back before their time


def again(identity: Any, policy: Any, cost: int) -> Decision | None:
    """The refusal that was the answer to the same question, if it still holds. What is asked about by another object
    is another question."""
    try:
        found = known.get((type(identity), identity, id(policy), cost))
    except TypeError:  # a mapping, by which nothing is remembered
        return None
    if found is None or type(cost) is not int:
        return None
    decision, asked, told, until, rules, caches, kept, names, ends = found
    now = monotonic()
    if now >= until or kept is not policy:
        return None
    if _setting("CACHES") is not caches or (_setting("RATE_LIMITER") or conf.config()) is not rules:
        return None
    if ends != ended and not _stands(names, asked):
        return None
    return Repeated(decision, now - told)


def remember(identity: Any, policy: Any, cost: int, decision: Decision, asked: float, names: Iterable[str]) -> None:
    ends = ended  # before the look, lest what comes back in between goes unnoticed
    if not _stands(names, asked):
        return  # units came back while it was on its way
    if len(known) >= MOST:
        known.clear()  # they last a second anyway
    told, until = monotonic(), asked + min(decision.retry_after, LONGEST)
    rules, caches = _setting("RATE_LIMITER") or conf.config(), _setting("CACHES")
    known[type(identity), identity, id(policy), cost] = _Refusal(
        decision, asked, told, until, rules, caches, policy, names, ends
    )


def end(names: Iterable[str] = (EVERY_POLICY,)) -> None:
    """Units came back: what was refused under these policies before now may be allowed."""
    global ended
    now = monotonic()
    for name in names:
        changed[name] = now
    ended += 1


def _stands(names: Iterable[str], asked: float) -> bool:
    if changed[EVERY_POLICY] >= asked:
        return False
    for name in names:  # noqa: SIM110  (three times as fast as all())
        if changed.get(name, 0.0) >= asked:
            return False
    return True
