"""gunicorn and uvicorn as real processes, and a real HTTP client."""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from rlaas_django import Policy, peek

from tests.support.http import (
    BROWSER,
    PROBLEM_JSON,
    assert_clean_headers,
    assert_complete_if_refused,
    assert_refusal,
    counters,
    rate_limit_fields,
)
from tests.support.internals import read_minutes
from tests.support.observation import assert_soon
from tests.support.web_servers import WORKERS, serving

CLIENT = "203.0.113.9"
FORWARDED = {"X-Forwarded-For": CLIENT}
SITE = Policy("site", "1000/d", key="global")


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
    """`site.get("/inline")`: of a sync view through gunicorn, and of its async sibling through uvicorn."""
    port = request.getfixturevalue(request.param)
    below = "" if request.param == "gunicorn" else "/async"
    options = {"timeout": 30, "headers": {"X-Forwarded-For": CLIENT}, "event_hooks": {"response": [assert_complete]}}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", **options) as client:
        yield SimpleNamespace(
            get=lambda where, **options: client.get(below + where, **options),
            post=lambda where, **options: client.post(below + where, **options),
            bare=client,
        )


def assert_complete(response):
    response.read()
    assert_complete_if_refused(response, own_body=response.url.path.endswith("/own"))


def statuses(request, count):
    return [request().status_code for _ in range(count)]


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


def test_a_token_bucket_by_a_parameter_of_the_query(site):
    assert statuses(lambda: site.get("/search", params={"q": "a"}), 4) == [200, 200, 200, 429]
    assert site.get("/search", params={"q": "b"}).status_code == 200


def test_a_limit_of_one_method(site):
    assert statuses(lambda: site.get("/post"), 3) == [200] * 3
    assert statuses(lambda: site.post("/post"), 3) == [200, 200, 429]


def test_a_shadow_policy(site):
    responses = [site.get("/shadow") for _ in range(3)]
    assert [response.json()["outcomes"] for response in responses] == [[True], [True], [False]]
    assert "RateLimit" not in responses[2].headers


def test_block_false(site):
    responses = [site.get("/annotated") for _ in range(3)]
    assert [response.json()["allowed"] for response in responses] == [True, True, False]


def test_failed_logins(site):
    assert statuses(lambda: site.post("/attempts", data={"password": "right"}), 5) == [200] * 5
    assert statuses(lambda: site.post("/attempts", data={"password": "wrong"}), 4) == [401, 401, 401, 429]


def test_an_own_response(site):
    responses = [site.get("/own") for _ in range(3)]
    assert_refusal(responses[2], policies={"own": (2, 3600)}, own_body=True)
    assert responses[2].text == "slow down"


def test_a_rate_by_plan(site):
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "none"}), 3) == [200] * 3
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "free"}), 2) == [200, 429]
    assert statuses(lambda: site.get("/plan", headers={"X-Plan": "paid"}), 3) == [200, 200, 429]


def test_a_limit_by_token(site, client):
    for token in ("one", "other"):
        headers = {"Authorization": f"Bearer {token}-s3cr3t"}
        assert statuses(lambda headers=headers: site.get("/token", headers=headers), 3) == [200, 200, 429]
    assert len(counters(client)) == 2
    assert not [key for key in counters(client) if "s3cr3t" in key]


@pytest.mark.parametrize(("accept", "media_type"), [(BROWSER, "text/html"), ("text/plain", "text/plain")])
def test_the_body_is_of_the_media_type_that_the_client_prefers(site, accept, media_type):
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


def test_the_rules_of_the_middleware_and_error_pages(site):
    assert statuses(lambda: site.bare.get("/healthz"), 9) == [200] * 9
    responses = [site.bare.get(f"/api/{n}?n={n}") for n in range(4)]
    assert [response.status_code for response in responses] == [200] * 3 + [429]
    assert_refusal(responses[3], policies={"api": (3, 3600)})
    for where, status in (("/default", 200), ("/default/nowhere", 404), ("/default/failing", 500)):
        response = site.bare.get(where)
        assert response.status_code == status
        assert len(assert_clean_headers(response)) == 5
        assert rate_limit_fields(response)[0] == {"default": (5, 60)}


def test_forged_headers_do_not_evade_the_limit(site):
    """The client is left of the address that the trusted proxy has added."""
    forged = [{"X-Forwarded-For": f"198.51.100.{n}, {CLIENT}"} for n in range(10)]
    assert [site.get("/inline", headers=each).status_code for each in forged] == [200] * 2 + [429] * 8


def test_workers_share_the_count(gunicorn):
    """Each request on a connection of its own, so that more than one worker serves them."""
    url = f"http://127.0.0.1:{gunicorn}/several"
    assert statuses(lambda: httpx.get(url, timeout=30), 6) == [200, 200, 429, 429, 429, 429]


# Load


def keep_requesting(port, where, limit, users, requests, connections):
    """Return how often each user got each status, over connections that are kept alive, and the workers."""
    seen, workers = Counter(), set()
    for _ in range(connections):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for n in range(requests):
            user = users[n % len(users)]
            connection.request("GET", where, headers={"X-Api-Key": user})
            response = connection.getresponse()
            answer = SimpleNamespace(status_code=response.status, headers=response.headers, content=response.read())
            seen[user, answer.status_code] += 1
            if answer.status_code == 200:
                workers.add(answer.headers["X-Worker"])
            else:
                assert_refusal(answer, policies=limit, media_type=PROBLEM_JSON)
        connection.close()
    return seen, workers


def load(port, where, limit, *, clients, connections, requests):
    """Return how often each of ten users got each status, with so many clients at once, and the workers."""
    users = [f"user-{n}" for n in range(10)]
    with ThreadPoolExecutor(clients) as executor:
        parts = [
            executor.submit(keep_requesting, port, where, limit, users, requests, connections) for _ in range(clients)
        ]
        results = [part.result() for part in parts]
    return sum((seen for seen, _ in results), Counter()), set().union(*(workers for _, workers in results))


@pytest.mark.parametrize(
    ("where", "limit", "connections"), [("less", 100, 2), pytest.param("load", 500, 25, marks=pytest.mark.slow)]
)
def test_many_requests_on_8_workers_admit_exactly_the_limit_of_each_of_ten_users(gunicorn, where, limit, connections):
    """1,600 requests in the quick tier, 20,000 in the long one."""
    policies = {where: (limit, 86400)}
    seen, workers = load(gunicorn, f"/{where}", policies, clients=16, connections=connections, requests=50)
    each = 16 * connections * 50 // 10
    assert seen == {
        (f"user-{n}", status): count for n in range(10) for status, count in ((200, limit), (429, each - limit))
    }
    assert len(workers) == WORKERS if limit == 500 else len(workers) > 1


@pytest.mark.slow
def test_2000_requests_on_an_async_view_admit_exactly_the_limit_of_each_of_ten_users(uvicorn):
    seen, _ = load(uvicorn, "/async/less", {"less": (100, 86400)}, clients=8, connections=5, requests=50)
    assert seen == {(f"user-{n}", status): 100 for n in range(10) for status in (200, 429)}


# The end of a server


@pytest.mark.slow
def test_a_server_that_is_terminated_loses_no_statistics(tmp_path):
    """Not so uvicorn, which ends by the signal, after which `atexit` functions do not run."""
    with serving("gunicorn", tmp_path / "log") as port:
        assert httpx.get(f"http://127.0.0.1:{port}/api/x", headers=FORWARDED).status_code == 200
    assert sum(minute.allowed for minute in read_minutes(["api"])["api"]) == 1


# Clients that hang up


@pytest.mark.slow
@pytest.mark.parametrize("where", ["apart", "stacked", "together", "def"])
def test_refused_clients_that_hang_up_at_once_leave_a_shared_limit_as_it_was(uvicorn, where):
    """Where the refund was cancelled with the request, 8 to 9 of 10 such requests used up a unit."""
    request = f"GET /shared/{where} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {CLIENT}\r\n\r\n".encode()
    allowed = statuses(lambda: httpx.get(f"http://127.0.0.1:{uvicorn}/shared/{where}", headers=FORWARDED), 3)
    assert allowed == [200, 200, 429]

    def hang_up(n):
        with socket.create_connection(("127.0.0.1", uvicorn)) as client:
            client.sendall(request)
            if n % 2:  # a reset, and not an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(600)))
    # Answered after all that was sent before; refunds take another moment.
    assert httpx.get(f"http://127.0.0.1:{uvicorn}/healthz").text == "ok"
    assert_soon(lambda: peek({"global": ""}, SITE).current_count == 2)
    time.sleep(0.5)
    assert peek({"global": ""}, SITE).current_count == 2
