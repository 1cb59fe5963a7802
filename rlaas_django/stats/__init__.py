"""Statistics of rate limited requests: decisions per minute, recent refusals, and identities near a limit.

A decision is recorded in memory and written by a background thread, so it costs a request no round trip.
"""

from __future__ import annotations

import os
import time

from ..core.decision import Decision
from . import background, recorder

__all__ = ["record"]


def record(decision: Decision, method: str, path: str) -> None:
    """Record a decision about a request; the background thread writes it to Redis within a second or two."""
    # Cut here, as the client chooses both, and they stay in memory while Redis is unavailable.
    recorder.pending.append((time.time(), decision, method[: recorder.MAX_METHOD], path[: recorder.MAX_PATH]))
    state = background.state
    if state.pid != os.getpid() or time.monotonic() - state.last_round > background.STALLED_AFTER:
        background.wake()
