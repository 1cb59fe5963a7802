"""RateLimitMiddleware: the rules of RATE_LIMITER['MIDDLEWARE'], and headers on every response, error pages included."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import conf
from .http.gate import aenter, enter, reach_view
from .http.rules import limits_of_request

__all__ = ["RateLimitMiddleware"]


class RateLimitMiddleware:
    """Belongs after AuthenticationMiddleware, so that users are known."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        conf.require_app()
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)
            # A subclass keeps its own. Then a request that is cancelled within its view is refunded, too.
            if not hasattr(self, "process_view"):
                self.process_view = reach_view

    def __call__(
        self, request: HttpRequest
    ) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        run: Any = aenter if self.is_async else enter
        return run(limits_of_request(request), request, self.get_response, request)  # type: ignore[no-any-return]
