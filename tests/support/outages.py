"""Outages of a server: how each begins and ends, and what it means to a limiter that was connected before."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from rlaas_django import Policy

from tests.support.deployments import HOST, Node, wait_until
from tests.support.faults import CHUNK, Proxy, messages
from tests.support.http import Site, assert_complete_if_refused
from tests.support.internals import FIXED_WINDOW, YEAR, breaker_module, pool_module

# Seconds, of RATE_LIMITER['TIMEOUT']: where a call has no reply in time, and where a busy machine must not keep it from
# one.
TIMEOUT, LONG_TIMEOUT = 0.3, 10.0
SLACK = 1.0  # seconds that a busy machine may add; what matters is counted, too
LIMIT = 4
# Within a year's window nothing leaves, refills or meets a boundary during a test.
ROOMY = Policy("roomy", (100_000, YEAR), algo=FIXED_WINDOW)
ON_FAILURE = ["open", "closed", "local"]
UNAVAILABLE, AVAILABLE_AGAIN = " unavailable: ", " available again "  # in log lines

each_on_failure = pytest.mark.parametrize("on_failure", ON_FAILURE)


def limited(on_failure: str, **options: Any) -> Policy:
    """Return a policy of LIMIT requests."""
    return Policy(
        **{"name": "p", "rate": (LIMIT, YEAR), "key": "ip", "algo": FIXED_WINDOW, "on_failure": on_failure, **options}
    )


def timed(work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and what it returns."""
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


class FixedReplyProxy(Proxy):
    """A proxy that may reply itself: to each command with the same bytes, or by closing the connection if none."""

    fixed_reply: bytes | None = None

    def reply_with(self, reply: bytes | None) -> None:
        """Close every connection, and reply so on the next ones; None: pass commands on, as a proxy does."""
        self.fixed_reply = reply
        self.cut()
        time.sleep(2 * pool_module.FRESH)  # a connection used since then is not examined

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fixed_reply is None:
            await super().serve(reader, writer)
            return
        data = bytearray()
        while chunk := await reader.read(CHUNK):
            data += chunk
            for _ in messages(data):
                writer.write(self.fixed_reply)
            await writer.drain()
            if not self.fixed_reply:
                return


class ProxiedServer:
    """A server on a TCP port, and a proxy before it; either may have an outage."""

    def __init__(self) -> None:
        self.node = Node()
        self.node.launch()
        self.configuration = self.node.configuration.read_text()
        self.proxy = FixedReplyProxy(self.node.url)

    def stop(self) -> None:
        self.proxy.stop()
        self.node.stop()

    def restore(self) -> None:
        """End every outage, and delete every key."""
        self.proxy.accept()
        self.proxy.pass_all()
        if self.proxy.fixed_reply is not None:
            self.proxy.reply_with(None)
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
        return self.proxy.url if fault.in_proxy else self.node.url


@dataclass(frozen=True)
class Fault:
    """An outage, and what it means to a limiter that was connected before."""

    name: str
    applied: Callable[[ProxiedServer], AbstractContextManager[None]]
    opens_breaker: bool = True  # after which no call is made until the next probe
    waits: bool = False  # whether a call waits for TIMEOUT
    counts: int = 0  # of the calls that had no reply, those that the server counts nevertheless
    loses_keys: bool = False  # whether all counts are gone afterwards
    in_proxy: bool = False  # whether the proxy has it, and not the server

    @property
    def timeout(self) -> float:
        return TIMEOUT if self.waits else LONG_TIMEOUT

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(name: str, **facts: Any) -> Callable[[Callable[[ProxiedServer], Iterator[None]]], None]:
    """Add a generator to FAULTS: what is before its `yield` begins the outage, what is after ends it in any case."""

    def add(steps_of: Callable[[ProxiedServer], Iterator[None]]) -> None:
        @contextmanager
        def applied(target: ProxiedServer) -> Iterator[None]:
            steps = steps_of(target)
            next(steps)
            try:
                yield
            finally:
                next(steps, None)

        FAULTS.append(Fault(name, applied, **facts))

    return add


def faults_named(*names: str) -> list[Fault]:
    return [each for each in FAULTS if each.name in names]


@fault("stopped", loses_keys=True)
def _stopped(target: ProxiedServer) -> Iterator[None]:
    target.node.kill()
    yield
    target.node.launch()


@fault("hung", waits=True, counts=1)
def _hung(target: ProxiedServer) -> Iterator[None]:
    target.node.hang()
    yield
    target.node.resume()


@fault("connections refused", in_proxy=True)
def _connections_refused(target: ProxiedServer) -> Iterator[None]:
    target.proxy.refuse()
    target.proxy.cut()
    yield
    target.proxy.accept()


@fault("replies lost", waits=True, counts=1, in_proxy=True)
def _replies_lost(target: ProxiedServer) -> Iterator[None]:
    target.proxy.drop()
    yield
    target.proxy.pass_all()


@fault("replies late", waits=True, counts=1, in_proxy=True)
def _replies_late(target: ProxiedServer) -> Iterator[None]:
    target.proxy.delay(2 * TIMEOUT)
    yield
    target.proxy.pass_all()


@fault("out of memory", opens_breaker=False)
def _out_of_memory(target: ProxiedServer) -> Iterator[None]:
    client = target.node.client()
    client.set("filler", os.urandom(1_000_000))
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb")
    yield
    client.config_set("maxmemory", "0")


@fault("snapshots fail", opens_breaker=False)
def _snapshots_fail(target: ProxiedServer) -> Iterator[None]:
    """MISCONF: its snapshots fail, so it takes no writes."""
    client, in_the_way = target.node.client(), target.node.directory / "dump.rdb"
    in_the_way.mkdir()
    client.config_set("save", "3600 1")
    client.set("unsaved", 1)
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a snapshot has failed")
    yield
    client.config_set("save", "")
    in_the_way.rmdir()
    client.save()
    (target.node.directory / "dump.rdb").unlink()


@fault("too few replicas", opens_breaker=False)
def _too_few_replicas(target: ProxiedServer) -> Iterator[None]:
    target.node.client().config_set("min-replicas-to-write", 1)
    yield
    target.node.client().config_set("min-replicas-to-write", 0)


@fault("read-only")
def _read_only(target: ProxiedServer) -> Iterator[None]:
    target.node.ask("REPLICAOF", HOST, 1)
    yield
    target.node.ask("REPLICAOF", "NO", "ONE")


@fault("replica without a master")
def _master_down(target: ProxiedServer) -> Iterator[None]:
    target.node.client().config_set("replica-serve-stale-data", "no")
    target.node.ask("REPLICAOF", HOST, 1)
    yield
    target.node.ask("REPLICAOF", "NO", "ONE")
    target.node.client().config_set("replica-serve-stale-data", "yes")


@fault("password required")
def _password_required(target: ProxiedServer) -> Iterator[None]:
    client = target.node.client()
    client.config_set("requirepass", "s3cret")
    client.client_kill_filter(_type="normal", skipme=True)
    yield
    client.config_set("requirepass", "")


@fault("no permission")
def _no_permission(target: ProxiedServer) -> Iterator[None]:
    target.node.ask("ACL", "SETUSER", "default", "-evalsha")
    yield
    target.node.ask("ACL", "SETUSER", "default", "+@all")


@fault("busy")
def _busy(target: ProxiedServer) -> Iterator[None]:
    """With a script that does not end."""
    client = target.node.client()
    client.config_set("lua-time-limit", 1)

    def run_for_ever() -> None:
        with redis.Redis(HOST, target.node.port) as other, suppress(redis.ResponseError):  # killed by SCRIPT KILL
            other.eval("while true do end", 0)

    thread = threading.Thread(target=run_for_ever)
    thread.start()
    wait_until(lambda: _replies(client, "BUSY"), "the server is busy")
    yield
    client.execute_command("SCRIPT KILL")
    thread.join()


@fault("loading")
def _loading(target: ProxiedServer) -> Iterator[None]:
    """A restarted server that is not done with its snapshot."""
    node, client, interval = target.node, target.node.client(), "loading-process-events-interval-bytes"
    if not client.config_get(interval):
        pytest.skip("before Redis 7, a server replies nothing while it loads so little")
    with client.pipeline() as pipeline:
        for n in range(1_000):
            pipeline.set(f"filler-{n}", os.urandom(2048))
        pipeline.execute()
    client.save()
    node.configuration.write_text(f"{target.configuration}key-load-delay 5000\n{interval} 1024\n")
    node.start()
    wait_until(lambda: _replies(client, "loading"), "the server is loading")
    node.configuration.write_text(target.configuration)
    yield
    client.config_set("key-load-delay", 0)
    node.wait_until_up()
    client.config_set(interval, 2_097_152)
    (node.directory / "dump.rdb").unlink()


def _replies(client: redis.Redis, word: str) -> bool:
    """Return whether the server replies with this error."""
    try:
        client.execute_command("PING")
    except redis.RedisError as error:
        return word in str(error)
    return False


# The reply to each command, whether it opens the breaker, and whether a call waits for more.
STRANGE_REPLIES = {
    "nothing, and closes": (b"", True, False),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True, False),
    "half a reply": (b"*8\r\n:1\r\n$100\r\nhalf", True, True),
    "OK": (b"+OK\r\n", False, False),
    "TLS": (b"\x15\x03\x03\x00\x02\x02\x28", True, False),
    "an integer of letters": (b":12x\r\n", True, False),
    "an integer": (b":1\r\n", False, False),
    "nil": (b"$-1\r\n", False, False),
    "an empty list": (b"*0\r\n", False, False),
    "a nested list": (b"*2\r\n:1\r\n*7\r\n:1\r\n:0\r\n:9\r\n:0\r\n:0\r\n:10\r\n:1\r\n", False, False),
    "a list too short": (b"*7\r\n" + 7 * b":1\r\n", False, False),
    "a list too long": (b"*10\r\n" + 10 * b":1\r\n", False, False),
    "a list of strings": (b"*8\r\n" + 8 * b"$1\r\n1\r\n", False, False),
    "a list with a nil": (b"*8\r\n" + 7 * b":1\r\n" + b"$-1\r\n", False, False),
    "a list with an error": (b"*8\r\n" + 7 * b":1\r\n" + b"-ERR inside\r\n", False, False),
    "an error": (b"-ERR unknown command\r\n", False, False),
    "LOADING": (b"-LOADING Redis is loading the dataset in memory\r\n", True, False),
    "NOAUTH": (b"-NOAUTH Authentication required.\r\n", True, False),
    "CLUSTERDOWN": (b"-CLUSTERDOWN The cluster is down\r\n", True, False),
    "MOVED": (b"-MOVED 1 127.0.0.1:1\r\n", False, False),
    "NOSCRIPT": (b"-NOSCRIPT No matching script.\r\n", False, False),
}


def _replying(reply: bytes) -> Callable[[ProxiedServer], Iterator[None]]:
    def steps_of(target: ProxiedServer) -> Iterator[None]:
        target.proxy.reply_with(reply)
        yield
        target.proxy.reply_with(None)

    return steps_of


for _name, (_reply, _opens, _waits) in STRANGE_REPLIES.items():
    fault(f"replies {_name}", opens_breaker=_opens, waits=_waits, in_proxy=True)(_replying(_reply))


class BreakerClock:
    """The clock of circuit breakers, which stands still."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def tick_to_probe(self) -> None:
        """Move on until a probe is due, after the first failure."""
        self.tick(breaker_module.FIRST_INTERVAL * (1 + breaker_module.JITTER))


class SiteOnOneLoop(Site):
    """A site whose async requests run on one event loop, where a connection to Redis stays open."""

    def __init__(self, way: str, settings: Any, runner: asyncio.Runner) -> None:
        super().__init__(way, settings)
        self.runner = runner

    def request(self, method: str, where: str = "/", *args: Any, address: str | None = None, **options: Any) -> Any:
        response = getattr(self.client(address), method)(where, *args, **options)
        if self.handler == "asgi":
            response = self.runner.run(response)
        assert_complete_if_refused(response, own_body=self.own_body)
        return response
