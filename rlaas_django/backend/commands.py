"""Commands as they are sent, and what their replies look like."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from .scripts import Script

Word = str | bytes | int | float

# Seconds that a page waits for a reply, where a decision waits for
# RATE_LIMITER['TIMEOUT'].
PAGE_TIMEOUT = 1.0


@dataclass(eq=False, repr=False)
class Call:
    """A packed command, for the server that has its keys."""

    script: Script | None = None  # what to load where the server does not know it
    key: str = ""  # one of the keys, which are all in one slot; "" for a single server
    packed: bytes = b""
    # The reply is a list of so many whole numbers; empty: one whole number; None:
    # anything.
    reply_lengths: Collection[int] | None = None
    is_refund: bool = False
    for_page: bool = False  # which waits longer for a reply than a decision does
    calls: tuple[Call, ...] | None = None  # of a pipeline
    sent_at: float = 0.0  # by `time.monotonic`
    # When its time began, if that was before it was sent: a topology was waited for,
    # or this is a further attempt.
    started_at: float = 0.0
    last_tick: int = 0  # of its time, in an event loop
    # Gets the reply, or the error, that nobody awaits.
    on_abandoned: Callable[[Any], None] | None = None

    def deadline(self, timeout: float) -> float:
        """Return when the time of all its attempts together is over."""
        if self.for_page:
            timeout = PAGE_TIMEOUT
        return (self.started_at or self.sent_at) + timeout

    def abandon(self, reply: Any) -> None:
        """Take the reply to a call whose caller was cancelled."""
        if self.on_abandoned is not None:
            self.on_abandoned(reply)


class Pipeline(Call):
    """Several calls that are sent together.

    Their replies are a list.
    """

    calls: tuple[Call, ...]

    def __init__(self, calls: Iterable[Call]) -> None:
        sent = tuple(calls)
        super().__init__(None, sent[-1].key, b"".join([call.packed for call in sent]))
        self.calls = sent
        self.for_page = sent[-1].for_page
        self.started_at = sent[-1].started_at

    def abandon(self, reply: Any) -> None:
        for call, part in zip(self.calls, reply, strict=True):
            call.abandon(part)


def pack(command: Sequence[Word]) -> bytes:
    """Return a command as it is sent.

    Numbers are made text here: hiredis 3.5 crashes if a signal handler raises while it
    converts one, as that of Ctrl-C does, and that of a time limit of Celery.
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
