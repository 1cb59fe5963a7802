"""A view that a page can poll: what its visitor has left of some limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache

from . import conf, limiter
from .http.gate import peek
from .http.headers import add_headers

__all__ = ["RateLimitStatusView"]


@method_decorator(never_cache, name="dispatch")
class RateLimitStatusView(View):
    """Responds with JSON, or with a template whose `quota` is the decision of the policies. Nothing is charged.

    >>> path("quota/", RateLimitStatusView.as_view(policies=["search"], template_name="quota.html"))
    """

    policies: Sequence[str] = ()
    template_name: str | None = None

    def get(self, request: HttpRequest) -> HttpResponse:
        status = peek(request, *self.policies)
        quota = status or limiter.unlimited()
        if self.template_name is not None:
            response = render(request, self.template_name, {"quota": quota})
        else:
            response = JsonResponse(
                {
                    "allowed": quota.allowed,
                    "limit": quota.limit,
                    "remaining": quota.remaining,
                    "retry_after": None
                    if quota.retry_after == math.inf
                    else quota.retry_after,
                    "reset_after": quota.reset_after,
                }
            )
        if conf.config().enabled:
            add_headers(response.headers, status)
        return response
