"""Commands as they are sent: packed bytes, and how many replies they bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis

from .scripts import Script

Word = str | bytes | int | float


class Call:
    """Packed commands, for the server that has their keys."""

    __slots__ = ("is_refund", "key", "on_abandoned", "packed", "replies", "script")

    def __init__(
        self, script: Script | None, key: str, packed: bytes, replies: int = 1, *, is_refund: bool = False
    ) -> None:
        self.script = script  # what to load where the server does not know it
        self.key = key  # one of the keys, which are all in one slot; '' where there is one server
        self.packed, self.replies, self.is_refund = packed, replies, is_refund
        self.on_abandoned: Callable[[Any, Any], None] | None = None  # gets the call and a reply that nobody awaits

    def abandon(self, reply: Any) -> None:
        """Take a reply whose caller was cancelled."""
        if self.on_abandoned is not None:
            self.on_abandoned(self, reply)

    def after(self, *command: Word) -> Call:
        """Return the call with a command before it, as one message: a reply of its own comes first."""
        packed = pack(command) + self.packed
        call = Call(self.script, self.key, packed, self.replies + 1, is_refund=self.is_refund)
        call.on_abandoned = lambda _, replies: self.abandon(replies[-1])
        return call


def pack(*commands: Sequence[Word]) -> bytes:
    """Return commands as they are sent."""
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]


def script_call(script: Script, keys: Sequence[str], args: Iterable[Word], *, is_refund: bool = False) -> Call:
    """Return a call of a script on these keys."""
    return Call(script, keys[0], pack(("EVALSHA", script.sha, len(keys), *keys, *args)), is_refund=is_refund)
