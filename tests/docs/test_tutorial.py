"""The tutorial, followed command by command: its files are written, its commands run, their output compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.browser.demo import free_port
from tests.support.deployments import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(python|console)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# The environment of the tests has what these install.
INSTALLS = ("python -m venv", ". env/bin/activate", "pip install")


def shows(output: str, line: str) -> bool:
    """Return whether the output of a command of ours has a line; figures, units and widths differ in each run."""
    found = r"\s+".join(re.sub(r"\d[\d.\\]*", r"[\\d.,]+", re.escape(word)) for word in line.split())
    for text, others in (("valkey", "(redis|valkey)"), ("kB", "k?B"), ("times", "times?"), ("min", "(min|s)")):
        found = found.replace(text, others)
    return re.search(found, output) is not None


class Reader:
    """Somebody who follows the tutorial in an empty directory."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory, self.port = directory, free_port()
        self.server: subprocess.Popen | None = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "REDIS_URL": redis_url,
        }

    def write(self, block: str) -> None:
        """Write a file, which the first line names, or add to it; a running server starts again with it."""
        path = self.directory / block.splitlines()[0].removeprefix("# ")
        begins = "urlpatterns = [" in block or not path.exists()
        with path.open("w" if begins else "a") as file:
            file.write(f"\n{block}")
        if self.server is not None:
            self.stop()
            self.serve()

    def run(self, command: str, expected: list[str]) -> None:
        if command.startswith(INSTALLS):
            return
        if "runserver" in command:
            self.serve()
            return
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        output = self.output(command)
        # Statistics are written within a second or two, on a busy machine later.
        for _ in range(5 if command.endswith("rlaas status") else 0):
            if all(shows(output, line) for line in expected):
                break
            output = self.output(command)
        for line in expected:
            assert shows(output, line) if "rlaas" in command else line in output, f"{command}\n{line}\n{output}"

    def output(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.directory, env=self.environment, capture_output=True, text=True
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{output}"
        return output

    def serve(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "manage.py", "runserver", "--noreload", f"127.0.0.1:{self.port}"],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C has to work, also where the tests run in the background of a shell.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        wait_until(self.answers, "the server answers")

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/admin/login/", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)  # Ctrl-C, after which statistics are written
            self.server.wait(20)


@pytest.fixture
def reader(tmp_path, own):
    reader = Reader(tmp_path, own.url)
    yield reader
    reader.stop()


@pytest.mark.slow
def test_the_tutorial_works_command_by_command(reader):
    for language, text in BLOCKS:
        if language == "python":
            reader.write(text)
            continue
        command, expected = "", []
        for line in [*text.splitlines(), "$ "]:
            if line.startswith("$ "):
                if command:
                    reader.run(command, expected)
                command, expected = line.removeprefix("$ "), []
            else:
                expected.append(line)
    wrong = {"username": "admin", "password": "wrong"}
    with httpx.Client(base_url=f"http://127.0.0.1:{reader.port}", timeout=60) as client:
        for _ in range(6):
            token = client.get("/admin/login/").cookies.get("csrftoken") or client.cookies["csrftoken"]
            response = client.post("/admin/login/", data={**wrong, "csrfmiddlewaretoken": token})
        assert response.status_code == 429
