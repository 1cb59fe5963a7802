"""Connections, made as the site's cache makes its own, but with our own timeouts.

Replies are read from the parser of a connection, which returns most error replies, and
raises those that mean the end of the connection. The connection's own `read_response`
also calls the parser, but prepares an error message first, for each reply: that takes a
tenth of a decision (benchmarks/profile.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from types import new_class
from typing import Any, NamedTuple

import redis
import redis.asyncio
from redis.asyncio.connection import DefaultParser as AsyncDefaultParser
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.retry import Retry

Address = tuple[str, int]
MAX_CONNECTIONS = 100  # per process and server
NOT_CONNECTED = -math.inf
MIN_TIMEOUT = 0.001  # seconds; 0 would not wait at all

# Options of the cache that our connections do not take over.
_IGNORED_OPTIONS = {
    # What would repeat a call.
    "retry",
    "retry_on_timeout",
    "retry_on_error",
    "health_check_interval",
    # What changes the replies that we read.
    "decode_responses",
    "protocol",
    "cache",
    "cache_config",
    # What belongs to redis-py's own pools.
    "connection_class",
    "connection_pool",
    "max_connections",
    "timeout",
    "url",
    "ssl",
    # Instead of these, RATE_LIMITER['TIMEOUT'] applies.
    "socket_timeout",
    "socket_connect_timeout",
}
# Options that only redis-py's connections for threads accept.
_SYNC_ONLY = {
    "parser_class",
    "command_packer",
    "socket_type",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
}
# For threads, and for event loops.
CONNECTION_CLASSES: dict[type, type] = {
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
    redis.Connection: redis.asyncio.Connection,
}


class _Bounded:
    """Bounds what a connection of redis-py reads itself, when it connects.

    Its timeout is that of each reply: to AUTH, SETINFO, SELECT.
    """

    deadline = math.inf

    def read_response(self, *args: Any, **options: Any) -> Any:
        if self.deadline < math.inf:
            wait(self, self.deadline)
        return super().read_response(*args, **options)  # type: ignore[misc]


_BOUNDED = {
    known: new_class(known.__name__, (_Bounded, known)) for known in CONNECTION_CLASSES
}


class ConnectionOptions(NamedTuple):
    """What connections to one server are made of."""

    connection_class: type[Any]
    options: dict[str, Any]
    maximum: int

    @classmethod
    def of(
        cls, connection_class: type[Any], options: dict[str, Any], maximum: int
    ) -> ConnectionOptions:
        """Return the options of a cache's pool, without those that are ignored."""
        kept = {
            name: value
            for name, value in options.items()
            if name not in _IGNORED_OPTIONS and not name.startswith(("maint_", "oss_"))
        }
        kept["protocol"] = 2
        return cls(connection_class, kept, min(maximum, MAX_CONNECTIONS))

    def at(self, address: Address) -> ConnectionOptions:
        """Return the same for another server."""
        host, port = address
        return self._replace(options={**self.options, "host": host, "port": port})

    @property
    def address(self) -> Address:
        """The host and port.

        Of a unix socket, the path and 0.
        """
        if "path" in self.options:
            return str(self.options["path"]), 0

        host = self.options.get("host") or "localhost"
        port = self.options.get("port") or 6379
        return str(host), int(port)

    def connection(self, timeout: float) -> HeldConnection:
        """Return a new connection for threads, not connected yet."""
        connection_class = _BOUNDED.get(self.connection_class, self.connection_class)
        connection = connection_class(**self.options, **timeouts(timeout))
        parser_class = self.options.get("parser_class", DefaultParser)
        return HeldConnection(connection, self._reader(connection, parser_class))

    def async_connection(self) -> tuple[Any, Any]:
        """Return a new connection for an event loop, and what reads its replies.

        It is not connected yet, and has no timeouts.
        """
        async_class: type[Any] = next(
            async_class
            for sync_class, async_class in CONNECTION_CLASSES.items()
            if issubclass(self.connection_class, sync_class)
        )
        options = {
            name: value
            for name, value in self.options.items()
            if name not in _SYNC_ONLY
        }
        connection = async_class(
            **options,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=AsyncRetry(NoBackoff(), 0),
        )
        return connection, self._reader(connection, AsyncDefaultParser)

    def _reader(self, connection: Any, parser_class: Callable[..., Any]) -> Any:
        """Give a connection a parser, and return what has `read_response`.

        The parser, or the connection itself, which may read in another way or choose
        another parser: if its class is not redis-py's own, or if a function of the
        site's is called when it connects.
        """
        redis_classes = {*_BOUNDED.values(), *CONNECTION_CLASSES.values()}
        is_plain = self.options.get("redis_connect_func") is None
        if type(connection) not in redis_classes or not is_plain:
            return connection

        parsers = []

        def make(socket_read_size: int) -> Any:
            parsers.append(parser_class(socket_read_size=socket_read_size))
            return parsers[0]

        connection.set_parser(make)
        return parsers[0]


def timeouts(seconds: float) -> dict[str, Any]:
    """Return the options of redis-py for a call that is tried once, for so long."""
    return {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": Retry(NoBackoff(), 0),
    }


def wait(connection: Any, deadline: float) -> None:
    """Wait for a reply until a deadline, whatever the connection's own timeout is."""
    if not connection.can_read(timeout=max(0.0, deadline - monotonic())):
        raise redis.TimeoutError


class HeldConnection:
    """A connection for threads, which a pool holds while nobody uses it."""

    def __init__(self, connection: Any, reader: Any) -> None:
        self.connection = connection
        self.read: Callable[[], Any] = reader.read_response
        if reader is connection:
            self.read = _returning_errors(reader.read_response)
        self.is_new = True  # nothing was read from it yet
        # Whether some time of the call was over before the connection could be used.
        self.is_delayed = False
        self.last_call = NOT_CONNECTED  # when it was sent

    def connect(self, deadline: float) -> None:
        """Connect anew."""
        connection = self.connection
        connection.disconnect()
        self.is_new = True
        self.is_delayed = True
        connection.socket_connect_timeout = max(MIN_TIMEOUT, deadline - monotonic())
        connection.deadline = deadline
        connection.connect()
        connection.deadline = math.inf

    def disconnect(self) -> None:
        self.last_call = NOT_CONNECTED
        self.connection.disconnect()

    def is_stale(self) -> bool:
        """Return whether the server closed it, or sent a reply to no call."""
        if self.last_call == NOT_CONNECTED:
            return True
        try:
            return bool(self.connection.can_read(timeout=0))
        except redis.RedisError:
            return True


# Not a method: a connection that has one of its own methods as an attribute would stay
# in the pool's WeakSet until the garbage collector runs.
def _returning_errors(read_response: Callable[[], Any]) -> Callable[[], Any]:
    """Return a reader that returns error replies, which `read_response` raises."""

    def read() -> Any:
        try:
            return read_response()
        except redis.ResponseError as error:
            return error

    return read
