"""What may befall a server, and how it ends; a clock for the breaker; and visitors who stay connected meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from rlaas_django.lines import FRESH

from rlaas_django import breaker
from tests.deployments import HOST, Node, wait_until
from tests.faults import CHUNK, Proxy, messages
from tests.http import Site, judge


class Babbler(Proxy):
    """A proxy that may answer itself: each command with the same bytes, or by hanging up if there are none."""

    nonsense: bytes | None = None

    def babble(self, nonsense: bytes | None) -> None:
        """From the next connection on, and there is none yet; None: pass commands on, as a proxy does."""
        self.nonsense = nonsense
        self.cut()
        time.sleep(2 * FRESH)  # no server comes and goes in less, and the limiter does not look for it

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.nonsense is None:
            await super().serve(reader, writer)
            return
        data = bytearray()
        while chunk := await reader.read(CHUNK):
            data += chunk
            for _ in messages(data):
                writer.write(self.nonsense)
            await writer.drain()
            if not self.nonsense:
                return


class Place:
    """A server, and the way to it, which may be troubled too."""

    def __init__(self) -> None:
        self.node = Node()
        self.node.launch()
        self.configuration = self.node.configuration.read_text()
        self.proxy = Babbler(self.node.url)

    def stop(self) -> None:
        self.proxy.stop()
        self.node.stop()

    def renew(self) -> None:
        """All is well, and nothing is counted."""
        self.proxy.accept()
        self.proxy.pass_all()
        if self.proxy.nonsense is not None:
            self.proxy.babble(None)
        with suppress(FileNotFoundError):
            (self.node.directory / "dump.rdb").unlink()  # some servers keep what they had from a master
        try:
            self.node.client().flushall()
        except redis.RedisError:  # a test failed, and left it so
            shutil.rmtree(self.node.directory)
            self.node.directory.mkdir()
            self.node.configuration.write_text(self.configuration)
            self.node.launch()

    def url(self, fault: Fault) -> str:
        return self.proxy.url if fault.on_the_way else self.node.url


@dataclass(frozen=True)
class Fault:
    """What befalls a place, and what it means to a limiter that was connected before."""

    name: str
    befall: Callable[[Place], Any]
    opens: bool = True  # whether the breaker opens, after which nobody asks until the next probe
    waits: bool = False  # whether a call waits for TIMEOUT
    counts: int = 0  # of the calls that had no answer, those that the server counts nevertheless
    forgets: bool = False  # whether all counts are gone afterwards
    on_the_way: bool = False  # whether it befalls the way, and not the server

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(name: str, **facts: Any) -> Callable[[Callable[[Place], Iterator[None]]], None]:
    """Of a generator: what is before its `yield` begins it, what is after ends it, whatever happens meanwhile."""

    def add(befall: Callable[[Place], Iterator[None]]) -> None:
        @contextmanager
        def befalling(place: Place) -> Iterator[None]:
            steps = befall(place)
            next(steps)
            try:
                yield
            finally:
                next(steps, None)

        FAULTS.append(Fault(name, befalling, **facts))

    return add


def named(*names: str) -> list[Fault]:
    return [each for each in FAULTS if each.name in names]


@fault("stopped", forgets=True)
def _stopped(place: Place) -> Iterator[None]:
    place.node.kill()
    yield
    place.node.launch()


@fault("hung", waits=True, counts=1)
def _hung(place: Place) -> Iterator[None]:
    place.node.hang()
    yield
    place.node.resume()


@fault("refusing", on_the_way=True)
def _refusing(place: Place) -> Iterator[None]:
    place.proxy.refuse()
    place.proxy.cut()
    yield
    place.proxy.accept()


@fault("replies lost", waits=True, counts=1, on_the_way=True)
def _replies_lost(place: Place) -> Iterator[None]:
    place.proxy.drop()
    yield
    place.proxy.pass_all()


@fault("replies late", waits=True, counts=1, on_the_way=True)
def _replies_late(place: Place) -> Iterator[None]:
    place.proxy.delay(0.2)
    yield
    place.proxy.pass_all()


@fault("full", opens=False)
def _full(place: Place) -> Iterator[None]:
    client = place.node.client()
    client.set("filler", os.urandom(1_000_000))
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb")
    yield
    client.config_set("maxmemory", "0")


@fault("not saving", opens=False)
def _not_saving(place: Place) -> Iterator[None]:
    """MISCONF: its snapshots fail, so it takes no writes."""
    client, in_the_way = place.node.client(), place.node.directory / "dump.rdb"
    in_the_way.mkdir()
    client.config_set("save", "3600 1")
    client.set("unsaved", 1)
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a snapshot has failed")
    yield
    client.config_set("save", "")
    in_the_way.rmdir()
    client.save()
    (place.node.directory / "dump.rdb").unlink()


@fault("too few replicas", opens=False)
def _too_few_replicas(place: Place) -> Iterator[None]:
    place.node.client().config_set("min-replicas-to-write", 1)
    yield
    place.node.client().config_set("min-replicas-to-write", 0)


@fault("read-only")
def _read_only(place: Place) -> Iterator[None]:
    place.node.ask("REPLICAOF", HOST, 1)
    yield
    place.node.ask("REPLICAOF", "NO", "ONE")


@fault("replica without a master")
def _masterdown(place: Place) -> Iterator[None]:
    place.node.client().config_set("replica-serve-stale-data", "no")
    place.node.ask("REPLICAOF", HOST, 1)
    yield
    place.node.ask("REPLICAOF", "NO", "ONE")
    place.node.client().config_set("replica-serve-stale-data", "yes")


@fault("wants a password")
def _password(place: Place) -> Iterator[None]:
    client = place.node.client()
    client.config_set("requirepass", "s3cret")
    client.client_kill_filter(_type="normal", skipme=True)
    yield
    client.config_set("requirepass", "")


@fault("permits nothing")
def _noperm(place: Place) -> Iterator[None]:
    place.node.ask("ACL", "SETUSER", "default", "-evalsha")
    yield
    place.node.ask("ACL", "SETUSER", "default", "+@all")


@fault("busy")
def _busy(place: Place) -> Iterator[None]:
    """With a script that does not end."""
    client = place.node.client()
    client.config_set("lua-time-limit", 1)

    def run_for_ever() -> None:
        with redis.Redis(HOST, place.node.port) as other, suppress(redis.ResponseError):  # killed by SCRIPT KILL
            other.eval("while true do end", 0)

    thread = threading.Thread(target=run_for_ever)
    thread.start()
    wait_until(lambda: _says(client, "BUSY"), "the server is busy")
    yield
    client.execute_command("SCRIPT KILL")
    thread.join()


@fault("loading")
def _loading(place: Place) -> Iterator[None]:
    """A restarted server that is not done with its snapshot."""
    node, client, interval = place.node, place.node.client(), "loading-process-events-interval-bytes"
    if not client.config_get(interval):
        pytest.skip("before Redis 7, a server says nothing while it loads so little")
    with client.pipeline() as pipeline:
        for n in range(1_000):
            pipeline.set(f"filler-{n}", os.urandom(2048))
        pipeline.execute()
    client.save()
    node.configuration.write_text(f"{place.configuration}key-load-delay 5000\n{interval} 1024\n")
    node.start()
    wait_until(lambda: _says(client, "loading"), "the server is loading")
    node.configuration.write_text(place.configuration)
    yield
    client.config_set("key-load-delay", 0)
    node.wait_until_up()
    client.config_set(interval, 2_097_152)
    (node.directory / "dump.rdb").unlink()


def _says(client: redis.Redis, word: str) -> bool:
    try:
        client.execute_command("PING")
    except redis.RedisError as error:
        return word in str(error)
    return False


# What is answered to each command, whether that opens the breaker, and whether a call waits for more.
NONSENSE = {
    "nothing and hangs up": (b"", True, False),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True, False),
    "half a reply": (b"*2\r\n:1\r\n$100\r\nhalf", True, True),
    "OK": (b"+OK\r\n", False, False),
    "TLS": (b"\x15\x03\x03\x00\x02\x02\x28", True, False),
    "a number of letters": (b":12x\r\n", True, False),
    "a number": (b":1\r\n", False, False),
    "nil": (b"$-1\r\n", False, False),
    "an empty list": (b"*0\r\n", False, False),
    "a list of something else": (b"*2\r\n:1\r\n*2\r\n+a\r\n+b\r\n", False, False),
    "an error": (b"-ERR unknown command\r\n", False, False),
    "LOADING": (b"-LOADING Redis is loading the dataset in memory\r\n", True, False),
    "NOAUTH": (b"-NOAUTH Authentication required.\r\n", True, False),
    "CLUSTERDOWN": (b"-CLUSTERDOWN The cluster is down\r\n", True, False),
    "MOVED": (b"-MOVED 1 127.0.0.1:1\r\n", False, False),
    "NOSCRIPT": (b"-NOSCRIPT No matching script.\r\n", False, False),
}


def _babbling(nonsense: bytes) -> Callable[[Place], Iterator[None]]:
    def befall(place: Place) -> Iterator[None]:
        place.proxy.babble(nonsense)
        yield
        place.proxy.babble(None)

    return befall


for _name, (_nonsense, _opens, _waits) in NONSENSE.items():
    fault(f"answers {_name}", opens=_opens, waits=_waits, on_the_way=True)(_babbling(_nonsense))


class Clock:
    """A breaker's, which stands still."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def pass_interval(self) -> None:
        """So long that a probe is due, after the first failure."""
        self.tick(breaker.FIRST_INTERVAL * (1 + breaker.JITTER))


class Visitor:
    """Asks a site again and again; of an async site, in one loop, where a connection lasts."""

    def __init__(self, way: str, settings: Any, runner: asyncio.Runner) -> None:
        self.site, self.runner = Site(way, settings), runner

    def get(self, where: str = "/") -> Any:
        if self.site.handler != "asgi":
            return self.site.get(where)
        response = self.runner.run(self.site.client().get(where))
        judge(response)
        return response

    def statuses(self, count: int) -> list[int]:
        return [self.get().status_code for _ in range(count)]
