"""Faults between client and server: replies lost or late, connections cut or refused, replies that are not RESP."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.deployments import HOST, reserve

CHUNK = 65_536


class Loopback:
    """A TCP server on a loopback port, in a thread of its own; a subclass says how a connection is served."""

    def __init__(self) -> None:
        self.port, self._reserved = reserve()
        self._listener: asyncio.Server | None = None
        self._served: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._thread.start()
        self.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._served)

    def accept(self) -> None:
        """Accept connections, as from the beginning; after `refuse()` on the same port."""
        self._do(self._accept())

    def refuse(self) -> None:
        """Refuse new connections; those that there are stay."""
        self._do(self._refuse())

    def cut(self) -> None:
        """Close every connection, on both sides; new ones are still taken."""
        self._do(self._cut())

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for each in self._reserved:
            each.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which is closed when this is over."""
        raise NotImplementedError

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _accept(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connected, HOST, self.port, reuse_address=True)

    async def _refuse(self) -> None:
        if self._listener is not None:
            for each in self._listener.sockets:
                each.shutdown(socket.SHUT_RDWR)  # while a fork has it open too, to close it is not enough
            self._listener.close()
            self._listener = None

    async def _cut(self) -> None:
        await cancel(*self._served)

    async def _end(self) -> None:
        await self._refuse()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # those of connections just taken too
            await cancel(*tasks)
        await self._loop.shutdown_default_executor()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):  # either side is gone
                await self.serve(reader, writer)
        finally:
            hang_up(writer)


class Garbage(Loopback):
    """A server that replies to whatever it reads with these bytes, and then closes if told to, or if they are none."""

    def __init__(self, answer: bytes, *, close: bool = False) -> None:
        self.answer = answer
        self.closes = close or not answer
        super().__init__()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(CHUNK):
            writer.write(self.answer)
            await writer.drain()
            if self.closes:
                return


class Proxy(Loopback):
    """A proxy before the server at a URL, unix:// or redis://, that passes, drops or delays its replies.

    All pass at first. `drop` and `delay` hold from then on, on every connection and for each reply by itself, however
    many commands a client has in flight. A server that is not there looks like one that closes at once.

    After a dropped reply the connection is silent: nothing more is passed on it, neither replies to what is in flight
    nor later commands, until the client closes it or `cut()` does. New connections are not affected.
    """

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url)
        self.commands = 0  # each EVALSHA that was passed to the server
        self.answered = 0  # each of them whose reply was passed to the client
        self.dropped = 0  # replies to any command; those that a silent connection loses afterwards are not counted
        self.pass_all()
        super().__init__()

    def pass_all(self) -> None:
        """Pass every reply from now on; connections that are silent stay so."""
        self.drop(0)
        self.delay(0)

    def drop(self, fraction: float = 1, seed: int = 0, *, of: str | None = None, close: bool = False) -> None:
        """Drop this fraction of the replies, or of those to the command `of`.

        The connection is silent from then on, or is closed. With a seed, the same order of replies loses the same ones.
        """
        self._drops = (fraction, random.Random(seed), of and of.upper().encode(), close)

    def delay(self, seconds: float) -> None:
        """Delay each reply by so many seconds; latency, not bandwidth: many may be held at once."""
        self.seconds = seconds

    def drops(self, name: bytes) -> tuple[bool, bool]:
        """Return whether the reply to this command is dropped, and whether its connection is closed then."""
        fraction, generator, of, close = self._drops
        dropped = of in (None, name) and generator.random() < fraction
        self.dropped += dropped
        return dropped, close

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target.scheme == "unix":
            server = await asyncio.open_unix_connection(self.target.path)
        else:
            server = await asyncio.open_connection(self.target.hostname, self.target.port)
        try:
            await ProxiedConnection(self, (reader, writer), server).run()
        finally:
            hang_up(server[1])


class TLSProxy(Proxy):
    """A proxy that speaks TLS with clients and plain RESP with the server: the server of the tests has no TLS."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.context = context
        super().__init__(url)

    async def _accept(self) -> None:
        self._listener = await asyncio.start_server(self._connected, HOST, self.port, ssl=self.context)


class ProxiedConnection:
    """One connection through a proxy."""

    def __init__(self, proxy: Proxy, client, server) -> None:
        self.proxy = proxy
        self.client_reader, self.client_writer = client
        self.server_reader, self.server_writer = server
        self.in_flight: deque[bytes] = deque()  # the names of the commands that await a reply
        self.held: asyncio.Queue[tuple[float, bytes, bytes] | None] = asyncio.Queue()
        self.silent = False

    async def run(self) -> None:
        """Run until the client closes, or the server does and its replies are delivered."""
        tasks = [asyncio.create_task(work) for work in (self.commands(), self.deliveries(), self.replies())]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*tasks)

    async def commands(self) -> None:
        data = bytearray()
        while chunk := await self.client_reader.read(CHUNK):
            data += chunk
            for command in messages(data):
                if self.silent:
                    continue
                name = command.split(b"\r\n", 3)[2].upper()
                self.in_flight.append(name)
                self.proxy.commands += name == b"EVALSHA"
                self.server_writer.write(command)
            await self.server_writer.drain()

    async def replies(self) -> None:
        data = bytearray()
        try:
            while chunk := await self.server_reader.read(CHUNK):
                data += chunk
                for reply in messages(data):
                    self.handle(reply)
        finally:
            if not self.silent:
                self.held.put_nowait(None)

    def handle(self, reply: bytes) -> None:
        if self.silent:
            return
        name = b""
        if not reply.startswith(b">"):  # a push answers nothing
            name = self.in_flight.popleft()
            dropped, close = self.proxy.drops(name)
            if dropped:
                self.silent = True
                if close:
                    self.held.put_nowait(None)
                return
        self.held.put_nowait((asyncio.get_running_loop().time() + self.proxy.seconds, name, reply))

    async def deliveries(self) -> None:
        while item := await self.held.get():
            due, name, reply = item
            if (early := due - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(early)
            self.proxy.answered += name == b"EVALSHA"
            self.client_writer.write(reply)
            await self.client_writer.drain()


def messages(data: bytearray) -> Iterator[bytes]:
    """Take the complete RESP messages out of what was read so far."""
    while (end := end_of_message(data)) is not None:
        message = bytes(data[:end])
        del data[:end]
        yield message


def end_of_message(data: bytearray) -> int | None:
    """Return where the first RESP message ends; None if some of it is still to come."""
    position, parts = 0, 1
    while parts:
        end = data.find(b"\r\n", position)
        if end < 0:
            return None
        kind, rest = data[position : position + 1], data[position + 1 : end]
        position = end + 2
        parts -= 1
        if kind in b"$=!":
            position += int(rest) + 2 if rest != b"-1" else 0
        elif kind in b"*~>":
            parts += max(int(rest), 0)
        elif kind in b"%|":  # an attribute comes before what it belongs to
            parts += 2 * int(rest) + (kind == b"|")
    return position if position <= len(data) else None


async def cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once; for forks too, as with one that has it open the other side would notice nothing."""
    with suppress(OSError):
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    writer.transport.abort()
