"""Settings of the tests. The server is started here: every process that loads them has its own."""

import os
from urllib.parse import urlsplit

from example_project import redis_server
from rlaas_django.testing import embedded_redis


def _redis_url() -> str:
    """Return the address of this process's server: its own, or a database of its own on the one of REDIS_URL."""
    url = redis_server.url()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if "REDIS_URL" not in os.environ or worker is None:
        return url
    number = worker.removeprefix("gw")
    if url.startswith("unix:"):
        return urlsplit(url)._replace(query=f"db={number}").geturl()
    return urlsplit(url)._replace(path=f"/{number}").geturl()


# A process that a test starts uses the test's own server.
REDIS = os.environ.get("RLAAS_TEST_REDIS") or _redis_url()

SECRET_KEY = "tests"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # quick; no secrets here
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rlaas_django",
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
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
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}

_TIMEOUTS = {"SOCKET_TIMEOUT": 20, "SOCKET_CONNECT_TIMEOUT": 20}
CACHES = {
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS, "OPTIONS": _TIMEOUTS},
    "django": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS,
        "OPTIONS": {option.lower(): value for option, value in _TIMEOUTS.items()},
    },
    "fakeredis": embedded_redis(),
    "locmem": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}

# Long enough for a busy machine. Tests of timeouts set their own.
RATE_LIMITER = {"TIMEOUT": 20}
