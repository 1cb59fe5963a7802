"""Refusals told again from memory, so that an attack costs Redis nothing.

A refusal whose wait is exact stays true until the wait is over: nothing but an operator can end it earlier. So it is
told again without asking, for a second at most, so that a reset, an override or another process' refund is seen then.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

from . import conf
from .policy import Decision, Repeated

LONGEST = 1.0  # seconds
MOST = 10_000


class _Refusal(NamedTuple):
    decision: Decision
    told: float
    until: float
    config: Any
    policy: Any  # kept, so that nothing else has its id


known: dict[Hashable, _Refusal] = {}
clear = known.clear
refundable: set[str] = set()  # policies whose units come back before their time


def again(key: Hashable, policy: Any) -> Decision | None:
    """The refusal that was the answer to this question, if it still holds."""
    found = known.get(key)
    if found is None:
        return None
    decision, told, until, config, kept = found
    now = time.monotonic()
    if now >= until or kept is not policy or config is not conf.config():
        return None
    return Repeated(decision, now - told)


def remember(key: Hashable, policy: Any, decision: Decision, asked: float) -> None:
    """`asked` is when the question was, by our clock: the wait begins at some moment between then and now."""
    if len(known) >= MOST:
        known.clear()  # they last a second anyway
    until = asked + min(decision.retry_after, LONGEST)
    known[key] = _Refusal(decision, time.monotonic(), until, conf.config(), policy)
