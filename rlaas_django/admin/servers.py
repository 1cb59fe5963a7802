"""The state of the Redis servers: latency, memory, loaded scripts, and open circuit breakers."""

from __future__ import annotations

import time
from types import SimpleNamespace

from .. import backend
from ..backend.scripts import SCRIPTS
from ..core.keys import COUNTER_PREFIX
from ..stats import schema
from . import panel
from .formats import duration

SAMPLE_SIZE = 100  # keys per server whose memory is measured


def open_breakers() -> list[dict[str, str]]:
    """Return the servers whose circuit breaker is open in this process."""
    return [
        {
            "name": server.name,
            "unavailable_for": duration(server.breaker.open_for),
            "next_probe": duration(server.breaker.next_probe_in),
        }
        for server in backend.topology().servers()
        if server.breaker.error is not None
    ]


def ping() -> float:
    """Return the mean latency of the servers in ms; raise UnavailableError if one is unavailable."""
    servers = backend.servers()
    started = time.perf_counter()
    for server in servers:
        backend.run_commands([("PING",)], server)
    return (time.perf_counter() - started) * 1000 / len(servers)


def server_state() -> SimpleNamespace:
    """Return the state of Redis; of a Cluster, the servers added up."""
    servers = backend.servers()
    commands = [("DBSIZE",), ("SCRIPT", "EXISTS", *(script.sha for script in SCRIPTS))]
    replies = [backend.run_commands(commands, server) for server in servers]
    infos = [_info(server) for server in servers]
    version = infos[0].get("valkey_version") or infos[0].get("redis_version", "?")
    keys = sum(size for size, _ in replies)
    return SimpleNamespace(
        latency_ms=ping(),
        version=f"{infos[0].get('server_name', 'redis')} {version}",
        used_memory=sum(int(info.get("used_memory", 0)) for info in infos),
        keys=keys,
        rate_limit_memory=_rate_limit_memory(keys),
        # The version of each script, and whether it is loaded.
        scripts=[(script.version, all(loaded[i] for _, loaded in replies)) for i, script in enumerate(SCRIPTS)],
    )


def _info(server: backend.Server) -> dict[str, str]:
    """Return the fields of INFO; none if an ACL forbids the command."""
    try:
        (info,) = backend.run_commands([("INFO",)], server)
    except backend.UnavailableError:
        return {}
    return dict(line.split(":", 1) for line in panel.as_text(info).splitlines() if ":" in line)


def _rate_limit_memory(size: int) -> int | None:
    """Return the bytes of our keys, or None if the server does not support MEMORY USAGE.

    Counters are extrapolated from a sample; statistics are few, and measured.
    """
    today = int(time.time()) // schema.DAY
    names = [*panel.policies()]
    measured = [schema.stats_key(name, day) for name in names for day in (today - 1, today)]
    measured += [schema.refusals_key(name) for name in names]
    try:
        sample = []
        for server in backend.servers():
            ((_cursor, keys),) = backend.run_commands([("SCAN", 0, "COUNT", SAMPLE_SIZE)], server)
            sample += keys
        counters = [key for key in map(panel.as_text, sample) if key.startswith(COUNTER_PREFIX)]
        replies = backend.run_commands([("MEMORY", "USAGE", key) for key in (*counters, *measured)])
    except backend.UnavailableError:  # the error of a server that does not know MEMORY USAGE, too
        return None
    sizes = [int(reply or 0) for reply in replies]
    estimated = size * sum(sizes[: len(counters)]) // max(1, len(sample))
    return estimated + sum(sizes[len(counters) :])
