"""Read keys by SCAN, of every server: some at a time, so that no server is kept from other calls."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .execution import run_commands, servers

SCAN_COUNT = 1_000  # keys that a server looks at per call


def scan_page(
    cursor: int, pattern: str, count: int = SCAN_COUNT
) -> tuple[int, list[str]]:
    """Return the next cursor, 0 at the end, and the keys that match among about `count`.

    The servers of a Cluster are scanned one after the other; our cursor holds the server and its own cursor.
    """
    found = servers()
    position, index = divmod(cursor, len(found))
    ((reply, keys),) = run_commands(
        [("SCAN", position, "MATCH", pattern, "COUNT", count)], found[index]
    )
    position = int(reply)
    index += position == 0
    following = position * len(found) + index if index < len(found) else 0
    return following, [
        key.decode(errors="replace") if isinstance(key, bytes) else key for key in keys
    ]


def scan(pattern: str, most: float = math.inf) -> Iterator[list[str]]:
    """Yield pages of keys that match, until the servers have looked at about `most` keys."""
    cursor = scanned = 0
    while scanned < most:
        cursor, keys = scan_page(cursor, pattern)
        scanned += SCAN_COUNT
        yield keys
        if cursor == 0:
            return
