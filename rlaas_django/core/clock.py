"""The frozen clock of tests. Outside of it, every decision uses the Redis server's own clock."""

from __future__ import annotations

import time


class Clock:
    """A clock that stands still until `tick` moves it."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def tick(self, ms: int) -> None:
        self.ms += ms


frozen: Clock | None = None  # set by `rlaas_django.testing.frozen_clock`


def script_time() -> str | int:
    """Return what scripts take as the time: '' is the server's clock."""
    return "" if frozen is None else frozen.ms


def local_time_ms() -> int:
    """Return the time for decisions that are made without Redis."""
    return time.time_ns() // 1_000_000 if frozen is None else frozen.ms
