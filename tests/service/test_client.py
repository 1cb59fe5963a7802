"""The Python client of the HTTP service: sync and async, within its time, and without the service."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import math
import multiprocessing
import resource
import select
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
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rlaas_django import peek, reset
from rlaas_django.service import client as client_module
from rlaas_django.service.client import Answer, AsyncClient, Client, ServiceError

from tests.support.internals import conf
from tests.support.service import LESSER, TOKEN, TOKENS, VERBS, digest, urlconf

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


# Refusals


@pytest.fixture
def seconds(monkeypatch):
    """The clock of the client, in seconds, which stands still."""
    clock = [100.0]
    monkeypatch.setattr(client_module, "monotonic", lambda: clock[0])
    return clock


def exhaust(limits, user="alice"):
    """Use up the policy `search`; return the refusal."""
    return [limits.check(user, policy="search") for _ in range(4)][3]


def test_a_refusal_is_answered_from_memory_until_its_wait_is_over(connect, server, seconds):
    limits = connect(server.server_port)
    refusal = exhaust(limits)
    reset("alice", "search")
    seconds[0] += 0.1004
    again = limits.check("alice", policy="search")
    assert not again.allowed
    assert again.retry_after == pytest.approx(refusal.retry_after - 0.1, abs=0.001)
    assert again.reset_after == pytest.approx(refusal.reset_after - 0.1, abs=0.001)
    assert len(str(again.retry_after).partition(".")[2]) <= 3
    assert limits.check("bob", policy="search").allowed
    assert limits.usage("alice", policy="search").allowed
    seconds[0] += refusal.retry_after
    assert limits.check("alice", policy="search").allowed


def test_a_refusal_of_another_cost_or_policy_is_not_that_of_a_check(connect, server):
    limits = connect(server.server_port)
    limits.check("alice", policy="search", cost=2)
    assert not limits.check("alice", policy="search", cost=2).allowed
    assert limits.check("alice", policy="search").allowed
    assert limits.check("alice").allowed


def test_refusals_hold_while_the_service_is_unavailable(connect, server):
    limits = connect(server.server_port)
    exhaust(limits)
    server.shutdown()
    server.server_close()
    server.close_connections()
    assert [limits.check("bob").degraded for _ in range(3)] == [True] * 3
    assert limits.check("alice", policy="search").allowed is False


def test_a_refund_forgets_the_refusals(connect, server):
    limits = connect(server.server_port)
    receipt = limits.check("alice", policy="search").receipt
    assert not exhaust(limits).allowed
    assert limits.refund(receipt)
    assert limits.check("alice", policy="search").allowed


def test_a_check_that_is_under_way_during_a_refund_is_not_remembered(server, monkeypatch):
    limits = Client(f"http://127.0.0.1:{server.server_port}/rlaas/", TOKEN, timeout=20)
    receipts = [limits.check("alice", policy="search").receipt for _ in range(3)]
    post = limits._post

    def refund_meanwhile(path, body):
        response = post(path, body)
        monkeypatch.setattr(limits, "_post", post)
        limits.refund(receipts[0])
        return response

    monkeypatch.setattr(limits, "_post", refund_meanwhile)
    assert not limits.check("alice", policy="search").allowed
    assert limits.check("alice", policy="search").allowed
    limits.close()


def test_a_cost_that_can_never_fit_is_not_remembered(connect, server, configure):
    limits = connect(server.server_port)
    assert limits.check("bob", cost=9).retry_after == math.inf
    configure(MAX_REQUESTS=10)
    assert limits.check("bob", cost=9).allowed


def test_a_refusal_without_redis_is_not_remembered(connect, server, use, settings):
    caches = settings.CACHES
    limits = connect(server.server_port)
    use("unix:///nowhere.sock")
    assert not limits.check("alice", policy="strict").allowed
    settings.CACHES = caches
    assert limits.check("alice", policy="strict").allowed


@pytest.mark.parametrize(("max_refusals", "forgotten"), [(0, True), (2, True), (3, False)])
def test_as_many_refusals_are_remembered_as_is_said(connect, server, max_refusals, forgotten):
    limits = connect(server.server_port, max_refusals=max_refusals)
    for user in ("alice", "bob", "carol"):
        exhaust(limits, user)
    reset("alice", "search")
    assert limits.check("alice", policy="search").allowed == forgotten


# Connections


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


def http(body, content_type="application/json", status=200, *headers):
    """Return a response of whatever is between the client and the service."""
    body = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body


HTML = http("no", "text/html", 502)
PROBLEM = "application/problem+json"
BAD_GATEWAY = json.dumps({"type": "about:blank", "title": "Bad Gateway", "status": 502, "detail": "no"})
FAILURES = {
    "hanging": hang,
    "dripping": drip,
    "closing": lambda connection, stopped: connection.recv(65536),
    "a proxy's error": reply(HTML),
    "no HTTP": reply(b"nonsense\r\n\r\n"),
    "cut short": reply(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"),
    "an error in JSON": reply(http('{"message": "no"}', status=502)),
    "a decision with an error": reply(http('{"allowed": true}', status=500)),
    "a problem": reply(http(BAD_GATEWAY, PROBLEM, 502)),
    "a gateway's own 503": reply(http(BAD_GATEWAY.replace("502", "503"), PROBLEM, 503, "Retry-After: 1")),
    "a problem without members": reply(http('{"title": "no"}', PROBLEM, 400)),
    "a problem that is cut off": reply(http('{"title": "n', PROBLEM, 400)),
    "a redirect": reply(http("", "text/html", 302, "Location: http://127.0.0.1:1/")),
    "a redirect to nowhere": reply(http("", "text/html", 302, "Location: http://[/")),
    "a page": reply(http("<p>Please log in</p>", "text/html")),
    "a page that says that it is JSON": reply(http("<p>Please log in</p>")),
    "garbage for gzip": reply(http("garbage", "application/json", 200, "Content-Encoding: gzip")),
    "gzip that is cut off": reply(http(gzip.compress(b"{}")[:-9], "application/json", 200, "Content-Encoding: gzip")),
    "another charset": reply(http('{"allowed": "\xe9"}'.encode("latin-1"), "application/json; charset=latin-1")),
    "deep JSON": reply(http("[" * 100_000)),
    "a long number": reply(http(f'{{"allowed": false, "retryAfter": {"9" * 5000}}}')),
    **{
        body: reply(http(body))
        for body in (
            *("", "{}", "[]", "null", "0", '"allowed"', "true", '{"allowed": true', '{"allowed": "no"}'),
            *('{"allowed": null}', '{"allowed": 1}', '{"allowed": true, "remaining": "5"}'),
            *('{"allowed": false, "retryAfter": "1"}', '{"allowed": false, "retryAfter": -1}'),
            *('{"allowed": false, "retryAfter": NaN}', '{"allowed": false, "resetAfter": 1e999}'),
            *('{"allowed": true, "policy": 5}', '{"allowed": true, "receipt": {}}', '{"results": [], "refunded": 1}'),
        )
    },
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


@pytest.mark.parametrize("failure", [name for name in FAILURES if name not in ("hanging", "dripping")])
def test_whatever_a_gateway_responds_every_call_fails_as_it_says(connect, failure):
    with listening(FAILURES[failure]) as port:
        assert connect(port).usage("alice") == Answer(True, degraded=True)
        assert connect(port).check_each([{"userId": "alice"}] * 2) == [Answer(True, degraded=True)] * 2
        with pytest.raises(ServiceError, match="unavailable"):
            connect(port).refund("x")


class Gateway:
    """It responds with what it is told, and the client's clock runs, so that no call pauses."""

    def __init__(self, monkeypatch) -> None:
        self.response = b""
        ticks = itertools.count(100.0, 100.0)
        monkeypatch.setattr(client_module, "monotonic", lambda: next(ticks))

    def __call__(self, connection, stopped) -> None:
        connection.recv(65536)
        connection.sendall(self.response)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MEMBERS = ["allowed", "policy", "limit", "currentCount", "remaining", "retryAfter", "resetAfter", "ttl", "degraded"]
MEMBERS += ["receipt", "outcomes", "results", "refunded", "error", "type", "title", "status", "detail"]
OBJECTS = st.dictionaries(st.sampled_from(MEMBERS), JSON | st.booleans() | st.integers(-2, 2), max_size=6)
BATCHES = st.builds(lambda results: {"results": results}, st.lists(OBJECTS | JSON, max_size=3))
BODIES = st.one_of(st.binary(max_size=20), (JSON | OBJECTS | BATCHES).map(lambda body: json.dumps(body).encode()))
TYPES = st.sampled_from(["application/json", PROBLEM, "text/html", "application/json; charset=utf-16", "", "\xe9"])
HEADERS = st.sampled_from(["", "Content-Encoding: gzip", "Location: x:", "Set-Cookie: \xe9", "Retry-After: x"])


def test_no_response_of_a_gateway_is_an_error_of_another_kind(connect, monkeypatch, scale):
    gateway = Gateway(monkeypatch)
    statuses = st.sampled_from([200, 204, 301, 302, 400, 401, 404, 429, 500, 502, 503])
    answers = 0

    with listening(gateway) as port:
        limits = connect(port)

        @hypothesis_settings(max_examples=scale(1000), database=None, suppress_health_check=[*HealthCheck])
        @given(body=BODIES, content_type=TYPES, status=statuses, header=HEADERS)
        @example(b"null", PROBLEM, 400, "")
        @example(b'{"results": {"a": 1}}', "application/json", 200, "")
        def call(body, content_type, status, header):
            nonlocal answers
            gateway.response = http(body, content_type, status, *filter(None, [header]))
            for function, argument in (
                (limits.check, "alice"),
                (limits.usage, "alice"),
                (limits.check_each, [{"userId": "alice"}]),
                (limits.refund, "x"),
            ):
                with contextlib.suppress(ServiceError):
                    answer = function(argument)
                    assert isinstance(answer, Answer | list | bool)
                    answers += 1

        call()
    assert answers


def test_beyond_1023_descriptors_the_client_fails_as_it_says(connect, monkeypatch):
    """Where there is no `poll`, as under gevent, httpx calls `select`, which takes no larger descriptor."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1200
    with contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(socket.socket())
        kept = http('{"allowed": true}').replace(b"Connection: close", b"Connection: keep-alive")
        port = stack.enter_context(listening(reply(kept)))
        without_poll = stack.enter_context(monkeypatch.context())
        without_poll.delattr(select, "poll")
        limits = connect(port)
        assert [limits.check("alice").degraded for _ in range(2)] == [True, True]
        with pytest.raises(ServiceError, match="unavailable"):
            limits.refund("x")


def test_a_refused_connection_is_a_failure_too(connect):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    limits = connect(port)
    assert limits.check("alice").degraded
    assert limits.usage("alice").degraded
    assert [answer.degraded for answer in limits.check_each([{"userId": "alice"}] * 2)] == [True, True]
    with pytest.raises(ServiceError, match="unavailable"):
        limits.refund("x")


def flaky(failing):
    """Respond by an error as long as `failing` says, and count the requests in `failing`."""

    def respond(connection, stopped):
        connection.recv(65536)
        failing["requests"] += 1
        connection.sendall(HTML if failing["fails"] else http('{"allowed": true}'))

    return respond


def test_an_outage_costs_one_timeout_per_pause_which_doubles(connect, seconds, caplog):
    caplog.set_level(logging.WARNING, logger="rlaas_django.client")
    failing = {"fails": True, "requests": 0}
    with listening(flaky(failing)) as port:
        limits = connect(port)
        assert limits.check("alice").degraded
        requests = 1
        for pause in (0.15, 0.3, 0.6, 1.2, 2.0, 2.0):
            for _ in range(5):
                assert limits.check("alice").degraded
            requests += 1
            assert failing["requests"] == len(caplog.records) == requests
            seconds[0] += pause - 0.001
            assert limits.check("alice").degraded
            assert failing["requests"] == requests
            seconds[0] += 0.002


def test_one_failure_pauses_nothing(connect, seconds):
    failing = {"fails": True, "requests": 0}
    with listening(flaky(failing)) as port:
        limits = connect(port)
        for number in range(1, 20):
            failing["fails"] = bool(number % 2)
            assert limits.check("alice").degraded == failing["fails"]
            assert failing["requests"] == number


def test_a_response_of_the_service_ends_the_doubling(connect, seconds):
    failing = {"fails": True, "requests": 0}
    with listening(flaky(failing)) as port:
        limits = connect(port)
        for _ in range(8):
            limits.check("alice")
            seconds[0] += 2.1
        failing["fails"] = False
        assert not limits.check("alice").degraded
        failing["fails"] = True
        assert [limits.check("alice").degraded for _ in range(3)] == [True] * 3
        assert failing["requests"] == 11
        seconds[0] += 0.16
        limits.check("alice")
        assert failing["requests"] == 12


def test_failures_of_calls_that_were_under_way_together_are_one(seconds):
    barrier = threading.Barrier(4)
    failing = {"fails": True, "requests": 0}

    def respond(connection, stopped):
        connection.recv(65536)
        failing["requests"] += 1
        threads.submit(finish, connection.dup())

    def finish(connection):
        with connection:
            barrier.wait(20)
            seconds[0] += 0.01
            connection.sendall(HTML)

    with ThreadPoolExecutor(8) as threads, listening(respond) as port:
        limits = Client(f"http://127.0.0.1:{port}/", TOKEN, timeout=20)
        assert all(answer.degraded for answer in threads.map(limits.check, ["alice"] * 4))
        assert all(answer.degraded for answer in threads.map(limits.check, ["alice"] * 4))
        assert failing["requests"] == 8
        limits.close()


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


def test_a_batch_that_can_never_fit_its_callers_limit_is_an_error(connect, server, configure):
    configure(SERVICE={"TOKENS": {"tester": {"digests": [digest(TOKEN)], "verbs": VERBS, "limit": "callers"}}})
    with pytest.raises(ServiceError, match="at most 2 checks at once") as raised:
        connect(server.server_port).check_each([{"userId": "alice"}] * 3)
    assert raised.value.status == 429


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
