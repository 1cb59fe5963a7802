"""The Python client of the HTTP service: sync and async, within its time, and without the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from rlaas_django import peek
from rlaas_django.service import client as client_module
from rlaas_django.service.client import Answer, AsyncClient, Client, ServiceError

from tests.support.internals import conf
from tests.support.service import LESSER, TOKEN, TOKENS, urlconf

POLICIES = {
    "search": {"rate": "3/h"},
    "login": {"rate": "2/h", "key": "ip"},
    "strict": {"rate": "3/h", "on_failure": "closed"},
    "callers": {"rate": "2/h"},
}


class Quiet(WSGIRequestHandler):
    def log_message(self, *args) -> None:
        pass


class Server(ThreadedWSGIServer):
    """Counts its connections, and can close them."""

    daemon_threads = True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.sockets = []

    @property
    def connections(self) -> int:
        return len(self.sockets)

    def process_request(self, request, *args) -> None:
        self.sockets.append(request)
        super().process_request(request, *args)

    def close_connections(self) -> None:
        for connection in self.sockets:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(settings, configure):
    """The service behind a real server."""
    settings.ROOT_URLCONF = urlconf()
    configure(POLICIES=POLICIES, SERVICE={"TOKENS": TOKENS})
    server = Server(("127.0.0.1", 0), Quiet)
    server.set_app(WSGIHandler())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class OnOneLoop:
    """The async client, called as the sync one is."""

    def __init__(self, runner: asyncio.Runner, *args, **options) -> None:
        self.runner, self.client = runner, AsyncClient(*args, **options)

    def __getattr__(self, name):
        async def run(*args, **options):
            return await getattr(self.client, name)(*args, **options)

        return lambda *args, **options: self.runner.run(run(*args, **options))


@pytest.fixture(params=["sync", "async"])
def connect(request):
    """Make clients: `connect(port, timeout=1)`."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        def make(port: int, token: str = TOKEN, timeout: float = 20, **options):
            url = f"http://127.0.0.1:{port}/rlaas/"
            if request.param == "sync":
                made = Client(url, token, timeout=timeout, **options)
            else:
                made = OnOneLoop(runner, url, token, timeout=timeout, **options)
            stack.callback(made.close)
            return made

        yield make


def test_a_program_needs_four_lines(connect, server):
    limits = connect(server.server_port)
    answers = [limits.check("alice", policy="search") for _ in range(4)]
    assert [answer.allowed for answer in answers] == [True, True, True, False]
    first, last = answers[0], answers[3]
    assert (first.policy, first.limit, first.current_count, first.remaining, first.ttl) == ("search", 3, 0, 2, 3600)
    assert (first.retry_after, first.degraded) == (0.0, False)
    assert 3500 < last.retry_after <= 3600
    assert last.receipt is None
    assert peek("alice", "search").current_count == 3


def test_every_argument(connect, server):
    limits = connect(server.server_port)
    answer = limits.check(identity={"user": 42, "ip": "203.0.113.9"}, policy=["search", "login"], cost=2)
    assert answer.allowed
    assert [peek("42", "search").current_count, peek("203.0.113.9", "login").current_count] == [2, 2]
    assert limits.check("bob", cost=9).retry_after == math.inf
    assert limits.usage("42", policy="search").current_count == 2
    assert [limits.refund(answer.receipt), limits.refund(answer.receipt)] == [True, False]
    assert limits.usage("42", policy="search").current_count == 0


def test_a_batch(connect, server):
    checks = [{"userId": "alice", "policy": "search"}] * 4 + [{"userId": ""}]
    *answers, error = connect(server.server_port).check_each(checks)
    assert [answer.allowed for answer in answers] == [True, True, True, False]
    assert isinstance(error, ServiceError)
    assert error.status == 400


def test_a_mistake_is_an_error_and_not_a_failure(connect, server):
    limits = connect(server.server_port)
    for arguments, status, message in (
        ({"user": "alice", "policy": "serach"}, 404, "did you mean 'search'?"),
        ({"user": ""}, 400, "'userId' should be text"),
        ({"user": "alice", "cost": -1}, 400, "cost"),
    ):
        with pytest.raises(ServiceError, match=message) as raised:
            limits.check(**arguments)
        assert raised.value.status == status
    with pytest.raises(ServiceError) as raised:
        connect(server.server_port, token="wrong").check("alice")
    assert raised.value.status == 401
    assert "wrong" not in str(raised.value)
    with pytest.raises(ServiceError, match="not a receipt"):
        limits.refund("x")
    with pytest.raises(ValueError, match="'open' or 'closed'"):
        connect(server.server_port, on_failure="local")


def test_connections_are_kept(connect, server):
    limits = connect(server.server_port)
    for _ in range(5):
        limits.check("alice")
    assert server.connections == 1


def test_threads_share_a_client(server):
    limits = Client(f"http://127.0.0.1:{server.server_port}/rlaas", TOKEN, timeout=20)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: limits.check("alice", policy="search").allowed, range(40)))
    assert sum(answers) == 3
    assert server.connections <= 8
    limits.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(server):
    limits = Client(f"http://127.0.0.1:{server.server_port}/rlaas/", TOKEN, timeout=20)
    limits.check("alice")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(limits.check("alice").current_count))
    child.start()
    assert queue.get() == 1
    child.join()
    assert limits.check("alice").current_count == 2
    assert server.connections == 2
    limits.close()


def test_a_connection_that_the_server_closed_is_replaced_and_nothing_is_sent_twice(connect, server):
    limits = connect(server.server_port)
    limits.check("alice")
    server.close_connections()
    assert limits.check("alice").current_count == 1
    assert server.connections == 2


# Without the service


@contextlib.contextmanager
def listening(behave):
    """Serve connections by a function."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = threading.Event()

        def serve():
            while not stopped.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    behave(connection, stopped)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stopped.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def hang(connection, stopped):
    stopped.wait(20)


def drip(connection, stopped):
    """Send a byte in time for each read, but never the whole."""
    connection.recv(65536)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX: " + b"x" * 200:
        if stopped.wait(0.05):
            return
        connection.sendall(bytes([byte]))


def reply(text):
    def send(connection, stopped):
        connection.recv(65536)
        connection.sendall(text)

    return send


HTML = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nno"
FAILURES = {
    "hanging": hang,
    "dripping": drip,
    "closing": lambda connection, stopped: connection.recv(65536),
    "a proxy's error": reply(HTML),
    "no HTTP": reply(b"nonsense\r\n\r\n"),
    "cut short": reply(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_without_the_service_the_client_fails_open_or_closed_in_time(connect, failure, caplog):
    with listening(FAILURES[failure]) as port:
        began = time.monotonic()
        assert connect(port, timeout=0.3).check("alice") == Answer(True, degraded=True)
        closed = connect(port, timeout=0.3, on_failure="closed")
        assert closed.check("alice") == Answer(False, degraded=True, retry_after=1.0)
        assert time.monotonic() - began < 5  # a drip takes ten seconds
    assert "is unavailable" in caplog.text
    assert TOKEN not in caplog.text


def test_a_refused_connection_is_a_failure_too(connect):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    limits = connect(port)
    assert limits.check("alice").degraded
    assert limits.usage("alice").degraded
    assert [answer.degraded for answer in limits.check_each([{"userId": "alice"}] * 2)] == [True, True]
    with pytest.raises(ServiceError, match="unavailable"):
        limits.refund("x")


def test_an_outage_costs_one_timeout_per_pause(connect, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="rlaas_django.client")
    clock = [100.0]
    with listening(reply(HTML)) as port:
        limits = connect(port)
        monkeypatch.setattr(client_module, "monotonic", lambda: clock[0])
        for _ in range(20):
            assert limits.check("alice").degraded
        assert len(caplog.records) == 1
        clock[0] += client_module.PAUSE
        assert limits.check("alice").degraded
        assert len(caplog.records) == 2


def test_a_policy_that_fails_closed_is_refused_though_the_client_fails_open(connect, server, use, caplog):
    use("unix:///nowhere.sock")
    limits = connect(server.server_port)
    assert limits.check("alice", policy="strict") == Answer(False, degraded=True, retry_after=1.0)
    assert limits.check("alice", policy="search").allowed
    assert not [record for record in caplog.records if record.name == "rlaas_django.client"]  # the service answered


def test_beyond_its_own_limit_a_client_is_on_its_own(connect, server, configure):
    configure(SERVICE={"TOKENS": {"tester": {**TOKENS["lesser"], "limit": "callers"}}})
    conf.config()
    limits = connect(server.server_port, token=LESSER)
    assert [limits.check("alice").degraded for _ in range(3)] == [False, False, True]


# One file


def test_the_client_is_one_file_that_needs_no_django(tmp_path, server):
    shutil.copy(client_module.__file__, tmp_path / "rlaas_client.py")
    program = (
        "import sys\n"
        "from rlaas_client import Client\n"
        f"limits = Client('http://127.0.0.1:{server.server_port}/rlaas/', {TOKEN!r}, timeout=20)\n"
        "print(limits.check('alice').remaining, 'django' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "4 False\n", done.stderr


def test_the_client_is_imported_without_settings():
    program = "import rlaas_django.service.client; from django.conf import settings; print(settings.configured)"
    root = Path(client_module.__file__).parents[2]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False\n", done.stderr
