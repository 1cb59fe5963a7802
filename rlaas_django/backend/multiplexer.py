"""The one connection of an event loop to a server, shared by its tasks.

A worker task owns the connection: commands that arrive while it waits for replies go out together in the next batch,
and replies, which come in order, go to the futures of their callers. A caller that is cancelled disturbs nobody: its
reply is read and goes to `Call.abandon`. With 32 commands in flight this takes a third of the time of `redis.asyncio`,
which has a connection for each (benchmarks/in_flight.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from typing import TYPE_CHECKING, Any

import redis

from .commands import Call
from .errors import UnexpectedReplyError
from .pool import FRESH

if TYPE_CHECKING:
    from .server import Server

MAX_BATCH = 128  # commands; a batch has one timeout
TICKS = 10  # The timeout is counted in ticks of the event loop: time in which other code blocks the loop does not count.


class Multiplexer:
    """Runs commands of one event loop on one server, each batch within the server's timeout."""

    def __init__(self, server: Server) -> None:
        self.loop, self._server = asyncio.get_running_loop(), server
        self._connection, self._reader = server.options.async_connection()
        self._waiting: deque[tuple[Call, asyncio.Future[Any]]] = deque()
        self._batch: list[tuple[Call, asyncio.Future[Any]]] = []  # sent, or about to be
        self._worker: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = (
            None  # what the worker waits for while there is nothing to do
        )
        self._is_new = True  # the connection: nothing was read from it yet
        self._last_use, self._ticks_left = 0.0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._timed_out = False
        self.reconnect = False  # before the next batch: behind the same address there may be another server now

    def execute(self, call: Call) -> asyncio.Future[Any]:
        """Return a future of the result; error replies are given, not raised."""
        reply = self.loop.create_future()
        self._waiting.append((call, reply))
        if self._worker is None:
            self._start_worker()
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return reply

    def _start_worker(self) -> None:
        # In a context of its own: that of the caller is a request's, whose id or span would stand in our log lines.
        self._worker = self.loop.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        """Send batches and read their replies until something fails or the loop ends."""
        try:
            while True:
                if not self._waiting:
                    self._idle = self.loop.create_future()
                    await self._idle
                commands = 0
                while self._waiting and commands < MAX_BATCH:
                    call, reply = self._waiting.popleft()
                    if not reply.done():  # cancelled before it was sent
                        self._batch.append((call, reply))
                        commands += 1 if call.calls is None else len(call.calls)
                if self._batch:
                    await self._exchange()
                    self._batch = []
        except asyncio.CancelledError:
            if not self._timed_out:
                with contextlib.suppress(redis.RedisError):
                    await (
                        self._connection.disconnect()
                    )  # TLS takes turns of the loop, which ends now
                self._stop(None)
                raise
            await self._connection.disconnect(nowait=True)
            self._stop(redis.TimeoutError())
        except Exception as error:  # noqa: BLE001  (whatever a broken reply makes redis-py raise)
            await self._connection.disconnect(nowait=True)
            self._stop(error)

    async def _exchange(self) -> None:
        self._ticks_left = TICKS
        if (
            self._timer is None
        ):  # one for all batches: to set and cancel one for each takes a tenth of a call
            self._timer = self.loop.call_later(self._server.timeout / TICKS, self._tick)
        connection = self._connection
        if self.reconnect or await self._is_stale():
            self.reconnect = False
            await connection.disconnect(nowait=True)
        if not connection.is_connected:
            self._is_new = True
            try:
                await connection.connect()
            except redis.ResponseError as error:  # to AUTH or SELECT
                raise redis.ConnectionError(str(error)) from error
        await connection.send_packed_command(
            [call.packed for call, _ in self._batch], check_health=False
        )
        await self._receive()
        self._last_use = self.loop.time()

    async def _receive(self) -> None:
        """Read the replies to the batch, and give them to their callers; error replies are given, not raised."""
        results: list[Any] = []
        try:
            for call, _ in self._batch:
                found = []
                for part in call.calls or (call,):
                    try:
                        reply = await self._reader.read_response()
                    except redis.ResponseError as error:
                        reply = error
                    found.append(
                        reply
                        if isinstance(reply, redis.ResponseError)
                        else part.validate(reply)
                    )
                    self._is_new = False
                results.append(found[0] if call.calls is None else found)
            if (
                hasattr(self._connection, "can_read")
                and await self._connection.can_read()
            ):
                with contextlib.suppress(
                    redis.ConnectionError, OSError
                ):  # the end of the connection is no reply
                    raise UnexpectedReplyError(await self._reader.read_response())
        except (
            UnexpectedReplyError,
            redis.ResponseError,
        ):  # or an error reply to no call: nobody knows which reply is whose
            results.clear()
            raise
        finally:
            for (call, future), result in zip(self._batch, results, strict=False):
                if future.done():
                    call.abandon(result)
                else:
                    future.set_result(result)

    async def _is_stale(self) -> bool:
        """Return whether the server closed the connection, or sent something that nobody asked for."""
        after_pause = self.loop.time() - self._last_use > FRESH
        if after_pause:  # two turns of the loop, in which it notices that the server closed the connection
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        connection = self._connection
        if not connection.is_connected:
            return False
        try:
            if hasattr(connection, "can_read"):
                return bool(await connection.can_read())
            return after_pause and bool(
                await connection.can_read_destructive()
            )  # redis-py < 8, where it takes longer
        except redis.RedisError:
            return True

    def _tick(self) -> None:
        self._timer = None
        if not self._batch or self._worker is None:
            return
        if self._ticks_left == 0:
            self._timed_out = True
            self._worker.cancel()
        else:
            self._ticks_left -= 1
            self._timer = self.loop.call_later(self._server.timeout / TICKS, self._tick)

    def _stop(self, error: Exception | None) -> None:
        """Fail what was sent, as nobody knows what ran. What was not goes out next, if the server is still available.

        Without an error the loop ends, and all is cancelled.
        """
        failed = self._batch
        self._batch, self._worker, self._idle, self._timed_out = [], None, None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        failure = (
            None if error is None else self._server.record_failure(error, self._is_new)
        )
        if failure is None or self._server.breaker.error is not None:
            failed += self._waiting
            self._waiting.clear()
        elif self._waiting:
            self._start_worker()
        for _, reply in failed:
            if failure is None:
                reply.cancel()
            elif not reply.done():
                reply.set_exception(failure)
