"""manage.py rlaas doctor: what is wrong, and what to write instead.

Each function that looks at something yields or returns findings.
"""

from __future__ import annotations

import ipaddress
import re
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from django.core import checks
from django.template.defaultfilters import filesizeformat, pluralize

from .. import backend, conf
from ..core.keys import IPAddress, decode, parse_address
from ..stats import reader
from .base import Output, Styled, argument, percent, subcommand

OK = "ok"
WARNING = "warning"
ERROR = "error"
STYLES = {OK: "SUCCESS", WARNING: "WARNING", ERROR: "ERROR"}

CALLS = 200  # whose latency is measured
OLDEST = (6, 2)
MAX_CLOCK_DIFFERENCE = 1.0  # seconds
FULL = 0.9  # of maxmemory
SCANNED = 10_000  # keys that are looked at
SAMPLED = 500  # of ours, those whose TTL is read


class Finding(NamedTuple):
    """What was found, and what to write or do instead."""

    level: str
    subject: str
    text: str
    fix: str = ""


@subcommand(
    argument(
        "--strict", action="store_true", help="Exit with 2 if there is a warning."
    ),
    example="manage.py rlaas doctor --strict",
)
def doctor(options: Namespace, output: Output) -> int:
    """Look for what is wrong with Redis and the settings, and what to write instead.

    The exit code is 1 for an error.
    """
    findings = [*look_at_settings(), *look_at_redis()]
    if output.as_json:
        output.json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            level = Styled(f"{finding.level:8}", STYLES[finding.level])
            output.line(level, f"{finding.subject}: {finding.text}")
            if finding.fix:
                output.line(f"         {finding.fix}")

    levels = {finding.level for finding in findings}
    if ERROR in levels:
        return 1
    if options.strict and WARNING in levels:
        return 2
    return 0


def look_at_settings() -> Iterator[Finding]:
    """Run our system checks, also those of a deployment."""
    messages = checks.run_checks(
        tags=["caches", "security"], include_deployment_checks=True
    )
    problems = [
        message for message in messages if str(message.id).startswith("rlaas_django.")
    ]
    for message in problems:
        level = ERROR if message.level >= checks.ERROR else WARNING
        subject = f"settings ({message.id})"
        yield Finding(level, subject, str(message.msg), str(message.hint or ""))

    if not problems:
        yield Finding(OK, "settings", "The system checks find nothing.")


def look_at_redis() -> Iterator[Finding]:
    """Look at the servers, and at our keys on them."""
    try:
        if backend.counts_in_process():  # which the system checks report
            return
        for server in backend.servers():
            yield from look_at_connection(server)
            yield from look_at_state(server)
        yield look_at_keys()
        yield look_at_clients()
    except Exception as error:  # noqa: BLE001  (also of settings, which are above)
        yield Finding(
            ERROR,
            "connection",
            f"Redis cannot be examined: {error}",
            "Start the server, or correct LOCATION in CACHES; until then policies "
            "decide by on_failure.",
        )


def look_at_connection(server: backend.Server) -> Iterator[Finding]:
    """Look at the latency, the encryption, and the clock."""
    latency = _latency(server)
    clock = _clock(server)

    encryption = backend.encryption(server)
    yield Finding(OK, "connection", f"{server.name} replies; {encryption.text}.")
    if not encryption.is_safe and not _is_private(server.address[0]):
        yield Finding(
            WARNING,
            "TLS",
            f"{server.name} is reached over a public network: {encryption.text}.",
            "Write rediss:// in LOCATION, and require the server's certificate.",
        )

    yield latency
    yield clock


def _latency(server: backend.Server) -> Finding:
    """Compare what a PING takes with the timeout."""
    latencies = []  # ms
    for _ in range(CALLS):
        started = time.perf_counter()
        backend.run_commands([("PING",)], server)
        latencies.append(1000 * (time.perf_counter() - started))

    percentiles = statistics.quantiles(latencies, n=100)
    p50 = percentiles[49]
    p99 = percentiles[98]
    timeout = 1000 * conf.config().timeout
    text = (
        f"p50 {p50:.2g} ms, p99 {p99:.2g} ms over {CALLS} calls; "
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


def _clock(server: backend.Server) -> Finding:
    """Compare the clock of a server with that of this host."""
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


def look_at_state(server: backend.Server) -> Iterator[Finding]:
    """Look at what INFO tells: version, role, memory, persistence."""
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
    """Compare the memory in use with maxmemory; a system check looks at eviction."""
    used = int(info.get("used_memory", 0))
    maximum = int(info.get("maxmemory", 0))
    if not maximum:
        return Finding(
            OK, "memory", f"{filesizeformat(used)} used; maxmemory is not set."
        )

    share = used / maximum
    text = (
        f"{filesizeformat(used)} of {filesizeformat(maximum)} ({percent(share)}) used"
    )
    if share <= FULL:
        return Finding(OK, "memory", f"{text}.")

    return Finding(
        ERROR,
        "memory",
        f"{text}: soon the server takes no writes.",
        "Raise maxmemory; `manage.py rlaas memory` shows what each policy takes.",
    )


def _persistence(info: dict[str, str]) -> Finding:
    statuses = ("rdb_last_bgsave_status", "aof_last_write_status")
    failed = [name for name in statuses if info.get(name, "ok") != "ok"]
    if not failed:
        return Finding(OK, "persistence", "No save has failed.")

    return Finding(
        ERROR,
        "persistence",
        f"The last save failed ({', '.join(failed)}).",
        "Make room on its disk; a server that cannot save refuses writes (MISCONF), "
        "and nothing is counted.",
    )


def look_at_keys() -> Finding:
    """Look for keys of ours without a TTL, in a sample."""
    pages = backend.scan("rlaas:*", SCANNED)
    sample = [key for page in pages for key in page][:SAMPLED]
    ttls = backend.run_commands([("PTTL", key) for key in sample])

    lasting = [key for key, ttl in zip(sample, ttls, strict=True) if ttl == -1]
    if not lasting:
        return Finding(OK, "keys", f"All of {len(sample)} sampled keys have a TTL.")

    return Finding(
        ERROR,
        "keys",
        f"{len(lasting)} of {len(sample)} keys have no TTL, such as {lasting[0]}.",
        "None of ours is written without one. If an old version or a person wrote "
        "it, delete it: UNLINK <key>.",
    )


def look_at_clients() -> Finding:
    """Compare the trusted proxies with the addresses of recent refusals."""
    parsed = [
        (parse_address(refusal.address), refusal.identity)
        for refusal in reader.refusals()
    ]
    refused = [(address, name) for address, name in parsed if address is not None]
    addresses = [address for address, _ in refused]
    trusted = [address for address in addresses if _is_trusted(address)]
    private = _shared(refused)

    most = len(addresses) / 2
    if len(trusted) > most:
        return Finding(
            WARNING,
            "proxies",
            f"{len(trusted)} of the last {len(addresses)} refusals are by the address "
            f"of a trusted proxy, which passes none on ({trusted[0]}).",
            "Have it set X-Forwarded-For, or the header that "
            "RATE_LIMITER['PROXY_HEADER'] names.",
        )
    if len(private) > most:
        return Finding(
            WARNING,
            "proxies",
            f"{len(private)} of the last {len(addresses)} refusals are by a private "
            "address with several users, as if all clients came through a proxy "
            f"({private[0]}).",
            "List your proxies in RATE_LIMITER['TRUSTED_PROXIES'], such as "
            f'["{private[0]}"]; [] if these are clients.',
        )

    clients = len(set(addresses))
    text = (
        f"The last {len(addresses)} refusals are of {clients} "
        f"client{pluralize(clients)} by address."
    )
    return Finding(OK, "proxies", text)


def _shared(refused: Sequence[tuple[IPAddress, str]]) -> list[IPAddress]:
    """Return the private addresses of refusals that several users share."""
    if (conf.raw() or {}).get("TRUSTED_PROXIES") == []:
        return []  # the site says that these are clients

    of_users = {pair for pair in refused if decode(pair[1])[0] == "user"}
    numbers = Counter(address for address, _ in of_users)
    return [
        address
        for address, _ in refused
        if numbers[address] > 1 and not (address.is_global or _is_trusted(address))
    ]


def _is_private(host: str) -> bool:
    """Return whether a host is a unix socket, a name without a dot, or not public."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.startswith("/")


def _is_trusted(address: IPAddress) -> bool:
    return any(
        address in network
        for network in conf.config().proxies
        if not isinstance(network, str)
    )
