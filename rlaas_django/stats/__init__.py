"""Statistics of decisions: numbers per minute and hour, recent refusals, and identities near a limit.

An observation is kept in memory and written by a background thread, so it costs a request no round trip.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from ..core.observers import Observation
from ..limiter.compiled import LazyDecision
from . import background, recorder
from .schema import WATCH_PERCENT

__all__ = ["record"]


def record(observation: Observation) -> None:
    """Keep an observation; the background thread writes it to Redis within a second or two."""
    decision, now = observation.decision, time.time()
    queue: deque[Any] = recorder.pending
    entry: tuple[Any, ...] = now, observation
    if isinstance(decision, LazyDecision) and decision.passes_below(WATCH_PERCENT):
        check, _ = decision.receipt
        queue, entry = recorder.uneventful, (now, check.policy_set, check.identities)
    if len(queue) == queue.maxlen:
        recorder.dropped += 1
    queue.append(entry)
    state = background.state
    if state.pid != os.getpid() or time.monotonic() - state.last_round > background.STALLED_AFTER:
        background.wake()
