"""The frozen clock, of tests and of replayed logs. Outside of it, every decision uses the Redis server's own clock."""

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
    """Every decision inside, in any thread or task, is made at this time; left out: the present.

    >>> with frozen_clock() as clock:
    ...     check("alice")
    ...     clock.tick(60_000)
    """
    global frozen
    before, frozen = (
        frozen,
        Clock(time.time_ns() // 1_000_000 if ms is None else int(ms)),
    )
    try:
        yield frozen
    finally:
        frozen = before


def script_time() -> str | int:
    """Return what scripts take as the time: '' is the server's clock."""
    return "" if frozen is None else frozen.ms


def local_time_ms() -> int:
    """Return the time for decisions that are made without Redis."""
    return time.time_ns() // 1_000_000 if frozen is None else frozen.ms
