"""Calls: commands as they are sent, and what their replies look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        "reply_type",
        "script",
        "sent_at",
    )

    def __init__(
        self,
        script: Script | None,
        key: str,
        packed: bytes,
        *,
        reply_type: type | None = None,
        is_refund: bool = False,
    ) -> None:
        self.script = script  # what to load where the server does not know it
        self.key = key  # one of the keys, which are all in one slot; '' where there is one server
        self.packed, self.is_refund = packed, is_refund
        self.reply_type = reply_type  # int; list, of whole numbers; None: whatever
        self.calls: tuple[Call, ...] | None = None  # of a pipeline
        self.sent_at = 0.0  # by `time.monotonic`
        self.on_abandoned: Callable[[Any], None] | None = (
            None  # gets a result that nobody awaits
        )

    def read(self, reply: Any) -> Any:
        """Return what a reply means to the caller; UnexpectedReplyError when it cannot be to this call."""
        if self.reply_type is not None:
            numbers = reply if type(reply) is list else (reply,)
            if type(reply) is not self.reply_type or not all(
                type(each) is int for each in numbers
            ):
                raise UnexpectedReplyError(reply)
        return reply

    def abandon(self, result: Any) -> None:
        """Take the result of a call whose caller was cancelled."""
        if self.on_abandoned is not None:
            self.on_abandoned(result)


class Pipeline(Call):
    """Several calls that are sent together; their results are a list."""

    __slots__ = ()
    calls: tuple[Call, ...]

    def __init__(self, calls: Iterable[Call]) -> None:
        sent = tuple(calls)
        super().__init__(None, sent[-1].key, b"".join([call.packed for call in sent]))
        self.calls = sent

    def abandon(self, result: Any) -> None:
        for call, each in zip(self.calls, result, strict=True):
            call.abandon(each)


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
    is_refund: bool = False,
) -> Call:
    """Return a call of a script on these keys. A refund replies a list, the other operations one number."""
    packed = pack(("EVALSHA", script.sha, len(keys), *keys, *args))
    return Call(
        script,
        keys[0],
        packed,
        reply_type=list if is_refund else int,
        is_refund=is_refund,
    )
