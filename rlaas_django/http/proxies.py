"""The client's address. Proxies are not believed unless RATE_LIMITER['TRUSTED_PROXIES'] says so."""

from __future__ import annotations

import re
from functools import lru_cache

from django.http import HttpRequest

from .. import conf, log
from ..core.keys import IPAddress, parse_address

# A pair of a Forwarded header (RFC 7239) and what ends it. Possessive, so that no header takes long to read.
_PAIR = re.compile(
    r"""\s*+ (?: ([\w!\#$%&'*+.^`|~-]++) \s*+ = \s*+ ( "(?:[^"\\]|\\.)*+" \s*+ | [^",;]*+ ) )?+ ([;,]|$)""",
    re.VERBOSE | re.ASCII,
)


def client_address(request: HttpRequest) -> str:
    """Return the address of the client: behind trusted proxies, the right-most address that is not one of theirs."""
    peer, text = _peer(request.META.get("REMOTE_ADDR") or "")
    config = conf.config()
    if config.proxies and _is_trusted(peer, config):
        # The header that the proxy writes. The other one may be the client's own, and is not read.
        header = next((name for name in config.proxy_headers if request.META.get(name)), None)
        if header is not None and (client := _client(_forwarded(header, request.META[header]), config)):
            return str(client)
    if peer is None:
        log.error(
            "A request has no address (REMOTE_ADDR is %r). Behind a unix socket, add 'unix' to "
            "RATE_LIMITER['TRUSTED_PROXIES'] and have the proxy set X-Forwarded-For.",
            request.META.get("REMOTE_ADDR"),
        )
    return text


@lru_cache(maxsize=4096)
def _peer(address: str) -> tuple[IPAddress | None, str]:
    """Return the address of the connection, parsed and as text."""
    peer = parse_address(address)
    return peer, "unknown" if peer is None else str(peer)


def _is_trusted(peer: IPAddress | None, config: conf.Config) -> bool:
    if peer is None:
        return conf.UNIX in config.proxies
    return any(not isinstance(network, str) and peer in network for network in config.proxies)


def _forwarded(header: str, value: str) -> list[str]:
    """Return the addresses in a forwarding header, the client's first; one that is no address where it is malformed."""
    if header == "HTTP_X_FORWARDED_FOR":
        return value.split(",")
    chain, at = [""], 0
    while (pair := _PAIR.match(value, at)) is not None:
        name, text, end = pair.groups()
        if name and name.lower() == "for":
            chain[-1] = re.sub(r"\\(.)", r"\1", text.strip().strip('"'))
        if not end:
            return chain
        if end == ",":
            chain.append("")
        at = pair.end()
    return ["malformed"]


def _client(chain: list[str], config: conf.Config) -> IPAddress | None:
    """Return the first address from the right that is not a trusted proxy's; None where something is no address."""
    address = None
    for text in reversed(chain):
        address = parse_address(text)
        if address is None or not _is_trusted(address, config):
            return address
    return address
