"""Who calls the service: the owner of a token, or whom the site's function names."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.debug import sensitive_variables

from .. import conf
from ..core.callers import Caller
from .answers import ProblemError

CLOSED = (
    "This service has no callers yet: run `manage.py rlaas token new <name>` and put "
    "what it prints into RATE_LIMITER['SERVICE']['TOKENS'], or set "
    "RATE_LIMITER['SERVICE']['AUTHENTICATE']."
)
CHALLENGE = {"WWW-Authenticate": "Bearer"}


def by_token(request: HttpRequest) -> Caller | None:
    """Return the owner of the request's token; None where the site's function decides.

    ProblemError where there is no such function.
    """
    service = conf.config().service
    if not service.is_open:
        raise ProblemError(CLOSED, 403)

    caller = _owner(request.META.get("HTTP_AUTHORIZATION", ""))
    if caller is None and service.authenticate is None:
        detail = "Send a token of this service: 'Authorization: Bearer <token>'."
        raise ProblemError(detail, 401, CHALLENGE)
    return caller


def require_verb(caller: Caller, verb: str) -> None:
    """Raise a ProblemError unless the caller may do this."""
    if verb not in caller.verbs:
        verbs = ", ".join(sorted(caller.verbs))
        raise ProblemError(f"{caller.name!r} may not {verb!r}; it may {verbs}.", 403)


def by_site(request: HttpRequest, verb: str) -> Caller:
    """Return whom the site's own function names."""
    function: Any = conf.config().service.authenticate
    if not getattr(function, "csrf_exempt", False):
        _check_csrf(request, verb)

    if iscoroutinefunction(function):
        function = async_to_sync(function)
    caller = function(request)

    if caller is None:
        raise ProblemError("This request is not authenticated.", 401, CHALLENGE)

    if not isinstance(caller, Caller):
        raise TypeError(
            "RATE_LIMITER['SERVICE']['AUTHENTICATE'] should return a Caller or None, "
            f"not {caller!r}."
        )
    return caller


def _check_csrf(request: HttpRequest, verb: str) -> None:
    """Refuse what another site may have made a browser send.

    A function that reads a session or another cookie needs this; one that reads a
    header does not, and is marked by `csrf_exempt`.
    """
    if verb == "check" and request.method in ("GET", "HEAD"):
        raise ProblemError("A GET has no protection against CSRF: check by POST.", 403)
    if _protected(request).status_code != 200:
        raise ProblemError("The CSRF token is missing or wrong.", 403)


@csrf_protect
def _protected(_: HttpRequest) -> HttpResponse:
    return HttpResponse()


@sensitive_variables()
def _owner(header: str) -> Caller | None:
    """Return the owner of a token. Every digest is compared, in constant time."""
    scheme, _, token = header.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        return None

    token_digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    owner = None
    for digest, caller in conf.config().service.digests:
        if hmac.compare_digest(digest, token_digest):
            owner = caller
    return owner
