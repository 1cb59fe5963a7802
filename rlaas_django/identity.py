"""Who is asking, and where in Redis that identity is counted."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from uuid import UUID

from . import conf
from .policy import DEFAULT, Policy
from .scripts import ENDINGS

PREFIX = "rlaas:rate_limit:"
LONGEST = 128  # bytes of an identity in a key; what is longer is hashed

Name = str | int | UUID
Identity = Name | Mapping[str, Name | None]

# Everything printable in ASCII but the space and what has a meaning in our keys: : / = { } %
_SAFE = "!\"#$&'()*+,;<>?@[\\]^`|~"


def redis_key(policy: Policy, identity: str, algo: str, window: int) -> str:
    """Where a policy counts an identity by an algorithm; the fixed window adds its index in the script."""
    scope = "" if policy.name == DEFAULT else f"{policy.name}/"
    return f"{PREFIX}{scope}{identity}{ENDINGS[algo].format(window=window)}"


def identify(identity: Identity, policy: Policy) -> str:
    """The part of the key that tells who: `alice`, `ip=203.0.113.9`, `token=<digest>`, `global`.

    Text stands for the kind of the policy's key; a mapping gives a name per kind.
    """
    kind = kind_of(policy.key)
    if kind == "global":
        return "global"
    if not isinstance(identity, Mapping):
        return _named("user" if kind == "user_or_ip" else kind, identity)
    if kind in ("user", "user_or_ip"):
        # Who is anonymous counts by address; one bucket for them all would be the first one's to empty.
        kind = "user" if identity.get("user") is not None else "ip"
    name = identity.get(policy.key) if isinstance(policy.key, str) else None
    if name is None:
        name = identity.get(kind)
    if name is None:
        raise ValueError(f"Policy {policy.name!r} counts by {policy.key!r}, which {dict(identity)!r} does not give.")
    return _named(kind, name)


def kind_of(key: Any) -> str:
    """`header` for `header:X-Api-Key`; `key` for a callable or its dotted path."""
    if not isinstance(key, str) or "." in key.partition(":")[0]:
        return "key"
    return key.partition(":")[0]


def _named(kind: str, name: object) -> str:
    if isinstance(name, bool) or not isinstance(name, (str, int, UUID)):
        raise TypeError(f"An identity is text, a whole number or a UUID, not {name!r}.")
    text = str(name)
    if not text:
        raise ValueError(f"An identity of kind {kind!r} is empty; all who have none would share one counter.")
    if kind == "user":
        return "%67lobal" if text == "global" else encode(text)
    if kind == "ip":
        text = address(text)
    elif kind in ("token", "header"):
        text = digest(text)  # a credential, or likely one
    return f"{kind}={encode(text)}"


def encode(text: str) -> str:
    """Text as it may stand in a key: no two texts give the same, none reaches beyond its place, none is long."""
    encoded = quote(text, safe=_SAFE, errors="surrogatepass")
    if len(encoded) <= LONGEST:
        return encoded
    hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"blake2={hashed}"  # no encoded text has a bare =, so nobody can be called this


def digest(text: str) -> str:
    """A credential's keyed digest: enough to count by, useless to whoever reads Redis."""
    key = hashlib.blake2b(conf.secret(), digest_size=32).digest()
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=key).hexdigest()


def address(text: str) -> str:
    """An address as it is counted: IPv4-mapped ones folded, IPv6 by the network that one host commands."""
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, conf.config().ipv6_prefix), strict=False))
    return str(parsed)
