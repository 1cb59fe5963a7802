"""One Redis process: our own connections to it, for threads and for loops, within our own time.

A call that may have run is never sent again, and a connection on which a reply may still come is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, Protocol

import redis
import redis.asyncio
from redis.exceptions import ResponseError

from .breaker import Breaker

PATIENCE = 1.0  # seconds that a page waits for a reply, where a decision waits for TIMEOUT
LONGEST_WAIT = 5.0  # seconds for a connection while all are in use and Redis answers
FRESH = 0.005  # seconds: a server is not restarted in less, so a connection used since needs no look
MOST_IN_FLIGHT = 128  # commands of a loop sent and not answered; the next wait their turn
GRACE = 0.01  # seconds for a loop that stood still to read what has arrived meanwhile

# Answers to whatever is asked. Not OOM and MISCONF: such a server still tells who is over a limit.
WHOLE_SERVER = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
)


class UnavailableError(Exception):
    """Redis could not be asked, or gave an error for an answer; the cause is what it said."""


class Message(Protocol):
    """Commands as they go over the wire, and how many replies they bring."""

    @property
    def packed(self) -> bytes: ...
    @property
    def replies(self) -> int: ...


class Batch(NamedTuple):
    """Commands of any kind."""

    packed: bytes
    replies: int = 1


def pack(*commands: Sequence[Any]) -> Batch:
    """Commands in Redis' protocol."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            encoded = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
    return Batch(b"".join(parts), len(commands))


class Server:
    """A Redis process, as it is reached from here."""

    def __init__(self, connection_class: Any, options: dict[str, Any], timeout: float, most: int) -> None:
        self.address = str(options.get("host") or options.get("path") or "redis"), int(options.get("port") or 0)
        self.name = f"Redis at {self.address[0]}" + (f":{self.address[1]}" if self.address[1] else "")
        self.breaker = Breaker(self.name)
        self.timeout = timeout
        self._connection_class, self._options, self._most = connection_class, options, most
        self.start_anew()
        _servers.add(self)

    def start_anew(self) -> None:
        self._quick = _Connections(self, self.timeout, self._most)
        self._patient = _Connections(self, max(self.timeout, PATIENCE), self._most)
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        self.breaker.renew_lock()

    def send(self, message: Message, *, patient: bool = False) -> Any:
        """The reply, or a list of them when there are several; the first error among them is raised."""
        connections = self._patient if patient else self._quick
        connection = None
        try:
            connection = connections.take()
            connection.send_packed_command((message.packed,), check_health=False)
            reply = connection.read_response() if message.replies == 1 else _read_all(connection, message.replies)
        except ResponseError as error:
            connections.give_back(connection)  # the server answered, and the connection is in order
            self._refused(error, patient)
            raise
        except BaseException as error:
            try:
                self._failed(error)
            finally:
                if connection is not None:
                    connection.disconnect()  # a reply may still be on its way, and must not reach the next caller
                    connections.give_back(connection, connected=False)
            raise
        connections.give_back(connection)
        if self.breaker.error is not None:
            self.breaker.succeeded()
        return reply

    async def asend(self, message: Message) -> Any:
        """As `send`, natively async."""
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            channel = await self._open_channel(loop)
        try:
            reply = await channel.send(message)
        except ResponseError as error:
            self._refused(error)
            raise
        except BaseException as error:
            self._failed(error)
            raise
        if self.breaker.error is not None:
            self.breaker.succeeded()
        return reply

    def _refused(self, error: ResponseError, patient: bool = False) -> None:
        if patient and isinstance(error, redis.exceptions.NoPermissionError):
            return  # a page asked for more than decisions need
        if _is_about_all(error):
            self.breaker.failed(error)
            # Behind the same name there may be another server by now.
            self._quick.close_idle()
            self._patient.close_idle()
            for channel in list(self._channels.values()):
                channel.stale = True
        elif self.breaker.error is not None:
            self.breaker.succeeded()

    def _failed(self, error: BaseException) -> None:
        """A call had no answer. Raises what redis-py made of it as a RedisError, if it is none."""
        if not isinstance(error, Exception) or isinstance(error, NoConnectionError):
            return
        if isinstance(error.__context__, BlockingIOError):  # how the kernel tells of a timeout
            ours: Exception = redis.TimeoutError(f"{self.name} did not answer in time")
        elif not isinstance(error, redis.RedisError):
            ours = redis.InvalidResponse(f"{self.name} gave no answer of Redis: {error!r}")
        else:
            self.breaker.failed(error)
            return
        self.breaker.failed(ours)
        raise ours from error

    def nonsense(self, reply: Any) -> UnavailableError:
        """It answered what no server does whom we should ask."""
        error = UnavailableError(f"{self.name} gave no answer of Redis: {reply!r:.100}")
        self.breaker.failed(error)
        return error

    def connect(self, timeout: float) -> Any:
        """A new connection, not connected yet."""
        kind = _KERNEL_TIMED.get(self._connection_class, self._connection_class)
        return kind(**self._options, socket_timeout=timeout, socket_connect_timeout=self.timeout)

    def aconnect(self) -> Any:
        """A new connection for a loop. Its time is kept by the channel, for many replies at once."""
        return _async_class(self._connection_class)(
            **self._options, socket_timeout=None, socket_connect_timeout=self.timeout
        )

    async def _open_channel(self, loop: asyncio.AbstractEventLoop) -> _Channel:
        for dead in [each for each in list(_open) if each.loop.is_closed()]:
            dead.forget()
        channel = self._channels[loop] = _Channel(self, loop)
        _open.add(channel)
        await anext(channel.guard)
        return channel

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        self._channels.pop(loop, None)


def _is_about_all(error: ResponseError) -> bool:
    """Whether a server would answer so whatever it is asked."""
    text = str(error)
    if isinstance(error, WHOLE_SERVER):
        return "slot not served" not in text
    return text.startswith("BUSY ") or "-READONLY " in text  # what a script's command was told, before Redis 7


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
_inherited: list[Any] = []


def _leave_to_the_parent() -> None:
    """In a fork: the connections are the parent's. They are kept from the garbage collector, as closing one of a loop
    would disturb the parent's."""
    for server in list(_servers):
        _inherited.append(vars(server).copy())
        server.start_anew()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class _KernelTimed:
    """A connection whose timeouts the kernel keeps: Python would look before each read and write whether to wait.

    Should redis-py give its hook another name, Python keeps the time as ever.
    """

    def _connect(self) -> socket.socket:
        connected: socket.socket = super()._connect()  # type: ignore[misc]
        if type(connected).__module__ != "socket":
            return connected  # gevent's or eventlet's never blocks, and so the kernel keeps no time for it
        seconds, rest = divmod(self.socket_timeout, 1)  # type: ignore[attr-defined]
        timeval = struct.pack("ll", int(seconds), int(rest * 1_000_000))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        connected.settimeout(None)
        return connected


class _Tcp(_KernelTimed, redis.Connection):
    pass


class _Unix(_KernelTimed, redis.UnixDomainSocketConnection):
    pass


# Not for TLS, whose reads are not the socket's, nor for a site's own classes.
_KERNEL_TIMED: dict[type, type] = (
    {redis.Connection: _Tcp, redis.UnixDomainSocketConnection: _Unix} if sys.platform in ("linux", "darwin") else {}
)


class NoConnectionError(redis.exceptions.ConnectionError):
    """All connections were in use for too long; the server is not to blame."""


class _Connections:
    """So many connections at most, the one used last first. One that is not connected connects with its next call."""

    def __init__(self, server: Server, timeout: float, most: int) -> None:
        self.server, self.timeout, self.most = server, timeout, most
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()  # without one that got lost in an interrupted call
        # With when each was used last, None if it is not connected. Pop and append are atomic.
        self.idle: list[tuple[Any, float | None]] = []
        self.lock = threading.Lock()

    def take(self) -> Any:
        """One that is connected."""
        try:
            connection, used = self.idle.pop()
        except IndexError:
            connection, used = self._another(), None
        if used is None or (time.monotonic() - used > FRESH and _is_spoilt(connection)):
            self._connect(connection)
        return connection

    def _connect(self, connection: Any) -> None:
        try:
            connection.disconnect()
            connection.connect()
        except BaseException as error:
            connection.disconnect()
            self.give_back(connection, connected=False)
            if isinstance(error, ResponseError):  # to the password, say, or the database's number
                raise redis.ConnectionError(str(error)) from error
            raise

    def give_back(self, connection: Any, *, connected: bool = True) -> None:
        self.idle.append((connection, time.monotonic() if connected else None))

    def close_idle(self) -> None:
        closed: list[tuple[Any, float | None]] = []
        with contextlib.suppress(IndexError):
            while True:
                connection, _ = self.idle.pop()
                connection.disconnect()
                closed.append((connection, None))
        self.idle += closed

    def _another(self) -> Any:
        """A new one, or one that comes back: a caller who is turned away would be let through as if Redis were down,
        and to ask often enough at once would be a way around every limit."""
        patience = time.monotonic() + LONGEST_WAIT
        while True:
            with self.lock:
                if len(self.made) < self.most:
                    connection = self.server.connect(self.timeout)
                    self.made.add(connection)
                    return connection
            if self.server.breaker.error is not None or time.monotonic() > patience:
                raise NoConnectionError(f"All {self.most} connections are in use.")
            time.sleep(0.001)
            with contextlib.suppress(IndexError):
                connection, used = self.idle.pop()
                if self.server.breaker.error is None:
                    return connection
                self.idle.append((connection, used))


def _is_spoilt(connection: Any) -> bool:
    """Whether the server has closed it, or says what nobody asked."""
    try:
        return bool(connection.can_read(timeout=0))
    except redis.RedisError:
        return True


def _read_all(connection: Any, count: int) -> list[Any]:
    replies = []
    error = None
    for _ in range(count):
        try:
            replies.append(connection.read_response())
        except ResponseError as each:
            error = error or each
    if error is not None:
        raise error
    return replies


class _Request:
    """A message on its way, and who waits for it. A cancelled one is still answered, to nobody."""

    __slots__ = ("ends", "future", "message", "replies")

    def __init__(self, message: Message, future: asyncio.Future[Any]) -> None:
        self.message, self.future = message, future
        self.ends = 0.0  # when its time is up; it begins when it is sent
        self.replies: list[Any] = []

    def add(self, reply: Any) -> bool:
        """Whether this was the last."""
        self.replies.append(reply)
        if len(self.replies) < self.message.replies:
            return False
        if not self.future.done():
            error = next((each for each in self.replies if isinstance(each, ResponseError)), None)
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(self.replies[0] if self.message.replies == 1 else self.replies)
        return True


class _Channel:
    """A loop's one connection, shared by its tasks: what has come together is sent at once, replies come in order.

    A task of its own does it while there is something to do, so that no caller's cancellation disturbs the others.
    """

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self.connection = server.aconnect()
        self.to_send: deque[_Request] = deque()
        self.sent: deque[_Request] = deque()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.used = 0.0
        self.stale = False
        self.guard = self._closing_with_the_loop()

    async def send(self, message: Message) -> Any:
        request = _Request(message, self.loop.create_future())
        self.to_send.append(request)
        if self.task is None:
            self.task = self.loop.create_task(self._work())
        return await request.future

    async def _work(self) -> None:
        try:
            await self._connect()
            while self.to_send or self.sent:
                await self._write()
                if self.sent:
                    await self._read()
        except BaseException as error:
            await self._break(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._keep_time(None)
            self.used, self.task = self.loop.time(), None

    async def _connect(self) -> None:
        self._keep_time(self.server.timeout)
        if self.connection.is_connected and (self.stale or self.loop.time() - self.used > FRESH):
            await asyncio.sleep(0)  # let the loop see whether the server has closed it
            if self.stale or await _is_spoilt_async(self.connection):
                await self.connection.disconnect(nowait=True)
        if not self.connection.is_connected:
            self.stale = False
            await self.connection.connect()

    async def _write(self) -> None:
        if not self.to_send or len(self.sent) >= MOST_IN_FLIGHT:
            return
        requests = [self.to_send.popleft() for _ in range(min(len(self.to_send), MOST_IN_FLIGHT - len(self.sent)))]
        wanted = [request for request in requests if not request.future.done()]
        self.sent.extend(wanted)
        ends = self.loop.time() + self.server.timeout
        for request in wanted:
            request.ends = ends
        if wanted:
            await self.connection.send_packed_command(
                [b"".join(each.message.packed for each in wanted)], check_health=False
            )

    async def _read(self) -> None:
        try:
            reply = await self.connection.read_response()
        except ResponseError as error:
            reply = error
        if self.sent[0].add(reply):
            self.sent.popleft()

    async def _break(self, error: BaseException) -> None:
        """Nobody knows which of the requests ran; nobody is to wait for them."""
        timed_out = self.timer is None
        if isinstance(error, asyncio.CancelledError):
            error = redis.exceptions.TimeoutError(f"{self.server.name} did not answer in time") if timed_out else error
        for request in (*self.sent, *self.to_send):
            if not request.future.done():
                if isinstance(error, Exception):
                    request.future.set_exception(error)
                else:
                    request.future.cancel()
        self.sent.clear()
        self.to_send.clear()
        with contextlib.suppress(Exception):
            await self.connection.disconnect(nowait=True)

    def _keep_time(self, seconds: float | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self.loop.call_later(seconds, self._last_call)

    def _last_call(self) -> None:
        left = self.sent[0].ends - self.loop.time() if self.sent else 0.0
        if left > 0:
            self._keep_time(left)
            return
        self.timer = self.loop.call_later(GRACE, self._too_late, self.sent[0] if self.sent else None)

    def _too_late(self, late: _Request | None) -> None:
        if self.sent and self.sent[0] is not late:
            self._last_call()  # that one was answered in the meantime
            return
        self.timer = None
        if self.task is not None:
            self.task.cancel()

    async def _closing_with_the_loop(self) -> AsyncGenerator[None]:
        """Suspended until the loop shuts its generators down, which is the last chance to close in order."""
        try:
            yield
        finally:
            self.forget()
            await self.connection.disconnect()

    def forget(self) -> None:
        self.server.forget(self.loop)
        _open.discard(self)


_open: set[_Channel] = set()  # also those of servers that another setting has replaced, until their loop ends


async def _is_spoilt_async(connection: Any) -> bool:
    look = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return bool(await look())
    except redis.RedisError:
        return True


def _async_class(sync: Any) -> Any:
    if sync.__module__.partition(".")[0] == "fakeredis":
        import fakeredis

        return getattr(fakeredis, "FakeAsyncRedisConnection", None) or fakeredis.FakeAsyncConnection
    if issubclass(sync, redis.SSLConnection):
        return redis.asyncio.SSLConnection
    if issubclass(sync, redis.UnixDomainSocketConnection):
        return redis.asyncio.UnixDomainSocketConnection
    return redis.asyncio.Connection
