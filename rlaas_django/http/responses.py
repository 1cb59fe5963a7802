"""Decision → response. The only module that names headers."""

from __future__ import annotations

import copyreg
import json
import logging
import math
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase, ResponseHeaders
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.datastructures import CaseInsensitiveMapping
from django.utils.log import log_response
from django.utils.timesince import TIME_STRINGS
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from .. import conf
from ..core.decision import Decision, Outcome, strictest
from ..core.policy import Rate
from . import page as refusal_page

Respond = Callable[[HttpRequest, Decision], Any]
Headers = ResponseHeaders | dict[str, str]

PROBLEM_JSON, PLAIN_TEXT = "application/problem+json", "text/plain; charset=utf-8"
PROBLEMS = "https://iana.org/assignments/http-problem-types#"
# In this order when the client does not care: a program rather than a person.
MEDIA_TYPES = (PROBLEM_JSON, "application/json", "text/html", "text/plain")
# The longest Accept header that is weighed, in characters and in media types; browsers send 140 and 8. To weigh one of
# 8 kB would take up to 250 times as long as the rest of a refusal.
MAX_ACCEPT, MAX_ACCEPTED = 256, 20
LONG_WAIT = 120  # seconds; from here on a wait is told in minutes, hours and days
FIGURES = frozenset(
    {
        "ratelimit",
        "ratelimit-policy",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    }
)


def plain_refusal(
    request: HttpRequest, refusal: Decision, decision: Decision | None
) -> HttpResponse | None:
    """Return a 429 or 503 as JSON or text; None if the client prefers a page, whose template may use the database."""
    preferred = preferred_type(request, MEDIA_TYPES)
    if preferred == "text/html":
        return None
    status, wait = _status(refusal), _wait(refusal)
    if preferred in (PROBLEM_JSON, "application/json"):
        violated = [
            each.policy.label
            for each in refusal.outcomes
            if not each.allowed and not each.policy.shadow
        ]
        body, content_type = (
            _problem(get_language(), status, wait, tuple(violated)),
            PROBLEM_JSON,
        )
    else:
        body, content_type = _text(status, wait), PLAIN_TEXT
    response = HttpResponse(body, content_type, status)
    # With its length, so that the server does not send it in chunks.
    headers = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Vary": "Accept",
    }
    headers["Cache-Control"] = "no-store"
    if wait is not None:
        headers["Retry-After"] = str(wait)
    add_headers(headers, decision)
    # All at once: they are ASCII without line breaks, and to check and encode each takes a tenth of a refused request.
    CaseInsensitiveMapping.__init__(response.headers, headers)
    return response


def page(request: HttpRequest, decision: Decision) -> HttpResponse:
    """Return the refusal as a page, by the template `rlaas_django/429.html`."""
    status, wait = _status(decision), _wait(decision)
    context = {
        **refusal_page.context(request, wait),
        "decision": decision,
        "title": _title(status),
        "detail": _detail(wait),
        "status": status,
    }
    try:
        text = render_to_string("rlaas_django/429.html", context, request)
    except (TemplateDoesNotExist, ImportError):  # a site without templates
        return HttpResponse(
            _text(status, wait), PLAIN_TEXT, status, headers={"Vary": "Accept"}
        )
    return HttpResponse(text, status=status, headers={"Vary": "Accept"})


def preferred_type(request: HttpRequest, offered: tuple[str, ...]) -> str | None:
    """Return which of these media types a client prefers; the first one where it does not say, or says too much."""
    accept = request.META.get("HTTP_ACCEPT", "*/*")
    if len(accept) > MAX_ACCEPT or accept.count(",") >= MAX_ACCEPTED:
        return offered[0]
    return _preferred(accept, offered)


@lru_cache(
    maxsize=256
)  # clients send few different headers, and weighing one takes longer than the rest of a refusal
def _preferred(accept: str, offered: tuple[str, ...]) -> str | None:
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = accept
    try:
        return request.get_preferred_type([*offered])
    except (ValueError, LookupError):  # malformed in a way that Django does not handle
        return None


def strip_figures_from_cached_pages() -> None:
    """Leave the figures, which are one client's, out of pickled responses, such as the pages in Django's cache."""
    copyreg.pickle(ResponseHeaders, _without_figures)


def _without_figures(
    headers: ResponseHeaders,
) -> tuple[type[ResponseHeaders], tuple[dict[str, str]]]:
    return ResponseHeaders, (
        {name: value for name, value in headers.items() if name.lower() not in FIGURES},
    )


def add_refusal_headers(response: HttpResponseBase, decision: Decision) -> None:
    """Add what goes with a refusal, also to the site's own response."""
    if response.status_code in (429, 503) and (wait := _wait(decision)) is not None:
        response.headers["Retry-After"] = str(wait)
    response.headers.setdefault("Cache-Control", "no-store")


def add_headers(headers: Headers, decision: Decision | None) -> None:
    """Add the figures of every enforced policy to the headers of a response; those that are there are replaced."""
    enforced: list[Outcome] = []
    labels: set[str] = set()
    policies, usage = [], []
    for outcome in () if decision is None else decision.outcomes:
        policy = outcome.policy
        # Without Redis there are figures only where this process counts.
        if not policy.shadow and (not outcome.degraded or policy.on_failure == "local"):
            label = policy.label
            if label in labels:  # of a policy of a rule, and of the view
                label = f"{label}-{len(labels) + 1}"
            labels.add(label)
            enforced.append(outcome)
            policies.append(
                _policy_item(label, outcome.limit, policy.rate, policy.burst)
            )
            usage.append(
                f'"{label}";r={outcome.remaining};t={math.ceil(outcome.reset_after)}'
            )
    if not enforced:
        return
    families = conf.config().headers
    if "RateLimit" in families:
        headers["RateLimit-Policy"], headers["RateLimit"] = (
            ", ".join(policies),
            ", ".join(usage),
        )
    if "X-RateLimit" in families:
        tightest = enforced[0] if len(enforced) == 1 else strictest(enforced)
        headers["X-RateLimit-Limit"] = str(tightest.limit)
        headers["X-RateLimit-Remaining"] = str(tightest.remaining)
        headers["X-RateLimit-Reset"] = str(math.ceil(tightest.reset_after))


def whole_seconds(wait: float) -> int:
    """Round up: a client that waits so long is not early."""
    return max(1, math.ceil(wait))


# Structured fields (RFC 9651). A policy's label has no character that its quotes would have to escape.
@lru_cache(maxsize=1024)
def _policy_item(label: str, limit: int, rate: Rate, burst: int | None) -> str:
    # The seconds in which the quota is refilled: of a bucket the time to fill it, so that q / w is its rate.
    window = (
        rate.window if limit != burst else math.ceil(rate.window * limit / rate.limit)
    )
    return f'"{label}";q={limit};w={window}'


def _status(decision: Decision) -> int:
    return 503 if decision.unavailable else 429


def _wait(decision: Decision) -> int | None:
    """Return whole seconds; None when waiting does not help."""
    return (
        None
        if decision.retry_after == math.inf
        else whole_seconds(decision.retry_after)
    )


def _title(status: int) -> str:
    return (
        _("Service temporarily unavailable")
        if status == 503
        else _("Too many requests")
    )


def _detail(wait: int | None) -> str:
    """Return what a person needs to know."""
    if wait is None:
        return _("This request asks for more than its limit can ever give.")
    if wait < LONG_WAIT:
        return ngettext(
            "Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait
        ) % {"wait": wait}
    return _("Try again in %(time)s.") % {"time": in_words(wait)}


def in_words(seconds: int) -> str:
    """Return a long wait as `5 minutes`, `1 hour, 30 minutes` or `2 days`, rounded up, in Django's own translations."""
    unit = 60 if seconds < 86_400 else 3_600
    hours, minutes = divmod(math.ceil(seconds / unit) * unit // 60, 60)
    parts = {"day": hours // 24, "hour": hours % 24, "minute": minutes}
    words = [
        TIME_STRINGS[name] % {"num": number} for name, number in parts.items() if number
    ]
    return _(", ").join(words).replace("\xa0", " ")


# To translate its texts takes longer than the rest of a refusal.
@lru_cache(maxsize=1024)
def _problem(
    language: str | None, status: int, wait: int | None, violated: tuple[str, ...]
) -> bytes:
    kind = "temporary-reduced-capacity" if status == 503 else "quota-exceeded"
    problem = {
        "type": PROBLEMS + kind,
        "title": _title(status),
        "status": status,
        "detail": _detail(wait),
    }
    return json.dumps({**problem, "violated-policies": violated}).encode()


def _text(status: int, wait: int | None) -> bytes:
    return f"{_title(status)}. {_detail(wait)}\n".encode()


async def arespond(
    function: Respond | None,
    request: HttpRequest,
    refusal: Decision,
    decision: Decision | None,
) -> HttpResponseBase:
    """Return the response of the site's function, or our own, with the headers of a refusal and of all figures."""
    if (
        function is None
        and (plain := plain_refusal(request, refusal, decision)) is not None
    ):
        return plain
    call = function if iscoroutinefunction(function) else in_thread(function or page)
    response: Any = await call(request, refusal)
    if not getattr(
        response, "is_rendered", True
    ):  # Django renders a view's template response, not a middleware's
        response = await in_thread(response.render)()
    add_refusal_headers(response, refusal)
    add_headers(response.headers, decision)
    return response  # type: ignore[no-any-return]


def respond(
    function: Respond | None,
    request: HttpRequest,
    refusal: Decision,
    decision: Decision | None,
) -> HttpResponseBase:
    """As `arespond`, for sync code."""
    if (
        function is None
        and (plain := plain_refusal(request, refusal, decision)) is not None
    ):
        return plain
    call = (
        async_to_sync(function) if iscoroutinefunction(function) else function or page
    )
    response: Any = call(request, refusal)
    if not getattr(response, "is_rendered", True):
        response = response.render()
    add_refusal_headers(response, refusal)
    add_headers(response.headers, decision)
    return response  # type: ignore[no-any-return]


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a function that runs the site's code, which may use the database, in Django's thread for sync code."""

    @sync_to_async
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:  # a future cannot carry one, and would never end
            raise RuntimeError(f"{function!r} raised StopIteration.") from error

    return run


SUPPRESSED = "rate_limit_log_suppressed"  # a key of a request's META
_silent = logging.Logger("rlaas_django.silent", logging.CRITICAL + 1)


def suppress_log(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Keep Django from logging a 429, and return it; a 503 is an error, which Django may mail.

    Django logs every response of 400 and more, once: under attack as many lines as there are requests. So it is logged
    here, where nothing is written. (A filter gets the record, which takes a fifth of a refused request to make.)
    """
    if response.status_code == 429:
        logged: Any = response  # its type says HttpResponse, and it takes any
        log_response(
            "", response=logged, request=request, logger=_silent, level="debug"
        )
    return response


class SuppressedRefusals(logging.Filter):
    """Keeps Django from logging a refusal by a throttle of another package, whose response is not ours.

    It is a filter of the logger `django.request`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # The throttle may not have seen Django's own request, but it shares its META.
        meta = getattr(getattr(record, "request", None), "META", {})
        return not (SUPPRESSED in meta and getattr(record, "status_code", 0) == 429)
