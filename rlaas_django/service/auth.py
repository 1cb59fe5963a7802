"""Who calls the service: the owner of a bearer token, or whom the site's own function names."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.debug import sensitive_variables

from .. import conf
from ..core.callers import Caller
from ..http.site_functions import in_thread
from .problems import ProblemError

CLOSED = (
    "This service has no callers yet: run `manage.py rlaas token new <name>` and put what it prints into "
    "RATE_LIMITER['SERVICE']['TOKENS'], or set RATE_LIMITER['SERVICE']['AUTHENTICATE']."
)
CHALLENGE = {"WWW-Authenticate": "Bearer"}


def by_token(request: HttpRequest) -> Caller | None:
    """Return the owner of a request's bearer token; None where the site's own function has to say."""
    service = conf.config().service
    if not service.is_open:
        raise ProblemError(403, CLOSED)
    caller = _owner(request.META.get("HTTP_AUTHORIZATION", ""))
    if caller is None and service.authenticate is None:
        raise ProblemError(
            401,
            "Send a token of this service: 'Authorization: Bearer <token>'.",
            CHALLENGE,
        )
    return caller


def by_site(request: HttpRequest, verb: str) -> Caller:
    """Return whom the site's own function names."""
    function = _function()
    check_csrf(request, function, verb)
    return _named(
        (async_to_sync(function) if iscoroutinefunction(function) else function)(
            request
        )
    )


async def aby_site(request: HttpRequest, verb: str) -> Caller:
    """As `by_site`, without blocking the event loop."""
    function = _function()
    await in_thread(check_csrf)(request, function, verb)
    return _named(
        await (function if iscoroutinefunction(function) else in_thread(function))(
            request
        )
    )


def require_verb(caller: Caller, verb: str) -> None:
    if verb not in caller.verbs:
        raise ProblemError(
            403,
            f"{caller.name!r} may not {verb!r}; it may {', '.join(sorted(caller.verbs))}.",
        )


def check_csrf(request: HttpRequest, function: Callable[..., Any], verb: str) -> None:
    """Refuse what another site may have made a browser send, unless the function is marked by `csrf_exempt`.

    A function that reads a session or another cookie needs it; one that reads a header does not.
    """
    if getattr(function, "csrf_exempt", False):
        return
    if verb == "check" and request.method in ("GET", "HEAD"):
        raise ProblemError(403, "A GET has no protection against CSRF: check by POST.")
    if _protected(request).status_code != 200:
        raise ProblemError(403, "The CSRF token is missing or wrong.")


@csrf_protect
def _protected(_: HttpRequest) -> HttpResponse:
    return HttpResponse()


@sensitive_variables()
def _owner(header: str) -> Caller | None:
    """Return the owner of a token. Every digest is compared, in constant time."""
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    digest, owner = (
        hashlib.sha256(token.strip().encode("utf-8", "surrogatepass")).hexdigest(),
        None,
    )
    for each, caller in conf.config().service.digests:
        if hmac.compare_digest(each, digest):
            owner = caller
    return owner


def _function() -> Callable[..., Any]:
    function = conf.config().service.authenticate
    assert function is not None  # noqa: S101  (by_token has looked)
    return function


def _named(caller: Any) -> Caller:
    if caller is None:
        raise ProblemError(401, "This request is not authenticated.", CHALLENGE)
    if not isinstance(caller, Caller):
        raise TypeError(
            f"RATE_LIMITER['SERVICE']['AUTHENTICATE'] should return a Caller or None, not {caller!r}."
        )
    return caller
