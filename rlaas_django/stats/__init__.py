"""Statistics of decisions: numbers per minute and hour, recent refusals, and identities near a limit.

An observation is kept in memory and written by a background thread, so it costs a request no round trip.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from ..core.decision import Decision
from ..limiter.replies import passes_below
from ..runtime.observers import Observation
from . import background, recorder
from .schema import WATCH_PERCENT

__all__ = ["count", "record"]


def record(observation: Observation) -> None:
    """Keep an observation; the background thread writes it to Redis within a second or two."""
    count(observation.decision, observation)


def count(decision: Decision, observation: Observation | None = None) -> bool:
    """Keep what is counted of a decision; return False if it takes the observation, and there is none."""
    now = time.time()
    queue: deque[Any] = recorder.pending
    entry: tuple[Any, ...] = now, observation
    if decision.reply is not None and passes_below(decision, WATCH_PERCENT):
        check = decision.reply[0]
        queue = recorder.uneventful
        entry = now, check.policy_set, check.identities
    elif observation is None:
        return False
    if len(queue) == queue.maxlen:
        recorder.dropped += 1
    queue.append(entry)
    state = background.state
    if (
        state.pid != os.getpid()
        or time.monotonic() - state.last_round > background.STALLED_AFTER
    ):
        background.wake()
    return True
