"""A site with metrics, for gunicorn: its settings, URLs and views in one module."""

from __future__ import annotations

import os

import django
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import path
from rlaas_django import rate_limit

SECRET_KEY = "metrics"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = __name__
USE_TZ = True
INSTALLED_APPS = ["rlaas_django", "rlaas_django.integrations.prometheus.Metrics"]
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": os.environ["RLAAS_TEST_REDIS"]}}
RATE_LIMITER = {"TIMEOUT": 20, "POLICIES": {"shared": {"rate": "100/h", "key": "global"}}}


@rate_limit("shared")
def limited(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


def metrics(request: HttpRequest) -> HttpResponse:
    from rlaas_django.integrations.prometheus import exposition

    text, media_type = exposition()
    return HttpResponse(text, content_type=media_type)


urlpatterns = [path("limited", limited), path("metrics", metrics)]


def wsgi() -> WSGIHandler:
    django.setup()
    return WSGIHandler()
