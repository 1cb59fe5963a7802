"""The environment of the benchmarks: `.bench/`, made on first use, and what it is. Needs Python alone."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench"
PYTHON = HOME / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
STAMP = HOME / "installed.json"  # what it was made of, and what could not be installed


def enter() -> None:
    """Go on inside the environment; comes back only when that is where we are."""
    os.chdir(ROOT)
    if Path(sys.prefix).resolve() == HOME.resolve():
        return
    made_of = _ingredients()
    if not STAMP.exists() or json.loads(STAMP.read_text())["made_of"] != made_of:
        print(f"Setting up {HOME.name}/ with the peers ...", file=sys.stderr, flush=True)
        failed = _make()
        STAMP.write_text(json.dumps({"made_of": made_of, "failed": failed}))
    os.execv(PYTHON, [str(PYTHON), "-m", "benchmarks", *sys.argv[1:]])


def failures() -> dict[str, str]:
    """The requirements that could not be installed, with the reason."""
    failed: dict[str, str] = json.loads(STAMP.read_text())["failed"]
    return failed


def requirements() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def _ingredients() -> str:
    texts = (REQUIREMENTS.read_text(), (ROOT / "pyproject.toml").read_text(), sys.version, str(ROOT))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _make() -> dict[str, str]:
    if uv := shutil.which("uv"):
        subprocess.run([uv, "venv", "-q", "--allow-existing", "--python", sys.executable, HOME], check=True)
    elif subprocess.run([sys.executable, "-m", "venv", HOME], check=False).returncode:
        raise SystemExit("python -m venv failed; on Debian: apt-get install python3-venv")
    if error := _install("-e", "."):
        raise SystemExit(f"The project itself could not be installed:\n{error}")
    if not _install("-r", str(REQUIREMENTS)):
        return {}
    attempts = {each: _install(each) for each in requirements()}  # one that fails must not take the others along
    return {each: error for each, error in attempts.items() if error}


def _install(*what: str) -> str:
    """'' when it worked, or the reason."""
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "-q", "--python", str(PYTHON)]
    else:
        command = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *what], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.lstrip().lower().startswith("error")), lines[-1])
    return re.sub(r"\w+://\S+", "<address>", reason)[:200]


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "Date": f"{now:%Y-%m-%d %H:%M} UTC",
        "Machine": f"{_processor()}, {cores} cores, {platform.system()} {platform.release()}",
        "Load before": load(),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "rlaas_django": f"{importlib.metadata.version('rlaas_django')} {_revision()}".strip(),
    }


def load() -> str:
    """Of the last 1, 5 and 15 minutes; the benchmarks themselves are a load of about 1."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def versions() -> str:
    """What is installed of the requirements, and Django."""
    names = ["Django", *(each.partition("==")[0] for each in requirements())]
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _revision() -> str:
    """The commit, with a + when files of the package differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"({commit}{'+' if _git('status', '--porcelain', 'rlaas_django') else ''})"
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
