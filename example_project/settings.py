"""Settings of the demo.

What a site needs for its rate limits is at the end; the rest is any Django project's.
"""

import hashlib
import os
import secrets
from pathlib import Path

from example_project import redis_server

BASE_DIR = Path(__file__).resolve().parent
DEMO_DIR = Path(os.environ.get("DEMO_DIR") or BASE_DIR.parent / ".demo")
DEMO_DIR.mkdir(parents=True, exist_ok=True)

DEBUG = True
SECRET_KEY = "demo"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": DEMO_DIR / "db.sqlite3"}
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "example_project",
    "rlaas_django",
    "rest_framework",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "example_project.middleware.content_security_policy",
    "example_project.middleware.remember_policies",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "rlaas_django.middleware.RateLimitMiddleware",
]
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
# On the terminal: what was refused, and errors; not every request.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "{levelname} {name}: {message}", "style": "{"}},
    "handlers": {"terminal": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        "rlaas_django": {"handlers": ["terminal"], "level": "WARNING"},
        "django.request": {"level": "ERROR"},
        "django.server": {"level": "ERROR"},
    },
}

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": redis_server.url(),
        "OPTIONS": {"SOCKET_TIMEOUT": 1, "SOCKET_CONNECT_TIMEOUT": 1},
    }
}
# A site keeps only the digest, of a token that `manage.py rlaas token new` prints once;
# the demo shows the token.
DEMO_TOKEN = secrets.token_urlsafe(32)
DEMO_TOKENS = {
    "demo": {
        "digests": [hashlib.sha256(DEMO_TOKEN.encode()).hexdigest()],
        "verbs": ["check", "usage"],
    }
}
RATE_LIMITER = {
    "TIMEOUT": 0.5,  # a laptop is busier than a server
    "MAX_REQUESTS": 5,  # the default policy: so many requests
    "WINDOW_SIZE": 20,  # in so many seconds
    "POLICIES": {"reports": {"rate": "3/15s", "key": "ip"}},
    "SERVICE": {"TOKENS": DEMO_TOKENS},
    "MIDDLEWARE": [{"path": "/try/report/", "policies": ["reports"]}],
}
