"""Ctrl-C while there are temporary keys in Redis: the first one ends the work, and none ends the deletion."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """The handler of SIGINT: raises KeyboardInterrupt once, unless it is told to ignore it."""

    def __init__(self) -> None:
        self._ignored = False

    def __call__(self, *_: object) -> None:
        if not self._ignored:
            self._ignored = True
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore Ctrl-C from now on; called when the work is done and the deletion begins."""
        self._ignored = True


@contextmanager
def one_interrupt() -> Iterator[Interrupts]:
    """Have Ctrl-C interrupt the block once: further ones do not interrupt its `finally` and `with` clauses."""
    interrupts = Interrupts()
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # where no handler can be set, and none is called
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
