"""Redis' protocol: commands as they are sent, and replies as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redis.connection import DefaultParser
from redis.exceptions import ResponseError

hiredis: Any
try:
    import hiredis
except ImportError:  # it is an extra
    hiredis = None

_error: Any = DefaultParser.parse_error


class Message(Protocol):
    """Commands as they go over the wire, and how many replies they bring."""

    @property
    def packed(self) -> bytes: ...
    @property
    def replies(self) -> int: ...


class Batch(NamedTuple):
    """Commands of any kind."""

    packed: bytes
    replies: int = 1


def pack(*commands: Sequence[Any]) -> Batch:
    """Commands in Redis' protocol."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            encoded = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
    return Batch(b"".join(parts), len(commands))


def first_error(reply: Any, message: Message) -> ResponseError | None:
    """What a reply says went wrong; the first, where there are several."""
    for each in reply if message.replies > 1 else (reply,):
        if isinstance(each, ResponseError):
            return each
    return None


class Reader:
    """Replies out of the bytes that came so far; as hiredis does it, where that is not installed."""

    def __init__(self) -> None:
        self._bytes, self._at = b"", 0

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def has_data(self) -> bool:
        return bool(self._bytes)

    def gets(self) -> Any:
        """The next reply; an error is given, not raised. False: it has not come yet, or not all of it."""
        self._at = 0
        try:
            reply = self._reply()
        except EOFError:
            return False
        self._bytes = self._bytes[self._at :]
        return reply

    def _reply(self) -> Any:
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            return _error(text.decode("utf-8", "replace"))
        if kind not in (b":", b"$", b"*"):
            raise ValueError(f"no reply of Redis begins with {line[:20]!r}")
        number = int(text)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"*":
            return [self._reply() for _ in range(number)]
        start, self._at = self._at, self._at + number + 2
        if len(self._bytes) < self._at:
            raise EOFError
        return self._bytes[start : start + number]

    def _line(self) -> bytes:
        end = self._bytes.find(b"\r\n", self._at)
        if end < 0:
            raise EOFError
        start, self._at = self._at, end + 2
        return self._bytes[start:end]


def reader() -> Any:
    return Reader() if hiredis is None else hiredis.Reader(replyError=_error)
