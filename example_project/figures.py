"""What the page shows of a decision, as JSON."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse

from rlaas_django import Outcome


def answer(
    request: HttpRequest, text: str = "Here you are.", status: int = 200
) -> JsonResponse:
    """An allowed request's response; the limiter adds the headers."""
    decision = request.rate_limit
    shown = [
        figures(outcome) for outcome in decision.outcomes if outcome.identity
    ]  # without one: there is no limit
    return JsonResponse(
        {"text": text, "figures": shown, "degraded": decision.degraded}, status=status
    )


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
