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
    """Responds with JSON, or with a template that gets the decision as `quota`.

    Nothing is charged.

    >>> options = {"policies": ["search"], "template_name": "quota.html"}
    >>> path("quota/", RateLimitStatusView.as_view(**options))
    """

    policies: Sequence[str] = ()
    template_name: str | None = None

    def get(self, request: HttpRequest) -> HttpResponse:
        status = peek(request, *self.policies)
        quota = status or limiter.unlimited()
        if self.template_name is not None:
            response = render(request, self.template_name, {"quota": quota})
        else:
            is_possible = quota.retry_after != math.inf
            figures = {
                "allowed": quota.allowed,
                "limit": quota.limit,
                "remaining": quota.remaining,
                "retry_after": quota.retry_after if is_possible else None,
                "reset_after": quota.reset_after,
            }
            response = JsonResponse(figures)

        if conf.config().enabled:
            add_headers(response.headers, status)
        return response
