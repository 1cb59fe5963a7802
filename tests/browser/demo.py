"""The example project as a process of its own, as `make run` starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(directory: Path, **more: str) -> dict[str, str]:
    """The demo's own: not the settings of the tests, and a server and a database that no one else has."""
    foreign = ("DJANGO_SETTINGS_MODULE", "REDIS_URL", "RLAAS_TEST_REDIS", "PORT")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "DEMO_DIR": str(directory), "PYTHONUNBUFFERED": "1", **more}


class Demo:
    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"demo-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "example_project"],
                cwd=ROOT,
                env=environment(directory, PORT=str(self.port)),
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 60) -> None:
        """Until the start page answers."""
        self.wait_for_port(seconds)
        httpx.get(self.url, timeout=seconds).raise_for_status()

    def wait_for_port(self, seconds: float = 60) -> None:
        """The port listens before the site is ready, and lets a client wait."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), seconds).close()
                return
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"The demo did not start:\n{self.said()}") from error
                time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT, seconds: float = 20) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()  # nothing, when it has ended


@contextmanager
def running(directory: Path) -> Iterator[Demo]:
    demo = Demo(directory)
    try:
        demo.wait()
        yield demo
    finally:
        demo.stop()
