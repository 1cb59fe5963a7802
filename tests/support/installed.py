"""Runs the tests on the installed package, for tox: from a copy without its source, which would be imported instead."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORIES = (".ci", ".github", "benchmarks", "docs", "example_project", "tests")


def copy(directory: Path) -> None:
    """Copy the tests, and the files that they read."""
    for name in DIRECTORIES:
        if (ROOT / name).exists():  # the sdist has no hidden ones
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, directory)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy(directory)
        command = [sys.executable, "-c", "import rlaas_django; print(rlaas_django.__file__)"]
        found = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_relative_to(sys.prefix):
            print(f"{found} is no installed package: install the wheel in {sys.prefix}.")
            return 1
        print(f"Testing {found}", flush=True)
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=directory).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
