"""From a request to the identity that a policy counts: user, address, credential, header.

Proxies are not believed unless RATE_LIMITER['TRUSTED_PROXIES'] says so.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException, UnreadablePostError
from django.utils.functional import SimpleLazyObject

from .. import conf
from ..core.keys import IPAddress, Name, credential_digest, key_kind, parse_address
from ..core.policy import KeyFunction
from ..core.text import fold
from ..runtime import log
from .responses import in_thread
from .site_functions import call_key

ERRORS = "_rate_limit_errors"  # the attribute of a framework's request with the errors to raise once it is counted


class RequestIdentity(Mapping[Any, Any]):
    """The names of a request's client by kind: `user`, `ip`, `token`, `header:...`; read when they are asked for."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self._results: dict[
            Any, Name | None
        ] = {}  # of the site's key functions, which are called once

    def call_key_function(self, key: str | KeyFunction) -> None:
        """Call the site's key function, if the key is one."""
        if key_kind(key) == "key":
            self._results[key] = call_key(key, self.request)

    def get(self, key: Any, default: Any = None) -> Any:
        """Not by way of `[]`, whose KeyError could be one of the site's own function."""
        if key == "ip":  # the most frequent, and the one that others fall back to
            return client_address(self.request)
        kind, _, argument = (
            key.partition(":") if isinstance(key, str) else ("key", "", "")
        )
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
                return _posted(self.request, argument)
        if key != "key" and key_kind(key) == "key":
            if key not in self._results:
                self.call_key_function(key)
            return self._results[key]
        return default

    def __getitem__(self, key: Any) -> Any:
        if (found := self.get(key)) is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(("user", "ip", "token"))

    def __len__(self) -> int:
        return 3


def read_attribute(request: HttpRequest, name: str, on_error: Any = None) -> Any:
    """Return an attribute that a framework may compute, else None; `on_error` if that fails and can be raised later.

    Django REST framework authenticates a request, and parses its body, when the attribute is read.
    """
    try:
        return getattr(request, name, None)
    except Exception as error:
        errors: list[Exception] | None = vars(request).get(ERRORS)
        if errors is None:
            raise
        errors.append(error)
        return on_error


async def load_user(request: Any) -> None:
    """Load a lazy `request.user` in a thread, as that may take the session and the database.

    Not by `request.auser()`, which is the user of the session: another middleware may have set one of its own, such as
    that of a token, or one that is verified by a second factor.
    """
    if isinstance(user := getattr(request, "user", None), SimpleLazyObject):
        await in_thread(bool)(user)


def _user(request: HttpRequest) -> Name | None:
    """Return the user whom Django or a framework has authenticated: `request.user`, otherwise `request.auth`."""
    user = read_attribute(request, "user")
    if not getattr(user, "is_authenticated", False):
        user = read_attribute(
            request, "auth"
        )  # of django-ninja: what the authenticator of the operation returned
        if not getattr(user, "is_authenticated", False):
            return _authenticated_as(user)
    return None if user.pk is None else str(user.pk)


def _authenticated_as(auth: Any) -> Name | None:
    """Return a name for what is no user: of a credential or the record of one a digest, as it may be a secret."""
    name = getattr(auth, "pk", auth)
    if isinstance(name, bool) or not isinstance(name, (str, int, UUID)) or name == "":
        return None
    kind = "" if name is auth else f"{type(auth).__module__}.{type(auth).__qualname__}:"
    return f"auth-{credential_digest(f'{kind}{name}', conf.secret())}"


def _posted(request: HttpRequest, name: str) -> str | None:
    """Return a field of the form, or of a JSON object, as user names are compared: whatever its spelling, it is one."""
    data = read_attribute(
        request, "data", on_error={}
    )  # of Django REST framework, which has read the body
    if data is None:
        try:
            # JSON whatever the client calls it: there are views that do not look at the content type either.
            data = request.POST if name in request.POST else _json(request)
        except UnreadablePostError:
            return (
                None  # counted by address; it is the view's error, if it reads the body
            )
    found = data.get(name) if isinstance(data, Mapping) else None
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        return None  # a list, say, which no view takes for a user name
    return fold(str(found)) or None


def _json(request: HttpRequest) -> Any:
    try:
        body = request.body  # up to DATA_UPLOAD_MAX_MEMORY_SIZE
        try:
            return json.loads(
                body.decode(request.encoding or "utf-8")
            )  # as REST framework does
        except (ValueError, LookupError):  # also for a codec that is not of text
            return json.loads(body)
    except (ValueError, RecursionError, RawPostDataException, RequestDataTooBig):
        return None


_token68 = re.compile(
    r"([A-Za-z0-9._~+/-]+)=*"
).fullmatch  # RFC 9110: what a credential is written in


def _credential(header: str) -> str | None:
    """Return the credential in one form, however it is spelled; None, to count by address, if it has none."""
    *scheme, credential = header.split() or [""]  # at any white space, as frameworks do
    found = _token68(credential)
    if found is None or len(scheme) > 1:
        return None
    if scheme and scheme[0].lower() == "basic":
        return _basic_user(credential)
    # The parts of a JWT are base64, which libraries decode leniently: without a ~, + as -, whatever the last bits are.
    return (
        ".".join(map(_respelled, found[1].split("."))) if "." in found[1] else found[1]
    )


def _basic_user(credential: str) -> str | None:
    try:
        decoded = base64.b64decode(credential, validate=True)
    except ValueError:
        return None
    try:
        text = decoded.decode()
    except UnicodeDecodeError:
        text = decoded.decode("latin-1")
    user, colon, _ = text.partition(":")
    return (
        f"basic:{user}" if user and colon else None
    )  # no other credential has a colon


def _respelled(part: str) -> str:
    """Return base64 as it would be encoded; what is no base64 as it is."""
    try:
        return (
            base64.urlsafe_b64encode(base64.urlsafe_b64decode(f"{part}==="))
            .decode()
            .rstrip("=")
        )
    except ValueError:
        return part


# A pair of a Forwarded header (RFC 7239) and what ends it. Possessive, so that no header takes long to read.
_PAIR = re.compile(
    r"""\s*+ (?: ([\w!\#$%&'*+.^`|~-]++) \s*+ = \s*+ ( "(?:[^"\\]|\\.)*+" \s*+ | [^",;]*+ ) )?+ (;|$)""",
    re.VERBOSE | re.ASCII,
)


def client_address(request: HttpRequest) -> str:
    """Return the address of the client: behind trusted proxies, the right-most address that is not one of theirs."""
    peer, text = _peer(request.META.get("REMOTE_ADDR") or "")
    config = conf.config()
    if config.proxies and _is_trusted(peer, config):
        # The header that the proxy writes. The other one may be the client's own, and is not read.
        header = next(
            (name for name in config.proxy_headers if request.META.get(name)), None
        )
        if header is not None and (
            client := _client(_forwarded(header, request.META[header]), config)
        ):
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
    return any(
        not isinstance(network, str) and peer in network for network in config.proxies
    )


def _forwarded(header: str, value: str) -> Iterator[str]:
    """Yield the addresses in a forwarding header from the right; text that is no address for a malformed element."""
    elements = reversed(value.split(","))
    if header == "HTTP_X_FORWARDED_FOR":
        yield from elements
        return
    parts, quotes = [], 0
    for part in elements:
        parts.append(part)
        # A comma in quotes ends no element. Counted from the right, so that a stray quote of the client, whose elements
        # are left of the proxies', does not change theirs.
        quotes += re.sub(r"\\.", "", part).count('"')
        if quotes % 2 == 0:
            yield _for(",".join(reversed(parts)))
            parts.clear()
    if parts:
        yield "malformed"


def _for(element: str) -> str:
    """Return the address in an element of a Forwarded header."""
    address, at = "", 0
    while (pair := _PAIR.match(element, at)) is not None:
        name, text, end = pair.groups()
        if name and name.lower() == "for":
            address = re.sub(r"\\(.)", r"\1", text.strip().strip('"'))
        if not end:
            return address
        at = pair.end()
    return "malformed"


def _client(chain: Iterable[str], config: conf.Config) -> IPAddress | None:
    """Return the first address, from the right, that is not a trusted proxy's; None where something is no address."""
    address = None
    for text in chain:
        address = parse_address(text)
        if address is None or not _is_trusted(address, config):
            return address
    return address
