"""What servers tell about themselves."""

from __future__ import annotations

import ssl
from typing import NamedTuple

import redis

from .errors import UnavailableError
from .execution import run_commands
from .server import Server

NO_EVICTION = "noeviction"
UNVERIFIED = (
    "none",
    "CERT_NONE",
    None,
    ssl.CERT_NONE,
)  # values of redis-py's option ssl_cert_reqs


class Encryption(NamedTuple):
    """How connections to a server are protected."""

    text: str
    is_safe: bool


def encryption(server: Server) -> Encryption:
    """Return how connections to a server are protected."""
    kind, options = server.options.connection_class, server.options.options
    if issubclass(kind, redis.SSLConnection):
        if options.get("ssl_cert_reqs", "required") in UNVERIFIED:
            return Encryption(
                "encrypted by TLS, but the certificate is not checked", is_safe=False
            )
        return Encryption("encrypted by TLS", is_safe=True)
    if "path" in options:
        return Encryption("over a unix socket", is_safe=True)
    return Encryption("not encrypted", is_safe=False)


def server_info(server: Server) -> dict[str, str]:
    """Return the fields of INFO; none if an ACL forbids the command."""
    try:
        (info,) = run_commands([("INFO",)], server)
    except UnavailableError:
        return {}
    text = info.decode(errors="replace") if isinstance(info, bytes) else str(info)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def eviction_policy(info: dict[str, str]) -> str | None:
    """Return the `maxmemory-policy` of a server that drops keys when its memory is full."""
    policy = info.get("maxmemory_policy", NO_EVICTION)
    return (
        policy if policy != NO_EVICTION and info.get("maxmemory", "0") != "0" else None
    )


def table_bytes_per_key(server: Server) -> float | None:
    """Return the bytes of the hash tables of a server per key; None if it does not tell."""
    try:
        (reply,) = run_commands([("MEMORY", "STATS")], server)
    except UnavailableError:
        return None
    stats = dict(zip(reply[::2], reply[1::2], strict=True))
    databases = [
        value
        for name, value in stats.items()
        if name.startswith(b"db.") and isinstance(value, list)
    ]
    return float(
        sum(sum(database[1::2]) for database in databases)
        / max(1, stats[b"keys.count"])
    )
