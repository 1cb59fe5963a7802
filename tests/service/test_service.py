"""The HTTP service: every endpoint, sync and async, on a real server."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from asgiref.testing import ApplicationCommunicator
from django.apps import apps
from django.contrib import admin
from django.core.handlers.asgi import ASGIHandler
from django.test import AsyncClient
from django.urls import path, reverse
from prometheus_client.parser import text_string_to_metric_families
from rlaas_django import check, peek

from tests.support.http import AUTHENTICATION, OURS, rate_limit_fields
from tests.support.internals import (
    ALGORITHMS,
    SCRIPTS,
    check_settings,
    flush_statistics,
    limiter_module,
    read_minutes,
    read_refusals,
    total,
)
from tests.support.service import LESSER, TOKEN, TOKENS, Service, assert_problem, serve, urlconf

POLICIES = {
    "search": {"rate": "3/m"},
    "login": {"rate": "2/m", "key": "ip"},
    "site": {"rate": "4/m", "key": "global"},
    "key": {"rate": "2/m", "key": "token"},
    "strict": {"rate": "2/m", "on_failure": "closed"},
    "counted": {"rate": "2/m", "on_failure": "local"},
    "large": {"rate": "20000/h"},
    "quiet": {"rate": "1/m", "shadow": True},
}


@pytest.fixture(params=["wsgi", "asgi"])
def service(request, settings, configure, clock) -> Service:
    return serve(request.param, settings, configure, POLICIES)


# Check


def test_the_answers_are_those_of_the_original_service(service):
    responses = [service.get("check?userId=alice") for _ in range(6)]
    assert [response.status_code for response in responses] == [200] * 5 + [429]
    assert responses[0].content == b"User is allowed"
    assert responses[5].content == b"User is not allowed...Try after 60 seconds."
    assert responses[0].headers["Content-Type"] == responses[5].headers["Content-Type"] == "text/plain; charset=utf-8"


def test_the_seconds_are_exact(service, clock):
    for _ in range(5):
        service.get("check?userId=alice")
        clock.tick(1_700)
    response = service.get("check?userId=alice")
    assert response.content == b"User is not allowed...Try after 52 seconds."  # 60 - 5 * 1.7, rounded up
    assert response.headers["Retry-After"] == "52"
    clock.tick(51_499)
    assert service.get("check?userId=alice").status_code == 429
    clock.tick(1)
    assert service.get("check?userId=alice").status_code == 200


def test_every_answer_has_the_standard_headers_and_is_not_cached(service):
    allowed = service.get("check?userId=alice&policy=search")
    assert rate_limit_fields(allowed) == ({"search": (3, 60)}, {"search": (2, 60)})
    assert allowed.headers["X-RateLimit-Remaining"] == "2"
    assert "Retry-After" not in allowed.headers
    service.get("check?userId=alice&policy=search&cost=2")
    refused = service.get("check?userId=alice&policy=search")
    assert rate_limit_fields(refused)[1] == {"search": (0, 60)}
    assert refused.headers["Retry-After"] == "60"
    for response in (allowed, refused):
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Vary"] == "Accept"


@pytest.mark.parametrize(
    ("query", "accept", "content_type"),
    [
        ("", "*/*", "text/plain; charset=utf-8"),
        ("", "text/html, */*;q=0.8", "text/plain; charset=utf-8"),
        ("", "application/json", "application/json"),
        ("", "application/json, text/plain;q=0.5", "application/json"),
        ("", "nonsense", "text/plain; charset=utf-8"),
        ("", "application/json," * 30, "text/plain; charset=utf-8"),
        ("&format=json", "text/plain", "application/json"),
        ("&format=text", "application/json", "text/plain; charset=utf-8"),
    ],
)
def test_json_by_accept_or_format(service, query, accept, content_type):
    response = service.get(f"check?userId=alice{query}", headers={"Accept": accept})
    assert response.headers["Content-Type"] == content_type


def test_the_json_of_a_check(service, clock):
    answer = service.get("check?userId=alice&policy=search&format=json").json()
    receipt = answer.pop("receipt")
    assert receipt
    figures = {"limit": 3, "currentCount": 0, "remaining": 2, "retryAfter": 0.0, "resetAfter": 60.0, "ttl": 60}
    outcome = {"policy": "search", "allowed": True, **figures, "shadow": False, "degraded": False}
    assert answer == {"allowed": True, "policy": "search", **figures, "degraded": False, "outcomes": [outcome]}
    clock.tick(100)
    response = service.post("check", {"userId": "alice", "policy": "search", "cost": 3})
    assert response.status_code == 429
    answer = response.json()
    assert (answer["allowed"], answer["currentCount"], answer["remaining"], answer["retryAfter"]) == (False, 1, 2, 59.9)
    assert "receipt" not in answer


def test_seconds_have_at_most_three_decimals(service, clock):
    for ms in range(1, 400, 7):
        clock.tick(ms)
        answer = service.post("usage", {"userId": "alice", "policy": "search", "cost": 3}).json()
        for figures in (answer, *answer["outcomes"]):
            for name in ("retryAfter", "resetAfter"):
                assert len(repr(figures[name]).partition(".")[2]) <= 3
        service.get("check?userId=alice&policy=search")


@pytest.mark.parametrize("handler", ["wsgi", "asgi"])
def test_the_seconds_of_a_cached_refusal_have_at_most_three_decimals(settings, configure, handler):
    service = serve(handler, settings, configure, POLICIES)
    responses = [service.post("check", {"userId": number % 2, "policy": "search"}) for number in range(20)]
    waits = {response.json()[name] for response in responses for name in ("retryAfter", "resetAfter")}
    assert max(len(repr(wait).partition(".")[2]) for wait in waits) <= 3


def test_a_cost_that_never_fits_has_no_wait(service):
    response = service.post("check", {"userId": "alice", "policy": "search", "cost": 10**400})
    assert response.status_code == 429
    assert response.json()["retryAfter"] is None
    assert "Retry-After" not in response.headers
    assert service.get("check?userId=alice&policy=search&cost=9").content == b"User is not allowed."


def test_several_identities_and_policies_are_one_decision(service):
    body = {
        "identity": {"user": 42, "ip": "203.0.113.9", "token": "s3cret"},
        "policies": ["search", "login", "key", "site"],
    }
    answers = [service.post("check", body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    refused = answers[2].json()
    assert [outcome["allowed"] for outcome in refused["outcomes"]] == [True, False, False, True]
    assert peek("42", "search").current_count == 2
    assert peek("203.0.113.9", "login").current_count == 2
    assert "s3cret" not in answers[2].content.decode()
    assert "receipt" in answers[0].json()


def test_a_policy_for_all_needs_no_identity(service):
    assert [service.get("check?policy=site").status_code for _ in range(5)] == [200] * 4 + [429]


def test_a_shadow_policy_refuses_nobody(service):
    assert [service.get("check?userId=alice&policy=quiet").status_code for _ in range(2)] == [200] * 2
    answer = service.get("check?userId=alice&policy=quiet&format=json").json()
    assert (answer["allowed"], answer["outcomes"][0]["allowed"]) == (True, False)


def test_views_and_the_service_share_counters(service):
    assert service.get("/search?q=x").status_code == 200  # counts by address
    assert check({"ip": "127.0.0.1"}, "search").allowed
    assert service.post("check", {"identity": {"ip": "127.0.0.1"}, "policy": "search"}).status_code == 200
    assert service.get("/search").status_code == 429
    assert service.get("check?ip=127.0.0.1&policy=search").status_code == 429


# Batch


def test_a_batch_decides_each_check_by_itself(service):
    items = [
        *[{"userId": "alice", "policy": "search"}] * 4,
        {"userId": "bob", "policies": ["search", "default"], "cost": 2},
        {"userId": "", "policy": "search"},
        {"userId": "bob", "policy": "serach"},
        "bob",
        {"userId": "bob", "cost": -1},
        {"identity": {"ip": "203.0.113.9"}, "policy": "login"},
    ]
    response = service.post("check/batch", {"checks": items})
    assert response.status_code == 200
    results = response.json()["results"]
    assert [result.get("allowed") for result in results] == [True] * 3 + [False, True, None, None, None, None, True]
    assert [result["error"]["status"] for result in results if "error" in result] == [400, 404, 400, 400]
    assert "did you mean 'search'?" in results[6]["error"]["detail"]
    assert [len(result.get("outcomes", [])) for result in results] == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert all(("receipt" in result) == result.get("allowed", False) for result in results)
    assert peek("bob", "search").current_count == 2


def test_a_batch_of_a_thousand_is_decided(service, configure):
    configure(MAX_REQUESTS=10)
    items = [{"userId": f"user-{i % 500}"} for i in range(1000)]
    results = service.post("check/batch", {"checks": items}).json()["results"]
    assert all(result["allowed"] for result in results)
    assert {peek(f"user-{i}").current_count for i in range(500)} == {2}


def test_an_empty_batch_is_answered(service):
    assert service.post("check/batch", {"checks": []}).json() == {"results": []}


@pytest.mark.parametrize("body", [{}, {"checks": {}}, {"checks": [{}] * 1001}, {"check": []}, []])
def test_what_is_no_batch_is_an_error(service, body):
    assert_problem(service.post("check/batch", body), 400)


# Usage, refund, reset


def test_usage_charges_nothing(service):
    check("alice", "search")
    for _ in range(3):
        response = service.get("usage?userId=alice&policy=search")
        assert response.status_code == 200
        answer = response.json()
        assert (answer["currentCount"], answer["remaining"], answer["allowed"]) == (1, 2, True)
        assert "receipt" not in answer
    response = service.post("usage", {"userId": "alice", "policy": "search", "cost": 3})
    assert (response.status_code, response.json()["allowed"]) == (200, False)
    assert rate_limit_fields(response)[1] == {"search": (2, 60)}


def test_a_receipt_is_refunded_once(service):
    service.post("check", {"userId": "alice"})
    receipt = service.post("check", {"userId": "alice", "cost": 2}).json()["receipt"]
    assert service.post("refund", {"receipt": receipt}).json() == {"refunded": True}
    assert service.post("refund", {"receipt": receipt}).json() == {"refunded": False}
    assert peek("alice").current_count == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"receipt": ""},
        {"receipt": "x:y"},
        {"receipt": 5},
        {"receipt": None},
        {"receipt": [":"]},
        {"reciept": "x"},
        "receipt",
    ],
)
def test_what_is_no_receipt_is_an_error(service, body):
    assert_problem(service.post("refund", body), 400)


def test_a_reset_deletes_the_usage(service):
    for _ in range(3):
        check("alice", "search")
    check("bob", "search")
    assert service.post("reset", {"userId": "alice", "policy": "search"}).json() == {"deleted": 1}
    assert peek("alice", "search").current_count == 0
    assert peek("bob", "search").current_count == 1
    assert_problem(service.post("reset", {"userId": "alice", "cost": 1}), 400, "no field 'cost'")


# What is there


def test_the_policies_that_a_caller_may_use(service):
    service.token = None
    assert service.get("policies").status_code == 401
    every = Service(service.handler).get("policies").json()["policies"]
    assert [policy["name"] for policy in every] == ["default", *POLICIES]
    assert every[2] == {
        "name": "login",
        "limit": 2,
        "window": 60,
        "key": "ip",
        "algorithm": "sliding-window-algo",
        "burst": None,
        "onFailure": "open",
        "shadow": False,
    }


def test_info_names_versions(service):
    info = service.get("info").json()
    assert info["algorithms"] == [*ALGORITHMS]
    assert info["defaultAlgorithm"] == "sliding-window-algo"
    assert [script["sha1"] for script in info["scripts"]] == [script.sha for script in SCRIPTS]


def test_health_is_open_to_a_load_balancer(service, client):
    response = service.as_caller(None).get("health")
    assert (response.status_code, response.json()) == (200, {"status": "UP", "reasons": []})
    assert service.as_caller(None).request("head", "health").status_code == 200
    assert client.keys() == []


@pytest.mark.usefixtures("redis_unavailable")
def test_health_says_that_redis_is_unavailable(service):
    response = service.as_caller(None).get("health")
    assert response.status_code == 503
    assert response.json()["status"] == "DOWN"
    assert response.json()["reasons"]
    assert "nowhere.sock" not in response.content.decode()


def test_without_metrics_the_service_says_how_to_get_them(service):
    assert_problem(service.get("metrics"), 404, "'rlaas_django.integrations.prometheus.Metrics' to INSTALLED_APPS")


def test_metrics(service, monkeypatch):
    monkeypatch.setattr(apps, "is_installed", lambda name: True)
    response = service.get("metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain")
    assert [*text_string_to_metric_families(response.content.decode())]


# Errors


@pytest.mark.parametrize(
    ("query", "status", "detail"),
    [
        ("", 400, '"userId"'),
        ("userId=", 400, "'userId' should be text"),
        ("userId=alice&userId=bob", 400, "more than once"),
        ("userID=alice", 400, "no parameter 'userID'; did you mean 'userId'?"),
        ("userId=alice&policy=serach", 404, "no policy 'serach'; did you mean 'search'?"),
        ("userId=alice&policy=", 404, "no policy ''"),
        (f"userId=alice&policy={'x' * 5000}", 404, "no policy 'xxx"),
        ("userId=alice&cost=-1", 400, '"cost" should be a whole number'),
        ("userId=alice&cost=1.5", 400, '"cost" should be a whole number'),
        ("userId=alice&cost=many", 400, '"cost" should be a whole number'),
        ("userId=alice&cost=", 400, '"cost" should be a whole number'),
        ("userId=alice&cost=20000&policy=large", 400, "the most that 'sliding-window-algo' accepts"),
        ("userId=alice&format=xml", 400, "'json' or 'text'"),
        ("userId=alice&policy=login", 400, "(ip)"),
        ("ip=&policy=login", 400, "'ip' should be text"),
    ],
)
def test_a_bad_query_is_a_problem_and_charges_nothing(service, client, query, status, detail):
    for where in ("check", "usage"):
        if "format" not in query or where == "check":
            assert_problem(service.get(f"{where}?{query}"), status, detail)
    assert client.keys("rlaas:rate_limit:*") == []


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ("", 400, "not JSON"),
        ("{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        ('{"userId": "alice", "cost": NaN}', 400, '"cost" should be a whole number'),
        ('{"userId": "alice", "cost": ' + "9" * 5000 + "}", 400, "not JSON"),
        ("[" * 100_000, 400, "not JSON"),
        ("null", 400, "JSON object"),
        ("[]", 400, "JSON object"),
        ({}, 400, '"userId"'),
        ({"userId": ""}, 400, "'userId' should be text"),
        ({"userId": None}, 400, "'userId' should be text"),
        ({"userId": True}, 400, "'userId' should be text"),
        ({"userId": 1.5}, 400, "'userId' should be text"),
        ({"userId": ["alice"]}, 400, "'userId' should be text"),
        ({"user": "alice"}, 400, "no field 'user'; did you mean 'userId'?"),
        ({"identity": "alice"}, 400, '"identity" should be an object'),
        ({"identity": {}}, 400, '"userId"'),
        ({"identity": {"usr": "alice"}}, 400, "did you mean 'user'?"),
        ({"identity": {"user": ""}}, 400, "'user' should be text"),
        ({"userId": "alice", "identity": {"user": "bob"}}, 400, "not both"),
        ({"userId": "alice", "policy": "serach"}, 404, "did you mean 'search'?"),
        ({"userId": "alice", "policy": 5}, 400, "the name of a policy"),
        ({"userId": "alice", "policies": "search"}, 400, "a list of names"),
        ({"userId": "alice", "policies": []}, 400, "a list of names"),
        ({"userId": "alice", "policies": ["search", None]}, 400, "a list of names"),
        ({"userId": "alice", "policy": "search", "policies": ["search"]}, 400, "not both"),
        ({"userId": "alice", "cost": -1}, 400, '"cost"'),
        ({"userId": "alice", "cost": "1"}, 400, '"cost"'),
        ({"userId": "alice", "cost": True}, 400, '"cost"'),
        ({"userId": "alice", "cost": 1.5}, 400, '"cost"'),
        ({"userId": "alice", "cost": None}, 400, '"cost"'),
        ({"userId": "alice", "x" * 5000: 1}, 400, "no field 'xxx"),
    ],
)
def test_a_bad_body_is_a_problem_and_charges_nothing(service, client, body, status, detail):
    problem = assert_problem(service.post("check", body), status, detail)
    assert len(problem["detail"]) < 500
    assert client.keys("rlaas:rate_limit:*") == []


def test_a_body_over_a_megabyte_is_too_large(service, settings):
    body = json.dumps({"userId": "x" * 1_000_000})
    assert_problem(service.post("check", body), 413, "1,000,000 bytes")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    assert_problem(service.post("check", {"userId": "x" * 2000}), 413)


@pytest.mark.django_db
async def test_a_body_without_a_length_is_bounded(settings, configure):
    settings.ROOT_URLCONF = urlconf("asgi")
    configure(SERVICE={"TOKENS": TOKENS}, POLICIES=POLICIES)
    headers = [(b"authorization", f"Bearer {LESSER}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/rlaas/check", "headers": headers, "query_string": b""}
    handler = ApplicationCommunicator(ASGIHandler(), scope)
    await handler.send_input({"type": "http.request", "body": b"x" * 1_000_001})
    assert (await handler.receive_output(20))["status"] == 413
    await handler.receive_output(20)
    await handler.wait(20)


@pytest.mark.parametrize(
    ("method", "where", "allow"),
    [
        ("put", "check", "GET, POST, HEAD"),
        ("get", "check/batch", "POST"),
        ("get", "refund", "POST"),
        ("get", "reset", "POST"),
        ("post", "policies", "GET, HEAD"),
        ("delete", "usage", "GET, POST, HEAD"),
        ("post", "health", "GET, HEAD"),
        ("options", "info", "GET, HEAD"),
        ("trace", "auth", "GET, POST, PUT, PATCH, DELETE, OPTIONS, HEAD"),
    ],
)
def test_a_wrong_method_names_the_right_ones(service, method, where, allow):
    response = service.request(method, where)
    assert_problem(response, 405)
    assert response.headers["Allow"] == allow


def test_unusual_identities_are_counted(service):
    for name in ("a:b/c=d", "{x}", "global", "😀", "\ud800", "x" * 5000, "\0", "\r\n", 0, 10**30):
        body = {"userId": name, "policy": "search"}
        assert [service.post("check", body).status_code for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize("where", ["", "chek", "check/", "check/batch/x", "authx", "openapi.yaml", "%F0%9F%98%80"])
@pytest.mark.parametrize("method", ["get", "post", "put", "delete", "options"])
def test_an_unknown_path_is_a_problem(service, where, method):
    problem = assert_problem(service.as_caller(None).request(method, where), 404)
    assert "openapi.json" in problem["detail"]


# Redis is unavailable


@pytest.mark.usefixtures("redis_unavailable")
def test_without_redis_each_policy_fails_as_it_says(service):
    opened = service.post("check", {"userId": "alice", "policy": "search"})
    assert (opened.status_code, opened.json()["allowed"], opened.json()["degraded"]) == (200, True, True)
    assert "receipt" not in opened.json()
    assert service.get("check?userId=alice").content == b"User is allowed"
    for response in (
        service.post("check", {"userId": "alice", "policy": "strict"}),
        service.get("usage?userId=a&policy=strict"),
    ):
        assert_problem(response, 503, "fails closed")
        assert response.headers["Retry-After"] == "1"
    counted = [service.post("check", {"userId": "alice", "policy": "counted"}) for _ in range(3)]
    assert [response.status_code for response in counted] == [200, 200, 429]
    assert all(response.json()["degraded"] for response in counted)
    results = service.post("check/batch", {"checks": [{"userId": "a", "policy": "strict"}, {"userId": "a"}]}).json()
    assert [(result["allowed"], result["degraded"]) for result in results["results"]] == [(False, True), (True, True)]


@pytest.mark.usefixtures("redis_unavailable")
def test_without_redis_nothing_is_reset_or_refunded(service):
    assert_problem(service.post("reset", {"userId": "alice"}), 503, "Redis is unavailable")


def test_a_refund_without_redis_may_be_asked_for_again(service, use, settings):
    caches = settings.CACHES
    receipt = service.post("check", {"userId": "alice"}).json()["receipt"]
    use("unix:///nowhere.sock")
    assert_problem(service.post("refund", {"receipt": receipt}), 503)
    settings.CACHES = caches
    assert service.post("refund", {"receipt": receipt}).json() == {"refunded": True}


# Handlers, statistics, log


async def test_under_asgi_the_event_loop_decides(settings, configure, monkeypatch):
    settings.ROOT_URLCONF = urlconf("asgi")
    configure(SERVICE={"TOKENS": TOKENS}, POLICIES=POLICIES)
    loops = []

    async def acheck_each(checks):
        loops.append(asyncio.get_running_loop())
        return limiter_module.check_each(checks)

    monkeypatch.setattr(limiter_module, "acheck_each", acheck_each)
    response = await AsyncClient().get("/rlaas/check?userId=a", headers={"Authorization": f"Bearer {LESSER}"})
    assert response.status_code == 200
    assert loops == [asyncio.get_running_loop()]


@pytest.mark.parametrize(("handler", "urls"), [("asgi", "wsgi"), ("wsgi", "asgi")])
def test_the_urls_of_the_other_handler_work(settings, configure, handler, urls):
    settings.ROOT_URLCONF = urlconf(urls)
    configure(SERVICE={"TOKENS": TOKENS}, POLICIES=POLICIES)
    statuses = [Service(handler).get("check?userId=alice&policy=search").status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


def test_the_middleware_does_not_limit_the_service(service, settings):
    settings.MIDDLEWARE = [OURS]
    assert [service.get(f"check?userId=user-{i}").status_code for i in range(9)] == [200] * 9
    assert [service.get("/search").status_code for _ in range(4)] == [200, 200, 200, 429]


def test_the_service_works_where_every_request_is_a_transaction(service, settings):
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
    try:
        assert service.get("check?userId=alice").status_code == 200
    finally:
        settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False


def test_decisions_are_in_the_statistics_under_the_name_of_the_caller(service):
    for _ in range(4):
        service.get("check?userId=alice&policy=search")
    service.post("check/batch", {"checks": [{"userId": "bob", "policy": "search"}] * 4})
    service.get("auth/search", headers={"X-RLaaS-User": "alice"})
    service.get("usage?userId=alice&policy=search")
    flush_statistics()
    counts = total(read_minutes(["search"])["search"])
    assert (counts.allowed, counts.refused) == (6, 3)
    assert {refusal.source for refusal in read_refusals()} == {"service:tester"}


def test_the_admin_shows_views_and_callers(service, settings, admin_client):
    settings.ROOT_URLCONF.urlpatterns.append(path("admin/", admin.site.urls))
    settings.MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware"]
    for where in ("/search", "check?ip=127.0.0.1&policy=search"):
        for _ in range(4):
            service.get(where)
    flush_statistics()
    page = admin_client.get(reverse("admin:rlaas_django_ratelimit_refusals")).content.decode()
    assert "service:tester" in page
    assert "/search" in page
    assert TOKEN not in page


def test_a_refusal_is_no_error_in_the_log_of_django(service, caplog):
    caplog.set_level(logging.WARNING, logger="django.request")
    for _ in range(4):
        service.get("check?userId=alice&policy=search")
    assert not [record for record in caplog.records if record.name == "django.request"]


def test_callers_may_not_use_other_policies(service):
    lesser = service.as_caller(LESSER)
    assert lesser.post("check", {"userId": "alice", "policy": "search"}).status_code == 200
    assert_problem(lesser.get("check?userId=alice&policy=login"), 404)


@pytest.mark.parametrize(("used", "unknown"), [("login", "nigol"), ("large", "egral"), ("searchx", "seerch")])
def test_a_policy_that_a_caller_may_not_use_is_answered_as_one_that_does_not_exist(service, configure, used, unknown):
    """Also `searchx`, which is near one that it may use; a name that is near one that it may not is not completed."""
    verbs = ["check", "usage", "reset", "refund"]
    configure(POLICIES={**POLICIES, "searchx": {"rate": "3/m"}})
    configure(SERVICE={"TOKENS": {**TOKENS, "lesser": {**TOKENS["lesser"], "verbs": verbs}}})
    lesser = service.as_caller(LESSER)

    def answers(policy):
        body = {"userId": "alice", "policy": policy}
        several = {"userId": "alice", "policies": ["search", policy]}
        responses = [
            *(lesser.get(f"{where}?userId=alice&policy={policy}") for where in ("check", "usage")),
            *(lesser.post(where, each) for where in ("check", "usage", "reset") for each in (body, several)),
            lesser.get(f"auth/search,{policy}", headers={"X-RLaaS-User": "alice"}),
        ]
        problems = [assert_problem(response, 404) for response in responses]
        problems += [result["error"] for result in lesser.post("check/batch", {"checks": [body]}).json()["results"]]
        return [{**problem, "detail": problem["detail"].replace(policy, "<name>", 1)} for problem in problems]

    assert answers(used) == answers(unknown)
    detail = assert_problem(lesser.get(f"check?userId=alice&policy={used}y"), 404)["detail"]
    assert f"did you mean '{used}'" not in detail
    identity = {"user": "alice", "ip": "203.0.113.9"}
    receipt = service.post("check", {"identity": identity, "policy": used}).json()["receipt"]
    refusal = assert_problem(lesser.post("refund", {"receipt": receipt}), 404)["detail"]
    assert refusal == assert_problem(lesser.get(f"check?userId=alice&policy={used}"), 404)["detail"]


@pytest.mark.usefixtures("no_views")
def test_a_service_without_callers_is_found_by_the_system_checks(settings, configure):
    assert check_settings() == []
    settings.ROOT_URLCONF = urlconf()
    assert [message.id for message in check_settings()] == ["rlaas_django.W020"]
    configure(SERVICE={"TOKENS": TOKENS}, POLICIES=POLICIES)
    assert "rlaas_django.W020" not in [message.id for message in check_settings()]
