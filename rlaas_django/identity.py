"""Who is asking, and where in Redis that identity is counted."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

from django.http import HttpRequest
from django.utils.module_loading import import_string

from . import conf, log
from .policy import DEFAULT, KeyFunction, Policy
from .scripts import ENDINGS

PREFIX = "rlaas:rate_limit:"
OVERRIDES = "rlaas:override:"
GLOBAL = "global"  # the identity of all at once
LONGEST = 128  # bytes of an identity in a key; what is longer is hashed

Name = str | int | UUID
Identity = Name | Mapping[Any, Name | None]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Everything printable in ASCII but the space and what has a meaning in our keys: : / = { } %
_SAFE = "!\"#$&'()*+,;<>?@[\\]^`|~"
_PLAIN = re.compile(r"[\w.@+-]{1,128}", re.ASCII).fullmatch


def redis_key(policy: Policy, identity: str, algo: str, window: int, *, tagged: bool = False) -> str:
    """Where a policy counts an identity by an algorithm; the fixed window adds its index in the script.

    Tagged, for a cluster, where all keys of an identity are to be in one slot.
    """
    return identity.join(key_parts(policy, algo, window, tagged=tagged))


def key_parts(policy: Policy, algo: str, window: int, *, tagged: bool) -> tuple[str, str]:
    """What is before and after the identity in a key."""
    scope = "" if policy.name == DEFAULT else f"{policy.name}/"
    before, after = ("{", "}") if tagged else ("", "")
    return f"{PREFIX}{scope}{before}", f"{after}{ENDINGS[algo].format(window=window)}"


def override_parts(*, tagged: bool) -> tuple[str, str]:
    """What is before and after the identity in the key of an operator's exceptions for it."""
    return (f"{OVERRIDES}{{", "}") if tagged else (OVERRIDES, "")


class Id(str):
    """An identity as it stands in a key already."""

    __slots__ = ()


def parse_key(key: str) -> tuple[str, Id] | None:
    """The policy's name and the identity of a key that an algorithm wrote; None for any other key."""
    if not key.startswith(PREFIX):
        return None
    scope, _, rest = key.removeprefix(PREFIX).rpartition("/")
    return scope or DEFAULT, Id(rest.partition(":")[0].strip("{}"))  # no identity has a brace of its own


def identify(identity: Identity, policy: Policy) -> str:
    """The part of the key that tells who: `alice`, `ip=203.0.113.9`, `token=<digest>`, `global`.

    Text stands for the kind of the policy's key; a mapping gives a name per kind, and who has no name of the kind
    that is asked for counts by address: one bucket for all of them would be the first one's to empty.
    """
    kind = kind_of(policy.key)
    if isinstance(identity, Id):
        return identity
    if kind == "global":
        return kind
    if not isinstance(identity, (Requester, Mapping)):  # the one is told quickly, and nearly always it
        return _named("user" if kind == "user_or_ip" else kind, identity)
    if kind == "user_or_ip":
        kind = "user"
    name = identity.get(policy.key) if kind != "user" else None
    if name in (None, ""):
        name = identity.get(kind)
    if name in (None, ""):
        kind, name = "ip", identity.get("ip")
    if name in (None, ""):
        raise ValueError(f"Policy {policy.name!r} counts by {policy.key!r}, which {identity!r} does not give.")
    return _named(kind, name)


def is_plain(text: str) -> bool:
    """Whether a user's name stands in a key as it is; nearly all do."""
    return _PLAIN(text) is not None and text != GLOBAL


@lru_cache(maxsize=1024)
def kind_of(key: Any) -> str:
    """`header` for `header:X-Api-Key`; `key` for a callable or its dotted path."""
    if not isinstance(key, str) or "." in key.partition(":")[0]:
        return "key"
    return key.partition(":")[0]


def _named(kind: str, name: object) -> str:
    if isinstance(name, bool) or not isinstance(name, (str, int, UUID)):
        raise TypeError(f"An identity is text, a whole number or a UUID, not {name!r}.")
    try:
        text = str(name)
    except ValueError:  # a number of more digits than Python writes in tens
        text = f"{name:x}"
    if not text:
        raise ValueError(f"An identity of kind {kind!r} is empty; all who have none would share one counter.")
    if kind == "user":
        return "%67lobal" if text == "global" else encode(text)
    if kind == "ip":
        return _address_identity(text, conf.config().ipv6_prefix)
    if kind in ("token", "header"):
        text = digest(text)  # a credential, or likely one
    return f"{kind}={encode(text)}"


def encode(text: str) -> str:
    """Text as it may stand in a key: no two texts give the same, none reaches beyond its place, none is long."""
    if _PLAIN(text):
        return text
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
    return _counted_address(text, conf.config().ipv6_prefix)


# Addresses come again and again, and to read one takes ten times as long as to look it up.
@lru_cache(maxsize=4096)
def _address_identity(text: str, ipv6_prefix: int) -> str:
    return f"ip={encode(_counted_address(text, ipv6_prefix))}"


def _counted_address(text: str, ipv6_prefix: int) -> str:
    parsed = parse_address(text)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, ipv6_prefix), strict=False))
    return text if parsed is None else str(parsed)


@lru_cache(maxsize=4096)
def parse_address(text: str) -> IPAddress | None:
    """`203.0.113.9`, `203.0.113.9:4711`, `2001:db8::1`, `[2001:db8::1]:4711`, `fe80::1%eth0`; else None."""
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


class Requester(Mapping[Any, Any]):
    """Who makes a request: a mapping that looks at the request only for the kinds that it is asked for."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.answers: dict[Any, Name | None] = {}  # of the site's own functions, which are asked once

    def ask(self, key: str | KeyFunction) -> None:
        """Have a function of the site's answer now."""
        if kind_of(key) == "key":
            self.answers[key] = _answer(function(key), self.request)

    def get(self, key: Any, default: Any = None) -> Any:
        """Not by way of `[]`, whose KeyError could be one of the site's own function."""
        if key == "ip":  # what is asked for most, and what others count by who have no name of their kind
            return client_address(self.request)
        kind, _, argument = key.partition(":") if isinstance(key, str) else ("key", "", "")
        match kind:
            case "user":
                return _user(self.request)
            case "token":
                return _credential(self.request.headers.get("Authorization", ""))
            case "header" if argument:
                return self.request.headers.get(argument)
            case "get" if argument:
                return self.request.GET.get(argument)
            case "post" if argument:
                return self.request.POST.get(argument)
        if key != "key" and kind_of(key) == "key":
            if key not in self.answers:
                self.ask(key)
            return self.answers[key]
        return default

    def __getitem__(self, key: Any) -> Any:
        if (found := self.get(key)) is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(("user", "ip", "token"))

    def __len__(self) -> int:
        return 3


def asks_the_site(policy: Policy) -> bool:
    """Whether a function of the site's has a say in it."""
    return kind_of(policy.key) == "key" or callable(policy.rate)


def needs_user(policy: Policy) -> bool:
    """Whether who is logged in matters: the key says so, or a function of the site's might ask."""
    return policy.key in ("user", "user_or_ip") or asks_the_site(policy)


@lru_cache(maxsize=256)
def function(key: str | KeyFunction) -> KeyFunction:
    """A key that is a function, or the dotted path of one."""
    if not isinstance(key, str):
        return key
    found: KeyFunction = import_string(key)
    return found


def decode(identity: str) -> tuple[str, str]:
    """The kind and the text of an identity in a key: `("ip", "203.0.113.9")`, `("user", "42")`."""
    kind, equals, text = identity.partition("=")
    if not equals:
        return ("global", "") if identity == "global" else ("user", unquote(identity, errors="surrogatepass"))
    if kind == "blake2":
        return "user", identity
    return kind, unquote(text, errors="surrogatepass")


def _answer(key: KeyFunction, request: HttpRequest) -> Name | None:
    name = key(request)
    if name is None or (isinstance(name, (str, int, UUID)) and not isinstance(name, bool)):
        return name
    log.error("The key %r gave a %s, which is no identity; the address counts.", key, type(name).__name__)
    return None


def _user(request: HttpRequest) -> Name | None:
    user = getattr(request, "user", None)
    return str(user.pk) if user is not None and user.is_authenticated and user.pk is not None else None


def _credential(header: str) -> str:
    scheme, space, credential = header.strip().partition(" ")
    return credential.strip() if space else scheme


def client_address(request: HttpRequest) -> str:
    """The address of who is asking. A proxy is believed only if TRUSTED_PROXIES says so, and nothing further left
    than the first address, from the right, that is not a trusted proxy's."""
    peer, text = _peer(request.META.get("REMOTE_ADDR") or "")
    if conf.config().proxies and _is_proxy(peer):
        # The header that the proxy writes. The other one may be the client's own, and says nothing.
        header = next((name for name in conf.config().proxy_headers if request.META.get(name)), None)
        if header is not None and (client := _hop(_chain(header, request.META[header]))):
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
    """The address that the server was asked from, also as it is written."""
    peer = parse_address(address)
    return peer, "unknown" if peer is None else str(peer)


# A pair of a Forwarded header (RFC 7239) and what ends it. Possessive, so that no header takes long to read.
_PAIR = re.compile(
    r"""\s*+ (?: ([\w!\#$%&'*+.^`|~-]++) \s*+ = \s*+ ( "(?:[^"\\]|\\.)*+" \s*+ | [^",;]*+ ) )?+ ([;,]|$)""",
    re.VERBOSE | re.ASCII,
)


def _is_proxy(peer: IPAddress | None) -> bool:
    proxies = conf.config().proxies
    if peer is None:
        return conf.UNIX in proxies
    return any(not isinstance(network, str) and peer in network for network in proxies)


def _chain(header: str, value: str | None) -> list[str]:
    """The addresses in a forwarding header, the client's first; nonsense where it is none."""
    if not value:
        return []
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
    return ["nonsense"]


def _hop(chain: list[str]) -> IPAddress | None:
    """The first address from the right that is not a trusted proxy's; None where something is no address."""
    hop = None
    for text in reversed(chain):
        hop = parse_address(text)
        if hop is None or not _is_proxy(hop):
            return hop
    return hop
