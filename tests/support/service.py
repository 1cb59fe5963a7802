"""The HTTP service behind Django's WSGI and ASGI handlers, and a caller of it for each token."""

from __future__ import annotations

import hashlib
import json
import types
from typing import Any

from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.urls import include, path
from rlaas_django import rate_limit

from tests.support.http import PROBLEM_JSON

TOKEN, LESSER = "rlaas_all-verbs", "rlaas_lesser"
VERBS = ["check", "usage", "refund", "reset", "policies", "info", "metrics"]


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = {
    "tester": {"digests": [digest(TOKEN)], "verbs": VERBS},
    "lesser": {"digests": [digest("rlaas_old"), digest(LESSER)], "policies": ["search", "default"]},
}


@rate_limit("search")
def search(request):
    return HttpResponse("found")


def urlconf(handler: str = "wsgi") -> Any:
    """Return URLs with the service for a handler, and a view under one of the policies."""
    urls = {"wsgi": "rlaas_django.service.urls", "asgi": "rlaas_django.service.async_urls"}[handler]
    module: Any = types.ModuleType("tests.service_urls")
    module.urlpatterns = [path("rlaas/", include(urls)), path("search", search)]
    return module


class Service:
    """`service.get("check?userId=alice")`, `service.post("check", {"userId": "alice"})`, with a token."""

    def __init__(self, handler: str, token: str | None = TOKEN) -> None:
        self.handler, self.token = handler, token

    def as_caller(self, token: str | None) -> Service:
        return Service(self.handler, token)

    def request(
        self, method: str, where: str, *args: Any, headers: Any = None, client: Any = None, **options: Any
    ) -> Any:
        client = client or (AsyncClient() if self.handler == "asgi" else Client())
        headers = {**({} if self.token is None else {"Authorization": f"Bearer {self.token}"}), **(headers or {})}
        function = getattr(client, method)
        where = where if where.startswith("/") else f"/rlaas/{where}"
        response = (async_to_sync(function) if self.handler == "asgi" else function)(
            where, *args, headers=headers, **options
        )
        assert self.token is None or self.token not in f"{response.content!r} {response.headers}"
        return response

    def get(self, where: str, **options: Any) -> Any:
        return self.request("get", where, **options)

    def post(self, where: str, body: Any = None, **options: Any) -> Any:
        text = body if isinstance(body, (str, bytes)) else json.dumps(body)
        return self.request("post", where, text, content_type="application/json", **options)


def serve(handler: str, settings: Any, configure: Any, policies: dict[str, Any]) -> Service:
    """Serve the service under these policies, to callers with TOKENS."""
    settings.ROOT_URLCONF = urlconf(handler)
    configure(POLICIES=policies, SERVICE={"TOKENS": TOKENS})
    return Service(handler)


def assert_problem(response: Any, status: int, detail: str = "") -> dict[str, Any]:
    """Check an error of the service."""
    assert response.status_code == status, response.content
    assert response.headers["Content-Type"] == PROBLEM_JSON
    assert response.headers["Cache-Control"] == "no-store"
    problem = response.json()
    assert list(problem) == ["type", "title", "status", "detail"]
    assert problem["status"] == status
    assert detail in problem["detail"], problem["detail"]
    return problem
