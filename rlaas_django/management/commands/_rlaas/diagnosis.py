"""What `doctor` looks at on each server; every function yields findings."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .... import backend, conf
from ....backend.scripts import SCRIPTS
from .output import duration, percent, plural, size

OK, WARNING, ERROR = "ok", "warning", "error"
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
    """Look at the connection, its encryption, and its latency beside the timeout."""
    times = []
    try:
        for _ in range(CALLS):
            started = time.perf_counter()
            backend.run_commands([("PING",)], server)
            times.append(1000 * (time.perf_counter() - started))
    except backend.UnavailableError as error:
        fix = "Start the server, or correct LOCATION in CACHES; until then policies decide by on_failure."
        yield Finding(
            ERROR, "connection", f"{server.name} is unavailable: {error}", fix
        )
        return
    encryption = backend.encryption(server)
    yield Finding(OK, "connection", f"{server.name} replies; {encryption.text}.")
    if not encryption.is_safe and not is_private(server.address[0]):
        fix = "Write rediss:// in LOCATION, and require the server's certificate."
        yield Finding(
            WARNING,
            "TLS",
            f"{server.name} is reached over a public network: {encryption.text}.",
            fix,
        )
    times.sort()
    p50, p99, timeout = (
        times[CALLS // 2],
        times[CALLS * 99 // 100],
        1000 * conf.config().timeout,
    )
    text = f"p50 {p50:.2g} ms, p99 {p99:.2g} ms over {CALLS} calls; RATE_LIMITER['TIMEOUT'] is {timeout:g} ms"
    if p99 > timeout / 2:
        fix = f"Set RATE_LIMITER['TIMEOUT'] to {4 * p99 / 1000:.2g}, or bring the server nearer."
        yield Finding(WARNING, "latency", f"{text}: decisions will time out.", fix)
    else:
        yield Finding(OK, "latency", f"{text}.")
    yield from _clock(server)


def is_private(host: str) -> bool:
    """Return whether a host is a unix socket, a name without a dot, or an address that is not public."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.startswith("/")


def _clock(server: backend.Server) -> Iterator[Finding]:
    before = time.time()
    ((seconds, microseconds),) = backend.run_commands([("TIME",)], server)
    difference = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
    if abs(difference) > MAX_CLOCK_DIFFERENCE:
        text = f"The server's clock differs by {difference:+.1f} s: statistics and ends of overrides are off by that."
        yield Finding(WARNING, "clock", text, "Run NTP on both hosts.")
    else:
        yield Finding(
            OK,
            "clock",
            f"The server's clock differs by {1000 * abs(difference):.0f} ms.",
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
    yield from _version(info)
    yield from _memory(info)
    yield from _persistence(info)
    yield from _replicas(info)


def _version(info: dict[str, str]) -> Iterator[Finding]:
    name, version = (
        info.get("server_name", "redis"),
        info.get("valkey_version") or info.get("redis_version", "0"),
    )
    numbers = tuple(
        int(number) for number in re.findall(r"\d+", info.get("redis_version", "0"))[:2]
    )
    if numbers < OLDEST:
        yield Finding(
            ERROR,
            "version",
            f"{name} {version} is too old.",
            "Use Redis 6.2 or newer, or Valkey.",
        )
    elif (role := info.get("role", "master")) != "master":
        fix = "Name the primary in LOCATION, or use Sentinel, which finds it."
        yield Finding(
            ERROR,
            "role",
            f"{name} {version} is a {role}: it takes no writes, so nothing is counted.",
            fix,
        )
    else:
        yield Finding(OK, "version", f"{name} {version}, {role}.")


def _memory(info: dict[str, str]) -> Iterator[Finding]:
    used, maximum = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "noeviction")
    if not maximum:
        yield Finding(OK, "memory", f"{size(used)} used; maxmemory is not set.")
    elif backend.eviction_policy(info) is not None:
        fix = "Set maxmemory-policy noeviction, on a server that the limiter does not share with a cache."
        yield Finding(
            WARNING,
            "memory",
            f"maxmemory-policy {policy} drops counters when the memory is full.",
            fix,
        )
    elif used > FULL * maximum:
        fix = "Raise maxmemory; `manage.py rlaas plan` predicts what the limits take."
        yield Finding(
            ERROR,
            "memory",
            f"{size(used)} of {size(maximum)} used: soon the server takes no writes.",
            fix,
        )
    else:
        yield Finding(
            OK,
            "memory",
            f"{size(used)} of {size(maximum)} ({percent(used / maximum)}) used, {policy}.",
        )


def _persistence(info: dict[str, str]) -> Iterator[Finding]:
    failed = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_write_status")
        if info.get(name, "ok") != "ok"
    ]
    aof = "on" if info.get("aof_enabled") == "1" else "off"
    if failed:
        fix = "Make room on its disk; a server that cannot save refuses writes (MISCONF), and nothing is counted."
        yield Finding(
            ERROR, "persistence", f"The last save failed ({', '.join(failed)}).", fix
        )
    else:
        ago = max(0, time.time() - int(info.get("rdb_last_save_time", 0)))
        yield Finding(
            OK,
            "persistence",
            f"AOF {aof}; last saved {duration(ago)} ago. Overrides are restored anyway.",
        )


def _replicas(info: dict[str, str]) -> Iterator[Finding]:
    listed = [value for name, value in info.items() if re.fullmatch(r"slave\d+", name)]
    replicas = [dict(re.findall(r"(\w+)=([^,]*)", value)) for value in listed]
    late = [
        each
        for each in replicas
        if each.get("state") != "online" or int(each.get("lag", 0)) > MAX_LAG
    ]
    for each in late:
        text = f"Replica {each.get('ip')}:{each.get('port')} is {each.get('state')}, {each.get('lag')} s behind."
        yield Finding(
            WARNING,
            "replicas",
            text,
            "After a failover the usage of that time is lost: mend the replica.",
        )
    if not late:
        yield Finding(
            OK,
            "replicas",
            f"{plural(len(replicas), 'replica')}, none behind."
            if replicas
            else "No replica.",
        )


def scripts(server: backend.Server) -> Iterator[Finding]:
    """Look at the scripts, which are known by the hash of their text."""
    exists = ("SCRIPT", "EXISTS", *(script.sha for script in SCRIPTS))
    loaded: Any = backend.run_commands([exists], server)[0]
    missing = [
        script.name
        for script, is_loaded in zip(SCRIPTS, loaded, strict=True)
        if not is_loaded
    ]
    text = f"{len(SCRIPTS) - len(missing)} of {len(SCRIPTS)} are loaded with the hashes of this version"
    later = "; the first decision loads the others" if missing else ""
    yield Finding(OK, "scripts", f"{text}{later}.")
