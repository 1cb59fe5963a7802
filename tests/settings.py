"""Settings of the tests. The server is started here: every process that loads them has its own."""

import os

from example_project import redis_server
from rlaas_django.testing import embedded_redis


def _worker_url() -> str:
    url = redis_server.url()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]
    if "REDIS_URL" in os.environ:  # shared by the workers of a run, so each takes a database
        return f"{url.rstrip('/')}/{worker}"
    return url


# A process that a test starts asks the test's own server.
REDIS = os.environ.get("RLAAS_TEST_REDIS") or _worker_url()

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
