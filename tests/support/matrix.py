"""Runs the tests on each Python and Django available, with tox; `make matrix ARGS=...` hands arguments to pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOX = [sys.executable, "-m", "tox"]


def search_path() -> str:
    """PATH with pyenv's versions, newest first, before all: its shims fail for a version that is not switched on."""
    versions = [path for path in Path.home().glob(".pyenv/versions/3.1*/bin") if path.is_dir()]
    versions.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.parent.name)], reverse=True)
    return os.pathsep.join([*map(str, versions), os.environ["PATH"]])


def environments() -> list[str]:
    listed = subprocess.run([*TOX, "list", "--no-desc", "-q"], cwd=ROOT, capture_output=True, text=True, check=True)
    return re.findall(r"^py\d+-\S+$", listed.stdout, re.MULTILINE)


def python_of(environment: str) -> str:
    """py312-django61 -> python3.12"""
    return re.sub(r"py(\d)(\d+)-.*", r"python\1.\2", environment)


def works(python: str, path: str) -> bool:
    """Return whether an interpreter runs; one that is found may still be a shim for nothing."""
    try:
        tried = subprocess.run([python, "-c", ""], env={**os.environ, "PATH": path}, capture_output=True)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


def run(chosen: Sequence[str], path: str, arguments: Sequence[str]) -> dict[str, dict]:
    """Run tox on these environments; return its report on each."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.json"
        command = [*TOX, "run", "-e", ",".join(chosen), "--result-json", str(results), "--", *arguments]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path})
        return json.loads(results.read_text())["testenvs"] if results.exists() else {}


def main(arguments: Sequence[str]) -> int:
    path, every = search_path(), environments()
    pythons = sorted({python_of(environment) for environment in every})
    missing = [python for python in pythons if not works(python, path)]
    chosen = [environment for environment in every if python_of(environment) not in missing]
    print(f"Running {', '.join(chosen) or 'nothing'} ...", flush=True)
    noted = run(chosen, path, arguments) if chosen else {}
    passed = [environment for environment in chosen if noted.get(environment, {}).get("result", {}).get("success")]
    print()
    for word, names in (
        ("passed", passed),
        ("failed", [environment for environment in chosen if environment not in passed]),
        ("missing", missing),
    ):
        print(f"{word + ':':9}{', '.join(names) or '-'}")
    return 0 if passed and passed == chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
