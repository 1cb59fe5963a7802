"""HTTP out: decisions, problems and settings as JSON or text. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse

from .. import conf
from ..core.callers import Caller
from ..core.decision import Decision, Outcome
from ..core.policy import Policy, Rate, nearest
from ..http.headers import add_headers, add_refusal_headers, whole_wait
from ..http.refusals import (
    PLAIN_TEXT,
    PROBLEM_JSON,
    preferred_type,
    suppress_log,
)
from . import receipts

Json = dict[str, Any]

# The texts of the service that the source documents describe.
ALLOWED = "User is allowed"
NOT_ALLOWED = "User is not allowed"
MAX_ECHO = 100  # characters of a client's text in a message


@dataclass(eq=False)
class ProblemError(Exception):
    """A request that is answered by a problem; nothing was charged for it."""

    detail: str
    status: int = 400
    headers: dict[str, str] | None = None
    decision: Decision | None = None  # whose figures go with the problem

    def members(self) -> Json:
        """Return the members of the JSON object."""
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }


def require_available(decision: Decision) -> None:
    """Raise a ProblemError for a decision that was refused without Redis."""
    if decision.unavailable:
        name = decision.policy.name
        detail = f"Redis is unavailable, and policy {name!r} fails closed."
        raise ProblemError(detail, 503, decision=decision)


def unknown(kind: str, word: object, known: Iterable[str]) -> str:
    """Return the message about an unknown word, with the nearest known one."""
    text = str(word)[:MAX_ECHO]
    return f"There is no {kind} {text!r}{nearest(text, known)}"


def decision_response(
    request: HttpRequest, decision: Decision, caller: Caller, *, as_text: bool
) -> HttpResponse:
    """Return the response to a check: 200 or 429."""
    require_available(decision)

    status = 200 if decision.allowed else 429
    if as_text:
        text = _decision_text(decision)
        response = HttpResponse(text, PLAIN_TEXT, status)
    else:
        response = JsonResponse(decision_json(decision, caller), status=status)

    # A refusal is a result here, not an error for Django to log.
    suppress_log(request, response)
    return with_headers(response, decision)


def problem_response(problem: ProblemError) -> HttpResponse:
    """Return the response to a request that is in error."""
    response = JsonResponse(
        problem.members(),
        content_type=PROBLEM_JSON,
        status=problem.status,
        headers=problem.headers,
    )
    if problem.decision is None:
        return response
    return with_headers(response, problem.decision)


def with_headers(response: HttpResponse, decision: Decision) -> HttpResponse:
    """Add the figures of a decision, and what goes with a refusal."""
    add_headers(response.headers, decision)
    if not decision.allowed:
        add_refusal_headers(response, decision)
    return response


def decision_json(
    decision: Decision, caller: Caller, *, in_batch: bool = False
) -> Json:
    """Return a decision, with its receipt for a caller that may refund.

    In a batch, policies are listed only where there are several.
    """
    answer = _figures(decision)
    if not in_batch or len(decision.outcomes) > 1:
        answer["outcomes"] = [
            {**_figures(outcome), "shadow": outcome.policy.shadow}
            for outcome in decision.outcomes
        ]

    if "refund" in caller.verbs:
        receipt = receipts.write(decision)
        if receipt is not None:
            answer["receipt"] = receipt

    return answer


def wants_text(request: HttpRequest) -> bool:
    """Return whether a check by GET is answered by text, as in the original service."""
    form = request.GET.get("format")
    if form is None:
        offered = ("text/plain", "application/json")
        return preferred_type(request, offered) != "application/json"

    if form not in ("json", "text"):
        raise ProblemError("The format should be 'json' or 'text'.")
    return form == "text"


def policy_json(policy: Policy) -> Json:
    """Return the settings of a policy."""
    answer = {
        "name": policy.name,
        "limit": None,  # a function of the request, where it is not fixed
        "window": None,
        "key": policy.key if isinstance(policy.key, str) else "key",
        "algorithm": policy.algo or conf.config().algo,
        "burst": policy.burst,
        "onFailure": policy.on_failure,
        "shadow": policy.shadow,
    }
    if isinstance(policy.rate, Rate):
        answer["limit"] = policy.capacity
        answer["window"] = policy.window
    return answer


def _decision_text(decision: Decision) -> str:
    if decision.allowed:
        return ALLOWED

    seconds = whole_wait(decision)
    if seconds is None:  # the cost can never fit
        return f"{NOT_ALLOWED}."
    return f"{NOT_ALLOWED}...Try after {seconds} seconds."


def _figures(result: Decision | Outcome) -> Json:
    """Return what a decision and the outcome of a policy have in common."""
    return {
        "allowed": result.allowed,
        "policy": result.policy.name,
        "limit": result.limit,
        "currentCount": result.current_count,
        "remaining": result.remaining,
        "retryAfter": _whole_ms(result.retry_after),
        "resetAfter": _whole_ms(result.reset_after),
        "ttl": result.ttl,
        "degraded": result.degraded,
    }


def _whole_ms(seconds: float) -> float | None:
    """Return seconds in whole ms, rounded up: who waits so long is not early.

    None when the cost can never fit.
    """
    if seconds == math.inf:
        return None
    ms = math.ceil(round(1000 * seconds, 3))
    return max(0, ms) / 1000
