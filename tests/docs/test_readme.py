"""The README, followed block by block in a new project: what is pasted works, and `check` says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(# (\w+)\.py.*?)^```", README, re.MULTILINE | re.DOTALL)
SIX_REQUESTS = """
from django.test import Client
print([Client(SERVER_NAME='localhost').get('/contact/').status_code for _ in range(6)])
"""


class Newcomer:
    """Somebody who pastes each block at the end of the file that it names."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory = directory
        self.redis_url = redis_url
        self.run("-m", "django", "startproject", "mysite", ".")

    def paste(self, block: str, module: str) -> None:
        block = block.replace("redis://127.0.0.1:6379/0", self.redis_url)
        with (self.directory / "mysite" / f"{module}.py").open("a") as file:
            file.write(f"\n{block}")

    def run(self, *arguments: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.directory, env=inherited, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def warnings(self) -> list[str]:
        return re.findall(r"\((\w+\.[EW]\d{3})\)", self.run("manage.py", "check"))

    def six_requests(self) -> str:
        return self.run("manage.py", "shell", "--no-imports", "-c", SIX_REQUESTS)


@pytest.fixture
def newcomer(tmp_path, own) -> Newcomer:
    return Newcomer(tmp_path, own.url)


def test_the_first_screen_limits_a_view(newcomer):
    for block, module in BLOCKS[:3]:
        newcomer.paste(block, module)
    assert newcomer.warnings() == ["rlaas_django.W016"]  # each process counts by itself
    assert "[200, 200, 200, 200, 200, 429]" in newcomer.six_requests()


def test_every_block_can_be_pasted_after_the_other(newcomer):
    expected = {"rlaas_django.W016", "rlaas_django.W023"}
    for block, module in BLOCKS:
        newcomer.paste(block, module)
        assert {*newcomer.warnings()} <= expected, block
    assert newcomer.warnings() == []
    assert "[200, 200, 200, 200, 200, 429]" in newcomer.six_requests()
