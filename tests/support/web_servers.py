"""gunicorn and uvicorn as real processes, serving tests/support/e2e_project.py."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.settings import REDIS

ROOT = Path(__file__).parents[2]
WORKERS = 8
TOKEN = "rlaas_end-to-end"  # of the HTTP service

SERVERS = {
    "gunicorn": [
        *("gunicorn", "tests.support.e2e_project:wsgi()", "--bind", "fd://{fd}", "--workers", "{workers}"),
        *("--worker-class", "gthread", "--threads", "2", "--keep-alive", "30", "--log-level", "warning"),
    ],
    # uvicorn would read X-Forwarded-For by itself; here the site does.
    "uvicorn": [
        *("uvicorn", "--factory", "tests.support.e2e_project:asgi", "--fd", "{fd}", "--no-proxy-headers"),
        *("--log-level", "warning", "--no-access-log"),
    ],
}


@contextlib.contextmanager
def serving(name: str, log: Path, workers: int = WORKERS) -> Iterator[int]:
    """Run a server on a port that is bound beforehand; its processes end with the block, by their id."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, log.open("wb") as output:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvicorn takes --fd for a unix socket's
        words = [word.format(fd=listener.fileno(), workers=workers) for word in SERVERS[name]]
        project = {
            "DJANGO_SETTINGS_MODULE": "tests.support.e2e_project",
            "RLAAS_TEST_REDIS": REDIS,
            "RLAAS_TEST_TOKEN": TOKEN,
            "RLAAS_TEST_SERVICE": "async_urls" if name == "uvicorn" else "urls",
        }
        server = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **project},
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        try:
            port = listener.getsockname()[1]
            assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).text == "ok", log.read_text()
            yield port
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
