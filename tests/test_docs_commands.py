"""The output of commands in the documentation is what they print; `UPDATE_DOCS=1 pytest <this file>` writes it anew."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.commands import rlaas
from tests.conftest import NOW

DOCS = Path(__file__).parent.parent / "docs"
POLICIES = {
    "login": {"rate": "5/m", "key": "ip"},
    "search": {"rate": "30/10s", "algo": "token-bucket-algo", "burst": 60},
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
