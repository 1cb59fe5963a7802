"""Decision → response. The only module that names headers."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from . import conf
from .policy import Decision, Outcome, strictest

PROBLEM_JSON = "application/problem+json"
PROBLEMS = "https://iana.org/assignments/http-problem-types#"
# In this order when the client does not care: a program rather than a person.
MEDIA_TYPES = (PROBLEM_JSON, "application/json", "text/html", "text/plain")


def refusal(request: HttpRequest, decision: Decision) -> HttpResponse:
    """429, or 503 when a limit could not be looked up, in the form that the client prefers."""
    preferred = _preferred(request.headers.get("Accept", "*/*"))
    if preferred in (PROBLEM_JSON, "application/json"):
        response: HttpResponse = _problem(decision)
    elif preferred == "text/html":
        response = _page(request, decision)
    else:
        response = _text(decision)
    patch_vary_headers(response, ["Accept"])
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
    if response.status_code in (429, 503) and not math.isinf(decision.retry_after):
        response.headers["Retry-After"] = str(whole_seconds(decision.retry_after))
    response.headers.setdefault("Cache-Control", "no-store")


def add_headers(response: HttpResponseBase, decision: Decision | None) -> None:
    """The figures of every enforced policy. Setting them again replaces them."""
    if decision is None:
        return
    enforced = [outcome for outcome in decision.outcomes if not outcome.policy.shadow and _counted(outcome)]
    if not enforced:
        return
    tightest = strictest(enforced)
    families = conf.config().headers
    if "RateLimit" in families:
        response.headers["RateLimit-Policy"] = ", ".join(map(_policy_item, enforced))
        response.headers["RateLimit"] = ", ".join(map(_usage_item, enforced))
    if "X-RateLimit" in families:
        response.headers["X-RateLimit-Limit"] = str(tightest.limit)
        response.headers["X-RateLimit-Remaining"] = str(tightest.remaining)
        response.headers["X-RateLimit-Reset"] = str(math.ceil(tightest.reset_after))


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


def _violated(decision: Decision) -> list[str]:
    return [str(outcome.policy) for outcome in decision.outcomes if not (outcome.allowed or outcome.policy.shadow)]


def title(decision: Decision) -> str:
    return _("Service temporarily unavailable") if decision.unavailable else _("Too many requests")


def detail(decision: Decision) -> str:
    """What a person needs to know."""
    if math.isinf(decision.retry_after):
        return _("This request asks for more than its limit can ever give.")
    wait = whole_seconds(decision.retry_after)
    return ngettext("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait) % {"wait": wait}


def _problem(decision: Decision) -> HttpResponse:
    problem: dict[str, Any] = {
        "type": PROBLEMS + ("temporary-reduced-capacity" if decision.unavailable else "quota-exceeded"),
        "title": title(decision),
        "status": _status(decision),
        "detail": detail(decision),
        "violated-policies": _violated(decision),
    }
    return HttpResponse(json.dumps(problem), status=_status(decision), content_type=PROBLEM_JSON)


def _page(request: HttpRequest, decision: Decision) -> HttpResponse:
    context = {"decision": decision, "title": title(decision), "detail": detail(decision), "status": _status(decision)}
    try:
        page = render_to_string("rlaas_django/429.html", context, request)
    except (TemplateDoesNotExist, ImportError):  # a site without templates
        return _text(decision)
    return HttpResponse(page, status=_status(decision))


def _text(decision: Decision) -> HttpResponse:
    text = f"{title(decision)}. {detail(decision)}\n"
    return HttpResponse(text, status=_status(decision), content_type="text/plain; charset=utf-8")
