"""One Redis server as it is reached from this process: its circuit breaker, and connections for threads and loops.

A call that may have run is never sent again.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, ClassVar

import redis

from .circuit_breaker import CircuitBreaker
from .commands import Call
from .connection import ConnectionOptions, HeldConnection
from .errors import (
    PROGRAMMING_ERRORS,
    PoolExhaustedError,
    UnexpectedReplyError,
    concerns_whole_server,
)
from .multiplexer import Multiplexer
from .pool import Pool


class Server:
    """A Redis server."""

    # Multiplexers live as long as their loops, also those of servers that other settings have replaced: a worker task
    # that is garbage-collected while it waits is an error to asyncio.
    _multiplexers: ClassVar[
        dict[tuple[Server, asyncio.AbstractEventLoop], Multiplexer]
    ] = {}

    def __init__(self, options: ConnectionOptions, timeout: float) -> None:
        self.options, self.timeout = options, timeout
        self.address = options.address
        self.name = f"Redis at {self.address[0]}" + (
            f":{self.address[1]}" if self.address[1] else ""
        )
        self.breaker = breaker = CircuitBreaker(self.name, timeout)
        self._pool = Pool(
            lambda: options.connection(timeout),
            options.maximum,
            lambda: breaker.error is None,
        )
        self._is_fake = (
            options.connection_class.__module__.partition(".")[0] == "fakeredis"
        )

    def send(self, call: Call, admin_timeout: float | None = None) -> Any:
        """Return the result of a call; of a pipeline the list of results, with error replies in their places.

        `admin_timeout` is how long a page waits for a reply; None for a decision.
        """
        pool, sent_at = self._pool, monotonic()
        call.sent_at = sent_at
        held: HeldConnection | Any = None
        try:
            held = pool.acquire(sent_at)
            held.connection.send_packed_command((call.packed,), check_health=False)
            deadline = None if admin_timeout is None else sent_at + admin_timeout
            if call.calls is None:
                if deadline is not None:
                    held.wait(deadline)
                reply = held.read()
                if isinstance(reply, redis.ResponseError):
                    try:
                        raise reply
                    finally:
                        del reply  # or it and this frame would keep each other alive
                result = call.validate(reply)
            else:
                result = [_read(held, part, deadline) for part in call.calls]
        except (
            redis.ResponseError
        ) as error:  # after one, the connection is as good as after any reply
            pool.release(held, sent_at)
            self._record_error(error, is_decision=admin_timeout is None)
            raise
        except BaseException as error:  # noqa: BLE001  (raised again)
            # Recorded first: a thread that waits for the connection would take it to a server that fails.
            is_new = held is None or held.is_new
            failure = (
                self.record_failure(error, is_new, admin_timeout)
                if isinstance(error, Exception)
                else error
            )
            try:
                if held is not None:
                    pool.discard(held)
                if failure is error:
                    raise
                raise failure from error
            finally:
                del failure  # or it and this frame, with the connection, would keep each other alive
        pool.release(held, sent_at)
        if self.breaker.failed or call.calls is not None:
            self._record_result(result, is_decision=admin_timeout is None)
        return result

    async def asend(self, call: Call) -> Any:
        """As `send`, without blocking the event loop."""
        if self._is_fake:  # fakeredis has no socket, and waits for nothing
            return self.send(call)
        loop, call.sent_at = asyncio.get_running_loop(), monotonic()
        multiplexer = self._multiplexers.get((self, loop)) or self._open_multiplexer(
            loop
        )
        future = multiplexer.execute(call)
        try:
            result = await future
        except asyncio.CancelledError:
            if (
                not future.cancelled() and future.exception() is None
            ):  # the reply came in the same turn of the loop
                call.abandon(future.result())
            raise
        if isinstance(result, redis.ResponseError):
            self._record_error(result)
            try:
                raise result
            finally:
                del result  # or it and this frame would keep each other alive
        if self.breaker.failed or call.calls is not None:
            self._record_result(result)
        return result

    def close(self) -> None:
        """Close the connections for threads that are not in use."""
        self._pool.disconnect_idle()

    def _open_multiplexer(self, loop: asyncio.AbstractEventLoop) -> Multiplexer:
        for key in list(self._multiplexers):  # other threads add theirs meanwhile
            if key[1].is_closed():
                self._multiplexers.pop(key, None)
        return self._multiplexers.setdefault((self, loop), Multiplexer(self))

    def _record_result(self, result: Any, *, is_decision: bool = True) -> None:
        """Tell the breaker what a result, or each of a pipeline, says of the server."""
        results = result if isinstance(result, list) else (result,)
        errors = [each for each in results if isinstance(each, redis.ResponseError)]
        for error in errors:
            self._record_error(error, is_decision=is_decision)
        if not errors:
            self.breaker.record_success()

    def _record_error(
        self, error: redis.ResponseError, *, is_decision: bool = True
    ) -> None:
        if not is_decision and isinstance(error, redis.exceptions.NoPermissionError):
            return  # a page needs more rights than decisions do
        if not concerns_whole_server(error):
            self.breaker.record_success()
            return
        self.breaker.record_failure(error)
        self._pool.disconnect_idle()
        for (server, _), multiplexer in list(self._multiplexers.items()):
            if server is self:
                multiplexer.reconnect = True

    def record_failure(
        self, error: Exception, is_new: bool, timeout: float | None = None
    ) -> Exception:
        """Tell the breaker that a call had no reply, on a new connection or not; return one of redis-py's errors."""
        if isinstance(error, PROGRAMMING_ERRORS):
            return error
        if isinstance(error, (PoolExhaustedError, UnexpectedReplyError)):
            self.breaker.log_error(error)
            return error
        if isinstance(error, (TimeoutError, redis.TimeoutError)):
            error = redis.TimeoutError(f"timeout after {timeout or self.timeout:g} s")
        elif isinstance(error, OSError):
            error = redis.ConnectionError(str(error))
        elif not isinstance(error, redis.RedisError):
            error = redis.InvalidResponse(
                f"{self.name} did not reply as Redis does: {error!r}"
            )
        is_lost = type(error) is redis.ConnectionError
        if is_lost and not is_new:
            # Closed by the server, or on the way to it. If the server is gone, the connection that replaces it fails.
            self._pool.examine_idle()
            self.breaker.log_error(error)
        else:  # one lost connection, or one slow call, does not mean that the next one fails
            self.breaker.record_failure(
                error, opens=not (is_lost or isinstance(error, redis.TimeoutError))
            )
        return error


def _read(held: HeldConnection, call: Call, deadline: float | None) -> Any:
    """Return the result of one call of a pipeline; an error reply is returned, not raised."""
    if deadline is not None:
        held.wait(deadline)
    try:
        reply = held.read()
    except (
        redis.ResponseError
    ) as error:  # as a connection raises it that is not redis-py's own
        return error
    return reply if isinstance(reply, redis.ResponseError) else call.validate(reply)
