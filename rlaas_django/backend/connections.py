"""Connections made as the site's cache makes its own: its connection class, its options, but our own time limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

MAX_CONNECTIONS = 100  # per process and server

# Not taken over from the cache: what would repeat a call, what changes the replies that we read, what belongs to
# redis-py's own pools, and the time limits, which are RATE_LIMITER['TIMEOUT'].
_OURS = {
    *("retry", "retry_on_timeout", "retry_on_error", "health_check_interval"),
    *("decode_responses", "protocol", "cache", "cache_config"),
    *("connection_class", "connection_pool", "max_connections", "timeout", "url", "ssl"),
    *("socket_timeout", "socket_connect_timeout"),
}
_OF_POOLS = ("maint", "oss_", "orig_", "himport_", "event_")
# Accepted by redis-py's connections for threads alone.
_SYNC_ONLY = {
    *("parser_class", "command_packer", "socket_type", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled"),
    *("ssl_ocsp_context", "ssl_ocsp_expected_cert"),
}
_ASYNC_CLASSES: tuple[tuple[type, type], ...] = (
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.Connection, redis.asyncio.Connection),
)


@dataclass(frozen=True)
class ConnectionOptions:
    """What connections to one server are made of."""

    connection_class: type[Any]
    options: dict[str, Any]
    maximum: int

    @classmethod
    def of(cls, connection_class: type[Any], options: dict[str, Any], maximum: int) -> ConnectionOptions:
        """Return the options of a cache's pool, without what is ours."""
        kept = {
            name: value
            for name, value in options.items()
            if name not in _OURS and not name.startswith(("maint_", "oss_"))
        }
        return cls(connection_class, {**kept, "protocol": 2}, min(maximum, MAX_CONNECTIONS))

    def at(self, address: tuple[str, int]) -> ConnectionOptions:
        """Return the same for another server."""
        options = {**self.options, "host": address[0], "port": address[1]}
        return ConnectionOptions(self.connection_class, options, self.maximum)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port; of a unix socket, the path and 0."""
        if "path" in self.options:
            return str(self.options["path"]), 0
        return str(self.options.get("host") or "localhost"), int(self.options.get("port") or 6379)

    @property
    def is_fake(self) -> bool:
        """Whether it is fakeredis', which has no socket."""
        return self.connection_class.__module__.partition(".")[0] == "fakeredis"

    def connection(self, timeout: float) -> Any:
        """Return a new connection for threads, not connected yet."""
        retry = Retry(NoBackoff(), 0)
        return self.connection_class(
            **self.options, retry=retry, socket_timeout=timeout, socket_connect_timeout=timeout
        )

    def async_connection(self, timeout: float) -> Any:
        """Return a new connection for a loop, not connected yet; the multiplexer keeps the time of its replies."""
        kind = next(other for known, other in _ASYNC_CLASSES if issubclass(self.connection_class, known))
        options = {name: value for name, value in self.options.items() if name not in _SYNC_ONLY}
        retry = AsyncRetry(NoBackoff(), 0)
        return kind(**options, retry=retry, socket_timeout=None, socket_connect_timeout=timeout)
