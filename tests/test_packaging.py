"""The wheel, built here and looked into."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rlaas_django
from tests.internals import ALGORITHMS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlaas_django"
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel with the hatchling that is installed, as an isolated build would download one."""
    built = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, f"the wheel could not be built:\n{done.stdout}{done.stderr}"
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


def test_the_package_works_as_it_is_installed(wheel, tmp_path):
    """With the wheel's files alone, every algorithm works."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(ALGORITHMS)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, version, decisions, deleted = json.loads(done.stdout)
    assert Path(file) == tmp_path / "rlaas_django" / "__init__.py"
    assert version == rlaas_django.__version__
    assert decisions == [True, False] * len(ALGORITHMS)
    assert deleted == len(ALGORITHMS)


def test_the_changelog_has_a_heading_for_this_version():
    heading = rf"^## {re.escape(rlaas_django.__version__)}\b"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE), (
        f"CHANGELOG.md has no heading '## {rlaas_django.__version__}'"
    )
