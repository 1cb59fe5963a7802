"""The URLs of the service: `path("rlaas/", include("rlaas_django.service.urls"))`.

Under ASGI, include `rlaas_django.service.async_urls`: the same with async views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.urls import URLPattern, path, re_path

from . import endpoints
from .views import sync_view

GET = ("GET", "HEAD")
POST = ("POST",)
GET_OR_POST = ("GET", "POST", "HEAD")

# The method is that of the original request, where a proxy keeps it.
FORWARDED = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")

# Of each endpoint: its path, its function, the verb that a caller needs, if any, its
# methods, and its cost where that is not 1.
ENDPOINTS = (
    ("check", endpoints.check, "check", GET_OR_POST),
    ("check/batch", endpoints.check_batch, "check", POST, endpoints.batch_cost),
    ("usage", endpoints.usage, "usage", GET_OR_POST),
    ("refund", endpoints.refund, "refund", POST),
    ("reset", endpoints.reset, "reset", POST),
    ("policies", endpoints.policies, "policies", GET),
    ("info", endpoints.info, "info", GET),
    ("metrics", endpoints.metrics, "metrics", GET),
    ("health", endpoints.health, None, GET),
    ("openapi.json", endpoints.openapi, None, GET),
)

# `auth/<policies>`, and what Envoy appends to it: the path of the original request.
AUTH = r"^auth(?:/(?P<policies>[^/]+)(?P<path>/.*)?)?$"


def patterns(view: Callable[..., Any]) -> list[URLPattern]:
    """Return the URL patterns, with sync or async views.

    Their names are check, check-batch, openapi ...
    """
    urls = []
    for route, *endpoint in ENDPOINTS:
        name = route.removesuffix(".json").replace("/", "-")
        urls.append(path(route, view(*endpoint), name=name))

    auth = view(endpoints.forward_auth, "check", FORWARDED)
    urls.append(re_path(AUTH, auth, name="auth"))
    unknown = view(endpoints.unknown_path, None, FORWARDED)
    urls.append(re_path("", unknown, name="unknown"))

    return urls


app_name = "rlaas_service"
urlpatterns = patterns(sync_view)
