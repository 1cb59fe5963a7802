"""Look at a server from outside: which commands it gets, which connections it has."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from example_project.redis_server import Server


@contextmanager
def observer(url: str) -> Iterator[redis.Redis]:
    """A client of its own, whose connections are not the limiter's."""
    client = redis.Redis.from_url(url)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def commands_sent(url: str) -> Iterator[list[str]]:
    """The names of the commands that clients send meanwhile, without those that scripts call."""
    names: list[str] = []
    with observer(url) as watcher, observer(url) as client:
        client.ping()  # its handshake is over before the monitor begins
        with watcher.monitor() as monitor:
            yield names
            client.ping()  # once it is answered, the server has read whatever was sent before
            client.echo("the end")
            for line in monitor.listen():
                if line["command"].upper() == "ECHO THE END":
                    break
                name, _, rest = line["command"].upper().partition(" ")
                if line["client_type"] != "lua":
                    names.append("SCRIPT LOAD" if name == "SCRIPT" and rest.startswith("LOAD") else name)
    names.remove("PING")


def connections(client: redis.Redis) -> int:
    return len(client.client_list())


def assert_soon(fact: Callable[[], object], *, within: float = 30) -> None:
    """Wait for a fact: a server notices a closed connection in its own time."""
    deadline = time.monotonic() + within
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def hanging(server: Server, seconds: float | None = None) -> Iterator[None]:
    """The server neither reads nor replies meanwhile, but for no longer than `seconds`."""

    def resume() -> None:
        os.kill(server.process.pid, signal.SIGCONT)

    timer = threading.Timer(60 if seconds is None else seconds, resume)
    os.kill(server.process.pid, signal.SIGSTOP)
    timer.start()
    try:
        yield
    finally:
        if seconds is None:
            timer.cancel()
            resume()
        timer.join()
