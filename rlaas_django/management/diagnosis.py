"""What `doctor` looks at on each server; every function yields findings."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import backend, conf
from ..backend.scripts import SCRIPTS
from ..operators.formatting import duration
from .output import percent, plural, size

OK = "ok"
WARNING = "warning"
ERROR = "error"

CALLS = 200  # whose latency is measured
OLDEST = (6, 2)
MAX_CLOCK_DIFFERENCE = 1.0  # seconds
MAX_LAG = 10  # seconds of a replica
FULL = 0.9  # of maxmemory


class Finding(NamedTuple):
    """What was found, and what to write or do instead."""

    level: str
    subject: str
    text: str
    fix: str = ""


def connection(server: backend.Server) -> Iterator[Finding]:
    """Look at the connection, its encryption, its latency, and the clock."""
    try:
        latencies = sorted(_measure_latency(server) for _ in range(CALLS))
    except backend.UnavailableError as error:
        yield Finding(
            ERROR,
            "connection",
            f"{server.name} is unavailable: {error}",
            "Start the server, or correct LOCATION in CACHES; until then policies "
            "decide by on_failure.",
        )
        return

    encryption = backend.encryption(server)
    yield Finding(OK, "connection", f"{server.name} replies; {encryption.text}.")
    if not encryption.is_safe and not is_private(server.address[0]):
        yield Finding(
            WARNING,
            "TLS",
            f"{server.name} is reached over a public network: {encryption.text}.",
            "Write rediss:// in LOCATION, and require the server's certificate.",
        )
    yield _latency(latencies)
    yield _clock(server)


def _measure_latency(server: backend.Server) -> float:
    """Return the ms that a PING takes."""
    started = time.perf_counter()
    backend.run_commands([("PING",)], server)
    return 1000 * (time.perf_counter() - started)


def _latency(latencies: list[float]) -> Finding:
    """Compare the sorted latencies of some calls with the timeout."""
    p50 = latencies[len(latencies) // 2]
    p99 = latencies[len(latencies) * 99 // 100]
    timeout = 1000 * conf.config().timeout
    text = (
        f"p50 {p50:.2g} ms, p99 {p99:.2g} ms over {len(latencies)} calls; "
        f"RATE_LIMITER['TIMEOUT'] is {timeout:g} ms"
    )
    if p99 <= timeout / 2:
        return Finding(OK, "latency", f"{text}.")
    return Finding(
        WARNING,
        "latency",
        f"{text}: decisions will time out.",
        f"Set RATE_LIMITER['TIMEOUT'] to {4 * p99 / 1000:.2g}, or bring the server "
        "nearer.",
    )


def is_private(host: str) -> bool:
    """Return whether a host is a unix socket, a name without a dot, or not public."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.startswith("/")


def _clock(server: backend.Server) -> Finding:
    before = time.time()
    ((seconds, microseconds),) = backend.run_commands([("TIME",)], server)
    now = (before + time.time()) / 2
    difference = int(seconds) + int(microseconds) / 1e6 - now
    if abs(difference) <= MAX_CLOCK_DIFFERENCE:
        text = f"The server's clock differs by {1000 * abs(difference):.0f} ms."
        return Finding(OK, "clock", text)
    return Finding(
        WARNING,
        "clock",
        f"The server's clock differs by {difference:+.1f} s: "
        "statistics and ends of overrides are off by that.",
        "Run NTP on both hosts.",
    )


def state(server: backend.Server) -> Iterator[Finding]:
    """Look at what INFO tells: version, role, memory, persistence, replicas."""
    info = backend.server_info(server)
    if not info:
        yield Finding(
            WARNING,
            "server",
            f"{server.name} does not permit INFO.",
            "Add +info to the rights of the user.",
        )
        return

    yield _version(info)
    yield _memory(info)
    yield _persistence(info)
    yield from _replicas(info)


def _version(info: dict[str, str]) -> Finding:
    version = info.get("redis_version", "0")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    version = info.get("valkey_version") or version
    name = f"{info.get('server_name', 'redis')} {version}"
    if numbers < OLDEST:
        return Finding(
            ERROR,
            "version",
            f"{name} is too old.",
            "Use Redis 6.2 or newer, or Valkey.",
        )

    role = info.get("role", "master")
    if role != "master":
        return Finding(
            ERROR,
            "role",
            f"{name} is a {role}: it takes no writes, so nothing is counted.",
            "Name the primary in LOCATION, or use Sentinel, which finds it.",
        )
    return Finding(OK, "version", f"{name}, {role}.")


def _memory(info: dict[str, str]) -> Finding:
    used = int(info.get("used_memory", 0))
    maximum = int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "noeviction")
    if not maximum:
        return Finding(OK, "memory", f"{size(used)} used; maxmemory is not set.")
    if backend.eviction_policy(info) is not None:
        return Finding(
            WARNING,
            "memory",
            f"maxmemory-policy {policy} drops counters when the memory is full.",
            "Set maxmemory-policy noeviction, on a server that the limiter does not "
            "share with a cache.",
        )

    text = f"{size(used)} of {size(maximum)}"
    if used > FULL * maximum:
        return Finding(
            ERROR,
            "memory",
            f"{text} used: soon the server takes no writes.",
            "Raise maxmemory; `manage.py rlaas memory` shows what each policy takes.",
        )
    share = percent(used / maximum)
    return Finding(OK, "memory", f"{text} ({share}) used, {policy}.")


def _persistence(info: dict[str, str]) -> Finding:
    statuses = ("rdb_last_bgsave_status", "aof_last_write_status")
    failed = [name for name in statuses if info.get(name, "ok") != "ok"]
    if failed:
        return Finding(
            ERROR,
            "persistence",
            f"The last save failed ({', '.join(failed)}).",
            "Make room on its disk; a server that cannot save refuses writes "
            "(MISCONF), and nothing is counted.",
        )

    aof = "on" if info.get("aof_enabled") == "1" else "off"
    ago = max(0, time.time() - int(info.get("rdb_last_save_time", 0)))
    text = f"AOF {aof}; last saved {duration(ago)} ago. Overrides are restored anyway."
    return Finding(OK, "persistence", text)


def _replicas(info: dict[str, str]) -> Iterator[Finding]:
    replicas = [
        dict(re.findall(r"(\w+)=([^,]*)", value))
        for name, value in info.items()
        if re.fullmatch(r"slave\d+", name)
    ]
    late = [
        replica
        for replica in replicas
        if replica.get("state") != "online" or int(replica.get("lag", 0)) > MAX_LAG
    ]
    for replica in late:
        address = f"{replica.get('ip')}:{replica.get('port')}"
        yield Finding(
            WARNING,
            "replicas",
            f"Replica {address} is {replica.get('state')}, "
            f"{replica.get('lag')} s behind.",
            "After a failover the usage of that time is lost: mend the replica.",
        )
    if not replicas:
        yield Finding(OK, "replicas", "No replica.")
    elif not late:
        text = f"{plural(len(replicas), 'replica')}, none behind."
        yield Finding(OK, "replicas", text)


def scripts(server: backend.Server) -> Iterator[Finding]:
    """Look at the scripts, which are known by the hash of their text."""
    hashes = [script.sha for script in SCRIPTS]
    loaded: Any = backend.run_commands([("SCRIPT", "EXISTS", *hashes)], server)[0]
    number = sum(loaded)
    text = f"{number} of {len(hashes)} are loaded with the hashes of this version"
    if number < len(hashes):
        text += "; the first decision loads the others"
    yield Finding(OK, "scripts", f"{text}.")
