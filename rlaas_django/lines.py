"""Connections to one server for threads: made and greeted by redis-py, asked by us.

A connection on which a reply may still come is never used again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import redis
from redis.exceptions import ResponseError

from .breaker import Breaker
from .wire import Message, reader

LONGEST_WAIT = 5.0  # seconds for a connection while all are in use and Redis answers
FRESH = 0.005  # seconds: a server is not restarted in less, so a connection used since needs no look
CHUNK = 16_384  # bytes to read at once; the reply to a decision has about a hundred


class _Ours:
    """A connection of redis-py's that lets us have its socket: its own way to send and to read takes twice the time of
    all else in a call."""

    plug: Any = None

    def _connect(self) -> Any:
        self.plug = connected = super()._connect()  # type: ignore[misc]
        # Where the kernel keeps the time, Python need not look before each read and write whether to wait. It cannot
        # for TLS, whose reads are not the socket's, nor for gevent's and eventlet's sockets, which never block. Where
        # signals come again and again, each would let the time begin anew.
        if type(connected).__module__ == "socket" and _KERNEL_KEEPS_TIME and not _is_interrupted():
            seconds, rest = divmod(self.socket_timeout, 1)  # type: ignore[attr-defined]
            timeval = struct.pack("ll", int(seconds), int(rest * 1_000_000))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            connected.settimeout(None)
        return connected


_KERNEL_KEEPS_TIME = sys.platform in ("linux", "darwin")


def _is_interrupted() -> bool:
    """Whether a timer of the process' sends signals, as a profiler's does."""
    return any(signal.getitimer(timer)[1] for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF))


def is_fake(connection_class: type) -> bool:
    """Whether it is fakeredis', which has no socket."""
    return connection_class.__module__.partition(".")[0] == "fakeredis"


def gives_its_socket(connection_class: type) -> bool:
    """Not if a redis-py to come has another name for its hook."""
    return hasattr(connection_class, "_connect") and not is_fake(connection_class)


@lru_cache
def ours(connection_class: type) -> type:
    return type(connection_class.__name__, (_Ours, connection_class), {})


class Line:
    """One connection, and who asks through it."""

    __slots__ = ("__weakref__", "_feed", "_gets", "_has_more", "_recv", "_sendall", "connection", "used")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.used: float | None = None  # when, if it is connected

    def connect(self) -> None:
        try:
            self.connection.disconnect()
            self.connection.connect()
        except BaseException as error:
            self.disconnect()
            if isinstance(error, ResponseError):  # to the password, say, or the database's number
                raise redis.ConnectionError(str(error)) from error
            raise
        self._plug_in()

    def _plug_in(self) -> None:
        replies = reader()
        self._sendall, self._recv = self.connection.plug.sendall, self.connection.plug.recv
        self._feed, self._gets, self._has_more = replies.feed, replies.gets, replies.has_data

    def disconnect(self) -> None:
        self.used = None
        self.connection.disconnect()

    def ask(self, message: Message) -> Any:
        """The reply, or a list of them when there are several; an error among them is given, not raised."""
        self._sendall(message.packed)
        if message.replies == 1:
            self._feed(self._recv(CHUNK))
            reply = self._gets()
            if type(reply) is not list:  # as a decision is
                reply = self._rest(reply)
        else:
            reply = [self._rest(self._gets()) for _ in range(message.replies)]
        if self._has_more():
            raise redis.InvalidResponse("It said more than it was asked.")  # which the next caller must not get
        self.used = time.monotonic()
        return reply

    def _rest(self, reply: Any) -> Any:
        """A reply once it is there as a whole; one that comes in small pieces must be in time too."""
        ends = time.monotonic() + self.connection.socket_timeout
        while reply is False:
            if time.monotonic() > ends:
                raise TimeoutError
            data = self._recv(CHUNK)
            if not data:
                raise redis.ConnectionError("It closed the connection.")
            self._feed(data)
            reply = self._gets()
        if isinstance(reply, redis.ConnectionError):  # it is loading, say, or wants a password
            raise reply
        return reply

    def is_spoilt(self) -> bool:
        """Whether the server has closed it, or says what nobody asked."""
        try:
            return bool(self.connection.can_read(timeout=0))
        except redis.RedisError:
            return True


class OrdinaryLine(Line):
    """By redis-py's own ways, where its socket is not to be had."""

    __slots__ = ()

    def _plug_in(self) -> None:
        """There is nothing to plug into."""

    def ask(self, message: Message) -> Any:
        self.connection.send_packed_command((message.packed,), check_health=False)
        replies = [self._reply() for _ in range(message.replies)]
        self.used = time.monotonic()
        return replies[0] if message.replies == 1 else replies

    def _reply(self) -> Any:
        try:
            return self.connection.read_response()
        except ResponseError as error:
            return error


class NoConnectionError(redis.exceptions.ConnectionError):
    """All connections were in use for too long; the server is not to blame."""


class Lines:
    """So many connections at most, the one used last first. One that is not connected connects with its next call."""

    def __init__(self, make: Callable[[], Line], breaker: Breaker, most: int) -> None:
        self.make, self.breaker, self.most = make, breaker, most
        self.made: weakref.WeakSet[Line] = weakref.WeakSet()  # without one that got lost in an interrupted call
        self.idle: list[Line] = []  # pop and append are atomic
        self.lock = threading.Lock()

    def take(self) -> Line:
        """One that is connected."""
        try:
            line = self.idle.pop()
        except IndexError:
            line = self._another()
        used = line.used
        if used is None or (time.monotonic() - used > FRESH and line.is_spoilt()):
            try:
                line.connect()
            except BaseException:
                self.idle.append(line)
                raise
        return line

    def close_idle(self) -> None:
        closed: list[Line] = []
        with contextlib.suppress(IndexError):
            while True:
                line = self.idle.pop()
                line.disconnect()
                closed.append(line)
        self.idle += closed

    def _another(self) -> Line:
        """A new one, or one that comes back: a caller who is turned away would be let through as if Redis were down,
        and to ask often enough at once would be a way around every limit."""
        patience = time.monotonic() + LONGEST_WAIT
        while True:
            with self.lock:
                if len(self.made) < self.most:
                    line = self.make()
                    self.made.add(line)
                    return line
            if self.breaker.error is not None or time.monotonic() > patience:
                raise NoConnectionError(f"All {self.most} connections are in use.")
            time.sleep(0.001)
            with contextlib.suppress(IndexError):
                line = self.idle.pop()
                if self.breaker.error is None:
                    return line
                self.idle.append(line)
