"""Settings of the benchmarks: a server of their own, which nothing else talks to."""

import os
from urllib.parse import urlsplit

from .server import URL_VARIABLE

SECRET_KEY = "benchmarks"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rlaas_django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
REDIS_URL = os.environ[URL_VARIABLE]
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS_URL,
        "OPTIONS": {"SOCKET_TIMEOUT": 20, "SOCKET_CONNECT_TIMEOUT": 20},
    },
    "process": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}

RATE_LIMITER: dict[str, object] = {"TIMEOUT": 5}  # a slow moment of the machine is no outage
RATELIMIT_BACKEND = "redis"  # django-smart-ratelimit's
RATELIMIT_REDIS = {"host": "127.0.0.1", "port": urlsplit(REDIS_URL).port}
