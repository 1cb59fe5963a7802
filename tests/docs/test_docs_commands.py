"""The shell commands of the documentation run, and print what it shows.

`UPDATE_DOCS=1 pytest <this file>` writes what they print anew. The commands of the tutorial, which build on each other,
are in tests/docs/test_tutorial.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
import time
import tomllib
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command

from tests.conftest import NOW
from tests.support.commands import rlaas
from tests.support.http import AUTHENTICATION

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
POLICIES = {
    "login": {"rate": "5/m", "key": "ip"},
    "search": {"rate": "30/10s", "algo": "token-bucket-algo", "burst": 60},
}

MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def shell_commands(text: str) -> list[str]:
    """Return the lines of the shell blocks of a page; where some begin with `$`, these."""
    found = []
    for block in re.findall(r"^ *```(?:console|sh|shell|bash)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        lines = textwrap.dedent(block).splitlines()
        found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
    return found


PAGES = {
    page.name: commands
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    if page.name != "tutorial.md" and (commands := shell_commands(page.read_text("utf-8")))
}

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_views")]


def shown_in(page: str, command: str, printed: str) -> None:
    """Compare what a command printed with the block of a page that begins with it; or write it there."""
    path = DOCS / page
    text = path.read_text("utf-8")
    block = re.compile(rf"(```console\n\$ python manage\.py {re.escape(command)}\n)(.*?)(```)", re.DOTALL)
    printed = re.sub(r"in \d+\.\d s\.", "in 0.4 s.", printed)
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(block.sub(lambda found: found[1] + printed + found[3], text), "utf-8")
    found = block.search(path.read_text("utf-8"))
    assert found, command
    assert found[2] == printed


def write_log(path: Path) -> None:
    """Write two minutes of 200 clients; one of them sends 180 requests around the end of the first minute."""
    start = (NOW - NOW % 60_000) // 1000
    requests = [(start + (7 * n + 13 * i) % 120, f"198.51.100.{n}") for n in range(200) for i in range(3 + n % 17)]
    requests += [(start + 45 + i // 6, "203.0.113.9") for i in range(180)]
    lines = []
    for at, ip in sorted(requests):
        stamp = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(at))
        lines.append(f'{ip} - - [{stamp}] "GET /search?q=a HTTP/1.1" 200 512 "-" "Mozilla/5.0"\n')
    path.write_text("".join(lines), "utf-8")


def test_the_report_of_a_replay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "access.log")
    printed = rlaas("replay", "access.log", "--policy", "100/m by ip").out
    shown_in("choosing-a-limit.md", 'rlaas replay access.log --policy "100/m by ip"', printed)


def test_the_table_of_policies(configure):
    configure(POLICIES=POLICIES, MIDDLEWARE=[{"path": "/api/", "policies": ["search"]}])
    shown_in("commands.md", "rlaas policies search", rlaas("policies", "search").out)


@pytest.mark.parametrize("page", PAGES)
def test_the_shell_commands_of_a_page_run(page, configure, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "access.log")
    configure(POLICIES=POLICIES)
    settings.MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware"]
    User.objects.create(pk=42, username="alice")
    for command in PAGES[page]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        run(shlex.split(command, comments=True))


def run(words: list[str]) -> None:
    """Run a command; of one that installs, builds or measures, look whether what it names is there."""
    if words[0] == "python":
        del words[0]
    match words:
        case ["manage.py", "rlaas", *arguments]:
            result = rlaas(*arguments)
            warned = 2 if arguments == ["doctor", "--strict"] else 0  # the tests share the cache of the site
            assert result.code == warned, result.err
        case ["manage.py", name, *arguments]:
            call_command(name, *arguments)
        case ["pip", "install", requirement]:  # the environment of the tests has it
            extras = re.fullmatch(r"rlaas_django(?:\[(\w+)\])?", requirement)
            assert extras[1] is None or extras[1] in EXTRAS
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
        case [".venv/bin/python", "-m", "pytest", test]:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text()
        case ["curl", *_]:
            pass  # tests/service/test_docs.py runs it against a server
        case _:
            pytest.fail(f"Add a way to run this command of the documentation: {shlex.join(words)}")
