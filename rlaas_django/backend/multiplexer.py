"""The one connection of an event loop to a server, shared by its tasks.

A worker task owns the connection: commands that arrive while it waits for replies go
out together in the next batch, and replies, which come in order, go to the futures of
their callers. A caller that is cancelled disturbs nobody: its reply is read and goes to
`Call.abandon`. With 32 commands in flight this takes a third of the time of
`redis.asyncio`, which has a connection for each (benchmarks/in_flight.py).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import ResponseError

from .commands import Call
from .errors import UnexpectedReplyError, as_redis_error
from .pool import FRESH

if TYPE_CHECKING:
    from .server import Server

MAX_BATCH = 128  # commands
# The timeout is counted in ticks of the event loop: time in which other code blocks the
# loop does not count.
TICKS = 20

Batch = list[tuple[Call, asyncio.Future[Any]]]


class Multiplexer:
    """Runs commands of one event loop on one server.

    Each call has the server's timeout, and so has each batch: then nobody reads the
    rest of its replies.
    """

    def __init__(self, server: Server) -> None:
        self.loop = asyncio.get_running_loop()
        # Whether to reconnect before the next batch: behind the same address there may
        # be another server now.
        self.reconnect = False
        self._server = server
        self._connection, self._reader = server.options.async_connection()
        self._is_new = True  # the connection: nothing was read from it yet
        self._last_use = 0.0
        self._waiting: deque[tuple[Call, asyncio.Future[Any]]] = deque()
        self._batch: Batch = []  # sent, or about to be
        self._worker: asyncio.Task[None] | None = None
        # What the worker waits for while there is nothing to do.
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0  # while there was something to do
        self._next_tick = 0.0
        self._last_tick = 0  # of the batch's time
        self._timed_out = False

    def execute(self, call: Call) -> asyncio.Future[Any]:
        """Return a future of the reply.

        Error replies are results, not exceptions.
        """
        reply = self.loop.create_future()
        call.last_tick = self._ticks + TICKS
        self._waiting.append((call, reply))
        if self._worker is None:
            self._start_worker()
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return reply

    def _start_worker(self) -> None:
        # In a context of its own: that of the caller is a request's, whose id or span
        # would stand in our log lines.
        self._worker = self.loop.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        """Send batches and read their replies until one fails or the loop ends."""
        try:
            while True:
                if not self._waiting:
                    self._idle = self.loop.create_future()
                    await self._idle
                self._take_batch()
                if self._batch:
                    await self._exchange()
                    self._batch = []
        except asyncio.CancelledError:
            if not self._timed_out:
                with suppress(redis.RedisError):
                    # With TLS this takes turns of the loop, which ends now.
                    await self._connection.disconnect()
                self._cancel_all()
                raise
            await self._connection.disconnect(nowait=True)
            self._fail_batch(redis.TimeoutError())
        except Exception as error:  # noqa: BLE001  (redis-py, of a broken reply)
            await self._connection.disconnect(nowait=True)
            self._fail_batch(error)

    def _take_batch(self) -> None:
        commands = 0
        while self._waiting and commands < MAX_BATCH:
            call, reply = self._waiting.popleft()
            if not reply.done():  # cancelled before it was sent
                self._batch.append((call, reply))
                commands += len(call.calls or (call,))

    async def _exchange(self) -> None:
        self._last_tick = self._ticks + TICKS
        # One for all batches: to set and cancel one for each takes a tenth of a call.
        if self._timer is None:
            self._start_timer(self.loop.time())

        await self._prepare_connection()
        packed = [call.packed for call, _ in self._batch]
        await self._connection.send_packed_command(packed, check_health=False)
        await self._receive()
        self._last_use = self.loop.time()

    async def _prepare_connection(self) -> None:
        connection = self._connection
        if self.reconnect or await self._is_stale():
            self.reconnect = False
            await connection.disconnect(nowait=True)
        if connection.is_connected:
            return

        self._is_new = True
        await connection.connect()

    async def _receive(self) -> None:
        """Read the replies to the batch, and give them to their callers."""
        replies: list[Any] = []
        try:
            for call, _ in self._batch:
                replies.append(await self._read(call))
            await self._expect_no_reply()
        except (UnexpectedReplyError, ResponseError):
            replies.clear()  # nobody knows which reply is whose
            raise
        finally:
            for (call, future), reply in zip(self._batch, replies, strict=False):
                if future.cancelled():
                    call.abandon(reply)
                elif not future.done():  # its time may be over
                    future.set_result(reply)

    async def _read(self, call: Call) -> Any:
        """Return the reply to a call.

        An error reply is returned, not raised.
        """
        if call.calls is not None:
            return [await self._read(part) for part in call.calls]

        try:
            reply = await self._reader.read_response()
        except ResponseError as error:
            reply = error
        self._is_new = False
        return self._server.validate(call, reply)

    async def _expect_no_reply(self) -> None:
        """Raise if there is a reply to no call.

        The end of the connection is not a reply.
        """
        connection = self._connection
        if hasattr(connection, "can_read") and await connection.can_read():
            with suppress(redis.ConnectionError, OSError):
                raise UnexpectedReplyError(await self._reader.read_response())

    async def _is_stale(self) -> bool:
        """Return whether the server closed it, or sent a reply to no call."""
        connection = self._connection
        after_pause = self.loop.time() - self._last_use > FRESH
        if after_pause:
            # In two turns the loop notices that the server closed the connection.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if not connection.is_connected:
            return False

        try:
            if hasattr(connection, "can_read"):
                return bool(await connection.can_read())
            # redis-py < 8, where it takes longer.
            return after_pause and bool(await connection.can_read_destructive())
        except redis.RedisError:
            return True

    def _start_timer(self, last: float) -> None:
        self._next_tick = last + self._server.timeout / TICKS
        self._timer = self.loop.call_at(self._next_tick, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._batch or self._worker is None:
            return
        self._ticks += 1
        if self._ticks > self._last_tick:
            self._timed_out = True
            self._worker.cancel()
        else:
            # A tick that is a little late does not delay the next ones.
            interval = self._server.timeout / TICKS
            self._start_timer(max(self._next_tick, self.loop.time() - interval))
            self._fail_late()

    def _fail_late(self) -> None:
        """Fail the calls whose time is over.

        The batch goes on. Calls that were made together have the time of their batch.
        """
        server = self._server
        failure = as_redis_error(TimeoutError(), server.name, server.timeout)
        for call, reply in (*self._batch, *self._waiting):
            is_late = call.calls is None and self._ticks > call.last_tick
            if call.started_at:
                is_late = monotonic() > call.deadline(server.timeout)
            if is_late and not reply.done():
                server.breaker.log_error(failure)
                reply.set_exception(failure)

    def _fail_batch(self, error: Exception) -> None:
        """Fail what was sent, as nobody knows what ran.

        What was not sent goes out next, if the server is still available.
        """
        server = self._server
        failure = server.record_failure(error, self._is_new, server.timeout)
        failed = self._stop()
        self._fail_late()
        if server.breaker.error is not None:
            failed += self._waiting
            self._waiting.clear()
        elif self._waiting:
            self._start_worker()
        for _, reply in failed:
            if not reply.done():
                reply.set_exception(failure)

    def _cancel_all(self) -> None:
        """Cancel what was sent and what was not.

        The loop ends.
        """
        for _, reply in (*self._stop(), *self._waiting):
            reply.cancel()
        self._waiting.clear()

    def _stop(self) -> Batch:
        """End the worker and its timer.

        Return the batch that it leaves.
        """
        batch = self._batch
        self._batch = []
        self._worker = None
        self._idle = None
        self._timed_out = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return batch
