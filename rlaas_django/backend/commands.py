"""Commands as they are sent: packed bytes, and how many replies they bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import hiredis

from .scripts import Script

Word = str | bytes | int | float


class Command(NamedTuple):
    """One or more commands, packed."""

    packed: bytes
    replies: int = 1


class Call(NamedTuple):
    """A script with its keys and arguments, packed; or any other command, without a script."""

    script: Script | None
    key: str  # one of its keys, which are all in one slot
    command: Command
    is_refund: bool = False


def pack(*commands: Sequence[Word]) -> Command:
    """Return commands as they are sent."""
    packed: list[bytes] = [hiredis.pack_command(tuple(command)) for command in commands]  # type: ignore[arg-type]
    return Command(b"".join(packed), len(commands))


def script_call(script: Script, keys: Sequence[str], args: Iterable[Word], *, is_refund: bool = False) -> Call:
    """Return a call of a script on these keys."""
    command = pack(("EVALSHA", script.sha, len(keys), *keys, *args))
    return Call(script, keys[0], command, is_refund)


ASKING = pack(("ASKING",))


def with_asking(command: Command) -> Command:
    """Return a command with ASKING before it, as one message: a reply of its own comes first."""
    return Command(ASKING.packed + command.packed, command.replies + 1)
