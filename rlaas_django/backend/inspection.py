"""What servers tell about themselves, and the keys that they have.

Keys are read by SCAN, some at a time, so that no server is kept from other calls.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Iterator
from typing import NamedTuple

import redis

from .errors import UnavailableError
from .execution import run_commands, servers
from .server import Server

SCAN_COUNT = 1_000  # keys that a server looks at per call
NO_EVICTION = "noeviction"
# Values of redis-py's option ssl_cert_reqs.
UNVERIFIED = ("none", "CERT_NONE", None, ssl.CERT_NONE)


class Encryption(NamedTuple):
    """How connections to a server are protected."""

    text: str
    is_safe: bool


def encryption(server: Server) -> Encryption:
    """Return how connections to a server are protected."""
    options = server.options.options
    if "path" in options:
        return Encryption("over a unix socket", is_safe=True)
    if not issubclass(server.options.connection_class, redis.SSLConnection):
        return Encryption("not encrypted", is_safe=False)
    if options.get("ssl_cert_reqs", "required") in UNVERIFIED:
        text = "encrypted by TLS, but the certificate is not checked"
        return Encryption(text, is_safe=False)
    return Encryption("encrypted by TLS", is_safe=True)


def server_info(server: Server) -> dict[str, str]:
    """Return the fields of INFO.

    There are none if an ACL forbids the command.
    """
    try:
        (reply,) = run_commands([("INFO",)], server)
    except UnavailableError:
        return {}
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def eviction_policy(info: dict[str, str]) -> str | None:
    """Return the `maxmemory-policy` of a server that drops keys when memory is full."""
    policy = info.get("maxmemory_policy", NO_EVICTION)
    if policy == NO_EVICTION or info.get("maxmemory", "0") == "0":
        return None
    return policy


def scan(pattern: str, most: float = math.inf) -> Iterator[list[str]]:
    """Yield pages of keys that match, until about `most` keys were looked at."""
    cursor = 0
    scanned = 0
    while scanned < most:
        cursor, keys = scan_page(cursor, pattern)
        scanned += SCAN_COUNT
        yield keys
        if cursor == 0:
            return


def scan_page(
    cursor: int, pattern: str, count: int = SCAN_COUNT
) -> tuple[int, list[str]]:
    """Return the next cursor, and the keys that match among about `count`.

    The cursor is 0 at the end. The servers of a Cluster are scanned one after the
    other; our cursor holds the server and its own cursor.
    """
    nodes = servers()
    position, index = divmod(cursor, len(nodes))
    command = ("SCAN", position, "MATCH", pattern, "COUNT", count)
    ((reply, keys),) = run_commands([command], nodes[index])

    position = int(reply)
    if position == 0:
        index += 1
    following = 0
    if index < len(nodes):
        following = position * len(nodes) + index
    return following, [key.decode(errors="replace") for key in keys]
