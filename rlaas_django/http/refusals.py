"""The response to a refused request: JSON, text, a page, or the site's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.contrib.sites.shortcuts import get_current_site
from django.core.exceptions import (
    DisallowedHost,
    ImproperlyConfigured,
    ObjectDoesNotExist,
)
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils import timezone
from django.utils.log import log_response
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from ..core.decision import Decision
from ..operators.formatting import duration_in_words
from .headers import add_refusal_headers, whole_wait
from .site_functions import in_thread

Respond = Callable[[HttpRequest, Decision], Any]

PROBLEM_JSON = "application/problem+json"
PLAIN_TEXT = "text/plain; charset=utf-8"
PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#"

# In this order when the client does not care: a program rather than a person.
MEDIA_TYPES = (PROBLEM_JSON, "application/json", "text/html", "text/plain")

# The longest Accept header that is weighed, in characters and in media types. Browsers
# send 140 and 8; to weigh one of 8 kB takes 250 times as long as the rest.
MAX_ACCEPT = 256
MAX_MEDIA_TYPES = 20

LONG_WAIT = 120  # seconds; from here on a wait is shown in minutes, hours and days

TEMPLATE = "rlaas_django/429.html"
STYLESHEET = "rlaas_django/429.css"
SCRIPT = "rlaas_django/429.js"

SUPPRESSED = "rate_limit_log_suppressed"  # a key of a request's META
_silent = logging.Logger("rlaas_django.silent", logging.CRITICAL + 1)


def respond(
    function: Respond | None, request: HttpRequest, refusal: Decision
) -> HttpResponseBase:
    """Return the response of the site's function, or our own."""
    response: Any = _plain_response(function, request, refusal)
    if response is None:
        response = _rendered(call_response(function or page, request, refusal))
    return add_refusal_headers(response, refusal)


async def arespond(
    function: Respond | None, request: HttpRequest, refusal: Decision
) -> HttpResponseBase:
    """As `respond`, natively async."""
    response: Any = _plain_response(function, request, refusal)
    if response is None:
        response = await _acall_response(function or page, request, refusal)
    return add_refusal_headers(response, refusal)


def call_response(function: Respond, request: HttpRequest, refusal: Decision) -> Any:
    """Call the site's function for refusals, sync or async, from sync code."""
    if iscoroutinefunction(function):
        function = async_to_sync(function)
    return function(request, refusal)


async def _acall_response(
    function: Any, request: HttpRequest, refusal: Decision
) -> Any:
    """As `call_response`, from async code; render a template in a thread."""
    if not iscoroutinefunction(function):
        function = in_thread(function)
    response = await function(request, refusal)
    if getattr(response, "is_rendered", True):
        return response
    return await in_thread(_rendered)(response)


def _rendered(response: Any) -> Any:
    """Render a template response; Django renders a view's, not a middleware's."""
    if getattr(response, "is_rendered", True):
        return response
    return response.render()


def _plain_response(
    function: Respond | None, request: HttpRequest, refusal: Decision
) -> HttpResponse | None:
    """Return our own 429 or 503 as JSON or text.

    None if the client prefers a page, whose template may use the database, or if the
    site has a function of its own.
    """
    media_type = preferred_type(request, MEDIA_TYPES)
    if function is not None or media_type == "text/html":
        return None

    status = _status(refusal)
    wait = whole_wait(refusal)
    if media_type in (PROBLEM_JSON, "application/json"):
        content_type = PROBLEM_JSON
        body = _problem(get_language(), status, wait, _violated_policies(refusal))
    else:
        content_type = PLAIN_TEXT
        body = _text(status, wait)

    # With its length, so that the server does not send it in chunks.
    headers = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Vary": "Accept",
    }
    return HttpResponse(body, status=status, headers=headers)


def page(request: HttpRequest, refusal: Decision) -> HttpResponse:
    """Return the refusal as a page, by the template `rlaas_django/429.html`."""
    status = _status(refusal)
    wait = whole_wait(refusal)
    context = {
        "decision": refusal,
        "status": status,
        "title": _title(status),
        "detail": _detail(wait),
        "wait": wait,
        "retry_at": _retry_at(wait),
        "retry_url": _retry_url(request),
        "site_name": _site_name(request),
        "stylesheet": _static_url(STYLESHEET),
        "script": _static_url(SCRIPT),
    }
    headers = {"Vary": "Accept"}
    try:
        text = render_to_string(TEMPLATE, context, request)
    except (TemplateDoesNotExist, ImportError):  # a site without templates
        return HttpResponse(_text(status, wait), PLAIN_TEXT, status, headers=headers)
    return HttpResponse(text, status=status, headers=headers)


def preferred_type(request: HttpRequest, offered: tuple[str, ...]) -> str | None:
    """Return which of these media types a client prefers.

    The first one where it does not say, or says too much.
    """
    accept = request.META.get("HTTP_ACCEPT", "*/*")
    if len(accept) > MAX_ACCEPT or accept.count(",") >= MAX_MEDIA_TYPES:
        return offered[0]
    return _preferred(accept, offered)


# Clients send few different headers, and to weigh one takes longer than the rest of a
# refusal.
@lru_cache(maxsize=256)
def _preferred(accept: str, offered: tuple[str, ...]) -> str | None:
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = accept
    try:
        return request.get_preferred_type([*offered])
    except (ValueError, LookupError):  # malformed in a way that Django does not handle
        return None


def _status(refusal: Decision) -> int:
    if refusal.unavailable:
        return 503
    return 429


def _title(status: int) -> str:
    if status == 503:
        return _("Service temporarily unavailable")
    return _("Too many requests")


def _detail(wait: int | None) -> str:
    """Return what a person needs to know."""
    if wait is None:
        return _("This request asks for more than its limit can ever give.")
    if wait >= LONG_WAIT:
        return _("Try again in %(time)s.") % {"time": duration_in_words(wait)}
    return ngettext(
        "Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait
    ) % {"wait": wait}


def _violated_policies(refusal: Decision) -> tuple[str, ...]:
    return tuple(
        outcome.policy.label
        for outcome in refusal.outcomes
        if not outcome.allowed and not outcome.policy.shadow
    )


# To translate its texts takes longer than the rest of a refusal.
@lru_cache(maxsize=1024)
def _problem(
    language: str | None,  # noqa: ARG001  (a part of the key)
    status: int,
    wait: int | None,
    violated: tuple[str, ...],
) -> bytes:
    kind = "quota-exceeded"
    if status == 503:
        kind = "temporary-reduced-capacity"
    problem = {
        "type": PROBLEM_TYPES + kind,
        "title": _title(status),
        "status": status,
        "detail": _detail(wait),
        "violated-policies": violated,
    }
    return json.dumps(problem).encode()


def _text(status: int, wait: int | None) -> bytes:
    return f"{_title(status)}. {_detail(wait)}\n".encode()


def _retry_at(wait: int | None) -> datetime | None:
    if wait is None:
        return None
    return timezone.localtime(datetime.now(UTC) + timedelta(seconds=wait))


def _retry_url(request: HttpRequest) -> str:
    """Return what a link can repeat; a form has to be sent again by the browser."""
    if request.method in ("GET", "HEAD"):
        return request.get_full_path()
    return ""


def _site_name(request: HttpRequest) -> str:
    """Return the name of django.contrib.sites, or the host.

    Empty if there is none: a refusal must not fail on that.
    """
    try:
        return get_current_site(request).name
    except (DisallowedHost, ImproperlyConfigured, ObjectDoesNotExist, DatabaseError):
        return ""


def _static_url(path: str) -> str:
    """Return the URL of a static file; empty before `collectstatic` has run."""
    try:
        return static(path)
    except (ImproperlyConfigured, ValueError):
        return ""


def suppress_log(request: HttpRequest, response: HttpResponseBase) -> None:
    """Keep Django from logging a 429.

    Django logs every response of 400 and more, once: under attack as many lines as
    there are requests. So it is logged here, where nothing is written. A filter would
    get the record, which takes a fifth of a refused request to make. A 503 is an error,
    which Django may mail.
    """
    if response.status_code == 429:
        logged: Any = response  # its type says HttpResponse, and it takes any
        log_response(
            "", response=logged, request=request, logger=_silent, level="debug"
        )


class SuppressedRefusals(logging.Filter):
    """Keeps Django from logging a refusal by a throttle of another package.

    Its response is not ours. This is a filter of the logger `django.request`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # The throttle may not have seen Django's own request, but it shares its META.
        meta = getattr(getattr(record, "request", None), "META", {})
        status = getattr(record, "status_code", 0)
        return SUPPRESSED not in meta or status != 429
