"""The server that is measured on: a real one on loopback TCP, on the same core as its client."""

from __future__ import annotations

import os
import socket
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import redis

URL_VARIABLE = "BENCHMARKS_REDIS_URL"  # how the web servers, in processes of their own, are told

ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
ONE_CORE = {min(ALL_CORES)} if ALL_CORES else set()
OTHER_CORES = ALL_CORES - ONE_CORE or ONE_CORE


def start() -> None:
    """Start the server, to be stopped with this process. What was pinned before is inherited by it."""
    from example_project import redis_server

    port = free_port()
    redis_server.start("--port", str(port), "--bind", "127.0.0.1")
    os.environ[URL_VARIABLE] = f"redis://127.0.0.1:{port}/0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pin(cores: set[int]) -> None:
    """Keep this process, and those that it starts from now on, on these cores; a wish where there is no such call."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0) if cores else set()
    pin(cores)
    try:
        yield
    finally:
        pin(before)


def url() -> str:
    return os.environ[URL_VARIABLE]


def client() -> redis.Redis:
    """The client that django-redis gives a site, whose `ping()` is the measure of all."""
    from django_redis import get_redis_connection

    return get_redis_connection("default")


def description() -> str:
    info = client().info("server")
    # Valkey gives a version of Redis too, for clients that ask for one.
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    pings = sorted(timeit.repeat(client().ping, number=25, repeat=21))
    return f"{name} on loopback TCP; redis-py's `ping()` takes {pings[10] / 25 * 1e6:.0f} µs"


class Sent(NamedTuple):
    """A command that reached the server, or ran in a script there."""

    words: tuple[str, ...]
    in_script: bool

    @property
    def name(self) -> str:
        return self.words[0].upper()


def watch(action: Callable[[], object]) -> list[Sent]:
    """What an action makes the server do, as MONITOR tells it."""
    marker = os.urandom(8).hex()
    sent = []
    client().ping()
    watcher = redis.Redis.from_url(url())  # with a pool of its own, so that nobody has to connect meanwhile
    with watcher, watcher.monitor() as monitor:
        action()
        client().echo(marker)
        for seen in monitor.listen():
            words = tuple(seen["command"].split(" "))
            if words == ("ECHO", marker):
                return sent
            sent.append(Sent(words, seen["client_type"] == "lua"))
    return sent
