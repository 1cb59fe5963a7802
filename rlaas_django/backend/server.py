"""One Redis server as this process reaches it.

It has a circuit breaker, and connections for threads and for event loops. A call that
may have run is never sent again.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, ClassVar

import redis
from redis.exceptions import NoPermissionError, ResponseError

from .circuit_breaker import CircuitBreaker
from .commands import PAGE_TIMEOUT, Call
from .connection import ConnectionOptions, HeldConnection, wait
from .errors import (
    PROGRAMMING_ERRORS,
    PoolExhaustedError,
    UnexpectedReplyError,
    as_redis_error,
    concerns_whole_server,
)
from .multiplexer import Multiplexer
from .pool import Pool


class Server:
    """A Redis server."""

    # Multiplexers live as long as their loops, also those of servers that other
    # settings have replaced: a worker task that is garbage-collected while it waits is
    # an error to asyncio.
    _multiplexers: ClassVar[
        dict[tuple[Server, asyncio.AbstractEventLoop], Multiplexer]
    ] = {}

    def __init__(self, options: ConnectionOptions, timeout: float) -> None:
        self.options = options
        self.timeout = timeout
        self.address = options.address
        host, port = self.address
        self.name = f"Redis at {host}:{port}" if port else f"Redis at {host}"
        self.breaker = CircuitBreaker(self.name, timeout)
        self._pool = Pool(
            lambda: options.connection(timeout), options.maximum, self.breaker
        )
        package = options.connection_class.__module__.partition(".")[0]
        self._is_fake = package == "fakeredis"

    def send(self, call: Call) -> Any:
        """Return the reply to a call, or the list of replies to a pipeline.

        Error replies are returned, not raised.
        """
        call.sent_at = sent_at = monotonic()
        is_pipeline = call.calls is not None
        held: Any = None
        try:
            held = self._pool.acquire(call)
            held.connection.send_packed_command((call.packed,), check_health=False)
            if is_pipeline or call.for_page or held.is_delayed:
                reply = _read(held, call, call.deadline(self.timeout))
            else:
                reply = self.validate(call, held.read())
        except BaseException as error:
            self._end_call(call, held, error)
            raise

        self._pool.release(held, sent_at)
        # A decision's reply is a list; isinstance would take 1 % of a decision.
        if self.breaker.failed or type(reply) is not list or is_pipeline:
            self._record(call, reply)
        return reply

    async def asend(self, call: Call) -> Any:
        """As `send`, without blocking the event loop."""
        if self._is_fake:  # fakeredis has no socket, and waits for nothing
            return self.send(call)

        call.sent_at = monotonic()
        future = self._multiplexer().execute(call)
        try:
            reply = await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                call.abandon(future.result())  # it came in the same turn of the loop
            raise

        if self.breaker.failed or type(reply) is not list or call.calls is not None:
            self._record(call, reply)
        return reply

    @staticmethod
    def validate(call: Call, reply: Any) -> Any:
        """Return a reply, or an error reply.

        UnexpectedReplyError when it cannot be to this call.
        """
        lengths = call.reply_lengths
        try:
            if lengths and type(reply) is list:
                sum(reply)  # TypeError where not all are numbers
                if len(reply) in lengths:
                    return reply
            elif lengths is None or isinstance(reply, ResponseError):
                return reply
            elif not lengths:
                return reply + 0
        except TypeError:
            pass
        raise UnexpectedReplyError(reply)

    def close(self) -> None:
        """Close the connections for threads that are not in use."""
        self._pool.disconnect_idle()

    def _multiplexer(self) -> Multiplexer:
        """Return the multiplexer of the running event loop."""
        loop = asyncio.get_running_loop()
        multiplexer = self._multiplexers.get((self, loop))
        if multiplexer is not None:
            return multiplexer

        for key in list(self._multiplexers):  # other threads add theirs meanwhile
            if key[1].is_closed():
                self._multiplexers.pop(key, None)
        return self._multiplexers.setdefault((self, loop), Multiplexer(self))

    def _record(self, call: Call, reply: Any) -> None:
        """Tell the breaker what a reply, or each of a pipeline, says of the server."""
        replies = reply if isinstance(reply, list) else [reply]
        for part in replies:
            if not isinstance(part, ResponseError) or not concerns_whole_server(part):
                continue
            # A page needs more rights than decisions do.
            if not (call.for_page and isinstance(part, NoPermissionError)):
                self._record_error_of_server(part)
            return
        self.breaker.record_success()

    def _record_error_of_server(self, error: ResponseError) -> None:
        self.breaker.record_failure(error)
        self._pool.disconnect_idle()
        for (server, _), multiplexer in list(self._multiplexers.items()):
            if server is self:
                multiplexer.reconnect = True

    def _end_call(
        self, call: Call, held: HeldConnection | None, error: BaseException
    ) -> None:
        """Record that a call had no reply.

        Raise redis-py's error for it, if any.
        """
        failure = error
        try:
            # Recorded first: a thread that waits for the connection would take it to a
            # server that fails.
            if isinstance(error, Exception):
                is_new = held is None or held.is_new
                timeout = self.timeout
                if call.for_page:
                    timeout = PAGE_TIMEOUT
                failure = self.record_failure(error, is_new, timeout)
            if held is not None:
                self._pool.discard(held)
            if failure is not error:
                raise failure from error
        finally:
            del failure  # or it and this frame would keep each other alive

    def record_failure(
        self, error: Exception, is_new: bool, timeout: float
    ) -> Exception:
        """Tell the breaker that a call had no reply.

        Return redis-py's error for it.
        """
        if isinstance(error, PROGRAMMING_ERRORS):
            return error

        failure = as_redis_error(error, self.name, timeout)
        is_connection_lost = type(failure) is redis.ConnectionError
        # A closed connection that had been used says little about the server: if the
        # server is down, the next connection fails.
        was_in_use = is_connection_lost and not is_new
        if was_in_use:
            self._pool.examine_idle()
        if was_in_use or isinstance(
            failure, (PoolExhaustedError, UnexpectedReplyError)
        ):
            self.breaker.log_error(failure)
            return failure

        # After one lost connection, or one slow call, the next call need not fail.
        is_timeout = isinstance(failure, redis.TimeoutError)
        opens_breaker = not is_connection_lost and not is_timeout
        self.breaker.record_failure(failure, opens=opens_breaker)
        return failure


def _read(held: HeldConnection, call: Call, deadline: float) -> Any:
    """Return the reply to a call, or the list of replies to a pipeline.

    The first reply comes until the deadline. Those of many decisions may go on then,
    each within the connection's timeout.
    """
    replies: list[Any] = []
    for part in call.calls or (call,):
        if not replies or call.for_page or call.started_at:
            wait(held.connection, deadline)
        replies.append(Server.validate(part, held.read()))

    held.is_new = False
    held.is_delayed = False
    if call.calls is None:
        return replies[0]
    return replies
