"""From a request to the encoded identity that a policy counts."""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.http import (
    HttpRequest,
    QueryDict,
    RawPostDataException,
    UnreadablePostError,
)
from django.http.multipartparser import MultiPartParser, MultiPartParserError
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
AMBIGUOUS = "ambiguous"  # what a field is where it depends on the view
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
UNICODE = ("utf-8", "utf-16", "utf-32")  # and -le, -be, -sig

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
            return user_name(user)
    return _credential_name(getattr(request, "auth", None))


def user_name(user: Any) -> str | None:
    """Return the name of a user who is logged in: the primary key, of any type."""
    if user.pk is None:
        return None
    return str(user.pk)


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
    """Return a field of the form, or of a JSON object, folded as user names are.

    One text for all requests in which it depends on the view what the field is.
    """
    try:
        values = _read_body(request, name)
    except UnreadablePostError:
        return None  # it is the view's error, if it reads the body
    except RequestDataTooBig:
        # It is left to the view, which may read it in parts.
        if not _is_read_in_parts(request):
            return None
        values = None
    if values is None:
        return AMBIGUOUS

    names = {fold(str(value)) for value in values if _is_posted_name(value)}
    names.discard("")
    if len(names) > 1:
        return AMBIGUOUS
    if AMBIGUOUS in names:  # somebody's name; no folded text ends in a space
        return f"{AMBIGUOUS} "
    return next(iter(names), None)


def _is_posted_name(value: object) -> bool:
    """Return whether a view may take a value for a name; not a list, say."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _read_body(request: HttpRequest, name: str) -> list[Any] | None:
    """Return what views find under a name; None where it may be anything."""
    body: bytes | None = None
    # Before anything is parsed, so that the view can still read it in its own way.
    with suppress(RawPostDataException):
        body = request.body  # up to DATA_UPLOAD_MAX_MEMORY_SIZE

    data = getattr(request, "data", None)  # of a framework with parsers of its own
    if isinstance(data, Mapping):
        return [data.get(name)]
    if data is not None:
        return []
    if body != b"" and not _is_plain(request):
        return None
    return [*_form(request, body).getlist(name), *_json_values(body, name)]


def _is_plain(request: HttpRequest) -> bool:
    """Return whether all views agree on the media type and on the charset.

    REST framework's first parser takes the type */*. RFC 8259 has JSON in UTF-8, and
    parsers detect UTF-16 and UTF-32; a form has no charset.
    """
    charset = codecs.lookup(request.encoding or "utf-8").name
    if request.content_type in FORMS:
        return charset == "utf-8"
    return "*" not in str(request.content_type) and charset.startswith(UNICODE)


def _is_read_in_parts(request: HttpRequest) -> bool:
    """Return whether parsers find fields in a body that `request.body` does not take.

    Django's of forms with files does, and those of frameworks may.
    """
    if not isinstance(request, HttpRequest):
        return True
    return request.content_type == FORMS[1] or not _is_plain(request)


def _form(request: HttpRequest, body: bytes | None) -> QueryDict:
    """Return the form, also of a PUT, which frameworks read and Django does not.

    Not `request.POST`, which may fail, and after which the view cannot choose how files
    are uploaded; unless it was read before, or as much of it as the view can read.
    """
    if body is None and request.method == "POST":
        return request.POST
    with suppress(MultiPartParserError, SuspiciousOperation):
        if request.content_type == FORMS[0]:
            return QueryDict(body)
        if request.content_type == FORMS[1]:
            return MultiPartParser(request.META, BytesIO(body or b""), []).parse()[0]
    return QueryDict()


def _json_values(body: bytes | None, name: str) -> list[Any]:
    """Return what a JSON object has under a name, which it may have several times.

    Whatever the client calls it: there are views that do not look at the content type.
    """
    try:
        pairs = json.loads(body or b"", strict=False, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return []
    if not isinstance(pairs, tuple):
        return []
    return [value for key, value in pairs if key == name]


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
