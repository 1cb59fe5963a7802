"""A new site with Django's own CACHES, without Redis and without migrations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = """
import json, logging, sys

from django.conf import settings

settings.configure(
    DEBUG={debug},
    SECRET_KEY="x",
    ALLOWED_HOSTS=["testserver"],
    ROOT_URLCONF="__main__",
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.sessions",
        "rlaas_django",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "rlaas_django.middleware.RateLimitMiddleware",
    ],
    RATE_LIMITER={{"MIDDLEWARE": [{{"path": "/rule/"}}]}},
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}}},
)

import django

django.setup()

from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from asgiref.sync import async_to_sync
from rest_framework.views import APIView
from rest_framework.response import Response
from rlaas_django import rate_limit
from rlaas_django.integrations.drf import AnonRateThrottle
from rlaas_django.runtime import background


class Levels(logging.Handler):
    seen = []

    def emit(self, record):
        self.seen.append([record.levelname, record.getMessage(), bool(record.exc_info)])


logging.getLogger("rlaas_django").addHandler(Levels())
logging.getLogger("django.request").addHandler(Levels(logging.ERROR))


@rate_limit("2/h", key="ip")
def decorated(request):
    return HttpResponse()


@rate_limit("2/h", key="ip")
async def native(request):
    return HttpResponse()


class Throttle(AnonRateThrottle):
    rate = "2/h"


class Throttled(APIView):
    throttle_classes = [Throttle]
    authentication_classes = []

    def get(self, request):
        return Response()


urlpatterns = [
    path("decorated/", decorated),
    path("async/", native),
    path("rule/", lambda request: HttpResponse()),
    path("throttle/", Throttled.as_view()),
]
statuses = {{}}
for name in ("decorated", "async", "rule", "throttle"):
    get = async_to_sync(AsyncClient().get) if name == "async" else Client().get
    responses = [get(f"/{{name}}/") for _ in range(6)]
    statuses[name] = [response.status_code for response in responses]
    last = responses[-1].headers
    statuses[name].append([last["Retry-After"] > "0", last["RateLimit"] != ""])
background.run()
print(json.dumps([statuses, Levels.seen]))
"""
NOTICE = "CACHES['default'] is not on Redis: each process counts by itself; configure Redis for more than one process."


@pytest.mark.slow
@pytest.mark.parametrize(("debug", "level"), [(True, "WARNING"), (False, "ERROR")])
def test_a_site_without_redis_and_migrations_is_limited(tmp_path, debug, level):
    program = tmp_path / "project.py"
    program.write_text(SITE.format(debug=debug))
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    statuses, lines = json.loads(done.stdout)
    limited = [True, True]
    assert statuses == {
        "decorated": [200, 200, 429, 429, 429, 429, limited],
        "async": [200, 200, 429, 429, 429, 429, limited],
        "rule": [200, 200, 200, 200, 200, 429, limited],
        "throttle": [200, 200, 429, 429, 429, 429, limited],
    }
    ours = [line for line in lines if not line[1].startswith("refused")]
    assert ours == [[level, NOTICE, False]]
