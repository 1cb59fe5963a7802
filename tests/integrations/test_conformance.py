"""The own tests of packages that we stand in for, taken from their releases and run with our modules in their place.

`make conformance` runs them. Nothing of theirs is kept here: pip downloads the source of the release into a temporary
folder. A test of theirs that cannot pass is listed with the reason, and has to fail.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from django.conf import settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

SETTINGS = """
from rlaas_django.testing import embedded_redis
from tests.settings import *

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
_NOWHERE = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "unix:///nowhere.sock"}
CACHES = {
    **CACHES,
    # Of django-ratelimit's tests: caches that cannot be reached, and one that keeps nothing.
    "connection-errors": _NOWHERE,
    "connection-errors-redis": _NOWHERE,
    "instant-expiration": embedded_redis(),
}
"""

# In the place of django_ratelimit's modules: ours. Its tests import two private functions, which have these names here.
RATELIMIT_MODULES = {
    "__init__": "from rlaas_django.integrations.django_ratelimit import ALL, UNSAFE",
    "decorators": "from rlaas_django.integrations.django_ratelimit import ratelimit",
    "exceptions": "from rlaas_django.integrations.django_ratelimit import Ratelimited",
    "core": "from rlaas_django.integrations.django_ratelimit import get_usage, is_ratelimited\n"
    "from rlaas_django.integrations.django_ratelimit import _address as _get_ip, _parse_rate as _split_rate",
}
RATELIMIT_FAILS = {
    # Of a cache that forgets at once what it is given; counters are not kept by way of the cache.
    "CacheFailTests::test_cache_timeout",
}

# A plugin of pytest, for the settings that REST framework's tests make: our app, our middleware around every request,
# our decorator on every API view, and our classes in the place of those of rest_framework.throttling.
DRF_PLUGIN = """
import pytest
from django.conf import LazySettings

configure = LazySettings.configure


def configure_with_ours(settings, **options):
    options["INSTALLED_APPS"] += ("rlaas_django",)
    options["MIDDLEWARE"] += ("rlaas_django.middleware.RateLimitMiddleware",)
    options["CACHES"] = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "limits": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "%s"},
    }
    options["RATE_LIMITER"] = {"CACHE": "limits", "TIMEOUT": 20, "MAX_REQUESTS": 1_000_000}
    configure(settings, **options)


LazySettings.configure = configure_with_ours


@pytest.hookimpl(trylast=True)  # after their conftest has set Django up
def pytest_configure(config):
    from rest_framework import throttling, views
    from rlaas_django import rate_limit
    from rlaas_django.integrations import drf

    for name in ("BaseThrottle", "SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"):
        setattr(throttling, name, getattr(drf, name))

    rate_limit("1000000/h", key="user")(views.APIView)
    rate_limit("1000000/h", key="ip")(views.APIView)


@pytest.fixture(autouse=True)
def each_with_empty_counters(rate_limits):
    pass
"""


def download(package: str, folder: Path) -> Path:
    """Return the folder with the source of the release that is installed."""
    wanted = f"{package}=={importlib.metadata.version(package)}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, wanted], capture_output=True, text=True)
    if done.returncode and "RLAAS_CONFORMANCE" not in os.environ:
        pytest.skip(f"{wanted} cannot be downloaded; `make conformance` would tell why")
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return next(each for each in folder.iterdir() if each.is_dir())


def run_tests(folder: Path, tests: str, *options: str, settings_module: str = "") -> dict[str, str]:
    """Run tests in a process of their own; return the result of each."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "DJANGO_SETTINGS_MODULE": settings_module, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull]
    command += ["--rootdir", str(folder), *options, tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    results = dict(re.findall(r"^(\S+?\.py::\S+) (PASSED|FAILED|ERROR|SKIPPED)", done.stdout, re.MULTILINE))
    assert results, done.stdout + done.stderr
    return results


def failed(results: dict[str, str]) -> set[str]:
    return {name.partition("::")[2] for name, result in results.items() if result in ("FAILED", "ERROR")}


def test_django_ratelimit_s_own_tests_pass(tmp_path):
    source = download("django-ratelimit", tmp_path)
    package = tmp_path / "site" / "django_ratelimit"
    package.mkdir(parents=True)
    for name, text in RATELIMIT_MODULES.items():
        (package / f"{name}.py").write_text(text)
    (package / "tests.py").write_bytes((source / "django_ratelimit" / "tests.py").read_bytes())
    (package.parent / "conformance_settings.py").write_text(SETTINGS)
    each_with_empty_counters = ("-o", "usefixtures=rate_limits")
    results = run_tests(
        package.parent, "django_ratelimit/tests.py", *each_with_empty_counters, settings_module="conformance_settings"
    )
    assert len(results) > 50
    assert failed(results) == RATELIMIT_FAILS


def test_all_of_django_rest_framework_s_own_tests_pass(tmp_path):
    source = download("djangorestframework", tmp_path)
    (source / "dj_database_url.py").touch()  # they import it for a database that an environment variable names
    (source / "rest_framework").rename(source / "unused")  # the installed one is tested
    (source / "ours.py").write_text(DRF_PLUGIN % settings.CACHES["default"]["LOCATION"])

    results = run_tests(source, "tests", "--no-migrations", "-p", "ours")
    assert len(results) > 1000
    assert any("test_wait_returns_correct_waiting_time_without_history" in name for name in results)
    failures = failed(results)
    if failures:
        failures -= failed(run_tests(source, "tests", "--no-migrations"))
    assert failures == set()
