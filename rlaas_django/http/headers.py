"""The headers of rate limits. The only module that names them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase, ResponseHeaders

from .. import conf
from ..core.decision import Decision, Outcome, strictest
from ..core.policy import Rate

Headers = ResponseHeaders | dict[str, str]
GetResponse = Callable[[HttpRequest], Any]

RATE_LIMIT = "RateLimit"
RATE_LIMIT_POLICY = "RateLimit-Policy"
X_LIMIT = "X-RateLimit-Limit"
X_REMAINING = "X-RateLimit-Remaining"
X_RESET = "X-RateLimit-Reset"
RETRY_AFTER = "Retry-After"


def add_headers(headers: Headers, decision: Decision | None) -> None:
    """Add the figures of every enforced policy; those that are there are replaced."""
    if decision is None:
        return
    outcomes = [outcome for outcome in decision.outcomes if _has_figures(outcome)]
    if not outcomes:
        return

    families = conf.config().headers
    if "RateLimit" in families:
        labels = _labels(outcomes)
        headers[RATE_LIMIT_POLICY] = ", ".join(map(_policy_item, labels, outcomes))
        headers[RATE_LIMIT] = ", ".join(map(_usage_item, labels, outcomes))
    if "X-RateLimit" in families:
        tightest = strictest(outcomes)
        headers[X_LIMIT] = str(tightest.limit)
        headers[X_REMAINING] = str(tightest.remaining)
        headers[X_RESET] = str(math.ceil(tightest.reset_after))


def add_refusal_headers(
    response: HttpResponseBase, refusal: Decision
) -> HttpResponseBase:
    """Add what goes with a refusal, also to the site's own response; return it."""
    wait = whole_wait(refusal)
    if wait is not None and response.status_code in (429, 503):
        response.headers[RETRY_AFTER] = str(wait)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def without_figures(get_response: GetResponse) -> GetResponse:
    """Strip figures from responses: a cached page has those of another client."""

    def get_stripped(request: HttpRequest) -> Any:
        return _strip(get_response(request))

    async def aget_stripped(request: HttpRequest) -> Any:
        return _strip(await get_response(request))

    if iscoroutinefunction(get_response):
        return aget_stripped
    return get_stripped


def _strip(response: HttpResponseBase) -> HttpResponseBase:
    for name in (RATE_LIMIT, RATE_LIMIT_POLICY, X_LIMIT, X_REMAINING, X_RESET):
        if name in response.headers:
            del response.headers[name]
    return response


def whole_wait(refusal: Decision) -> int | None:
    """Return the wait in whole seconds; None when waiting does not help."""
    if refusal.retry_after == math.inf:
        return None
    return whole_seconds(refusal.retry_after)


def whole_seconds(wait: float) -> int:
    """Round up: a client that waits so long is not early."""
    return max(1, math.ceil(wait))


def _has_figures(outcome: Outcome) -> bool:
    """Return whether a policy is enforced, and counted somewhere."""
    if outcome.policy.shadow:
        return False
    return not outcome.degraded or outcome.policy.on_failure == "local"


def _labels(outcomes: list[Outcome]) -> list[str]:
    """Return the policies' labels, numbered where a rule and a view have the same."""
    labels: list[str] = []
    for outcome in outcomes:
        label = outcome.policy.label
        if label in labels:
            label = f"{label}-{len(labels) + 1}"
        labels.append(label)
    return labels


# Structured fields (RFC 9651). A label has no character that its quotes would have to
# escape.


def _policy_item(label: str, outcome: Outcome) -> str:
    policy = outcome.policy
    return _quota(label, outcome.limit, policy.fixed_rate, policy.burst)


@lru_cache(maxsize=1024)
def _quota(label: str, limit: int, rate: Rate, burst: int | None) -> str:
    """Return the quota and the seconds in which it is refilled.

    Those of a bucket are the time to fill it, so that q / w is its rate.
    """
    window = rate.window
    if limit == burst:
        window = math.ceil(rate.window * limit / rate.limit)
    return f'"{label}";q={limit};w={window}'


def _usage_item(label: str, outcome: Outcome) -> str:
    reset = math.ceil(outcome.reset_after)
    return f'"{label}";r={outcome.remaining};t={reset}'
