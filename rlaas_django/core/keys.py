"""Identities, and the Redis keys that count them. No Django, no Redis.

An identity is encoded before it becomes part of a key: no two identities give the same key, none reaches another's key,
and none makes a long key.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import UUID

from . import policy as algorithms
from .policy import DEFAULT, Policy

COUNTER_PREFIX = "rlaas:rate_limit:"
OVERRIDE_PREFIX = "rlaas:override:"
GLOBAL = "global"  # the identity of all clients together
NETWORK = "net"  # the kind of an identity that stands for all addresses of a network; only overrides have it
MAX_LENGTH = 128  # of an encoded identity; a longer one is hashed

# What a counter's key ends in. Where another window would give the state another meaning, the window is in the ending,
# so that changing the window needs no flush.
ENDINGS = {
    algorithms.FIXED_WINDOW: "",  # the script adds the window's index, which only the server's clock tells
    algorithms.SLIDING_WINDOW: "",
    algorithms.SLIDING_WINDOW_COMPACT: ":log",
    algorithms.SLIDING_WINDOW_COUNTER: ":counter-{window}",
    algorithms.TOKEN_BUCKET: ":bucket-{window}",
}

Name = str | int | UUID
Identity = Name | Mapping[Any, Name | None]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Everything printable in ASCII but the space and what has a meaning in our keys: : / = { } %
_SAFE = "!\"#$&'()*+,;<>?@[\\]^`|~"
_is_plain = re.compile(
    rf"[0-9A-Za-z_.@+-]{{1,{MAX_LENGTH}}}"
).fullmatch  # whether text is its own encoding, as most is

# An IPv4 address as `ipaddress` writes it, which takes ten times as long to parse and write.
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}")


class EncodedIdentity(str):
    """An identity as it stands in a key: `alice`, `ip=203.0.113.9`, `token=<digest>`, `global`."""

    __slots__ = ()


class Encoding(NamedTuple):
    """The settings that an encoded identity depends on."""

    ipv6_prefix: int
    secret: Callable[[], bytes]  # what credentials are digested with


class KeyTemplate(NamedTuple):
    """A key without its identity."""

    before: str
    after: str

    def key(self, identity: str) -> str:
        return f"{self.before}{identity}{self.after}"


def counter_key(policy: str, algo: str, window: int, *, hash_tag: bool) -> KeyTemplate:
    """Return the key of a policy's counters; with a hash tag, all keys of an identity are in one slot of a cluster."""
    scope = "" if policy == DEFAULT else f"{policy}/"
    before, after = ("{", "}") if hash_tag else ("", "")
    return KeyTemplate(
        f"{COUNTER_PREFIX}{scope}{before}",
        f"{after}{ENDINGS[algo].format(window=window)}",
    )


def override_key(*, hash_tag: bool) -> KeyTemplate:
    """Return the key of an identity's overrides."""
    return (
        KeyTemplate(f"{OVERRIDE_PREFIX}{{", "}")
        if hash_tag
        else KeyTemplate(OVERRIDE_PREFIX, "")
    )


def parse_counter_key(key: str) -> tuple[str, EncodedIdentity] | None:
    """Return the policy's name and the identity of a counter's key; None for any other key."""
    if not key.startswith(COUNTER_PREFIX):
        return None
    scope, _, rest = key.removeprefix(COUNTER_PREFIX).rpartition("/")
    return scope or DEFAULT, EncodedIdentity(
        rest.partition(":")[0].strip("{}")
    )  # no identity has a brace of its own


def identify(identity: Identity, policy: Policy, encoding: Encoding) -> str:
    """Return the encoded identity that a policy counts.

    Text stands for the kind of the policy's key. A mapping gives a name per kind; without a name of the policy's kind
    the address counts, because one counter shared by all without a name would be used up by the first of them.
    """
    if isinstance(identity, EncodedIdentity):
        return identity
    kind = key_kind(policy.key)
    if kind == GLOBAL:
        return kind
    if kind == "user_or_ip":
        kind = "user"
    if not isinstance(identity, Mapping):
        return encode_name(kind, identity, encoding)
    name = identity.get(policy.key) if kind != "user" else None
    if name in (None, ""):
        name = identity.get(kind)
    if name in (None, ""):
        kind, name = "ip", identity.get("ip")
    if name in (None, ""):
        raise ValueError(
            f"Policy {policy.name!r} counts by {policy.key!r}, which {identity!r} does not give."
        )
    if kind == "ip" and type(name) is str and len(name) <= MAX_LENGTH:
        return _encode_address(name, encoding.ipv6_prefix)
    return encode_name(kind, name, encoding)


@lru_cache(maxsize=1024)
def key_kind(key: Any) -> str:
    """Return the kind of a policy's key: `header` for `header:X-Api-Key`, `key` for a callable or its dotted path."""
    if not isinstance(key, str) or "." in key.partition(":")[0]:
        return "key"
    return key.partition(":")[0]


def encode_name(kind: str, name: object, encoding: Encoding) -> str:
    """Return the encoded identity of a name of this kind."""
    if isinstance(name, bool) or not isinstance(name, (str, int, UUID)):
        raise TypeError(f"An identity is text, a whole number or a UUID, not {name!r}.")
    try:
        text = str(name)
    except ValueError:  # a number of more digits than Python writes in tens
        text = f"{name:x}"
    if not text:
        raise ValueError(
            f"An identity of kind {kind!r} is empty; all without one would share a counter."
        )
    if kind == "user":
        return encode_user(text)
    if kind == "ip" and len(text) <= MAX_LENGTH:  # no address is longer
        return _encode_address(text, encoding.ipv6_prefix)
    if kind in ("token", "header"):
        text = credential_digest(text, encoding.secret())  # a credential, or likely one
    return f"{kind}={encode(text)}"


def encode(text: str) -> str:
    """Return text as it may stand in a key."""
    if _is_plain(text):
        return text
    encoded = quote(text, safe=_SAFE, errors="surrogatepass")
    if len(encoded) <= MAX_LENGTH:
        return encoded
    return f"blake2={digest(text)}"  # no encoded text has a bare =, so no other identity is encoded like this


def encode_network(text: str, encoding: Encoding) -> str:
    """Return the encoded identity of a network, or of an address where it is as large as one is counted; ValueError.

    >>> encode_network("203.0.113.0/24", encoding), encode_network("203.0.113.9/32", encoding)
    ('net=203.0.113.0%2F24', 'ip=203.0.113.9')
    """
    network = ipaddress.ip_network(text.strip(), strict=False)
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None and network.prefixlen >= 96:
        network = ipaddress.ip_network((mapped, network.prefixlen - 96))
    counted_length = 32 if network.version == 4 else encoding.ipv6_prefix
    if network.prefixlen == counted_length:
        return _encode_address(str(network.network_address), encoding.ipv6_prefix)
    return f"{NETWORK}={encode(str(network))}"


def decode(identity: str) -> tuple[str, str]:
    """Return the kind and the text of an encoded identity: `("ip", "203.0.113.9")`, `("user", "42")`."""
    kind, equals, text = identity.partition("=")
    if not equals:
        return (
            (GLOBAL, "")
            if identity == GLOBAL
            else ("user", unquote(identity, errors="surrogatepass"))
        )
    if kind == "blake2":
        return "user", identity
    return kind, unquote(text, errors="surrogatepass")


def is_client(identity: str) -> bool:
    """Return whether an identity names a client (user, address, network, token, global), not a parameter's value."""
    return decode(identity)[0] in ("user", "ip", NETWORK, "token", GLOBAL)


def credential_digest(text: str, secret: bytes) -> str:
    """Return a digest of a credential, keyed so that nobody who reads Redis can use it."""
    return digest(text, hashlib.blake2b(secret, digest_size=32).digest())


def digest(text: str, key: bytes = b"") -> str:
    """Return a digest of text."""
    return hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=16, key=key
    ).hexdigest()


# The encoded identities of users by name: names repeat, and to encode one takes ten times as long as a look-up.
encoded_users: dict[str, str] = {}
MAX_ENCODED_USERS = 4096


def encode_user(name: str) -> str:
    """Return the encoded identity of a user; keep it, unless it is long."""
    encoded = "%67lobal" if name == GLOBAL else encode(name)
    if len(name) <= MAX_LENGTH:
        if len(encoded_users) >= MAX_ENCODED_USERS:
            encoded_users.clear()
        encoded_users[name] = encoded
    return encoded


@lru_cache(maxsize=4096)  # given short text only, so that the cache stays small
def _encode_address(text: str, ipv6_prefix: int) -> str:
    return f"ip={encode(counted_address(text, ipv6_prefix))}"


def counted_address(text: str, ipv6_prefix: int) -> str:
    """Return an address as it is counted: IPv4-mapped as IPv4, IPv6 by its network (RATE_LIMITER['IPV6_PREFIX'])."""
    if _IPV4.fullmatch(text):
        return text
    parsed = parse_address(text)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, ipv6_prefix), strict=False))
    return text if parsed is None else str(parsed)


def parse_address(text: str) -> IPAddress | None:
    """Parse `203.0.113.9`, `203.0.113.9:4711`, `2001:db8::1`, `[2001:db8::1]:4711`, `fe80::1%eth0`; else None."""
    return _parse_address(text) if len(text) <= MAX_LENGTH else None


@lru_cache(maxsize=4096)
def _parse_address(text: str) -> IPAddress | None:
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed
