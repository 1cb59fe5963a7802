"""The URLs of the service: `path("rlaas/", include("rlaas_django.service.urls"))`.

Under ASGI, include `rlaas_django.service.async_urls`: the same with async views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.urls import URLPattern, path, re_path

from . import endpoints
from .views import Endpoint, sync_view

GET = ("GET",)
POST = ("POST",)
GET_OR_POST = ("GET", "POST")
# Those of the original request, where a proxy keeps its method.
FORWARDED = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

ENDPOINTS = {
    "check": Endpoint(endpoints.check, GET_OR_POST, "check"),
    "check/batch": Endpoint(endpoints.check_batch, POST, "check"),
    "usage": Endpoint(endpoints.usage, GET_OR_POST, "usage"),
    "refund": Endpoint(endpoints.refund, POST, "refund"),
    "reset": Endpoint(endpoints.reset, POST, "reset"),
    "policies": Endpoint(endpoints.policies, GET, "policies"),
    "info": Endpoint(endpoints.info, GET, "info"),
    "metrics": Endpoint(endpoints.metrics, GET, "metrics"),
    "health": Endpoint(endpoints.health, GET),
    "openapi.json": Endpoint(endpoints.openapi, GET),
}
AUTH = Endpoint(endpoints.forward_auth, FORWARDED, "check")
AUTH_ROUTE = r"^auth(?:/(?P<policies>[^/]+)(?P<path>/.*)?)?$"


def patterns(view: Callable[[Endpoint], Any]) -> list[URLPattern]:
    """Return the URL patterns of the endpoints, with sync or async views."""
    routes = [re_path(AUTH_ROUTE, view(AUTH), name="auth")]
    for route, endpoint in ENDPOINTS.items():
        name = route.replace("/", "-").removesuffix(".json")
        routes.append(path(route, view(endpoint), name=name))

    return routes


app_name = "rlaas_service"
urlpatterns = patterns(sync_view)
