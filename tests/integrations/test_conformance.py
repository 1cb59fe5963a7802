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

# In the place of the classes of rest_framework.throttling: ours.
DRF_CONFTEST = """
from rest_framework import throttling
from rlaas_django.integrations import drf

for name in ("BaseThrottle", "SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"):
    setattr(throttling, name, getattr(drf, name))
"""
DRF_FAILS = {
    # It sets `history`, of which there is none.
    "SimpleRateThrottleTests::test_wait_returns_correct_waiting_time_without_history",
}


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


def run_tests(folder: Path, file: str) -> dict[str, str]:
    """Run a file of tests, each with empty counters and a frozen clock; return the result of each."""
    (folder / "conformance_settings.py").write_text(SETTINGS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "DJANGO_SETTINGS_MODULE": "conformance_settings", "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull]
    command += ["-o", "usefixtures=rate_limits", "--rootdir", str(folder), file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    results = dict(re.findall(r"^\S+?\.py::(\S+) (PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE))
    assert results, done.stdout + done.stderr
    return results


def failed(results: dict[str, str]) -> set[str]:
    return {name for name, result in results.items() if result != "PASSED"}


def test_django_ratelimit_s_own_tests_pass(tmp_path):
    source = download("django-ratelimit", tmp_path)
    package = tmp_path / "site" / "django_ratelimit"
    package.mkdir(parents=True)
    for name, text in RATELIMIT_MODULES.items():
        (package / f"{name}.py").write_text(text)
    (package / "tests.py").write_bytes((source / "django_ratelimit" / "tests.py").read_bytes())
    results = run_tests(package.parent, "django_ratelimit/tests.py")
    assert len(results) > 50
    assert failed(results) == RATELIMIT_FAILS


def test_django_rest_framework_s_own_tests_of_throttles_pass(tmp_path):
    source = download("djangorestframework", tmp_path)
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "conftest.py").write_text(DRF_CONFTEST)
    (folder / "test_throttling.py").write_bytes((source / "tests" / "test_throttling.py").read_bytes())
    results = run_tests(folder, "test_throttling.py")
    assert len(results) > 20
    assert failed(results) == DRF_FAILS
