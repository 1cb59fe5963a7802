"""Commands as they are sent: packed bytes, and how many replies they bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import hiredis

from .scripts import Script

Word = str | bytes | int | float


class Call(NamedTuple):
    """Packed commands, for the server that has their keys."""

    script: Script | None  # what to load where the server does not know it
    key: str  # one of the keys, which are all in one slot; '' where there is one server
    packed: bytes
    replies: int = 1
    is_refund: bool = False

    def after(self, *command: Word) -> Call:
        """Return the call with a command before it, as one message: a reply of its own comes first."""
        return self._replace(packed=pack(command) + self.packed, replies=self.replies + 1)


def pack(*commands: Sequence[Word]) -> bytes:
    """Return commands as they are sent."""
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]


def script_call(script: Script, keys: Sequence[str], args: Iterable[Word], *, is_refund: bool = False) -> Call:
    """Return a call of a script on these keys."""
    return Call(script, keys[0], pack(("EVALSHA", script.sha, len(keys), *keys, *args)), is_refund=is_refund)
