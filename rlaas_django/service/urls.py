"""The URLs of the service: `path("rlaas/", include("rlaas_django.service.urls"))`."""

from __future__ import annotations

import asyncio
from typing import Any

from django.urls import ResolverMatch, URLPattern, path, re_path

from . import endpoints
from .views import Endpoint, async_view, sync_view

app_name = "rlaas_service"


GET, POST, EITHER = ("GET",), ("POST",), ("GET", "POST")
FORWARDED = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
)  # of the original request, where a proxy keeps it


class _Route(URLPattern):
    """A route to an async view where Django runs on an event loop (ASGI), and to a sync one elsewhere (WSGI).

    A view is the one or the other. Here, where a handler looks for the view, it is known which one it calls without
    another thread or another event loop.
    """

    def __init__(self, pattern: URLPattern, endpoint: Endpoint) -> None:
        super().__init__(
            pattern.pattern, pattern.callback, pattern.default_args, pattern.name
        )
        self.async_view = async_view(endpoint)

    def resolve(self, path: str) -> ResolverMatch | None:
        match = super().resolve(path)
        if match is not None and _on_event_loop():
            match.func = self.async_view
        return match


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _route(route: str, name: str, endpoint: Endpoint, make: Any = path) -> _Route:
    return _Route(make(route, sync_view(endpoint), name=name), endpoint)


urlpatterns = [
    _route("check", "check", Endpoint(endpoints.check, EITHER, "check")),
    _route(
        "check/batch", "check-batch", Endpoint(endpoints.check_batch, POST, "check")
    ),
    _route("usage", "usage", Endpoint(endpoints.usage, EITHER, "usage")),
    _route("refund", "refund", Endpoint(endpoints.refund, POST, "refund")),
    _route("reset", "reset", Endpoint(endpoints.reset, POST, "reset")),
    _route("policies", "policies", Endpoint(endpoints.policies, GET, "policies")),
    _route("info", "info", Endpoint(endpoints.info, GET, "info")),
    _route("metrics", "metrics", Endpoint(endpoints.metrics, GET, "metrics")),
    _route("health", "health", Endpoint(endpoints.health, GET)),
    _route("openapi.json", "openapi", Endpoint(endpoints.openapi, GET)),
    _route(
        r"^auth(?:/(?P<policies>[^/]+)(?P<path>/.*)?)?$",
        "auth",
        Endpoint(endpoints.forward_auth, FORWARDED, "check"),
        re_path,
    ),
]
