"""Overrides of networks.

Every process has all of them, and sends those of a client's address with its check. So
a check needs no other round trip, and where there are none it costs nothing. The
background thread reads the digests of their shards once a second, and the shards that
have changed. Redis has

  rlaas:networks:shards   HASH   index -> JSON: {shard: a digest of it, ...};
                                 <shard> -> JSON: [[network, policy, kind, until,
                                 amount, every_client], ...];
                                 expires with the last
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from zlib import crc32

from .. import backend
from ..core.keys import (
    Identity,
    IPAddress,
    decode,
    digest,
    parse_address,
    parse_network,
)
from ..core.policy import EVERY_POLICY, Policy
from ..runtime import process
from .overrides import Override, replacing_call

KEY = "rlaas:networks:shards"
INDEX = "index"
SHARDS = 64
SPARE_TTL = 60_000  # ms that the key stays after the last has ended: clocks differ
MAX_FOUND = 4096  # addresses whose overrides are remembered


class Shard:
    """Some of the overrides: all those of some networks."""

    def __init__(self, overrides: Iterable[Override], digest: str) -> None:
        self.digest = digest
        # One policy is narrower than all policies, so those of all come first.
        self.overrides = [
            (parse_network(override.identity), override)
            for override in sorted(overrides, key=_is_for_one_policy)
        ]


class Networks:
    """Overrides of networks, found by address."""

    def __init__(self, shards: Mapping[str, Shard], index: str = "") -> None:
        self.shards = shards
        self.index = index  # in Redis
        # By version and length of the prefix, and by the first address.
        self._by_prefix: dict[tuple[int, int], dict[int, list[Override]]] = {}
        for shard in shards.values():
            for network, override in shard.overrides:
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
    call = replacing_call(KEY, _fields(overrides), overrides, SPARE_TTL)
    backend.execute(backend.topology(), call)
    refresh()


def differs(overrides: Sequence[Override]) -> bool:
    """Return whether Redis does not have these overrides, or has others."""
    return _read([INDEX]) != [_fields(overrides).get(INDEX, "")]


def refresh() -> None:
    """Read the shards of the overrides that have changed in Redis."""
    global current
    before = current or Networks({})
    (index,) = _read([INDEX])
    if index == before.index:
        return

    digests: dict[str, str] = json.loads(index or "{}")
    shards = {
        name: shard
        for name, shard in before.shards.items()
        if shard.digest == digests.get(name)
    }
    changed = [name for name in digests if name not in shards]
    # Should they have changed again meanwhile, the next round finds another index.
    for name, text in zip(changed, _read(changed), strict=True):
        overrides = [Override(*entry) for entry in json.loads(text or "[]")]
        shards[name] = Shard(overrides, digests[name])
    current = Networks(shards, index) if digests else None


def reset() -> None:
    """Have none, until they are read again."""
    global current
    current = None


process.on_fork(reset)


def _read(fields: Sequence[str]) -> list[str]:
    """Return fields of the HASH, '' for those that it does not have."""
    if not fields:
        return []
    (reply,) = backend.run_commands([("HMGET", KEY, *fields)])
    return [(value or b"").decode() for value in reply]


def _fields(overrides: Sequence[Override]) -> dict[str, str]:
    """Return what the HASH has, nothing where there are no overrides."""
    shards: dict[str, list[Override]] = {}
    for override in sorted(overrides, key=lambda override: override[:4]):
        name = str(crc32(override.identity.encode()) % SHARDS)
        shards.setdefault(name, []).append(override)
    if not shards:
        return {}

    fields = {
        name: json.dumps(shard, separators=(",", ":")) for name, shard in shards.items()
    }
    return {
        INDEX: json.dumps({name: digest(fields[name]) for name in fields}),
        **fields,
    }
