"""Wait for room under a limit, for tasks and outbound calls: `acquire` and its async twin."""

from __future__ import annotations

import asyncio
import math
import time

from ..core.decision import Decision
from ..core.keys import Identity
from ..core.policy import Policies
from ..runtime import clock
from ..runtime.observers import CODE
from . import acheck, check

MAX_WAIT = 60.0  # seconds


def acquire(
    identity: Identity,
    policy: Policies = None,
    *,
    cost: int = 1,
    timeout: float = MAX_WAIT,
    source: str = CODE,
) -> Decision:
    """Check, and while it is refused wait as long as the decision says; return the first allowed decision.

    The refusal is returned instead where its wait would end after `timeout` seconds. Under the frozen clock of tests,
    the clock is moved and nobody waits.

    >>> if acquire("payments", "partner-api", timeout=30).allowed:
    ...     call_partner()
    """
    deadline = time.monotonic() + timeout
    while True:
        decision = check(identity, policy, cost=cost, source=source)
        if decision.allowed or (wait := _wait(decision, deadline)) is None:
            return decision
        time.sleep(wait)


async def aacquire(
    identity: Identity,
    policy: Policies = None,
    *,
    cost: int = 1,
    timeout: float = MAX_WAIT,  # noqa: ASYNC109  (not a timeout of the calls, but of the waits)
    source: str = CODE,
) -> Decision:
    """As `acquire`, without blocking the event loop."""
    deadline = time.monotonic() + timeout
    while True:
        decision = await acheck(identity, policy, cost=cost, source=source)
        if decision.allowed or (wait := _wait(decision, deadline)) is None:
            return decision
        await asyncio.sleep(wait)


def _wait(decision: Decision, deadline: float) -> float | None:
    """Return the seconds to wait; None where they are too many."""
    if (
        decision.retry_after == math.inf
        or time.monotonic() + decision.retry_after > deadline
    ):
        return None
    if clock.frozen is None:
        return decision.retry_after
    clock.frozen.tick(max(1, round(decision.retry_after * 1000)))
    return 0.0
