"""Overrides of networks.

Every process has all of them, and sends those of a client's address with its check. So
a check needs no other round trip, and where there are none it costs nothing. The
background thread reads them once a second; while nothing changes, only their digest,
and after a change the shards that have another one. Redis has

  rlaas:networks:shards   HASH   digest -> a digest of the index;
                                 index -> JSON: {shard: its digest, ...};
                                 <shard> -> JSON: [[network, policy, kind, until,
                                 amount, every_client], ...];
                                 expires with the last
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from zlib import crc32

from .. import backend
from ..backend.scripts import OVERRIDE
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
from ..runtime.clock import script_time
from .overrides import Override

KEY = "rlaas:networks:shards"
DIGEST = "digest"
INDEX = "index"
SHARDS = 256
SPARE_TTL = 60_000  # ms that the key stays after the last has ended: clocks differ
MAX_FOUND = 4096  # addresses whose overrides are remembered


class Networks:
    """Overrides of networks, found by address."""

    def __init__(self, overrides: Iterable[Override] = ()) -> None:
        self.digest = ""  # in Redis
        # By shard, its digest and its overrides; those of a network are in one shard.
        self.shards: dict[str, tuple[str, list[Override]]] = {}
        # By version and length of the prefix, and by the first address.
        self._by_prefix: dict[tuple[int, int], dict[int, list[Override]]] = {}
        self._find = lru_cache(MAX_FOUND)(self._find_by_prefix)
        self._add(overrides)

    def _add(self, overrides: Iterable[Override]) -> None:
        # One policy is narrower than all policies, so those of all come first.
        for override in sorted(overrides, key=_is_for_one_policy):
            prefix, first_address = _place(override)
            networks = self._by_prefix.setdefault(prefix, {})
            networks.setdefault(first_address, []).append(override)

    def replaced(self, shards: Mapping[str, tuple[str, list[Override]]]) -> Networks:
        """Return a copy that has these shards in place of its own ones."""
        networks = Networks()
        networks.shards = {**self.shards, **shards}
        for prefix, by_address in self._by_prefix.items():
            networks._by_prefix[prefix] = {**by_address}

        for shard in self.shards.keys() & shards:
            for override in self.shards[shard][1]:
                prefix, first_address = _place(override)
                networks._by_prefix[prefix].pop(first_address, None)
        for _, overrides in shards.values():
            networks._add(overrides)
        return networks

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


def _place(override: Override) -> tuple[tuple[int, int], int]:
    """Return the version and length of a network's prefix, and its first address."""
    network = parse_network(override.identity)
    return (network.version, network.prefixlen), int(network.network_address)


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
    ends = max([override.until for override in overrides], default=0) + SPARE_TTL
    fields = chain.from_iterable(_fields(overrides).items())
    call = backend.script_call(OVERRIDE, (KEY,), (script_time(), ends, *fields))
    call.for_page = True
    backend.execute(backend.topology(), call)
    refresh()


def differs(overrides: Sequence[Override]) -> bool:
    """Return whether Redis does not have these overrides, or has others."""
    return _read(DIGEST)[0] != _fields(overrides).get(DIGEST, "")


def refresh() -> None:
    """Read the shards of the overrides that have changed in Redis."""
    global current
    before = current or Networks()
    if _read(DIGEST)[0] == before.digest:
        return

    # Should another process write them meanwhile, the next round finds other digests.
    new_digest, text = _read(DIGEST, INDEX)
    digests: dict[str, str] = json.loads(text or "{}")
    changed = [
        shard
        for shard in before.shards.keys() | digests
        if before.shards.get(shard, ("", []))[0] != digests.get(shard, "")
    ]
    if not changed:
        return

    shards = {}
    for shard, text in zip(changed, _read(*changed), strict=True):
        overrides = [Override(*entry) for entry in json.loads(text or "[]")]
        shards[shard] = digests.get(shard, ""), overrides
    networks = before.replaced(shards)
    networks.digest = new_digest
    current = networks if digests else None


def reset() -> None:
    """Have none, until they are read again."""
    global current
    current = None


process.on_fork(reset)


def _read(*fields: str) -> list[str]:
    """Return fields of the HASH, '' for those that it does not have."""
    (reply,) = backend.run_commands([("HMGET", KEY, *fields)])
    return [(value or b"").decode() for value in reply]


def _fields(overrides: Sequence[Override]) -> dict[str, str]:
    """Return what the HASH has, nothing where there are no overrides."""
    shards: dict[str, list[Override]] = {}
    for override in sorted(overrides, key=lambda override: override[:4]):
        shard = str(crc32(override.identity.encode()) % SHARDS)
        shards.setdefault(shard, []).append(override)
    if not shards:
        return {}

    texts = {
        shard: json.dumps(overrides, separators=(",", ":"))
        for shard, overrides in shards.items()
    }
    index = json.dumps({shard: digest(text) for shard, text in texts.items()})
    return {DIGEST: digest(index), INDEX: index, **texts}
