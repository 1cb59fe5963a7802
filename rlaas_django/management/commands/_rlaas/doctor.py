"""manage.py rlaas doctor: what is wrong, and what to write instead."""

from __future__ import annotations

import ipaddress
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator

from django.core import checks

from .... import backend, conf
from ....core.keys import COUNTER_PREFIX, parse_address, parse_counter_key
from ....stats import reader
from . import diagnosis
from .diagnosis import ERROR, OK, WARNING, Finding
from .output import Output, Styled, percent, size

HELP = (
    "Look for what is wrong with Redis and the settings, and say what to write instead."
)
EXAMPLE = "manage.py rlaas doctor --strict"

SCANNED, SAMPLED = (
    10_000,
    500,
)  # keys that are looked at, and of ours the ones that are measured
PREFIX = "rlaas:"
# Looked at here, too, and more closely.
OWN_CHECKS = {"rlaas_django.W011"}
STYLES = {OK: "SUCCESS", WARNING: "WARNING", ERROR: "ERROR"}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--strict", action="store_true", help="Exit with 2 if there is a warning."
    )


def run(options: Namespace, output: Output) -> int:
    """Print the findings; exit with 1 for an error, and with 2 for a warning if it is to be strict."""
    findings = [*settings(), *redis()]
    if output.as_json:
        output.json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            output.line(
                Styled(f"{finding.level:8}", STYLES[finding.level]),
                f"{finding.subject}: {finding.text}",
            )
            if finding.fix:
                output.line(f"         {finding.fix}")
    levels = {finding.level for finding in findings}
    return 1 if ERROR in levels else 2 if options.strict and WARNING in levels else 0


def settings() -> Iterator[Finding]:
    """Run our system checks, those of a deployment too: the cache alias, proxies, the order of the middleware."""
    found = checks.run_checks(
        tags=["caches", "security"], include_deployment_checks=True
    )
    ours = [
        each
        for each in found
        if (each.id or "").startswith("rlaas_django.") and each.id not in OWN_CHECKS
    ]
    for message in ours:
        level = ERROR if message.level >= checks.ERROR else WARNING
        yield Finding(
            level, f"settings ({message.id})", str(message.msg), str(message.hint or "")
        )
    if not ours:
        yield Finding(OK, "settings", "The system checks find nothing.")


def redis() -> Iterator[Finding]:
    """Look at the servers, and at our keys on them."""
    try:
        servers = backend.servers()
    except Exception as error:  # noqa: BLE001  (also of settings that no client can be made of, which are above)
        yield Finding(
            ERROR,
            "connection",
            f"No server is known: {error}",
            "Correct LOCATION in CACHES.",
        )
        return
    for server in servers:
        found = list(diagnosis.connection(server))
        yield from found
        if any(finding.level == ERROR for finding in found):
            return
        yield from diagnosis.state(server)
        yield from diagnosis.scripts(server)
    yield from keys()
    yield from proxies()


def keys() -> Iterator[Finding]:
    """Look for keys of ours without a TTL, and at the memory of each policy, in a sample."""
    ours = [key for page in backend.scan(f"{PREFIX}*", SCANNED) for key in page][
        :SAMPLED
    ]
    ttls = backend.run_commands([("PTTL", key) for key in ours])
    lasting = [key for key, ttl in zip(ours, ttls, strict=True) if ttl == -1]
    if lasting:
        fix = "None of ours is written without one. If an old version or a person wrote it, delete it: UNLINK <key>."
        yield Finding(
            ERROR,
            "keys",
            f"{len(lasting)} of {len(ours)} keys have no TTL, such as {lasting[0]}.",
            fix,
        )
    else:
        yield Finding(OK, "keys", f"All of {len(ours)} sampled keys have a TTL.")
    counters = [key for key in ours if key.startswith(COUNTER_PREFIX)]
    sizes = backend.run_commands([("MEMORY", "USAGE", key) for key in counters])
    by_policy: dict[str, list[int]] = defaultdict(list)
    for key, number in zip(counters, sizes, strict=True):
        if (pair := parse_counter_key(key)) and number:
            by_policy[pair[0]].append(number)
    total = sum(map(sum, by_policy.values()))
    for name, numbers in sorted(by_policy.items(), key=lambda item: -sum(item[1])):
        mean, share = size(sum(numbers) / len(numbers)), percent(sum(numbers) / total)
        yield Finding(
            OK,
            "memory by policy",
            f"{name}: {mean} per identity, {share} of the sampled counters.",
        )


def proxies() -> Iterator[Finding]:
    """Compare the trusted proxies with the addresses that recent refusals were counted by."""
    addresses = Counter(
        each.address
        for each in reader.refusals()
        if parse_address(each.address) is not None
    )
    if not addresses:
        yield Finding(
            OK,
            "proxies",
            "No recent refusal tells by which address clients are counted.",
        )
        return
    trusted = [
        network for network in conf.config().proxies if not isinstance(network, str)
    ]
    behind = [
        each
        for each in addresses
        if any(ipaddress.ip_address(each) in network for network in trusted)
    ]
    private = [
        each for each in addresses if each not in behind and diagnosis.is_private(each)
    ]
    total, are_clients = (
        sum(addresses.values()),
        (conf.raw() or {}).get("TRUSTED_PROXIES") == [],
    )
    for text, suspicious, fix in (
        (
            "are by the address of a trusted proxy, which passes none on",
            behind,
            "Have it set X-Forwarded-For, or the header that RATE_LIMITER['PROXY_HEADER'] names.",
        ),
        (
            "are by a private address, as if all clients came through a proxy",
            [] if are_clients else private,
            "List your proxies in RATE_LIMITER['TRUSTED_PROXIES'], such as [\"{}\"]; [] if these are clients.",
        ),
    ):
        if 2 * sum(addresses[each] for each in suspicious) > total:
            most = max(suspicious, key=lambda each: addresses[each])
            text = f"{sum(addresses[each] for each in suspicious)} of the last {total} refusals {text} ({most})."
            yield Finding(WARNING, "proxies", text, fix.format(most))
            return
    yield Finding(
        OK,
        "proxies",
        f"The last {total} refusals are of {len(addresses)} clients by address.",
    )
