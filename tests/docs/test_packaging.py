"""The wheel and the sdist, built here, looked into and installed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import rlaas_django
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.internals import ALGORITHMS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlaas_django"
pytestmark = pytest.mark.skipif(
    not PACKAGE.exists(), reason="there is no source to build: see tests/support/installed.py"
)
DIST_INFO = f"rlaas_django-{rlaas_django.__version__}.dist-info"

PROGRAM = """
import json, sys, django, rlaas_django
from django.conf import settings
from rlaas_django import Policy, check, refund, reset
from rlaas_django.testing import embedded_redis
settings.configure(CACHES={"default": embedded_redis()}, INSTALLED_APPS=["rlaas_django"])
django.setup()
policies = [Policy(algo, "1/m", algo=algo) for algo in json.loads(sys.argv[1])]
decisions = [check("alice", policy).allowed for policy in policies for _ in range(2)]
print(json.dumps([rlaas_django.__file__, rlaas_django.__version__, decisions, reset("alice", policies)]))
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a program, and return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build both with the hatchling that is installed, as an isolated build would download one."""
    directory = tmp_path_factory.mktemp("dist")
    for kind in ("--wheel", "--sdist"):
        run(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", directory, ROOT)
    return directory


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_for_every_platform(wheel):
    assert wheel.name == f"rlaas_django-{rlaas_django.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_nothing_else(names):
    assert {name.partition("/")[0] for name in names} == {"rlaas_django", DIST_INFO}
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_holds_every_file_of_the_package(names):
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("rlaas_django/")} == {
        name for name in files if "__pycache__" not in name
    }
    assert len([name for name in names if name.endswith(".lua")]) == len(list(PACKAGE.glob("lua/*.lua"))) > 0
    assert "rlaas_django/py.typed" in names


def test_the_wheel_holds_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{DIST_INFO}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_requires_what_the_package_imports_in_versions_that_are_safe(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
    required = [Requirement(line) for line in re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)]
    versions = {each.name: each.specifier for each in required}
    assert set(versions) == {"asgiref", "django", "django-redis", "redis"}
    unsafe = [*(f"5.2.{n}" for n in range(13)), "6.0", "6.0.0", "6.0.1", "6.0.2", "6.0.3"]
    assert not list(versions["django"].filter(unsafe))
    assert len(list(versions["django"].filter(["5.2.13", "5.2.19", "6.0.4", "6.1", "6.1.3"]))) == 5
    # The backend works with connections of redis-py and clients of django-redis: a major version is tried first.
    assert list(versions["redis"].filter(["5.3", "6.0", "8.1.0", "9.0"])) == ["6.0", "8.1.0"]
    assert list(versions["django-redis"].filter(["6.0", "7.0", "7.9", "8.0"])) == ["7.0", "7.9"]


def test_tox_tests_the_oldest_versions_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [
        project["optional-dependencies"][name] for name in ("client", "drf", "ninja", "opentelemetry", "prometheus")
    ]
    allowed = [Requirement(each) for each in itertools.chain(project["dependencies"], *extras)]
    oldest = {
        each.name: Version(bound.version) for each in allowed for bound in each.specifier if bound.operator == ">="
    }
    pinned = re.findall(r"^    oldest: (\S+)==(\S+)$", (ROOT / "tox.ini").read_text("utf-8"), re.MULTILINE)
    assert {name: Version(version) for name, version in pinned if name != "hiredis"} == oldest


def test_the_package_works_as_it_is_installed(wheel, tmp_path):
    """With the wheel's files alone, every algorithm works."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    printed = run(sys.executable, "-c", PROGRAM, json.dumps(ALGORITHMS), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    file, version, decisions, deleted = json.loads(printed)
    assert Path(file) == tmp_path / "rlaas_django" / "__init__.py"
    assert version == rlaas_django.__version__
    assert decisions == [True, False] * len(ALGORITHMS)
    assert deleted == len(ALGORITHMS)


def test_the_sdist_holds_what_is_needed_to_test_and_build(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "constraints.txt",
    }
    assert expected <= names
    assert {"rlaas_django", "tests", "docs", "example_project"} <= {name.partition("/")[0] for name in names}
    assert not [name for name in names if name.startswith((".venv", ".demo")) or "__pycache__" in name]


def test_the_metadata_renders_on_a_package_index(built):
    pytest.importorskip("twine", reason="in the dev extra")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())


@pytest.mark.slow
def test_a_new_project_uses_the_installed_wheel(wheel, tmp_path):
    """In an empty environment: startproject, the README's lines, migrate, check, and a limited view."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, "fakeredis[lua]")
    run(python, "-m", "django", "startproject", "mysite", ".", cwd=tmp_path)
    with (tmp_path / "mysite" / "settings.py").open("a") as settings:
        settings.write(NEW_SETTINGS)
    (tmp_path / "mysite" / "urls.py").write_text(NEW_URLS)
    run(python, "manage.py", "migrate", "-v", "0", cwd=tmp_path)
    assert "no issues" in run(python, "manage.py", "check", cwd=tmp_path)
    assert json.loads(run(python, "-c", USE, cwd=tmp_path)) == [200] * 5 + [429]


NEW_SETTINGS = """
from rlaas_django.testing import embedded_redis
INSTALLED_APPS += ["rlaas_django"]
CACHES = {"default": embedded_redis()}
"""
NEW_URLS = """
from django.contrib import admin
from django.http import HttpResponse
from django.urls import path
from rlaas_django import rate_limit

@rate_limit("5/m", key="ip")
def contact(request):
    return HttpResponse("Thank you.")

urlpatterns = [path("admin/", admin.site.urls), path("", contact)]
"""
USE = """
import json, os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
django.setup()
from django.test import Client
client = Client(headers={"host": "localhost"})
print(json.dumps([client.get("/").status_code for _ in range(6)]))
"""


def test_the_changelog_has_a_heading_for_this_version():
    heading = rf"^## {re.escape(rlaas_django.__version__)}\b"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE), (
        f"CHANGELOG.md has no heading '## {rlaas_django.__version__}'"
    )
