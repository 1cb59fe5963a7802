"""A small site that gunicorn and uvicorn serve as real processes: its settings, URLs and views in one module."""

from __future__ import annotations

import os
from hashlib import sha256

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path
from django.views import View
from rlaas_django import Policy, rate_limit
from rlaas_django.core.callers import VERBS

TOKEN = os.environ["RLAAS_TEST_TOKEN"]
SECRET_KEY = "end to end"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = __name__
USE_TZ = True
INSTALLED_APPS = ["rlaas_django", "rlaas_django.integrations.prometheus.Metrics"]
MIDDLEWARE = ["rlaas_django.middleware.RateLimitMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ["RLAAS_TEST_REDIS"],
        "OPTIONS": {"SOCKET_TIMEOUT": 20, "SOCKET_CONNECT_TIMEOUT": 20},
    }
}
RATE_LIMITER = {
    "TIMEOUT": 20,  # long enough for a busy machine
    "LOCAL_REFUSALS": False,  # the tests empty Redis between them, which the servers cannot know
    "POLICIES": {
        "login": {"rate": "2/h", "key": "ip"},
        "search": {"rate": "2/h", "key": "get:q", "algo": "token-bucket-algo", "burst": 3},
        "api": {"rate": "3/h", "key": "ip"},
        "site": {"rate": "1000/d", "key": "global"},
        "proxied": {"rate": "5/h", "key": "ip"},
        "many": {"rate": "100/d"},
    },
    "MIDDLEWARE": [
        {"path": "/default", "policies": ["default"]},
        {"path": "/api/", "policies": ["api"]},
        {"path": "/shared/", "policies": ["site"]},
        {"path": "/", "exempt": True},
    ],
    "TRUSTED_PROXIES": ["127.0.0.1"],
    "SERVICE": {"TOKENS": {"tester": {"digests": [sha256(TOKEN.encode()).hexdigest()], "verbs": [*VERBS]}}},
}
WSGI_APPLICATION = f"{__name__}.wsgi"


def show(request: HttpRequest) -> HttpResponse:
    decision = request.rate_limit  # type: ignore[attr-defined]
    body = {"allowed": decision.allowed, "outcomes": [outcome.allowed for outcome in decision.outcomes]}
    return JsonResponse(body, headers={"X-Worker": str(os.getpid())})


async def ashow(request: HttpRequest) -> HttpResponse:
    return show(request)


def failing(request: HttpRequest) -> HttpResponse:
    raise RuntimeError


def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=200 if request.POST.get("password") == "right" else 401)


async def alogin(request: HttpRequest) -> HttpResponse:
    return login(request)


def own(request: HttpRequest, decision: object) -> HttpResponse:
    return HttpResponse("slow down", status=429, content_type="text/plain; charset=utf-8")


def plan(request: HttpRequest) -> str | None:
    return {"free": "1/h", "paid": "3/h"}.get(request.headers.get("X-Plan", ""))


@rate_limit("2/h", key="ip")
class Page(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return show(request)


@rate_limit("2/h", key="ip")
class AsyncPage(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return show(request)


def wrong(response: HttpResponse) -> bool:
    return response.status_code == 401


LIMITS = {
    "named": rate_limit("login"),
    "inline": rate_limit("2/h", key="ip", group="inline"),
    "several": rate_limit("3/h", "2/d", key="ip", group="several"),
    "search": rate_limit("search"),
    "post": rate_limit("2/h", key="ip", method="POST", group="post"),
    "cost": rate_limit("4/h", key="ip", cost=2, group="cost"),
    "shadow": rate_limit("2/h", key="ip", shadow=True, group="shadow"),
    "annotated": rate_limit("2/h", key="ip", block=False, group="annotated"),
    "own": rate_limit("2/h", key="ip", response=own, group="own"),
    "plan": rate_limit(rate=plan, key="ip", group="plan"),
    "token": rate_limit("2/h", key="token", group="token"),
    "mixed": rate_limit("login", Policy("trial", "1/h", key="ip", shadow=True)),
    "load": rate_limit("500/d", key="header:X-Api-Key", group="load"),
    "less": rate_limit("100/d", key="header:X-Api-Key", group="less"),
}
APART = rate_limit("2/d", key="ip", charge_when=lambda response: True, group="apart")
TOGETHER = rate_limit("2/d", key="ip", group="together")
LOGIN = rate_limit("3/h", key="ip", charge_when=wrong, group="attempts")

urlpatterns = [
    path("default", show),
    path("api/<path:rest>", lambda request, rest: show(request)),
    path("default/failing", failing),
    path("rlaas/", include(f"rlaas_django.service.{os.environ['RLAAS_TEST_SERVICE']}")),
    path("healthz", lambda request: HttpResponse("ok")),
    path("class", Page.as_view()),
    path("async/class", AsyncPage.as_view()),
    path("shared/apart", APART(ashow)),
    path("shared/stacked", APART(TOGETHER(ashow))),
    path("shared/together", TOGETHER(ashow)),
    path("shared/def", APART(show)),
    path("attempts", LOGIN(login)),
    path("async/attempts", LOGIN(alogin)),
    *(path(name, limit(show)) for name, limit in LIMITS.items()),
    *(path(f"async/{name}", limit(ashow)) for name, limit in LIMITS.items()),
]


def wsgi():
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()


def asgi():
    from django.core.asgi import get_asgi_application

    return get_asgi_application()
