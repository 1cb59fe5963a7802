"""manage.py rlaas doctor: what is wrong, and what to write instead."""

from __future__ import annotations

import ipaddress
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from django.core import checks

from .. import backend, conf
from ..core.keys import parse_address
from ..stats import reader
from . import diagnosis
from .diagnosis import ERROR, OK, WARNING, Finding
from .output import Output, Styled
from .subcommands import Subcommand, argument

SCANNED = 10_000  # keys that are looked at
SAMPLED = 500  # of ours, those whose TTL is read
# What is looked at here also, and more closely.
OWN_CHECKS = {"rlaas_django.W011"}
STYLES = {OK: "SUCCESS", WARNING: "WARNING", ERROR: "ERROR"}


class Doctor(Subcommand):
    """What is wrong, and what to write instead."""

    help = (
        "Look for what is wrong with Redis and the settings, and say what to write "
        "instead."
    )
    example = "manage.py rlaas doctor --strict"

    arguments = (
        argument(
            "--strict", action="store_true", help="Exit with 2 if there is a warning."
        ),
    )

    def run(self, options: Namespace, output: Output) -> int:
        """Print the findings; the exit code is 1 for an error."""
        findings = [*settings(), *redis()]
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


def settings() -> Iterator[Finding]:
    """Run our system checks, also those of a deployment."""
    messages = checks.run_checks(
        tags=["caches", "security"], include_deployment_checks=True
    )
    problems = [
        message
        for message in messages
        if str(message.id).startswith("rlaas_django.") and message.id not in OWN_CHECKS
    ]
    for message in problems:
        level = ERROR if message.level >= checks.ERROR else WARNING
        subject = f"settings ({message.id})"
        yield Finding(level, subject, str(message.msg), str(message.hint or ""))
    if not problems:
        yield Finding(OK, "settings", "The system checks find nothing.")


def redis() -> Iterator[Finding]:
    """Look at the servers, and at our keys on them."""
    try:
        servers = backend.servers()
    except Exception as error:  # noqa: BLE001  (also of settings, which are above)
        text = f"No server is known: {error}"
        yield Finding(ERROR, "connection", text, "Correct LOCATION in CACHES.")
        return

    for server in servers:
        findings = list(diagnosis.connection(server))
        yield from findings
        if any(finding.level == ERROR for finding in findings):
            return
        yield from diagnosis.state(server)
        yield from diagnosis.scripts(server)
    yield from keys()
    yield from proxies()


def keys() -> Iterator[Finding]:
    """Look for keys of ours without a TTL, in a sample."""
    pages = backend.scan("rlaas:*", SCANNED)
    sample = [key for page in pages for key in page][:SAMPLED]
    ttls = backend.run_commands([("PTTL", key) for key in sample])

    lasting = [key for key, ttl in zip(sample, ttls, strict=True) if ttl == -1]
    if lasting:
        yield Finding(
            ERROR,
            "keys",
            f"{len(lasting)} of {len(sample)} keys have no TTL, such as {lasting[0]}.",
            "None of ours is written without one. If an old version or a person wrote "
            "it, delete it: UNLINK <key>.",
        )
    else:
        yield Finding(OK, "keys", f"All of {len(sample)} sampled keys have a TTL.")


def proxies() -> Iterator[Finding]:
    """Compare the trusted proxies with the addresses of recent refusals."""
    addresses = Counter(
        refusal.address
        for refusal in reader.refusals()
        if parse_address(refusal.address) is not None
    )
    if not addresses:
        text = "No recent refusal tells by which address clients are counted."
        yield Finding(OK, "proxies", text)
        return

    total = addresses.total()
    trusted = {address for address in addresses if _is_trusted(address)}
    private = {address for address in addresses if diagnosis.is_private(address)}
    if (conf.raw() or {}).get("TRUSTED_PROXIES") == []:
        private.clear()  # the site says that these are clients

    for suspects, text, fix in (
        (
            trusted,
            "are by the address of a trusted proxy, which passes none on",
            "Have it set X-Forwarded-For, or the header that "
            "RATE_LIMITER['PROXY_HEADER'] names.",
        ),
        (
            private - trusted,
            "are by a private address, as if all clients came through a proxy",
            "List your proxies in RATE_LIMITER['TRUSTED_PROXIES'], such as "
            '["{}"]; [] if these are clients.',
        ),
    ):
        number = sum(addresses[address] for address in suspects)
        if 2 * number > total:
            most = max(suspects, key=addresses.__getitem__)
            text = f"{number} of the last {total} refusals {text} ({most})."
            yield Finding(WARNING, "proxies", text, fix.format(most))
            return

    text = f"The last {total} refusals are of {len(addresses)} clients by address."
    yield Finding(OK, "proxies", text)


def _is_trusted(address: str) -> bool:
    return any(
        ipaddress.ip_address(address) in network
        for network in conf.config().proxies
        if not isinstance(network, str)
    )
