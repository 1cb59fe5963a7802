"""Identities, and the Redis keys that count them. No Django, no Redis.

An identity is encoded before it becomes part of a key: no two identities give the same
key, none reaches another's key, and none makes a long key.
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

from .algorithms import ALGORITHMS
from .policy import DEFAULT, Policy

COUNTER_PREFIX = "rlaas:rate_limit:"
RESET_ENDING = ":reset"  # of the key that says when a counter was reset
OVERRIDE_PREFIX = "rlaas:override:"
GLOBAL = "global"  # the identity of all clients together
# The kind of an identity that stands for all addresses of a network, in overrides.
NETWORK = "net"
# The kinds of identities that log in: a name that no user has, as a digest; and a user,
# or such a name, at an address.
LOGIN = "login"
UNKNOWN_NAME = "name"
MAX_LENGTH = 128  # of an encoded identity; a longer one is hashed

Name = str | int | UUID
Identity = Name | Mapping[Any, Name | None]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# What is printable in ASCII, without the space and what has a meaning in our keys:
# : / = { } %
_SAFE = "!\"#$&'()*+,;<>?@[\\]^`|~"
# Whether text is its own encoding, as most is.
_is_plain = re.compile(rf"[0-9A-Za-z_.@+-]{{1,{MAX_LENGTH}}}").fullmatch


class EncodedIdentity(str):
    """An identity in a key.

    `alice`, `ip=203.0.113.9`, `token=<digest>`, `global`.
    """

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
    """Return the key of a policy's counters.

    With a hash tag, all keys of an identity are in one slot of a cluster.
    """
    prefix = COUNTER_PREFIX
    if policy != DEFAULT:
        prefix = f"{prefix}{policy}/"

    ending = ALGORITHMS[algo].key_ending.format(window=window)
    return _template(prefix, ending, hash_tag)


def override_key(*, hash_tag: bool) -> KeyTemplate:
    """Return the key of an identity's overrides."""
    return _template(OVERRIDE_PREFIX, "", hash_tag)


def _template(prefix: str, ending: str, hash_tag: bool) -> KeyTemplate:
    if hash_tag:
        return KeyTemplate(f"{prefix}{{", f"}}{ending}")
    return KeyTemplate(prefix, ending)


def parse_counter_key(key: str) -> tuple[str, EncodedIdentity] | None:
    """Return the policy's name and the identity of a counter's key.

    None for any other key.
    """
    if not key.startswith(COUNTER_PREFIX) or key.endswith(RESET_ENDING):
        return None

    policy, _, rest = key.removeprefix(COUNTER_PREFIX).rpartition("/")
    identity = rest.partition(":")[0].strip("{}")  # it has no brace of its own
    return policy or DEFAULT, EncodedIdentity(identity)


def identify(identity: Identity, policy: Policy, encoding: Encoding) -> str:
    """Return the encoded identity that a policy counts.

    Text stands for the kind of the policy's key. A mapping gives a name per kind;
    without a name of the policy's kind the address counts, because one counter shared
    by all without a name would be used up by the first of them.
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

    for key, kind_of_name in ((policy.key, kind), (kind, kind), ("ip", "ip")):
        if key == "user_or_ip":
            continue
        name = identity.get(key)
        if name not in (None, ""):
            return encode_name(kind_of_name, name, encoding)
    raise ValueError(
        f"Policy {policy.name!r} counts by {policy.key!r}, "
        f"which {identity!r} does not give."
    )


@lru_cache(maxsize=1024)
def key_kind(key: Any) -> str:
    """Return the kind of a policy's key.

    `header` for `header:X-Api-Key`, `key` for a callable or its dotted path.
    """
    if not isinstance(key, str):
        return "key"
    kind: str = key.partition(":")[0]
    if "." in kind:
        return "key"
    return kind


def is_name(value: object) -> bool:
    """Return whether a value can name a client: text, a whole number or a UUID."""
    return isinstance(value, Name) and not isinstance(value, bool)


def encode_name(kind: str, name: object, encoding: Encoding) -> str:
    """Return the encoded identity of a name of this kind."""
    if not is_name(name):
        raise TypeError(f"An identity is text, a whole number or a UUID, not {name!r}.")

    try:
        text = str(name)
    except ValueError:  # a number of more digits than Python writes in tens
        text = f"{name:x}"
    if not text:
        raise ValueError(
            f"An identity of kind {kind!r} is empty; "
            "all without one would share a counter."
        )

    if kind == "user":
        return encode_user(text)
    if kind == "ip" and len(text) <= MAX_LENGTH:  # no address is longer
        return encode_address(text, encoding.ipv6_prefix)
    if kind in ("token", "header"):  # a credential, or likely one
        text = credential_digest(text, encoding.secret())
    return f"{kind}={encode(text)}"


def encode_user(name: str) -> str:
    """Return the encoded identity of a user, which is not that of all clients."""
    if name == GLOBAL:
        return "%67lobal"
    return encode(name)


def encode_unknown_name(name: str, secret: bytes) -> str:
    """Return the encoded identity of a name that no user has.

    A digest: people type passwords into the field for the name.
    """
    return f"{UNKNOWN_NAME}={credential_digest(name, secret)}"


def encode_login(identity: str, address: str) -> str:
    """Return the encoded identity of another at an address; both are encoded.

    >>> encode_login("42", "ip=203.0.113.9")
    'login=42@203.0.113.9'
    """
    return f"{LOGIN}={identity}@{address.removeprefix('ip=')}"


def split_login(identity: str) -> tuple[str, str]:
    """Return the encoded identity and the address of a login.

    >>> split_login("login=42@203.0.113.9"), split_login("42")
    (('42', '203.0.113.9'), ('42', ''))
    """
    if decode(identity)[0] != LOGIN:
        return identity, ""
    name, _, address = identity.removeprefix(f"{LOGIN}=").rpartition("@")
    return name, unquote(address, errors="surrogatepass")


def encode(text: str) -> str:
    """Return text as it may stand in a key."""
    if _is_plain(text):
        return text
    encoded = quote(text, safe=_SAFE, errors="surrogatepass")
    if len(encoded) <= MAX_LENGTH:
        return encoded
    # No encoded text has a bare =, so no other identity is encoded like this.
    return f"blake2={digest(text)}"


def encode_network(text: str, encoding: Encoding) -> str:
    """Return the encoded identity of a network.

    ValueError where it is not one. A network of the size that is counted as an address
    is encoded as that address.

    >>> encode_network("203.0.113.0/24", encoding)
    'net=203.0.113.0%2F24'
    >>> encode_network("203.0.113.9/32", encoding)
    'ip=203.0.113.9'
    """
    network = parse_network(text)
    counted_length = 32
    if network.version == 6:
        counted_length = encoding.ipv6_prefix
    if network.prefixlen == counted_length:
        return encode_address(str(network.network_address), encoding.ipv6_prefix)
    return f"{NETWORK}={encode(str(network))}"


def decode(identity: str) -> tuple[str, str]:
    """Return the kind and the text of an encoded identity.

    >>> decode("ip=203.0.113.9"), decode("42")
    (('ip', '203.0.113.9'), ('user', '42'))
    """
    kind, equals, text = identity.partition("=")
    if equals and kind != "blake2":
        return kind, unquote(text, errors="surrogatepass")
    if identity == GLOBAL:
        return GLOBAL, ""
    return "user", unquote(identity, errors="surrogatepass")


def is_client(identity: str) -> bool:
    """Return whether an identity names a client, not a parameter's value."""
    return decode(identity)[0] in ("user", "ip", NETWORK, "token", GLOBAL)


def credential_digest(text: str, secret: bytes) -> str:
    """Return a digest of a credential, keyed so that readers of Redis cannot use it."""
    return digest(text, hashlib.blake2b(secret, digest_size=32).digest())


def digest(text: str, key: bytes = b"") -> str:
    """Return a digest of text."""
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, key=key).hexdigest()


@lru_cache(maxsize=4096)  # given short text only, so that the cache stays small
def encode_address(text: str, ipv6_prefix: int) -> str:
    """Return the encoded identity of an address.

    IPv4-mapped as IPv4, and IPv6 by its network (RATE_LIMITER['IPV6_PREFIX']).
    """
    address = parse_address(text)
    counted: object = address or text
    if address is not None and address.version == 6:
        counted = ipaddress.ip_network((address, ipv6_prefix), strict=False)
    return f"ip={encode(str(counted))}"


def parse_network(text: str) -> Network:
    """Parse a network, or an address as one; IPv4-mapped as IPv4.

    ValueError where it is not one.
    """
    network = ipaddress.ip_network(text.strip(), strict=False)
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None and network.prefixlen >= 96:
        return ipaddress.ip_network((mapped, network.prefixlen - 96))
    return network


def parse_address(text: str) -> IPAddress | None:
    """Parse an address, with or without port, brackets or zone.

    Return None for other text.

    `203.0.113.9`, `203.0.113.9:4711`, `2001:db8::1`, `[2001:db8::1]:4711`,
    `fe80::1%eth0`.
    """
    if len(text) > MAX_LENGTH:
        return None
    return _parse_address(text)


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
