"""Overrides of networks.

Every process has all of them, and sends those of a client's address with its check. So
a check needs no other round trip, and where there are none it costs nothing. The
background thread reads them once a second; while nothing changes, only their digest.
Redis has

  rlaas:networks   STRING   a digest of the rest, and JSON:
                            [[network, policy, kind, until, amount, every_client], ...];
                            expires with the last
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .. import backend
from ..core.keys import Identity, IPAddress, decode, parse_address
from ..core.policy import EVERY_POLICY, Policy
from ..runtime import process
from ..runtime.clock import local_time_ms
from .overrides import Override

KEY = "rlaas:networks"
DIGEST_SIZE = 32  # characters
SPARE_TTL = 60_000  # ms that the key stays after the last has ended: clocks differ
MAX_FOUND = 4096  # addresses whose overrides are remembered


class Networks:
    """Overrides of networks, found by address."""

    def __init__(self, overrides: Iterable[Override]) -> None:
        # By version and length of the prefix, and by the first address.
        self._by_prefix: dict[tuple[int, int], dict[int, list[Override]]] = {}
        # One policy is narrower than all policies, so those of all come first.
        for override in sorted(overrides, key=_is_for_one_policy):
            network = ipaddress.ip_network(override.identity)
            prefix = (network.version, network.prefixlen)
            networks = self._by_prefix.setdefault(prefix, {})
            networks.setdefault(int(network.network_address), []).append(override)
        self._find = lru_cache(MAX_FOUND)(self._find_by_prefix)

    def find(self, address: str) -> list[Override]:
        """Return the overrides of an address, those of the widest network first."""
        parsed = parse_address(address.partition("/")[0])
        if parsed is None:
            return []
        return self._find(parsed)

    def _find_by_prefix(self, parsed: IPAddress) -> list[Override]:
        overrides: list[Override] = []
        for version, length in sorted(self._by_prefix):
            if version == parsed.version:
                shift = parsed.max_prefixlen - length
                first_address = int(parsed) >> shift << shift
                networks = self._by_prefix[version, length]
                overrides += networks.get(first_address, ())
        return overrides

    def override_texts(
        self, address: str, policies: Sequence[Policy], identities: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the overrides that apply to a check, as text per policy.

        () for none. `address` is that of the client, '' if it is not known.
        """
        overrides = self.find(address)
        if not overrides:
            return ()

        texts = []
        for policy, identity in zip(policies, identities, strict=True):
            by_address = identity.startswith("ip=")
            applying = [
                override.text
                for override in overrides
                if override.policy in (policy.name, EVERY_POLICY)
                and (by_address or override.every_client)
            ]
            texts.append(";".join(applying))
        return tuple(texts) if any(texts) else ()


def _is_for_one_policy(override: Override) -> bool:
    return override.policy != EVERY_POLICY


current: Networks | None = None  # None: there are none
_digest = ""


def override_texts_of_each(
    policies: Sequence[Policy], identities: Sequence[str]
) -> tuple[str, ...]:
    """As `override_texts`, where each policy counts another client."""
    if current is None:
        return ()
    texts: list[str] = []
    for policy, identity in zip(policies, identities, strict=True):
        address = address_of(identity, (identity,))
        texts += current.override_texts(address, (policy,), (identity,)) or ("",)
    return tuple(texts) if any(texts) else ()


def address_of(identity: Identity, identities: Iterable[str]) -> str:
    """Return the address of a client, as far as the caller gives it."""
    if isinstance(identity, Mapping):
        return str(identity.get("ip") or "")
    for encoded in identities:
        if encoded.startswith("ip="):
            return decode(encoded)[1]
    return ""


def publish(overrides: Sequence[Override]) -> None:
    """Replace the overrides of networks by these, for all processes within a second."""
    if overrides:
        ends = max(override.until for override in overrides)
        ttl = max(0, ends - local_time_ms()) + SPARE_TTL
        backend.run_commands([("SET", KEY, _text(overrides), "PX", ttl)])
    else:
        backend.run_commands([("DEL", KEY)])
    refresh()


def differs(overrides: Sequence[Override]) -> bool:
    """Return whether Redis does not have these overrides, or has others."""
    expected = ""
    if overrides:
        expected = _text(overrides)[:DIGEST_SIZE]
    return _read_digest() != expected


def refresh() -> None:
    """Read the overrides from Redis if they have changed."""
    global current, _digest
    if _read_digest() == _digest:
        return

    (reply,) = backend.run_commands([("GET", KEY)])
    text = (reply or b"").decode()
    entries: list[Any] = json.loads(text[DIGEST_SIZE:] or "[]")
    current = None
    if entries:
        current = Networks(Override(*entry) for entry in entries)
    _digest = text[:DIGEST_SIZE]


def reset() -> None:
    """Have none, until they are read again."""
    global current, _digest
    current = None
    _digest = ""


process.on_fork(reset)


def _read_digest() -> str:
    (reply,) = backend.run_commands([("GETRANGE", KEY, 0, DIGEST_SIZE - 1)])
    digest: str = reply.decode()
    return digest


def _text(overrides: Sequence[Override]) -> str:
    ordered = sorted(overrides, key=lambda override: override[:4])
    text = json.dumps(ordered, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE // 2)
    return digest.hexdigest() + text
