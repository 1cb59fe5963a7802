"""Connections to one server for threads.

redis-py's own ConnectionPool takes half of the time of a call (1.19 against 0.78 of a
PING, benchmarks/profile.py), and it raises at once when all connections are in use, so
that the request would go unlimited. So redis-py's connections are held here, in a list:
`pop` and `append` are atomic.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from .circuit_breaker import CircuitBreaker
from .commands import Call
from .connection import HeldConnection
from .errors import PoolExhaustedError

# Seconds: a connection used since then is not examined, which takes a sixth of a call.
FRESH = 0.005


class Pool:
    """At most `maximum` connections, the one used last first.

    They connect when they are acquired.
    """

    def __init__(
        self,
        make: Callable[[], HeldConnection],
        maximum: int,
        breaker: CircuitBreaker,
    ) -> None:
        self.maximum = maximum
        self._make = make
        self._breaker = breaker
        self._idle: list[HeldConnection] = []
        # When a connection was found closed: those used before are examined.
        self._lost_at = 0.0
        # Weak: an interrupted call may drop its connection.
        self._made: weakref.WeakSet[HeldConnection] = weakref.WeakSet()
        self._released = threading.Condition(threading.Lock())
        self._waiting = 0

    def acquire(self, call: Call) -> HeldConnection:
        """Return a connection that is connected, within the time of a call."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._make_or_wait(call.deadline(self._breaker.timeout))

        last_call = connection.last_call
        is_doubtful = last_call <= self._lost_at or call.sent_at - last_call >= FRESH
        if is_doubtful and connection.is_stale():
            try:
                connection.connect(call.deadline(self._breaker.timeout))
            except BaseException:
                self.discard(connection)
                raise
        return connection

    def release(self, connection: HeldConnection, last_call: float) -> None:
        """Take back a connection on which no reply is outstanding."""
        connection.last_call = last_call
        self._idle.append(connection)
        if self._waiting:
            self._notify()

    def discard(self, connection: HeldConnection) -> None:
        """Take back a connection on which a reply may still arrive.

        It is closed, so that nobody else reads that reply.
        """
        connection.disconnect()
        self._idle.append(connection)
        self._notify()

    def examine_idle(self) -> None:
        """Have the connections examined before they are used again.

        The server closed one, and perhaps others.
        """
        self._lost_at = time.monotonic()

    def disconnect_idle(self) -> None:
        """Close the connections that are not in use.

        Behind the same address there may be another server now.
        """
        idle = []
        with suppress(IndexError):  # none is left
            while True:
                idle.append(self._idle.pop())
        for connection in idle:
            self.discard(connection)

    def _notify(self) -> None:
        with self._released:
            self._released.notify_all()

    def _make_or_wait(self, deadline: float) -> HeldConnection:
        with self._released:
            self._waiting += 1
            try:
                while True:
                    with suppress(IndexError):  # none is there, or no more
                        connection = self._idle.pop()
                        connection.is_delayed = True
                        return connection
                    if len(self._made) < self.maximum:
                        connection = self._make()
                        self._made.add(connection)
                        return connection

                    self._released.wait(deadline - time.monotonic())
                    is_late = time.monotonic() >= deadline
                    if is_late or self._breaker.error is not None:
                        message = f"All {self.maximum} connections are in use."
                        raise PoolExhaustedError(message)
            finally:
                self._waiting -= 1
