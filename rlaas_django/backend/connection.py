"""Connections, made as the site's cache makes its own: its connection class, its options, but our own timeouts.

Replies are read from the parser of a connection, which returns most error replies, and raises those that mean the end
of the connection. The connection's own `read_response` calls the parser, too, but prepares an error message first, for
each reply: that takes a tenth of a decision (benchmarks/profile.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
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

# Options of the cache that our connections do not take over: what would repeat a call, what changes the replies that we
# read, what belongs to redis-py's own pools, and the timeouts, which are RATE_LIMITER['TIMEOUT'].
_IGNORED_OPTIONS = {
    *("retry", "retry_on_timeout", "retry_on_error", "health_check_interval"),
    *("decode_responses", "protocol", "cache", "cache_config"),
    *(
        "connection_class",
        "connection_pool",
        "max_connections",
        "timeout",
        "url",
        "ssl",
    ),
    *("socket_timeout", "socket_connect_timeout"),
}
# Accepted by redis-py's connections for threads alone.
_SYNC_ONLY = {
    *(
        "parser_class",
        "command_packer",
        "socket_type",
        "ssl_validate_ocsp",
        "ssl_validate_ocsp_stapled",
    ),
    *("ssl_ocsp_context", "ssl_ocsp_expected_cert"),
}
ASYNC_CLASSES: tuple[tuple[type, type], ...] = (
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.Connection, redis.asyncio.Connection),
)
_OWN_CLASSES = {each for pair in ASYNC_CLASSES for each in pair}


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
        names = [
            name
            for name in options
            if name not in _IGNORED_OPTIONS and not name.startswith(("maint_", "oss_"))
        ]
        kept = {name: options[name] for name in names}
        return cls(
            connection_class, {**kept, "protocol": 2}, min(maximum, MAX_CONNECTIONS)
        )

    def at(self, address: Address) -> ConnectionOptions:
        """Return the same for another server."""
        return self._replace(
            options={**self.options, "host": address[0], "port": address[1]}
        )

    @property
    def address(self) -> Address:
        """The host and port; of a unix socket, the path and 0."""
        if "path" in self.options:
            return str(self.options["path"]), 0
        return str(self.options.get("host") or "localhost"), int(
            self.options.get("port") or 6379
        )

    def connection(self, timeout: float) -> HeldConnection:
        """Return a new connection for threads, not connected yet."""
        limits = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
        }
        connection = self.connection_class(**self.options, **limits)
        return HeldConnection(
            connection,
            self._reader(connection, self.options.get("parser_class", DefaultParser)),
        )

    def async_connection(self) -> tuple[Any, Any]:
        """Return a new connection for a loop, not connected yet and without timeouts, and what reads its replies."""
        kind = next(
            other
            for known, other in ASYNC_CLASSES
            if issubclass(self.connection_class, known)
        )
        options = {
            name: value
            for name, value in self.options.items()
            if name not in _SYNC_ONLY
        }
        limits = {
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "retry": AsyncRetry(NoBackoff(), 0),
        }
        connection = kind(**options, **limits)
        return connection, self._reader(connection, AsyncDefaultParser)

    def _reader(self, connection: Any, parser_class: Callable[..., Any]) -> Any:
        """Give a connection a parser, and return it: its `read_response` reads replies.

        The connection itself where its class is not redis-py's own, or where a function of the site's is called when it
        connects: these may read in another way, or choose another parser.
        """
        if (
            type(connection) not in _OWN_CLASSES
            or self.options.get("redis_connect_func") is not None
        ):
            return connection
        parsers = []

        def make(socket_read_size: int) -> Any:
            parsers.append(parser_class(socket_read_size=socket_read_size))
            return parsers[0]

        connection.set_parser(make)
        return parsers[0]


class HeldConnection:
    """A connection for threads, which a pool holds while nobody uses it."""

    __slots__ = ("__weakref__", "connection", "is_new", "last_call", "read")

    def __init__(self, connection: Any, reader: Any) -> None:
        self.connection = connection
        self.read = reader.read_response
        self.is_new = True  # nothing was read from it yet
        self.last_call = NOT_CONNECTED  # when it was sent

    def connect(self) -> None:
        """Connect anew."""
        self.connection.disconnect()
        self.is_new = True
        try:
            self.connection.connect()
        except redis.ResponseError as error:  # to AUTH or SELECT
            raise redis.ConnectionError(str(error)) from error

    def wait(self, deadline: float) -> None:
        """Wait for a reply of a page's call, for longer than the connection's own timeout; TimeoutError."""
        if not self.connection.can_read(timeout=max(0.0, deadline - monotonic())):
            raise redis.TimeoutError

    def disconnect(self) -> None:
        self.last_call = NOT_CONNECTED
        self.connection.disconnect()

    def is_stale(self) -> bool:
        """Return whether the server closed the connection, or sent a reply to no call."""
        try:
            return self.last_call == NOT_CONNECTED or bool(
                self.connection.can_read(timeout=0)
            )
        except redis.RedisError:
            return True
