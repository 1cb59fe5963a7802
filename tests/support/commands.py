"""Run `manage.py rlaas` inside the test's process, and read what it printed."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.internals import RlaasCommand

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def rlaas(*arguments: str) -> Result:
    """Run a subcommand as the shell does."""
    out, err = io.StringIO(), io.StringIO()
    command = RlaasCommand(stdout=out, stderr=err, no_color=True)
    code = 0
    try:
        command.run_from_argv(["manage.py", "rlaas", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def process(*arguments: str, redis_url: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a subcommand as a process of its own, on this server."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "RLAAS_TEST_REDIS": redis_url,
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "django", "rlaas", *arguments]
    return subprocess.Popen(command, env=environment, cwd=ROOT, **options)


class OnTerminal:
    """A subcommand on a pseudo-terminal; `read_until` returns what it has shown so far."""

    def __init__(self, *arguments: str, redis_url: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = process(*arguments, redis_url=redis_url, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str, within: float = 60) -> str:
        """Return what was shown, once this text is in it; '' is the end."""
        deadline = time.monotonic() + within
        while not text or text not in self.shown:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} is not in {self.shown!r}")
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    part = os.read(self._master, 65_536)
                except OSError:  # Linux: the process has ended
                    part = b""
                if not part:
                    if text:
                        raise AssertionError(f"{text!r} is not in {self.shown!r}")
                    break
                self.shown += part.decode()
        return self.shown

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
