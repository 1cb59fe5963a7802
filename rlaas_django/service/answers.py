"""HTTP out: decisions and settings as JSON or text. No I/O."""

from __future__ import annotations

import json
import math
from typing import Any

from django.http import HttpRequest, HttpResponse

from .. import __version__, conf
from ..backend.scripts import SCRIPTS
from ..core.algorithms import ALGORITHMS
from ..core.callers import Caller
from ..core.decision import Decision, Outcome
from ..core.policy import Policy, Rate
from ..http import responses
from . import receipts
from .problems import ProblemError

# The texts of the service that the source documents describe.
ALLOWED = "User is allowed"
NOT_ALLOWED = "User is not allowed"


def json_response(content: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(
        json.dumps(content, separators=(",", ":")),
        content_type="application/json",
        status=status,
    )


def decision_response(
    decision: Decision, caller: Caller, *, as_text: bool
) -> HttpResponse:
    """Return the response to a check: 200, 429, or 503 where a policy fails closed."""
    if decision.unavailable:
        response = unavailable(
            f"Redis is unavailable, and policy {decision.policy.name!r} fails closed."
        ).response()
    elif as_text:
        text = ALLOWED if decision.allowed else NOT_ALLOWED + _try_after(decision)
        response = HttpResponse(
            text, content_type="text/plain; charset=utf-8", status=_status(decision)
        )
    else:
        response = json_response(decision_json(decision, caller), _status(decision))
    return with_headers(response, decision)


def with_headers(response: HttpResponse, decision: Decision) -> HttpResponse:
    """Add the figures of a decision, and what goes with a refusal."""
    responses.add_headers(response.headers, decision)
    if not decision.allowed:
        responses.add_refusal_headers(response, decision)
    return response


def decision_json(
    decision: Decision, caller: Caller | None = None, *, in_batch: bool = False
) -> dict[str, Any]:
    """Return a decision; with its receipt for a caller that may refund. A batch lists policies only if several."""
    answer = {
        "allowed": decision.allowed,
        "policy": decision.policy.name,
        **_figures(decision),
    }
    answer["degraded"] = decision.degraded
    if not in_batch or len(decision.outcomes) > 1:
        answer["outcomes"] = [_outcome_json(outcome) for outcome in decision.outcomes]
    if (
        caller is not None
        and "refund" in caller.verbs
        and (receipt := receipts.write(decision)) is not None
    ):
        answer["receipt"] = receipt
    return answer


def wants_text(request: HttpRequest) -> bool:
    """Return whether a check by GET is answered by text, as the original service answers every check."""
    form = request.GET.get("format")
    if form not in (None, "json", "text"):
        raise ProblemError(400, "The format should be 'json' or 'text'.")
    if form is None:
        return (
            responses.preferred_type(request, ("text/plain", "application/json"))
            != "application/json"
        )
    return form == "text"


def unavailable(detail: str) -> ProblemError:
    return ProblemError(503, detail, {"Retry-After": "1"})


def policies_json(caller: Caller) -> dict[str, Any]:
    """Return the policies that a caller may use."""
    config = conf.config()
    usable = [
        policy for policy in config.policies.values() if caller.may_use(policy.name)
    ]
    return {"policies": [_policy_json(policy, config.algo) for policy in usable]}


def info_json() -> dict[str, Any]:
    """Return what runs here."""
    scripts = [
        {"name": each.name, "version": each.version, "sha1": each.sha}
        for each in SCRIPTS
    ]
    named = {"name": "rlaas_django", "version": __version__}
    return {
        **named,
        "defaultAlgorithm": conf.config().algo,
        "algorithms": [*ALGORITHMS],
        "scripts": scripts,
    }


def _status(decision: Decision) -> int:
    return 200 if decision.allowed else 429


def _try_after(decision: Decision) -> str:
    if decision.retry_after == math.inf:
        return "."  # its cost can never fit
    return f"...Try after {responses.whole_seconds(decision.retry_after)} seconds."


def _figures(result: Decision | Outcome) -> dict[str, Any]:
    return {
        "limit": result.limit,
        "currentCount": result.current_count,
        "remaining": result.remaining,
        "retryAfter": None if result.retry_after == math.inf else result.retry_after,
        "resetAfter": result.reset_after,
        "ttl": result.ttl,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy.name,
        "allowed": outcome.allowed,
        **_figures(outcome),
        "shadow": outcome.policy.shadow,
        "degraded": outcome.degraded,
    }


def _policy_json(policy: Policy, default_algo: str) -> dict[str, Any]:
    fixed = isinstance(policy.rate, Rate)
    return {
        "name": policy.name,
        "limit": policy.capacity if fixed else None,  # None: a function of the request
        "window": policy.window if fixed else None,
        "key": policy.key if isinstance(policy.key, str) else "key",
        "algorithm": policy.algo or default_algo,
        "burst": policy.burst,
        "onFailure": policy.on_failure,
        "shadow": policy.shadow,
    }
