"""Calls: commands as they are sent, and what their replies look like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import hiredis

from .errors import UnexpectedReplyError
from .scripts import Script

Word = str | bytes | int | float


class Call:
    """A packed command, for the server that has its keys."""

    __slots__ = (
        "calls",
        "is_refund",
        "key",
        "on_abandoned",
        "packed",
        "reply_lengths",
        "script",
        "sent_at",
    )

    def __init__(
        self,
        script: Script | None,
        key: str,
        packed: bytes,
        *,
        reply_lengths: Collection[int] | None = None,
        is_refund: bool = False,
    ) -> None:
        self.script = script  # what to load where the server does not know it
        # One of the keys, which are all in one slot; "" where there is one server.
        self.key = key
        self.packed = packed
        # The reply is a list of so many whole numbers; empty: one whole number;
        # None: anything.
        self.reply_lengths = reply_lengths
        self.is_refund = is_refund
        self.calls: tuple[Call, ...] | None = None  # of a pipeline
        self.sent_at = 0.0  # by `time.monotonic`
        # Gets the reply, or the error, that nobody awaits.
        self.on_abandoned: Callable[[Any], None] | None = None

    def validate(self, reply: Any) -> Any:
        """Return a reply; UnexpectedReplyError when it cannot be to this call."""
        lengths = self.reply_lengths
        if lengths is None:
            return reply

        numbers = reply
        if not lengths:
            numbers = [reply]
        elif type(reply) is not list or len(reply) not in lengths:
            raise UnexpectedReplyError(reply)

        try:
            sum(numbers)
        except TypeError:  # not all are numbers
            raise UnexpectedReplyError(reply) from None
        return reply

    def abandon(self, reply: Any) -> None:
        """Take the reply to a call whose caller was cancelled."""
        if self.on_abandoned is not None:
            self.on_abandoned(reply)


class Pipeline(Call):
    """Several calls that are sent together; their replies are a list."""

    __slots__ = ()
    calls: tuple[Call, ...]

    def __init__(self, calls: Iterable[Call]) -> None:
        sent = tuple(calls)
        super().__init__(None, sent[-1].key, b"".join([call.packed for call in sent]))
        self.calls = sent

    def abandon(self, reply: Any) -> None:
        for call, part in zip(self.calls, reply, strict=True):
            call.abandon(part)


def pack(command: Sequence[Word]) -> bytes:
    """Return a command as it is sent.

    Numbers are made text here: hiredis 3.5 crashes if a signal handler raises while it converts one, as that of Ctrl-C
    does, and that of a time limit of Celery.
    """
    words = [word if isinstance(word, (str, bytes)) else str(word) for word in command]
    packed: bytes = hiredis.pack_command(tuple(words))  # type: ignore[arg-type]
    return packed


def script_call(
    script: Script,
    keys: Sequence[str],
    args: Iterable[Word],
    *,
    reply_lengths: Collection[int] = (),
    is_refund: bool = False,
) -> Call:
    """Return a call of a script on these keys, which replies one number by default."""
    packed = pack(("EVALSHA", script.sha, len(keys), *keys, *args))
    return Call(
        script,
        keys[0],
        packed,
        reply_lengths=reply_lengths,
        is_refund=is_refund,
    )
