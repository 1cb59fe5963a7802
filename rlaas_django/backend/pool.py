"""Connections to one server for threads.

redis-py's own ConnectionPool takes half of the time of a call (1.19 against 0.78 of a PING, benchmarks/profile.py), and
it raises at once when all connections are in use, so that the request would go unlimited. So redis-py's connections are
held here, in a list: `pop` and `append` are atomic.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis

from .errors import PoolExhaustedError

MAX_WAIT = 5.0  # seconds for a free connection while the server answers
FRESH = 0.005  # seconds: a connection used since then is not examined, which would take a sixth of a call
NOT_CONNECTED = -math.inf


class Pool:
    """At most `maximum` connections, the one used last first; they connect when they are acquired."""

    def __init__(self, make: Callable[[], Any], maximum: int, is_available: Callable[[], bool]) -> None:
        self.maximum = maximum
        self._make, self._is_available = make, is_available
        self._idle: list[tuple[Any, float]] = []  # with the time of the last use, or NOT_CONNECTED
        self._lost_at = 0.0  # when a connection was found closed: those used before are examined
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # without one that an interrupted call dropped
        self._released = threading.Condition(threading.Lock())
        self._waiting = 0

    def acquire(self) -> tuple[Any, bool]:
        """Return a connection that is connected, and whether it is new."""
        try:
            connection, used = self._idle.pop()
        except IndexError:
            connection, used = self._make_or_wait()
        if used > self._lost_at and time.monotonic() - used < FRESH:
            return connection, False
        if used != NOT_CONNECTED and not _is_stale(connection):
            return connection, False
        try:
            connection.disconnect()
            connection.connect()
        except BaseException as error:
            self.discard(connection)
            if isinstance(error, redis.ResponseError):  # to AUTH or SELECT
                raise redis.ConnectionError(str(error)) from error
            raise
        return connection, True

    def release(self, connection: Any, used: float | None = None) -> None:
        """Take back a connection on which no reply is outstanding."""
        self._idle.append((connection, time.monotonic() if used is None else used))
        if self._waiting:
            with self._released:
                self._released.notify_all()

    def discard(self, connection: Any) -> None:
        """Take back a connection on which a reply may still arrive: it is closed, so that nobody else reads it."""
        connection.disconnect()
        self.release(connection, NOT_CONNECTED)

    def examine_idle(self) -> None:
        """Have the connections examined before they are used again: the server closed one, and perhaps others."""
        self._lost_at = time.monotonic()

    def disconnect_idle(self) -> None:
        """Close the connections that are not in use: behind the same address there may be another server now."""
        idle = []
        with suppress(IndexError):  # none is left
            while True:
                idle.append(self._idle.pop()[0])
        for connection in idle:
            self.discard(connection)

    def _make_or_wait(self) -> tuple[Any, float]:
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
                        return connection, NOT_CONNECTED
                    self._released.wait(deadline - time.monotonic())
                    if not self._is_available() or time.monotonic() >= deadline:
                        raise PoolExhaustedError(f"All {self.maximum} connections are in use.")
            finally:
                self._waiting -= 1


def _is_stale(connection: Any) -> bool:
    """Return whether the server closed the connection, or sent something that nobody asked for."""
    try:
        return bool(connection.can_read(timeout=0))
    except redis.RedisError:
        return True
