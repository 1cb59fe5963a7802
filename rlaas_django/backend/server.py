"""One Redis server as it is reached from this process: its circuit breaker, and connections for threads and loops.

A call that may have run is never sent again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis

from .circuit_breaker import CircuitBreaker
from .commands import Call
from .connections import ConnectionOptions
from .errors import PoolExhaustedError, concerns_whole_server
from .multiplexer import Multiplexer
from .pool import Pool

# Multiplexers live as long as their loops, also those of servers that other settings have replaced: a worker task that
# is garbage-collected while it waits is an error to asyncio.
_multiplexers: set[Multiplexer] = set()


class Server:
    """A Redis server."""

    def __init__(self, options: ConnectionOptions, timeout: float) -> None:
        self.options, self.timeout = options, timeout
        self.address = options.address
        self.name = f"Redis at {self.address[0]}" + (f":{self.address[1]}" if self.address[1] else "")
        self.breaker = breaker = CircuitBreaker(self.name)
        self._pool = Pool(lambda: options.connection(timeout), options.maximum, lambda: breaker.error is None)
        self._loops: dict[asyncio.AbstractEventLoop, Multiplexer] = {}

    def send(self, call: Call, *, timeout: float | None = None) -> Any:
        """Return the reply, or the list of replies; the first error among them is raised."""
        pool, connection = self._pool, None
        try:
            connection = pool.acquire()
            connection.send_packed_command((call.packed,), check_health=False)
            if timeout is not None and not connection.can_read(timeout):
                raise redis.TimeoutError
            reply = connection.read_response() if call.replies == 1 else _read_replies(connection, call.replies)
        except redis.ResponseError as error:  # after one, the connection is as good as after any reply
            pool.release(connection)
            self._record_error(error, admin=timeout is not None)
            raise
        except BaseException as error:  # noqa: BLE001  (raised again)
            # Recorded first: a thread that waits for the connection would take it to a server that fails.
            failure = self._record_failure(error) if isinstance(error, Exception) else error
            try:
                if connection is not None:
                    pool.discard(connection)
                if failure is error:
                    raise
                raise failure from error
            finally:
                del failure  # or it and this frame, with the connection, would keep each other alive
        pool.release(connection)
        if self.breaker.error is not None or call.replies > 1:
            self._record_reply(reply, admin=timeout is not None)
        return reply

    async def asend(self, call: Call) -> Any:
        """As `send`, without blocking the event loop."""
        if self.options.is_fake:  # fakeredis waits for nothing
            return self.send(call)
        loop = asyncio.get_running_loop()
        multiplexer = self._loops.get(loop) or self._open_multiplexer(loop)
        reply = await multiplexer.execute(call)
        if type(reply) is not list or self.breaker.error is not None or call.replies > 1:
            self._record_reply(reply)
        return reply

    def _open_multiplexer(self, loop: asyncio.AbstractEventLoop) -> Multiplexer:
        for each in list(_multiplexers):  # other threads add theirs meanwhile
            if each.loop.is_closed():
                _multiplexers.discard(each)
        for other in list(self._loops):
            if other.is_closed():
                self._loops.pop(other, None)
        multiplexer = self._loops[loop] = Multiplexer(
            lambda: self.options.async_connection(self.timeout), self.timeout, self._record_failure
        )
        _multiplexers.add(multiplexer)
        return multiplexer

    def _record_reply(self, reply: Any, *, admin: bool = False) -> None:
        """Tell the breaker what a reply says of the server, and raise the first error in it."""
        for each in reply if isinstance(reply, list) else (reply,):
            if isinstance(each, redis.ResponseError):
                self._record_error(each, admin=admin)
                raise each
        self.breaker.record_success()

    def _record_error(self, error: redis.ResponseError, *, admin: bool) -> None:
        if admin and isinstance(error, redis.exceptions.NoPermissionError):
            return  # a page needs more rights than decisions do
        if not concerns_whole_server(error):
            self.breaker.record_success()
            return
        self.breaker.record_failure(error)
        self._pool.disconnect_idle()
        for multiplexer in list(self._loops.values()):
            multiplexer.reconnect()

    def _record_failure(self, error: Exception) -> Exception:
        """Tell the breaker that a call had no reply; return the error as one of redis-py's."""
        if isinstance(error, PoolExhaustedError):
            self.breaker.log_error(error)
            return error
        if isinstance(error, (TimeoutError, redis.TimeoutError)):
            error = redis.TimeoutError(f"timeout after {self.timeout:g} s")
        elif not isinstance(error, redis.RedisError):
            error = redis.InvalidResponse(f"{self.name} did not reply as Redis does: {error!r}")
        self.breaker.record_failure(error)
        return error


def _read_replies(connection: Any, number: int) -> list[Any]:
    replies = []
    for _ in range(number):
        try:
            replies.append(connection.read_response())
        except redis.ResponseError as error:
            replies.append(error)
    return replies
