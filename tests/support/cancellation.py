"""Cancel a coroutine at a chosen wait, as a task is cancelled."""

from __future__ import annotations

import asyncio
import itertools
import types

from rlaas_django import Policy, apeek

# When a wait is cancelled: at once, when the command has been sent, or when its reply has come, in the same turn.
MOMENTS = ("at once", "sent", "late")


@types.coroutine
def cancelled(coroutine, at: int, moment: str):
    """Run a coroutine and cancel it at its nth wait, as a task is cancelled; return whether it got there."""
    step, got_there = coroutine.send, False
    for n in itertools.count():
        try:
            waited_for = step(None) if step == coroutine.send else step(asyncio.CancelledError())
        except StopIteration:
            return got_there
        except asyncio.CancelledError:
            assert got_there
            return got_there
        step = coroutine.send
        if n == at:
            step, got_there = coroutine.throw, True
            if moment == "late":
                yield waited_for
            else:
                for _ in range(4 if moment == "sent" else 0):
                    yield
                if waited_for is not None:
                    waited_for.cancel()
        else:
            yield waited_for


async def assert_soon_charged(identity, policy: Policy, units: int, when: str) -> None:
    """Refunds run in tasks of their own: wait for them."""
    for _ in range(500):
        count = (await apeek(identity, policy)).current_count
        if count == units:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{policy} counts {count}, not {units}; cancelled {when}")
