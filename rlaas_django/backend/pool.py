"""Connections to one server for threads.

redis-py's own ConnectionPool takes half of the time of a call (1.19 against 0.78 of a PING, benchmarks/profile.py), and
it raises at once when all connections are in use, so that the request would go unlimited. So redis-py's connections are
held here, in a list: `pop` and `append` are atomic.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from .connection import HeldConnection
from .errors import PoolExhaustedError

MAX_WAIT = 5.0  # seconds for a free connection while the server answers
FRESH = 0.005  # seconds: a connection used since then is not examined, which would take a sixth of a call


class Pool:
    """At most `maximum` connections, the one used last first; they connect when they are acquired."""

    def __init__(
        self,
        make: Callable[[], HeldConnection],
        maximum: int,
        is_available: Callable[[], bool],
    ) -> None:
        self.maximum = maximum
        self._make, self._is_available = make, is_available
        self._idle: list[HeldConnection] = []
        self._lost_at = (
            0.0  # when a connection was found closed: those used before are examined
        )
        self._made: weakref.WeakSet[HeldConnection] = (
            weakref.WeakSet()
        )  # without one that an interrupted call dropped
        self._released = threading.Condition(threading.Lock())
        self._waiting = 0

    def acquire(self, now: float) -> HeldConnection:
        """Return a connection that is connected."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._make_or_wait()
        last_call = connection.last_call
        if (
            last_call <= self._lost_at or now - last_call >= FRESH
        ) and connection.is_stale():
            try:
                connection.connect()
            except BaseException:
                self.discard(connection)
                raise
        return connection

    def release(self, connection: HeldConnection, last_call: float) -> None:
        """Take back a connection on which no reply is outstanding."""
        connection.last_call, connection.is_new = last_call, False
        self._idle.append(connection)
        if self._waiting:
            self._notify()

    def discard(self, connection: HeldConnection) -> None:
        """Take back a connection on which a reply may still arrive: it is closed, so that nobody else reads it."""
        connection.disconnect()
        self._idle.append(connection)
        self._notify()

    def examine_idle(self) -> None:
        """Have the connections examined before they are used again: the server closed one, and perhaps others."""
        self._lost_at = time.monotonic()

    def disconnect_idle(self) -> None:
        """Close the connections that are not in use: behind the same address there may be another server now."""
        idle = []
        with suppress(IndexError):  # none is left
            while True:
                idle.append(self._idle.pop())
        for connection in idle:
            self.discard(connection)

    def _notify(self) -> None:
        with self._released:
            self._released.notify_all()

    def _make_or_wait(self) -> HeldConnection:
        deadline = time.monotonic() + MAX_WAIT
        with self._released:
            self._waiting += 1
            try:
                while True:
                    with suppress(IndexError):  # none is there, or no more
                        return self._idle.pop()
                    if len(self._made) < self.maximum:
                        connection = self._make()
                        self._made.add(connection)
                        return connection
                    self._released.wait(deadline - time.monotonic())
                    if not self._is_available() or time.monotonic() >= deadline:
                        raise PoolExhaustedError(
                            f"All {self.maximum} connections are in use."
                        )
            finally:
                self._waiting -= 1
