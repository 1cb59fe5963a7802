"""What servers tell about themselves."""

from __future__ import annotations

from .errors import UnavailableError
from .execution import run_commands
from .server import Server

NO_EVICTION = "noeviction"


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
    return policy if policy != NO_EVICTION and info.get("maxmemory", "0") != "0" else None
