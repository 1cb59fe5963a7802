"""Statistics of decisions: their numbers, recent refusals, identities near a limit.

An observation is kept in memory and written by a background thread, so that it costs a
request no round trip.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ..core.decision import Decision
from ..limiter.replies import passes_below
from ..runtime import background
from ..runtime.observers import Observation
from . import recorder
from .schema import WATCH_PERCENT

__all__ = ["count", "record"]


def record(observation: Observation) -> None:
    """Keep an observation, which is written to Redis within a second or two."""
    count(observation.decision, observation)


def count(decision: Decision, observation: Observation | None = None) -> bool:
    """Keep what is counted of a decision; return False if an observation is needed."""
    now = time.time()
    queue: deque[Any] = recorder.pending
    entry: Any = (now, observation)
    if decision.reply is not None and passes_below(decision, WATCH_PERCENT):
        check = decision.reply[0]
        queue = recorder.uneventful
        entry = (now, check.policy_set, check.identities)
    elif observation is None:
        return False

    if len(queue) == queue.maxlen:
        recorder.dropped += 1
    queue.append(entry)
    if time.monotonic() > background.state.wake_at:
        background.wake()
    return True
