"""One Redis process: our own connections to it, for threads and for loops, within our own time.

A call that may have run is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ResponseError

from .breaker import Breaker
from .channel import Channel
from .lines import Line, Lines, NoConnectionError, OrdinaryLine, gives_its_socket, is_fake, ours
from .wire import Batch, Message, first_error, pack

PATIENCE = 1.0  # seconds that a page waits for a reply, where a decision waits for TIMEOUT

# Answers to whatever is asked. Not OOM and MISCONF: such a server still tells who is over a limit.
WHOLE_SERVER = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
)


class UnavailableError(Exception):
    """Redis could not be asked, or gave an error for an answer; the cause is what it said."""


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
        self._quick = self._lines(self.timeout)
        self._patient = self._lines(max(self.timeout, PATIENCE))
        self._channels: dict[asyncio.AbstractEventLoop, Channel] = {}
        self.breaker.renew_lock()

    def _lines(self, timeout: float) -> Lines:
        return Lines(lambda: self.line(timeout), self.breaker, self._most)

    def line(self, timeout: float) -> Line:
        """A new connection, not connected yet."""
        kind, options = self._connection_class, {**self._options, "socket_connect_timeout": self.timeout}
        if gives_its_socket(kind):
            return Line(ours(kind)(**options, socket_timeout=timeout))
        return OrdinaryLine(kind(**options, socket_timeout=timeout))

    def send(self, message: Message, *, patient: bool = False) -> Any:
        """The reply, or a list of them when there are several; the first error among them is raised."""
        lines = self._patient if patient else self._quick
        line = None
        try:
            line = lines.take()
            reply = line.ask(message)
        except BaseException as error:
            try:
                self._failed(error)
            finally:
                if line is not None:
                    line.disconnect()  # a reply may still be on its way, and must not reach the next caller
                    lines.idle.append(line)
            raise
        lines.idle.append(line)
        if message.replies > 1 or type(reply) is not list or self.breaker.error is not None:
            self._heed(reply, message, patient)
        return reply

    async def asend(self, message: Message) -> Any:
        """As `send`, natively async."""
        if is_fake(self._connection_class):
            return self.send(message)  # which waits for nothing
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            channel = await self._open_channel(loop)
        try:
            reply = await channel.ask(message)
        except BaseException as error:
            self._failed(error)
            raise
        if message.replies > 1 or type(reply) is not list or self.breaker.error is not None:
            self._heed(reply, message)
        return reply

    def _heed(self, reply: Any, message: Message, patient: bool = False) -> None:
        """What an answer says of the server; raised, if it is an error."""
        error = first_error(reply, message)
        if error is not None:
            self._refused(error, patient)
            raise error
        if self.breaker.error is not None:
            self.breaker.succeeded()

    def _refused(self, error: ResponseError, patient: bool) -> None:
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
        """A call had no answer. Raises what was made of it as a RedisError, if it is none."""
        if not isinstance(error, Exception) or isinstance(error, NoConnectionError):
            return
        ours: Exception = error
        if _is_timeout(error) or _is_timeout(error.__context__):
            ours = redis.TimeoutError(f"{self.name} did not answer in time")
        elif isinstance(error, OSError):
            ours = redis.ConnectionError(f"{self.name}: {error}")
        elif not isinstance(error, redis.RedisError):
            ours = redis.InvalidResponse(f"{self.name} gave no answer of Redis: {error!r}")
        self.breaker.failed(ours)
        if ours is not error:
            raise ours from error

    def _blame(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._failed(error)

    def nonsense(self, reply: Any) -> UnavailableError:
        """It answered what no server does whom we should ask."""
        error = UnavailableError(f"{self.name} gave no answer of Redis: {reply!r:.100}")
        self.breaker.failed(error)
        return error

    async def _open_channel(self, loop: asyncio.AbstractEventLoop) -> Channel:
        for dead in [each for each in list(_open) if each.loop.is_closed()]:
            _forget(dead)
        channel = self._channels[loop] = Channel(self.name, self.timeout, self._dial, self._blame, loop)
        _open[channel] = self, channel.closing_with_the_loop(_forget)
        await anext(_open[channel][1])
        return channel

    async def _dial(self, protocol: Callable[[], asyncio.Protocol]) -> Batch:
        """Connect, and tell what is to be said first; as redis-py would, of which nothing is in the way here."""
        options, loop = self._options, asyncio.get_running_loop()
        if issubclass(self._connection_class, redis.UnixDomainSocketConnection):
            await loop.create_unix_connection(protocol, options["path"])
            return await self._greeting()
        # One of redis-py's, which is not connected, for its defaults and its TLS.
        secure = issubclass(self._connection_class, redis.SSLConnection)
        like: Any = redis.asyncio.SSLConnection(**_for_tls(options)) if secure else redis.asyncio.Connection(**options)
        context = like.ssl_context.get() if secure else None
        transport, _ = await loop.create_connection(protocol, like.host, like.port, ssl=context)
        if like.socket_keepalive:
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in like.socket_keepalive_options.items():
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        return await self._greeting()

    async def _greeting(self) -> Batch:
        options, commands = self._options, []
        if (provider := options.get("credential_provider")) is not None:
            commands.append(("AUTH", *await provider.get_credentials_async()))
        elif options.get("username") or options.get("password"):
            names = [options["username"]] if options.get("username") else []
            commands.append(("AUTH", *names, options.get("password") or ""))
        if options.get("client_name"):
            commands.append(("CLIENT", "SETNAME", options["client_name"]))
        if options.get("db"):
            commands.append(("SELECT", options["db"]))
        # Whatever an old server says to this, it is heard whether it wants a password.
        return pack(*commands, ("CLIENT", "SETINFO", "LIB-NAME", "rlaas_django"))


def _is_timeout(error: BaseException | None) -> bool:
    return isinstance(error, (BlockingIOError, TimeoutError))  # the first is how the kernel tells of one


def _for_tls(options: dict[str, Any]) -> dict[str, Any]:
    """Without what redis-py has for threads alone, as OCSP."""
    known = inspect.signature(redis.asyncio.SSLConnection).parameters
    return {option: value for option, value in options.items() if option in known or not option.startswith("ssl_")}


def _is_about_all(error: ResponseError) -> bool:
    """Whether a server would answer so whatever it is asked."""
    text = str(error)
    if isinstance(error, WHOLE_SERVER):
        return "slot not served" not in text
    return text.startswith("BUSY ") or "-READONLY " in text  # what a script's command was told, before Redis 7


# By channel, whose it is and what ends it with its loop: also those of servers that another setting has replaced.
_open: dict[Channel, tuple[Server, Any]] = {}


def _forget(channel: Channel) -> None:
    known = _open.pop(channel, None)
    if known is not None:
        known[0]._channels.pop(channel.loop, None)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
_inherited: list[Any] = []


def _leave_to_the_parent() -> None:
    """In a fork: the connections are the parent's. They are kept from the garbage collector, as closing one of a loop
    would disturb the parent's."""
    for server in list(_servers):
        _inherited.append(vars(server).copy())
        server.start_anew()


os.register_at_fork(after_in_child=_leave_to_the_parent)
