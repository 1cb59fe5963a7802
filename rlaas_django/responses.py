"""Decision → response. The only module that names headers."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

from django.core.signals import setting_changed
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from . import conf
from .policy import Decision, Outcome, strictest

PROBLEM_JSON = "application/problem+json"
PROBLEMS = "https://iana.org/assignments/http-problem-types#"
# In this order when the client does not care: a program rather than a person.
MEDIA_TYPES = (PROBLEM_JSON, "application/json", "text/html", "text/plain")


def refusal(request: HttpRequest, decision: Decision) -> HttpResponse:
    """429, or 503 when a limit could not be looked up, in the form that the client prefers."""
    preferred = _preferred_by(request)
    if preferred in (PROBLEM_JSON, "application/json"):
        return _problem(decision)
    response = _page(request, decision) if preferred == "text/html" else _text(decision)
    add_refusal_headers(response, decision)
    return response


def is_page(request: HttpRequest) -> bool:
    """Whether a refusal would be rendered by a template, which may ask the database."""
    return _preferred_by(request) == "text/html"


def _preferred_by(request: HttpRequest) -> str | None:
    # Not by way of `request.headers`, which reads every header there is.
    return _preferred(request.META.get("HTTP_ACCEPT", "*/*"))


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


def add_headers(response: HttpResponseBase, decision: Decision | None) -> None:
    """The figures of every enforced policy. Setting them again replaces them."""
    if decision is None:
        return
    enforced = [outcome for outcome in decision.outcomes if not outcome.policy.shadow and _counted(outcome)]
    if not enforced:
        return
    families, headers = conf.config().headers, response.headers
    if "RateLimit" in families:
        headers["RateLimit-Policy"] = ", ".join([_policy_item(outcome) for outcome in enforced])
        headers["RateLimit"] = ", ".join([_usage_item(outcome) for outcome in enforced])
    if "X-RateLimit" in families:
        tightest = enforced[0] if len(enforced) == 1 else strictest(enforced)
        headers["X-RateLimit-Limit"] = str(tightest.limit)
        headers["X-RateLimit-Remaining"] = str(tightest.remaining)
        headers["X-RateLimit-Reset"] = str(math.ceil(tightest.reset_after))


def _counted(outcome: Outcome) -> bool:
    """Whether there are figures: of Redis, or of this process while it is away."""
    return not outcome.degraded or outcome.policy.on_failure == "local"


def whole_seconds(wait: float) -> int:
    """Rounded up: who waits that long is not early."""
    return max(1, math.ceil(wait))


# Structured fields (RFC 9651). A policy's name has no character that its quotes would have to escape.
def _policy_item(outcome: Outcome) -> str:
    return f'"{outcome.policy.name}";q={outcome.limit};w={_window(outcome)}'


def _window(outcome: Outcome) -> int:
    """The seconds in which the quota comes back: of a bucket, the time to fill it, so that q / w is its rate."""
    policy = outcome.policy
    if policy.burst is None or outcome.limit != policy.burst:
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
    return _title(decision.unavailable)


def _title(unavailable: bool) -> str:
    return _("Service temporarily unavailable") if unavailable else _("Too many requests")


def detail(decision: Decision) -> str:
    """What a person needs to know."""
    return _detail(_wait(decision))


def _detail(wait: int | None) -> str:
    if wait is None:
        return _("This request asks for more than its limit can ever give.")
    return ngettext("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait) % {"wait": wait}


def _problem(decision: Decision) -> HttpResponse:
    refusing = [each for each in decision.outcomes if not (each.allowed or each.policy.shadow)]
    unavailable = refusing[0].degraded and decision.unavailable
    violated = tuple([each.policy.name for each in refusing])
    body, headers = _problem_parts(unavailable, _wait(decision), violated, get_language())
    return HttpResponse(body, status=503 if unavailable else 429, headers=headers)


# Who is refused over and over is told the same for a second, in words that take long to find and to write.
@lru_cache(maxsize=1024)
def _problem_parts(
    unavailable: bool,
    wait: int | None,
    violated: tuple[str, ...],
    language: str | None,  # noqa: ARG001
) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a problem."""
    problem: dict[str, Any] = {
        "type": PROBLEMS + ("temporary-reduced-capacity" if unavailable else "quota-exceeded"),
        "title": _title(unavailable),
        "status": 503 if unavailable else 429,
        "detail": _detail(wait),
        "violated-policies": violated,
    }
    body = json.dumps(problem).encode()
    # With its length, so that the server need not send it in chunks, which would take longer.
    headers = {"Content-Type": PROBLEM_JSON, "Content-Length": str(len(body)), "Vary": "Accept"}
    if wait is not None:
        headers["Retry-After"] = str(wait)
    return body, {**headers, "Cache-Control": "no-store"}


@receiver(setting_changed)
def _forget(**_facts: object) -> None:
    """A test may give a language other words."""
    _problem_parts.cache_clear()


def _page(request: HttpRequest, decision: Decision) -> HttpResponse:
    context = {"decision": decision, "title": title(decision), "detail": detail(decision), "status": _status(decision)}
    try:
        page = render_to_string("rlaas_django/429.html", context, request)
    except (TemplateDoesNotExist, ImportError):  # a site without templates
        return _text(decision)
    return HttpResponse(page, status=_status(decision), headers={"Vary": "Accept"})


def _text(decision: Decision) -> HttpResponse:
    text = f"{title(decision)}. {detail(decision)}\n"
    headers = {"Content-Type": "text/plain; charset=utf-8", "Vary": "Accept"}
    return HttpResponse(text, status=_status(decision), headers=headers)
