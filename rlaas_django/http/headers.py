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

Headers = ResponseHeaders | dict[str, str]
GetResponse = Callable[[HttpRequest], Any]

RATE_LIMIT = "RateLimit"
RATE_LIMIT_POLICY = "RateLimit-Policy"
X_LIMIT = "X-RateLimit-Limit"
X_REMAINING = "X-RateLimit-Remaining"
X_RESET = "X-RateLimit-Reset"
RETRY_AFTER = "Retry-After"


def add_headers(headers: Headers, decision: Decision | None) -> None:
    """Add what every enforced policy decided, in place of what is there."""
    if decision is None:
        return
    counted: dict[str, Outcome] = {}  # by label
    for outcome in decision.outcomes:
        policy = outcome.policy
        is_counted = not outcome.degraded or policy.on_failure == "local"
        if is_counted and not policy.shadow:
            label = policy.label
            if label in counted:  # of a rule, and of the view
                label = f"{label}-{len(counted) + 1}"
            counted[label] = outcome
    if not counted:
        return

    families = conf.config().headers
    if "RateLimit" in families:
        # Structured fields (RFC 9651). No label has a character to be escaped.
        quotas = []
        usage = []
        # Retry-After ends no earlier than any `t`, says the draft.
        longest = decision.retry_after or math.inf
        for label, outcome in counted.items():
            policy = outcome.policy
            quotas.append(_quota(label, outcome.limit, policy.rate, policy.burst))
            wait = math.ceil(min(outcome.more_after, longest))
            usage.append(f'"{label}";r={outcome.remaining};t={wait}')
        headers[RATE_LIMIT_POLICY] = ", ".join(quotas)
        headers[RATE_LIMIT] = ", ".join(usage)
    if "X-RateLimit" in families:
        tightest = outcome
        if len(counted) > 1:
            tightest = strictest(counted.values())
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


def without_rate_limit_headers(get_response: GetResponse) -> GetResponse:
    """Strip our headers from responses: a cached page has those of another client."""

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


@lru_cache(maxsize=1024)
def _quota(label: str, limit: int, rate: Any, burst: int | None) -> str:
    """Return the quota and the seconds in which it is refilled.

    Those of a bucket are the time to fill it, so that q / w is its rate.
    """
    window = rate.window
    if limit == burst:
        window = math.ceil(rate.window * limit / rate.limit)
    return f'"{label}";q={limit};w={window}'
