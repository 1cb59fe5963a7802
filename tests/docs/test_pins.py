"""What a fresh clone downloads is fixed: actions and hooks by hash, packages by version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / ".pre-commit-config.yaml"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CONSTRAINTS = [
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.lstrip().startswith("#")
]
PYTHONS = ("3.11.9", "3.12.9", "3.13.9", "3.14.2")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_an_action_is_pinned_by_its_hash_with_the_version_beside_it(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)] == []


@pytest.mark.skipif(not HOOKS.exists(), reason="the sdist has no hidden files")
def test_a_hook_is_pinned_by_its_hash_or_runs_what_is_installed():
    repositories = HOOKS.read_text().split("- repo: ")[1:]
    assert len(repositories) == 2
    for repository in repositories:
        pinned = re.search(r"rev: [0-9a-f]{40} # frozen: v\d", repository)
        assert pinned or (repository.startswith("local\n") and "entry: .venv/bin/" in repository)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_tool_of_the_environment_has_one_version_under_each_python(python):
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    versions = {}
    for line in CONSTRAINTS:
        constraint = Requirement(line)
        if constraint.marker is None or constraint.marker.evaluate(environment):
            (specifier,) = constraint.specifier
            assert specifier.operator == "=="
            assert versions.setdefault(constraint.name, specifier.version) == specifier.version
    for text in (text for extra in EXTRAS.values() for text in extra):
        requirement = Requirement(text)
        if requirement.name != "rlaas_django":
            assert requirement.specifier.contains(versions[requirement.name], prereleases=True), text


def test_the_constraints_name_no_index():
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_make_install_uses_the_constraints():
    installs = re.findall(r"pip install \$\(2\).*", (ROOT / "Makefile").read_text())
    assert len(installs) == 2
    assert all("-c constraints.txt" in command for command in installs)
