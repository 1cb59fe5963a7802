"""gunicorn and uvicorn as real processes, asked with a real HTTP client."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.http import BROWSER, PROBLEM_JSON, assert_clean_headers, assert_refusal, counters, judge, rate_limit_fields
from tests.settings import REDIS

ROOT = Path(__file__).parent.parent
WORKERS = 8
CLIENT = "203.0.113.9"

SERVERS = {
    "gunicorn": [
        *("gunicorn", "tests.e2e_project:wsgi()", "--bind", "fd://{fd}", "--workers", str(WORKERS)),
        *("--worker-class", "gthread", "--threads", "2", "--keep-alive", "30", "--log-level", "warning"),
    ],
    # uvicorn would believe X-Forwarded-For by itself; here that is the site's own business.
    "uvicorn": [
        *("uvicorn", "--factory", "tests.e2e_project:asgi", "--fd", "{fd}", "--no-proxy-headers"),
        *("--lifespan", "off", "--log-level", "warning", "--no-access-log"),
    ],
}


@contextlib.contextmanager
def serving(name, log):
    """A server on a port that is ours from the start; its processes end with the block, by their id."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, log.open("wb") as output:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvicorn takes --fd for a unix socket's
        command = [sys.executable, "-m", *(word.format(fd=listener.fileno()) for word in SERVERS[name])]
        environment = {**os.environ, "RLAAS_TEST_REDIS": REDIS, "DJANGO_SETTINGS_MODULE": "tests.e2e_project"}
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
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


@pytest.fixture(scope="module")
def gunicorn(tmp_path_factory):
    with serving("gunicorn", tmp_path_factory.mktemp("gunicorn") / "log") as port:
        yield port


@pytest.fixture(scope="module")
def uvicorn(tmp_path_factory):
    with serving("uvicorn", tmp_path_factory.mktemp("uvicorn") / "log") as port:
        yield port


@pytest.fixture(params=["gunicorn", "uvicorn"])
def site(request):
    """`site.get("/inline")`, of a sync view through gunicorn and of its async sibling through uvicorn."""
    port = request.getfixturevalue(request.param)
    below = "" if request.param == "gunicorn" else "/async"
    options = {"timeout": 30, "headers": {"X-Forwarded-For": CLIENT}, "event_hooks": {"response": [judge_each]}}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", **options) as asking:
        yield SimpleNamespace(
            get=lambda where, **options: asking.get(below + where, **options),
            post=lambda where, **options: asking.post(below + where, **options),
            bare=asking,
        )


def judge_each(response):
    response.read()
    judge(response, own_body=response.url.path.endswith("/own"))


def statuses(ask, count):
    return [ask().status_code for _ in range(count)]


# Each feature once


@pytest.mark.parametrize(
    ("where", "policies"),
    [
        ("/named", {"login": (2, 3600)}),
        ("/inline", {"inline": (2, 3600)}),
        ("/several", {"several-3600s": (3, 3600), "several-86400s": (2, 86400)}),
        ("/cost", {"cost": (4, 3600)}),
        ("/mixed", {"login": (2, 3600)}),
    ],
)
def test_two_pass_and_the_third_is_refused(site, where, policies):
    responses = [site.get(where) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert rate_limit_fields(responses[0])[0] == policies
    assert_refusal(responses[2], policies=policies, media_type=PROBLEM_JSON)


def test_a_class_based_view(site):
    responses = [site.get("/class") for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert_refusal(responses[2], policies=rate_limit_fields(responses[0])[0])


def test_a_bucket_keyed_by_the_query(site):
    assert statuses(lambda: site.get("/search", params={"q": "a"}), 4) == [200, 200, 200, 429]
    assert site.get("/search", params={"q": "b"}).status_code == 200


def test_a_method(site):
    assert statuses(lambda: site.get("/post"), 3) == [200] * 3
    assert statuses(lambda: site.post("/post"), 3) == [200, 200, 429]


def test_a_shadow(site):
    responses = [site.get("/shadow") for _ in range(3)]
    assert [response.json()["outcomes"] for response in responses] == [[True], [True], [False]]
    assert "RateLimit" not in responses[2].headers


def test_an_annotation(site):
    responses = [site.get("/annotated") for _ in range(3)]
    assert [response.json()["allowed"] for response in responses] == [True, True, False]


def test_failed_logins(site):
    assert statuses(lambda: site.post("/attempts", data={"password": "right"}), 5) == [200] * 5
    assert statuses(lambda: site.post("/attempts", data={"password": "wrong"}), 4) == [401, 401, 401, 429]


def test_a_response_of_one_s_own(site):
    responses = [site.get("/own") for _ in range(3)]
    assert_refusal(responses[2], policies={"own": (2, 3600)}, own_body=True)
    assert responses[2].text == "slow down"


def test_a_rate_by_plan(site):
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "none"}), 3) == [200] * 3
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "free"}), 2) == [200, 429]
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "paid"}), 3) == [200, 200, 429]


def test_a_token(site, client):
    for token in ("one", "other"):
        ask = {"headers": {"Authorization": f"Bearer {token}-s3cr3t"}}
        assert statuses(lambda ask=ask: site.get("/token", **ask), 3) == [200, 200, 429]
    assert len(counters(client)) == 2
    assert not [key for key in counters(client) if "s3cr3t" in key]


@pytest.mark.parametrize(("accept", "media_type"), [(BROWSER, "text/html"), ("text/plain", "text/plain")])
def test_the_body_is_what_the_client_prefers(site, accept, media_type):
    for _ in range(2):
        site.get("/inline")
    refused = site.get("/inline", headers={"Accept": accept})
    assert_refusal(refused, policies={"inline": (2, 3600)}, media_type=media_type)


def test_a_head_request(site):
    for _ in range(2):
        site.get("/inline")
    refused = site.bare.head("/inline")
    assert_refusal(refused, policies={"inline": (2, 3600)})
    assert refused.content == b""


def test_the_middleware_s_rules_and_pages_of_errors(site):
    assert statuses(lambda: site.bare.get("/healthz"), 9) == [200] * 9
    responses = [site.bare.get(f"/api/{n}?n={n}") for n in range(4)]
    assert [response.status_code for response in responses] == [200] * 3 + [429]
    assert_refusal(responses[3], policies={"api": (3, 3600)})
    for where, status in (("/default", 200), ("/default/nowhere", 404), ("/default/failing", 500)):
        response = site.bare.get(where)
        assert response.status_code == status
        assert len(assert_clean_headers(response)) == 5
        assert rate_limit_fields(response)[0] == {"default": (5, 60)}


def test_100_forged_headers_pass_twice(site):
    """The client is left of the address that the trusted proxy has added."""
    forged = [{"X-Forwarded-For": f"198.51.100.{n}, {CLIENT}"} for n in range(100)]
    assert [site.get("/inline", headers=each).status_code for each in forged] == [200] * 2 + [429] * 98


def test_workers_share_the_count(gunicorn):
    """Connections of their own, so that more than one worker is asked."""
    url = f"http://127.0.0.1:{gunicorn}/several"
    assert statuses(lambda: httpx.get(url, timeout=30), 6) == [200, 200, 429, 429, 429, 429]


# Load


def keep_asking(port, where, limit, users, requests, connections):
    """What each user was answered, over connections that are kept alive, and by which workers."""
    told, workers = Counter(), set()
    for _ in range(connections):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for n in range(requests):
            user = users[n % len(users)]
            connection.request("GET", where, headers={"X-Api-Key": user})
            response = connection.getresponse()
            answer = SimpleNamespace(status_code=response.status, headers=response.headers, content=response.read())
            told[user, answer.status_code] += 1
            if answer.status_code == 200:
                workers.add(answer.headers["X-Worker"])
            else:
                assert_refusal(answer, policies=limit, media_type=PROBLEM_JSON)
        connection.close()
    return told, workers


def load(port, where, limit, *, clients, connections, requests):
    """The answers to so many requests on ten users, over connections of so many clients."""
    users = [f"user-{n}" for n in range(10)]
    with ThreadPoolExecutor(clients) as executor:
        parts = [executor.submit(keep_asking, port, where, limit, users, requests, connections) for _ in range(clients)]
        results = [part.result() for part in parts]
    return sum((told for told, _ in results), Counter()), set().union(*(workers for _, workers in results))


def test_20000_requests_on_8_workers_admit_exactly_the_limit_of_each_of_ten_users(gunicorn):
    told, workers = load(gunicorn, "/load", {"load": (500, 86400)}, clients=16, connections=25, requests=50)
    assert told.total() == 20_000
    assert told == {(f"user-{n}", status): count for n in range(10) for status, count in ((200, 500), (429, 1500))}
    assert len(workers) == WORKERS


def test_2000_requests_on_an_async_view_admit_exactly_the_limit_of_each_of_ten_users(uvicorn):
    told, _ = load(uvicorn, "/async/less", {"less": (100, 86400)}, clients=8, connections=5, requests=50)
    assert told == {(f"user-{n}", status): 100 for n in range(10) for status in (200, 429)}
