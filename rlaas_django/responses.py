"""Decision → response. The only module that names headers."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

from django.core.signals import setting_changed
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase, ResponseHeaders
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from . import conf
from .policy import Decision, Outcome, Policy, strictest

PROBLEM_JSON = "application/problem+json"
PROBLEMS = "https://iana.org/assignments/http-problem-types#"
# In this order when the client does not care: a program rather than a person.
MEDIA_TYPES = (PROBLEM_JSON, "application/json", "text/html", "text/plain")


def plain_refusal(request: HttpRequest, decision: Decision) -> HttpResponse | None:
    """429, or 503 when a limit could not be looked up, with all its headers; None if the client prefers a page."""
    # Not by way of `request.headers`, which reads every header there is.
    preferred = _preferred(request.META.get("HTTP_ACCEPT", "*/*"))
    if preferred in (PROBLEM_JSON, "application/json"):
        return _problem(decision)
    if preferred == "text/html":
        return None
    response = _text(decision)
    add_refusal_headers(response, decision)
    add_headers(response, decision)
    return response


@lru_cache(maxsize=256)
def _preferred(accept: str) -> str | None:
    """Of those that we have. Clients ask in few ways, and to weigh one takes longer than all else in a refusal."""
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = accept
    try:
        return request.get_preferred_type([*MEDIA_TYPES])
    except (ValueError, LookupError):  # of what a client can write there, Django does not survive everything
        return None


def add_refusal_headers(response: HttpResponseBase, decision: Decision) -> None:
    """What goes with a refusal, also with the site's own response, if it is one."""
    if response.status_code in (429, 503) and (wait := _wait(decision)) is not None:
        response.headers["Retry-After"] = str(wait)
    response.headers.setdefault("Cache-Control", "no-store")


def leave_out_of_log(response: HttpResponseBase) -> None:
    """Where there was no room for a line of ours, Django is not to write one either.

    It writes one about every response of 400 and more, under attack as many as there are requests, and takes longer
    over it than all of a refusal does. That there was one already is all that keeps it from it; no setting does.
    """
    if response.status_code == 429:  # a 503 is an error, which Django may mail
        response._has_been_logged = True  # type: ignore[attr-defined]


def add_headers(response: HttpResponseBase, decision: Decision | None) -> None:
    """The figures of every enforced policy. Setting them again replaces them."""
    if decision is None:
        return
    enforced = _enforced(decision)
    if not enforced:
        return
    families, headers = conf.config().headers, {}
    if "RateLimit" in families:
        headers["RateLimit-Policy"] = ", ".join([_policy_item(outcome.policy, outcome.limit) for outcome in enforced])
        headers["RateLimit"] = ", ".join([_usage_item(outcome) for outcome in enforced])
    if "X-RateLimit" in families:
        tightest = enforced[0] if len(enforced) == 1 else strictest(enforced)
        headers["X-RateLimit-Limit"] = str(tightest.limit)
        headers["X-RateLimit-Remaining"] = str(tightest.remaining)
        headers["X-RateLimit-Reset"] = str(math.ceil(tightest.reset_after))
    _set(response, headers)


def _set(response: HttpResponseBase, headers: dict[str, str]) -> None:
    """Set headers that need no check: names and whole numbers of ours.

    Django checks each, which takes longer than all else that we do around a view. `_store`, by name in lower case the
    name and the value, is Django's own, and no other way leads past it; a Django without it is given them one by one.
    """
    store = getattr(response.headers, "_store", None)
    for name, value in headers.items():
        if store is None:
            response.headers[name] = value
        else:
            store[name.lower()] = name, value


def _enforced(decision: Decision) -> list[Outcome]:
    return [outcome for outcome in decision.outcomes if not outcome.policy.shadow and _counted(outcome)]


def _counted(outcome: Outcome) -> bool:
    """Whether there are figures: of Redis, or of this process while it is away."""
    return not outcome.degraded or outcome.policy.on_failure == "local"


def whole_seconds(wait: float) -> int:
    """Rounded up: who waits that long is not early."""
    return max(1, math.ceil(wait))


# Structured fields (RFC 9651). A policy's name has no character that its quotes would have to escape.
@lru_cache(maxsize=1024)
def _policy_item(policy: Policy, limit: int) -> str:
    return f'"{policy.name}";q={limit};w={_window(policy, limit)}'


def _window(policy: Policy, limit: int) -> int:
    """The seconds in which the quota comes back: of a bucket, the time to fill it, so that q / w is its rate."""
    if policy.burst is None or limit != policy.burst:
        return policy.window
    return math.ceil(policy.window * policy.burst / policy.fixed_rate.limit)


def _usage_item(outcome: Outcome) -> str:
    return f'"{outcome.policy.name}";r={outcome.remaining};t={math.ceil(outcome.reset_after)}'


def _status(decision: Decision) -> int:
    return 503 if decision.unavailable else 429


def _wait(decision: Decision) -> int | None:
    """Whole seconds; None: waiting does not help."""
    wait = decision.retry_after
    return None if wait == math.inf else whole_seconds(wait)


def title(decision: Decision) -> str:
    return _("Service temporarily unavailable") if decision.unavailable else _("Too many requests")


def detail(decision: Decision) -> str:
    """What a person needs to know."""
    wait = _wait(decision)
    if wait is None:
        return _("This request asks for more than its limit can ever give.")
    return ngettext("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait) % {"wait": wait}


class _Headers(ResponseHeaders):
    """Headers as they were set and checked once, given to another response.

    Django also looks each up by its name to list them, which takes longer than the view. For `_store` see `_set`.
    """

    def __init__(self, checked: ResponseHeaders) -> None:
        self._store = {**checked._store}

    def items(self) -> Any:
        return self._store.values()


class _Problem(NamedTuple):
    """A refusal in JSON, as it is told."""

    status: int
    body: bytes
    headers: ResponseHeaders


# By all that they depend on. Who is refused over and over is told the same for a second, in words that take long to
# find and to write.
_problems: dict[Any, _Problem] = {}
MOST_PROBLEMS = 1024


def _problem(decision: Decision) -> HttpResponse:
    origin, age = decision.origin
    figures = [
        (each.policy, each.allowed, each.limit, each.remaining, math.ceil(each.reset_after - age), each.degraded)
        for each in origin.outcomes
    ]
    tightest = strictest(_enforced(origin) or origin.outcomes).policy.name if len(figures) > 1 else ""
    wait = origin.retry_after - age
    key = (*figures, tightest, wait if wait == math.inf else math.ceil(wait), conf.config().headers, get_language())
    problem = _problems.get(key)
    if problem is None:
        if len(_problems) >= MOST_PROBLEMS:
            _problems.clear()
        problem = _problems[key] = _told(decision)
    response = HttpResponse(problem.body, status=problem.status, content_type=PROBLEM_JSON)
    headers = problem.headers
    response.headers = _Headers(headers) if hasattr(headers, "_store") else ResponseHeaders(dict(headers.items()))
    return response


def _told(decision: Decision) -> _Problem:
    status, refusing = _status(decision), [each for each in decision.outcomes if not each.allowed]
    problem: dict[str, Any] = {
        "type": PROBLEMS + ("temporary-reduced-capacity" if decision.unavailable else "quota-exceeded"),
        "title": title(decision),
        "status": status,
        "detail": detail(decision),
        "violated-policies": [each.policy.name for each in refusing if not each.policy.shadow],
    }
    body = json.dumps(problem).encode()
    # With its length, so that the server need not send it in chunks, which would take longer.
    length = {"Content-Length": str(len(body)), "Vary": "Accept"}
    response = HttpResponse(status=status, content_type=PROBLEM_JSON, headers=length)
    add_refusal_headers(response, decision)
    add_headers(response, decision)
    return _Problem(status, body, response.headers)


@receiver(setting_changed)
def _forget(**_facts: object) -> None:
    """A test may give a language other words."""
    _problems.clear()


def page(request: HttpRequest, decision: Decision) -> HttpResponse:
    context = {"decision": decision, "title": title(decision), "detail": detail(decision), "status": _status(decision)}
    try:
        text = render_to_string("rlaas_django/429.html", context, request)
    except (TemplateDoesNotExist, ImportError):  # a site without templates
        return _text(decision)
    return HttpResponse(text, status=_status(decision), headers={"Vary": "Accept"})


def _text(decision: Decision) -> HttpResponse:
    text = f"{title(decision)}. {detail(decision)}\n"
    headers = {"Content-Type": "text/plain; charset=utf-8", "Vary": "Accept"}
    return HttpResponse(text, status=_status(decision), headers=headers)
