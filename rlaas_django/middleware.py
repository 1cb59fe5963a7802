"""RateLimitMiddleware: the rules of RATE_LIMITER['MIDDLEWARE'].

It also adds the headers to every response, error pages included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest

from . import conf
from .http.gate import aenter, enter, reach_view
from .http.headers import without_rate_limit_headers
from .http.rules import limits_of_request

__all__ = ["RateLimitMiddleware"]

CACHE_MIDDLEWARE = "django.middleware.cache.UpdateCacheMiddleware"


class RateLimitMiddleware:
    """Belongs after AuthenticationMiddleware, so that users are known."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        conf.require_app()
        self.enter: Callable[..., Any] = enter
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)
            self.enter = aenter
            # A request that is cancelled before its view begins is refunded.
            # A subclass keeps a method of its own.
            if not hasattr(self, "process_view"):
                self.process_view = reach_view

        self.get_response = get_response
        if CACHE_MIDDLEWARE in conf.middleware():
            self.get_response = without_rate_limit_headers(get_response)

    def __call__(self, request: HttpRequest) -> Any:
        limits = limits_of_request(request)
        return self.enter(limits, request, self.get_response, request)
