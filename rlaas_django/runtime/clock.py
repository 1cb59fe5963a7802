"""The frozen clock of tests and replayed logs.

Without it, every decision uses the clock of the Redis server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """A clock that stands still until `tick` moves it."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def tick(self, ms: int) -> None:
        self.ms += ms


frozen: Clock | None = None  # set by `frozen_clock`


@contextmanager
def frozen_clock(ms: int | None = None) -> Iterator[Clock]:
    """Make every decision inside, in any thread or task, at this time.

    Left out: the present.

    >>> with frozen_clock() as clock:
    ...     check("alice")
    ...     clock.tick(60_000)
    """
    global frozen
    before = frozen
    frozen = Clock(_present_ms() if ms is None else int(ms))
    try:
        yield frozen
    finally:
        frozen = before


def script_time() -> str | int:
    """Return what scripts take as the time: '' is the server's clock."""
    return "" if frozen is None else frozen.ms


def local_time_ms() -> int:
    """Return the time for decisions that are made without Redis."""
    return _present_ms() if frozen is None else frozen.ms


def _present_ms() -> int:
    return time.time_ns() // 1_000_000
