"""Wait for room under a limit, for tasks and outbound calls."""

from __future__ import annotations

import asyncio
import math
import time

from ..core.decision import Decision
from ..core.keys import Identity
from ..core.policy import Policies
from ..runtime import clock
from ..runtime.observers import CODE
from .checking import acheck, check

MAX_WAIT = 60.0  # seconds


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
    """Return the seconds to wait; None where it is allowed, or they are too many."""
    wait = decision.retry_after
    if decision.allowed or wait == math.inf or time.monotonic() + wait > deadline:
        return None
    if clock.frozen is None:
        return wait
    clock.frozen.tick(max(1, round(wait * 1000)))
    return 0.0
