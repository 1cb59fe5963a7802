"""From a request to the encoded identity that a policy counts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, RawPostDataException, UnreadablePostError
from django.utils.functional import SimpleLazyObject

from .. import conf
from ..core.keys import (
    GLOBAL,
    Name,
    credential_digest,
    encode_address,
    encode_name,
    is_name,
    key_kind,
)
from ..core.policy import KeyFunction
from ..core.text import fold
from .proxies import client_address
from .site_functions import call_key, in_thread

BY_USER = ("user", "user_or_ip")

# RFC 9110: what a credential is written in.
_token68 = re.compile(r"([A-Za-z0-9._~+/-]+)=*").fullmatch


def identify(request: HttpRequest, key: str | KeyFunction) -> str:
    """Return the encoded identity of a request's client under a policy's key.

    Where the request does not have what the key names, the address counts: one counter
    shared by all clients without a name would be used up by the first of them.
    """
    kind = key_kind(key)
    if kind == GLOBAL:
        return GLOBAL

    encoding = conf.config().encoding
    if kind != "ip":
        if kind == "user_or_ip":
            kind = "user"
        name = read_name(request, key)
        if name not in (None, ""):
            return encode_name(kind, name, encoding)
    return encode_address(client_address(request), encoding.ipv6_prefix)


async def load_user(request: Any) -> None:
    """Load a lazy `request.user` in a thread, as that may take the database.

    Not by `request.auser()`, which is the user of the session: another middleware may
    have set one of its own, such as that of a token, or one that is verified by a
    second factor.
    """
    user = getattr(request, "user", None)
    if isinstance(user, SimpleLazyObject):
        await in_thread(bool)(user)


def read_name(request: HttpRequest, key: str | KeyFunction) -> Name | None:
    """Return the name that a request has for a policy's key, if any."""
    kind = key_kind(key)
    if kind == "key":
        return call_key(key, request)
    if kind in BY_USER:
        return _user(request)
    if kind == "token":
        return _credential(request.headers.get("Authorization", ""))

    argument = str(key).partition(":")[2]
    if kind == "header":
        return request.headers.get(argument)
    if kind == "get":
        return request.GET.get(argument)
    return _posted(request, argument)


def _user(request: HttpRequest) -> Name | None:
    """Return the user whom Django or another framework has authenticated.

    That is `request.user`, otherwise `request.auth`: what a framework's own
    authenticator returned.
    """
    for attribute in ("user", "auth"):
        user: Any = getattr(request, attribute, None)
        if getattr(user, "is_authenticated", False):
            if user.pk is None:
                return None
            return str(user.pk)
    return _credential_name(getattr(request, "auth", None))


def _credential_name(auth: Any) -> Name | None:
    """Return a name for what is not a user.

    A digest of the credential, or of the key of its record, as it may be a secret.
    """
    name = getattr(auth, "pk", auth)
    if not is_name(name) or name == "":
        return None

    kind = ""
    if name is not auth:
        kind = f"{type(auth).__module__}.{type(auth).__qualname__}:"
    digest = credential_digest(f"{kind}{name}", conf.secret())
    return f"auth-{digest}"


def _posted(request: HttpRequest, name: str) -> str | None:
    """Return a field of the form, or of a JSON object, folded as user names are."""
    data = getattr(request, "data", None)  # of a framework that has read the body
    if data is None:
        try:
            data = _form_or_json(request, name)
        except UnreadablePostError:
            return None  # it is the view's error, if it reads the body

    value = None
    if isinstance(data, Mapping):
        value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None  # a list, say, which no view takes for a user name
    return fold(str(value)) or None


def _form_or_json(request: HttpRequest, name: str) -> Any:
    """Return the form that has this field, otherwise the body as JSON.

    JSON whatever the client calls it: there are views that do not look at the content
    type either.
    """
    if name in request.POST:
        return request.POST
    try:
        body = request.body  # up to DATA_UPLOAD_MAX_MEMORY_SIZE
        return _parse_json(body, request.encoding or "utf-8")
    except (ValueError, RecursionError, RawPostDataException, RequestDataTooBig):
        return None


def _parse_json(body: bytes, encoding: str) -> Any:
    try:
        return json.loads(body.decode(encoding))
    except (ValueError, LookupError):  # also for a codec that is not of text
        return json.loads(body)


def _credential(header: str) -> str | None:
    """Return the credential in one form, however it is spelled; None if it has none."""
    words = header.split()  # at any white space, as frameworks do
    if not words or len(words) > 2:
        return None

    token = _token68(words[-1])
    if token is None:
        return None
    if len(words) == 2 and words[0].lower() == "basic":
        return _basic_user(words[1])

    # The parts of a JWT are base64, which libraries decode leniently: without a ~,
    # + as -, whatever the last bits are.
    parts = token[1].split(".")
    if len(parts) == 1:
        return token[1]
    return ".".join(map(_normal_base64, parts))


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
    if not user or not colon:
        return None
    return f"basic:{user}"  # no other credential has a colon


def _normal_base64(part: str) -> str:
    """Return base64 as it would be encoded; other text as it is."""
    try:
        decoded = base64.urlsafe_b64decode(f"{part}===")
    except ValueError:
        return part
    return base64.urlsafe_b64encode(decoded).decode().rstrip("=")
