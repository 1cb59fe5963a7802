"""The address of a client, behind proxies that are trusted.

No proxy is believed unless RATE_LIMITER['TRUSTED_PROXIES'] names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from django.http import HttpRequest

from .. import conf
from ..core.keys import IPAddress, parse_address
from ..runtime import log

MALFORMED = "malformed"  # in place of an address; no address is written like this

# A pair of a Forwarded header (RFC 7239) and what ends it.
# Possessive, so that no header takes long to read.
_PAIR = re.compile(
    r"""\s*+
    (?:
        ([\w!\#$%&'*+.^`|~-]++)
        \s*+ = \s*+
        ( "(?:[^"\\]|\\.)*+" \s*+ | [^",;]*+ )
    )?+
    (;|$)""",
    re.VERBOSE | re.ASCII,
)


def client_address(request: HttpRequest) -> str:
    """Return the address of a client.

    Behind trusted proxies it is the right-most address that is not one of theirs.
    """
    peer, text = _parse_peer(request.META.get("REMOTE_ADDR") or "")
    config = conf.config()

    if config.proxies and _is_trusted(peer, config):
        forwarded = _forwarded_client(request, config)
        if forwarded is not None:
            return str(forwarded)

    if peer is None:
        log.error(
            "A request has no address (REMOTE_ADDR is %r). Behind a unix socket, add "
            "'unix' to RATE_LIMITER['TRUSTED_PROXIES'] and have the proxy set "
            "X-Forwarded-For.",
            request.META.get("REMOTE_ADDR"),
        )
    return text


@lru_cache(maxsize=4096)
def _parse_peer(address: str) -> tuple[IPAddress | None, str]:
    """Return the address of the connection, parsed and as text."""
    peer = parse_address(address)
    if peer is None:
        return None, "unknown"
    return peer, str(peer)


def _is_trusted(peer: IPAddress | None, config: conf.Config) -> bool:
    if peer is None:
        return conf.UNIX in config.proxies
    networks = (network for network in config.proxies if not isinstance(network, str))
    return any(peer in network for network in networks)


def _forwarded_client(request: HttpRequest, config: conf.Config) -> IPAddress | None:
    """Return the client that a proxy forwards; None where there is no valid one."""
    for header in config.proxy_headers:
        value = request.META.get(header)
        if value:
            # The header that the proxy writes.
            # The other one may be the client's own, and is not read.
            return _first_untrusted(_forwarded_addresses(header, value), config)
    return None


def _forwarded_addresses(header: str, value: str) -> Iterator[str]:
    """Yield the addresses of a forwarding header from the right."""
    elements = reversed(value.split(","))
    if header == "HTTP_X_FORWARDED_FOR":
        yield from elements
        return

    parts: list[str] = []
    quotes = 0
    for part in elements:
        parts.append(part)
        # A comma in quotes ends no element. Quotes are counted from the right, so that
        # a stray one of the client, whose elements are left of the proxies', does not
        # change theirs.
        quotes += re.sub(r"\\.", "", part).count('"')
        if quotes % 2 == 0:
            yield _address_of_element(",".join(reversed(parts)))
            parts.clear()
    if parts:
        yield MALFORMED


def _address_of_element(element: str) -> str:
    """Return the address in an element of a Forwarded header."""
    address = ""
    position = 0
    while (pair := _PAIR.match(element, position)) is not None:
        name, text, end = pair.groups()
        if name and name.lower() == "for":
            address = re.sub(r"\\(.)", r"\1", text.strip().strip('"'))
        if not end:
            return address
        position = pair.end()
    return MALFORMED


def _first_untrusted(addresses: Iterable[str], config: conf.Config) -> IPAddress | None:
    """Return the first address that is not a proxy's, or the last one if all are.

    None where something is not an address.
    """
    address = None
    for text in addresses:
        address = parse_address(text)
        if address is None or not _is_trusted(address, config):
            return address
    return address
