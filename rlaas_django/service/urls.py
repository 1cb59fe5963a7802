"""The URLs of the service: `path("rlaas/", include("rlaas_django.service.urls"))`.

Under ASGI, include `rlaas_django.service.async_urls`: the same with async views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.urls import URLPattern, path, re_path

from . import endpoints
from .views import sync_view

# `auth/<policies>`, and what Envoy appends to it: the path of the original request.
AUTH = r"^auth(?:/(?P<policies>[^/]+)(?P<path>/.*)?)?$"
# The method is that of the original request, where a proxy keeps it.
FORWARDED = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def patterns(view: Callable[..., Any]) -> list[URLPattern]:
    """Return the URL patterns, with sync or async views.

    A view has a function, the verb that a caller needs, if any, and its methods.
    """
    return [
        path(
            "check",
            view(endpoints.check, "check", "GET", "POST"),
            name="check",
        ),
        path(
            "check/batch",
            view(endpoints.check_batch, "check", "POST"),
            name="check-batch",
        ),
        path(
            "usage",
            view(endpoints.usage, "usage", "GET", "POST"),
            name="usage",
        ),
        path("refund", view(endpoints.refund, "refund", "POST"), name="refund"),
        path("reset", view(endpoints.reset, "reset", "POST"), name="reset"),
        path("policies", view(endpoints.policies, "policies", "GET"), name="policies"),
        path("info", view(endpoints.info, "info", "GET"), name="info"),
        path("metrics", view(endpoints.metrics, "metrics", "GET"), name="metrics"),
        path("health", view(endpoints.health, None, "GET"), name="health"),
        path("openapi.json", view(endpoints.openapi, None, "GET"), name="openapi"),
        re_path(
            AUTH,
            view(endpoints.forward_auth, "check", *FORWARDED),
            name="auth",
        ),
    ]


app_name = "rlaas_service"
urlpatterns = patterns(sync_view)
