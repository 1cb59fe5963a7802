"""What the page shows of a decision, as JSON."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse

from rlaas_django import Outcome


def answer(request: HttpRequest, text: str = "Here you are.") -> JsonResponse:
    """Return the response of an allowed request; the limiter adds the headers."""
    decision = request.rate_limit
    # An outcome without an identity means that there is no limit.
    counted = [outcome for outcome in decision.outcomes if outcome.identity]
    content = {
        "text": text,
        "figures": [figures(outcome) for outcome in counted],
        "degraded": decision.degraded,
    }
    return JsonResponse(content)


def figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy.name,
        "allowed": outcome.allowed,
        "shadow": outcome.policy.shadow,
        "limit": outcome.limit,
        "count": outcome.limit - outcome.remaining,
        "retry_after": outcome.retry_after,
        "reset_after": outcome.reset_after,
    }
