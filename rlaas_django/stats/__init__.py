"""Statistics of decisions: numbers per minute and hour, recent refusals, and identities near a limit.

An observation is kept in memory and written by a background thread, so it costs a request no round trip.
"""

from __future__ import annotations

import os
import time

from ..core.observers import Observation
from . import background, recorder

__all__ = ["record"]


def record(observation: Observation) -> None:
    """Keep an observation; the background thread writes it to Redis within a second or two."""
    recorder.keep(time.time(), observation)
    state = background.state
    if state.pid != os.getpid() or time.monotonic() - state.last_round > background.STALLED_AFTER:
        background.wake()
