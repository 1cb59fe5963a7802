"""Fixtures, and the two tiers of the suite.

`make test` runs the tests without the marker `slow`: every behaviour once. `make test-all` runs all of them. What is in
the long tier is said in two ways: a file, a test or a parameter by `pytest.mark.slow`, and the full size of a test that
takes the fixture `scale`.

Each process of pytest-xdist has a server of its own (tests/settings.py). The tests of a file stay in one process
(`--dist loadfile`), as many files start a site or a Cluster for all of their tests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import ssl
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import redis
import rlaas_django
from example_project.redis_server import Server
from rlaas_django.signals import backend_failed
from rlaas_django.testing import frozen_clock, reset

from tests.support.deployments import Node
from tests.support.http import BOTH_WAYS, EVERY_WAY, Site
from tests.support.internals import (
    ALGORITHMS,
    breaker_module,
    conf,
    forget_limits,
    have_no_background_thread,
    limits_in_use,
    redis_client,
    restore_limits,
)
from tests.support.outages import LONG_TIMEOUT, BreakerClock, ProxiedServer, SiteOnOneLoop

NOW = 1_700_000_000_000  # 20 s into a window of a minute

# No deadline: an example that takes long on a busy machine is no failure.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


# Shells start background jobs with Ctrl-C ignored, and so would be the processes that tests interrupt by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _clean_slate(request):
    """Start each test with empty servers and a process that remembers nothing; fail it for a key without a TTL."""
    clients = [redis_client(alias) for alias in ("default", "fakeredis")]
    reset()
    if "background" not in request.keywords:
        have_no_background_thread()
    for client in clients:
        client.flushdb()
    limits = limits_in_use()
    yield
    restore_limits(limits)
    for client in clients:
        lasting = [key for key in client.scan_iter("rlaas:*", count=1000) if client.pttl(key) == -1]
        assert not lasting, f"keys without a TTL: {lasting}"


# Size


@pytest.fixture(params=[pytest.param(0.05, id="small"), pytest.param(1, id="full", marks=pytest.mark.slow)])
def scale(request):
    """Return a count for this tier: `scale(1000)` is 50 in the quick tier and 1000 in the long one."""

    def scaled(count: int, least: int = 1) -> int:
        return max(least, round(count * request.param))

    return scaled


# Settings


@pytest.fixture
def configure(settings):
    """Set keys of RATE_LIMITER for the length of a test."""

    def set_keys(**options):
        settings.RATE_LIMITER = {**getattr(settings, "RATE_LIMITER", {}), **options}

    return set_keys


@pytest.fixture
def no_views():
    """Forget every decorated view, so that the checks speak of the test's own only."""
    limits = limits_in_use()
    forget_limits()
    yield
    restore_limits(limits)


# Servers


@pytest.fixture
def client() -> redis.Redis:
    """A client of the server that the limiter uses."""
    return redis_client(conf.config().cache)


@pytest.fixture(params=["default", "fakeredis"])
def server(request, configure):
    """A real server, and fakeredis as our users' tests have it."""
    configure(CACHE=request.param)
    return redis_client(request.param)


@pytest.fixture(params=["default", "fakeredis", "locmem"])
def store(request, configure) -> str:
    """What counts: a real server, fakeredis, and this process. For tests that do not look into Redis."""
    configure(CACHE=request.param)
    return request.param


# For a test whose many checks take seconds on fakeredis, which is Python: there in the long tier alone.
_fakeredis = pytest.param("fakeredis", marks=pytest.mark.slow)
fakeredis_is_slow = pytest.mark.parametrize("server", ["default", _fakeredis], indirect=True)
fakeredis_store_is_slow = pytest.mark.parametrize("store", ["default", _fakeredis, "locmem"], indirect=True)


@pytest.fixture
def start():
    """Start servers of the test's own, with these options; they stop with the test."""
    servers = []

    def start_one(*options: str) -> Server:
        servers.append(Server(*options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture
def use(settings):
    """Have the limiter use this entry of CACHES."""

    def use_entry(location: str, backend: str = "django_redis.cache.RedisCache", **options) -> None:
        entry = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        settings.CACHES = {**settings.CACHES, "default": entry}

    return use_entry


@pytest.fixture
def own(start, use) -> Server:
    """A server that nobody else uses, so that its clients and their commands can be counted."""
    server = start()
    use(server.url, SOCKET_TIMEOUT=20, SOCKET_CONNECT_TIMEOUT=20)
    return server


@pytest.fixture
def node():
    """A server on a TCP port, which the test may kill, stop and restart."""
    with Node() as node:
        node.launch()
        yield node


@pytest.fixture
def redis_unavailable(use):
    """Redis cannot be reached."""
    use("unix:///nowhere.sock")


@pytest.fixture(scope="module")
def _proxied_server():
    server = ProxiedServer()
    yield server
    server.stop()


@pytest.fixture
def target(_proxied_server) -> ProxiedServer:
    """A server and a proxy before it, for faults; empty and without any at the beginning of the test."""
    _proxied_server.restore()
    return _proxied_server


@pytest.fixture
def use_url(settings, configure):
    """Have the limiter use a server, and log everything."""

    def use(url: str, timeout: float = LONG_TIMEOUT, **pool_options) -> None:
        if pool_options:  # django-redis keeps a pool by its URL, whatever the other options are
            url = f"{url}?client_name=pool-{next(_pool_numbers)}"
        entry = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": url,
            "OPTIONS": {"CONNECTION_POOL_KWARGS": pool_options},
        }
        settings.CACHES = {**settings.CACHES, "default": entry}
        configure(TIMEOUT=timeout, LOG_LINES_PER_SECOND=1000)

    return use


_pool_numbers = itertools.count()


@pytest.fixture(scope="session")
def certificate():
    """Return a server's TLS context for 127.0.0.1 and localhost, and the path of the certificate to trust."""
    path = Path(__file__).parent / "tls"  # made beforehand, as not every machine has openssl; no secret
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path / "certificate.pem", path / "key.pem")
    return context, path / "certificate.pem"


# Calls


@pytest.fixture(params=ALGORITHMS)
def algo(request) -> str:
    return request.param


@pytest.fixture
def clock():
    """The frozen clock of every decision."""
    with frozen_clock(NOW) as clock:
        yield clock


@pytest.fixture(params=["sync", "async"])
def limiter(request):
    """`limiter.check(...)`, `limiter.peek(...)` and so on: the sync function, or its async twin on one event loop."""
    if request.param == "sync":
        yield rlaas_django
        return

    class AsyncLimiter:
        def __getattr__(self, name):
            return lambda *args, **options: runner.run(getattr(rlaas_django, f"a{name}")(*args, **options))

    with asyncio.Runner() as runner:
        yield AsyncLimiter()


@pytest.fixture(params=EVERY_WAY)
def site(request, settings):
    """A site behind a handler: WSGI and `def` views in the quick tier, `@both_ways` for ASGI and `async def` too."""
    return Site(request.param, settings)


@pytest.fixture(params=BOTH_WAYS)
def site_on_one_loop(request, settings):
    """A site behind WSGI and behind ASGI, there on one event loop, where a connection to Redis stays open."""
    with asyncio.Runner() as runner:
        yield SiteOnOneLoop(request.param, settings, runner)


@pytest.fixture
def breaker_clock(monkeypatch) -> BreakerClock:
    """The clock of circuit breakers, which stands still."""
    clock = BreakerClock()
    monkeypatch.setattr(breaker_module, "time", clock)
    return clock


# Observation


@pytest.fixture
def log_lines(caplog):
    """`log_lines(text)`: the lines of our logger that contain it."""
    caplog.set_level(logging.DEBUG, logger="rlaas_django")

    def containing(text: str) -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "rlaas_django"]
        return [line for line in lines if text in line]

    return containing


@pytest.fixture
def connects(monkeypatch):
    """Count the connections to each port."""
    seen = Counter()
    connect = socket.socket.connect

    def counting(self, address):
        seen[address[1]] += 1
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counting)
    return seen


@pytest.fixture
def failure_signals():
    """Collect what `backend_failed` was sent with."""
    signals = []

    def receiver(sender, **sent):
        signals.append(sent)

    backend_failed.connect(receiver)
    yield signals
    backend_failed.disconnect(receiver)


@pytest.fixture
def failures():
    """Collect the errors that `backend_failed` was sent with."""
    errors = []

    def receiver(error, **_):
        errors.append(str(error))

    backend_failed.connect(receiver)
    yield errors
    backend_failed.disconnect(receiver)
