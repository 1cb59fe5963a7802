"""A loop's one connection to a server, shared by its tasks: what has come together is sent at once, and replies, which
come in order, go to whoever asked. A task that is cancelled disturbs nobody: its reply is read, and goes to no one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from time import monotonic
from typing import Any

import redis
from redis.exceptions import ResponseError

from .lines import FRESH, LONGEST_WAIT, NoConnectionError
from .wire import Batch, Message, reader

MOST_IN_FLIGHT = 128  # commands of a loop sent and not answered; the next wait their turn
GRACE = 0.01  # seconds for a loop that stood still to read what has arrived meanwhile

# Connects a protocol to the server, and tells what to say to it first; the answer to the last of that means nothing.
Open = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Batch]]
Blame = Callable[[Exception], None]


class _Request:
    """A message on its way, and who waits for it."""

    __slots__ = ("ends", "future", "message", "replies")

    def __init__(self, message: Message, future: asyncio.Future[Any], ends: float) -> None:
        self.message, self.future = message, future
        self.ends = ends  # when its time is up; once it is sent, by the loop's clock
        self.replies: list[Any] = []

    def add(self, reply: Any) -> bool:
        """Whether this was the last."""
        if self.message.replies > 1:
            self.replies.append(reply)
            if len(self.replies) < self.message.replies:
                return False
            reply = self.replies
        if not self.future.done():
            self.future.set_result(reply)
        return True


class _Wire(asyncio.Protocol):
    """A connection while it lasts."""

    transport: asyncio.Transport | None = None

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sent: deque[_Request] = deque()
        replies = reader()
        self.feed, self.gets = replies.feed, replies.gets

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, requests: list[_Request], ends: float) -> None:
        for request in requests:
            request.ends = ends
        self.sent.extend(requests)
        if self.transport is not None:
            self.transport.write(b"".join([request.message.packed for request in requests]))

    def data_received(self, data: bytes) -> None:
        sent = self.sent
        try:
            self.feed(data)
            while (reply := self.gets()) is not False:
                if type(reply) is not list and isinstance(reply, redis.ConnectionError):
                    raise reply  # it is loading, say, or wants a password
                if sent[0].add(reply):
                    sent.popleft()
        except Exception as error:  # noqa: BLE001  (whatever a reader makes of nonsense, or of a reply to no question)
            self.hang_up()
            self.channel.lost(self, error)
        else:
            self.channel.answered()

    def connection_lost(self, error: Exception | None) -> None:
        reason = error or "it closed the connection"
        self.channel.lost(self, redis.ConnectionError(f"{self.channel.name}: {reason}"))

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Channel:
    """Of one loop and server. It connects when it is asked something."""

    def __init__(self, name: str, timeout: float, open_: Open, blame: Blame, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.timeout, self.loop = name, timeout, loop
        self.stale = False  # behind the same address there may be another server by now
        self.waiting: deque[_Request] = deque()
        self._open, self._blame = open_, blame  # who is told of a failure, whether or not anybody still waits
        self._wire: _Wire | None = None
        self._attempt: object | None = None  # to connect, while it is under way
        self._connecting: asyncio.Task[None] | None = None
        self._connect_by = 0.0
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._used = 0.0

    @property
    def sent(self) -> deque[_Request]:
        """What is not answered yet."""
        return deque() if self._wire is None else self._wire.sent

    def ask(self, message: Message) -> asyncio.Future[Any]:
        """Will have the reply, or a list of them when there are several; an error among them is given, not raised."""
        future = self.loop.create_future()
        self.waiting.append(_Request(message, future, monotonic() + LONGEST_WAIT))
        if not self._begun:
            self._begun = True
            self.loop.call_soon(self._begin)
        return future

    def _begin(self) -> None:
        """Whoever else asks in this turn of the loop has done so by now."""
        if self._wire is not None and not self._wire.sent and self.loop.time() - self._used > FRESH:
            self.loop.call_soon(self._flush)  # by then the loop has seen whether the server has closed it
        else:
            self._flush()

    def _flush(self) -> None:
        self._begun = False
        wire = self._wire
        if wire is not None and wire.transport is not None:
            if not wire.transport.is_closing() and not (self.stale and not wire.sent):
                self._write(wire)
                return
            self._wire = None
            wire.hang_up()
        if self._attempt is None:
            self.stale = False
            self._attempt, self._connect_by = object(), self.loop.time() + self.timeout
            self._keep_time()
            self._connecting = self.loop.create_task(self._connect(self._attempt))

    def _write(self, wire: _Wire) -> None:
        requests: list[_Request] = []
        now = monotonic()
        while self.waiting and len(wire.sent) + len(requests) < MOST_IN_FLIGHT:
            request = self.waiting.popleft()
            if request.future.done():
                continue
            if request.ends > now:
                requests.append(request)
            else:
                request.future.set_exception(NoConnectionError(f"{self.name} has too much to answer."))
        if requests:
            wire.send(requests, self.loop.time() + self.timeout)
            self._keep_time()

    def answered(self) -> None:
        self._used = self.loop.time()
        if self.waiting and self._wire is not None:
            self._write(self._wire)

    async def _connect(self, attempt: object) -> None:
        wire = _Wire(self)
        try:
            greeting = await self._open(lambda: wire)
            request = _Request(greeting, self.loop.create_future(), self._connect_by)
            wire.send([request], self._connect_by)
            replies = await request.future
            for reply in replies[:-1] if greeting.replies > 1 else ():
                if isinstance(reply, ResponseError):  # to the password, say, or the database's number
                    raise redis.ConnectionError(str(reply))
        except BaseException as error:
            wire.hang_up()
            if self._attempt is attempt:  # else nobody waits for it any more
                self._connecting = None
                self.fail(redis.ConnectionError(f"{self.name}: {error}") if isinstance(error, OSError) else error)
            if not isinstance(error, Exception):
                raise
        else:
            if self._attempt is attempt:
                self._attempt, self._connecting, self._wire, self._used = None, None, wire, self.loop.time()
                self._write(wire)

    def lost(self, wire: _Wire, error: Exception) -> None:
        """A connection ended. Nobody knows which of the requests on it ran; nobody is to wait for them."""
        if wire is self._wire and wire.sent:
            self.fail(error)
            return
        if wire is self._wire:
            self._wire = None
        _give_up(wire.sent, error)

    def fail(self, error: BaseException) -> None:
        """Nobody is to wait any more, neither for what was sent nor for what was to be."""
        wire, self._wire = self._wire, None
        connecting, self._connecting, self._attempt = self._connecting, None, None
        if connecting is not None:
            connecting.cancel()
        if isinstance(error, Exception):
            self._blame(error)
        if wire is not None:
            wire.hang_up()
            _give_up(wire.sent, error)
        _give_up(self.waiting, error)

    # One timer, which is not set anew for each request: it looks whether there is one whose time is up.

    def _keep_time(self) -> None:
        if self._timer is None and (oldest := self._oldest()) is not None:
            self._timer = self.loop.call_at(oldest[1], self._look)

    def _oldest(self) -> tuple[Any, float] | None:
        """What is waited for, and until when."""
        if self._attempt is not None:
            return self._attempt, self._connect_by
        if self._wire is not None and self._wire.sent:
            return self._wire.sent[0], self._wire.sent[0].ends
        return None

    def _look(self) -> None:
        self._timer = None
        oldest = self._oldest()
        if oldest is not None and oldest[1] <= self.loop.time():
            self._timer = self.loop.call_later(GRACE, self._too_late, oldest[0])
        else:
            self._keep_time()

    def _too_late(self, late: Any) -> None:
        self._timer = None
        oldest = self._oldest()
        if oldest is not None and oldest[0] is late:
            self.fail(redis.TimeoutError(f"{self.name} did not answer in time"))
        else:
            self._look()  # that one was answered in the meantime

    async def closing_with_the_loop(self, forget: Callable[[Channel], None]) -> AsyncGenerator[None]:
        """Suspended until the loop shuts its generators down, which is the last chance to close in order."""
        try:
            yield
        finally:
            forget(self)
            if self._timer is not None:
                self._timer.cancel()
            self.fail(asyncio.CancelledError())
            for _ in range(2):  # turns of the loop, in which the transport closes
                await asyncio.sleep(0)


def _give_up(requests: deque[_Request], error: BaseException) -> None:
    while requests:
        future = requests.popleft().future
        if future.done():
            continue
        if isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.cancel()
