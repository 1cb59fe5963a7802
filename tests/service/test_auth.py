"""Who may call the HTTP service: tokens, the site's own authentication, CSRF, limits of the callers themselves."""

from __future__ import annotations

import logging

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import AsyncClient, Client
from django.utils.log import AdminEmailHandler
from django.views.decorators.csrf import csrf_exempt
from rlaas_django import peek
from rlaas_django.service import Caller

from tests.support.http import AUTHENTICATION
from tests.support.internals import check_settings, conf, limiter_module, service_auth
from tests.support.service import LESSER, TOKEN, TOKENS, VERBS, Service, assert_problem, digest, serve

CSRF = "django.middleware.csrf.CsrfViewMiddleware"
POLICIES = {"search": {"rate": "3/m"}, "callers": {"rate": "2/m"}}
ENDPOINTS = ["check?userId=a", "usage?userId=a", "policies", "info", "auth", "check/batch", "refund", "reset"]


@pytest.fixture(params=["wsgi", "asgi"])
def service(request, settings, configure, clock) -> Service:
    return serve(request.param, settings, configure, POLICIES)


# Tokens


@pytest.mark.parametrize("where", ENDPOINTS)
def test_without_callers_the_service_is_closed_and_says_what_to_set(service, configure, where):
    configure(SERVICE={})
    method = service.post if where in ("check/batch", "refund", "reset") else service.get
    problem = assert_problem(method(where), 403, "RATE_LIMITER['SERVICE']['TOKENS']")
    assert "manage.py rlaas token new" in problem["detail"]


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN} {TOKEN}",
        f"Bearer {digest(TOKEN)}",
        "Bearer \xe9",
    ],
)
def test_without_a_known_token_nothing_is_answered(service, client, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    for where in ENDPOINTS[:5]:
        response = service.as_caller(None).get(where, headers=headers)
        assert_problem(response, 401, "Authorization: Bearer")
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert client.keys("rlaas:rate_limit:*") == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_scheme_may_be_spelled_in_any_case(service, scheme):
    response = service.as_caller(None).get("info", headers={"Authorization": f"{scheme} {TOKEN}"})
    assert response.status_code == 200


def test_a_caller_has_several_tokens_while_they_are_rotated(service):
    for token in ("rlaas_old", LESSER):
        assert service.as_caller(token).get("check?userId=alice").status_code == 200
    assert peek("alice").current_count == 2


def test_a_caller_may_do_what_its_verbs_say(service, configure):
    for verb in VERBS:
        configure(SERVICE={"TOKENS": {"one": {"digests": [digest("rlaas_one")], "verbs": [verb]}}})
        one = service.as_caller("rlaas_one")
        allowed = {
            where.partition("?")[0]
            for where in ENDPOINTS
            if (one.post if where in ("check/batch", "refund", "reset") else one.get)(where).status_code != 403
        }
        assert allowed == {"check": {"check", "auth", "check/batch"}, "metrics": set()}.get(verb, {verb})
    problem = assert_problem(one.get("check?userId=a"), 403, "'one' may not 'check'; it may")
    assert "rlaas_one" not in problem["detail"]


def test_without_the_verb_refund_there_is_no_receipt(service):
    assert "receipt" not in service.as_caller(LESSER).post("check", {"userId": "alice"}).json()
    assert "receipt" in service.post("check", {"userId": "alice"}).json()


def test_a_receipt_of_a_policy_that_a_caller_may_not_use_is_refused(service, configure):
    tokens = {**TOKENS, "other": {"digests": [digest("rlaas_x")], "verbs": ["refund"], "policies": ["callers"]}}
    configure(SERVICE={"TOKENS": tokens})
    receipt = service.post("check", {"userId": "alice", "policy": "search"}).json()["receipt"]
    problem = assert_problem(service.as_caller("rlaas_x").post("refund", {"receipt": receipt}), 404)
    assert problem["detail"] == "There is no policy 'search'."
    assert service.post("refund", {"receipt": receipt}).json() == {"refunded": True}


def test_every_digest_is_compared_in_constant_time(service, monkeypatch):
    compared = []

    def compare_digest(*pair):
        compared.append(pair)
        return pair[0] == pair[1]

    monkeypatch.setattr(service_auth.hmac, "compare_digest", compare_digest)
    for token in (TOKEN, LESSER, "unknown"):
        compared.clear()
        service.as_caller(token).get("info")
        assert len(compared) == 3
        assert all(TOKEN not in pair for pair in compared)


def test_tokens_are_in_no_log_and_no_error_report(service, monkeypatch, caplog, settings):
    """Also when the view fails: the report that Django mails has every local variable, and the headers."""
    caplog.set_level(logging.DEBUG)

    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    async def afail(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(limiter_module, "check_each", fail)
    monkeypatch.setattr(limiter_module, "acheck_each", afail)
    client = (AsyncClient if service.handler == "asgi" else Client)(raise_request_exception=False)
    reports = []
    monkeypatch.setattr(
        AdminEmailHandler, "send_mail", lambda self, *args, **options: reports.append(f"{args}{options}")
    )
    settings.ADMINS = ["admin@example.com"]
    handler = AdminEmailHandler(include_html=True)
    logging.getLogger("django.request").addHandler(handler)
    try:
        service.get("check?userId=alice", client=client)
    finally:
        logging.getLogger("django.request").removeHandler(handler)
    service.as_caller("wrong-token").get("check?userId=alice")
    assert reports
    assert "broken" in reports[0]
    assert TOKEN not in f"{reports}{caplog.text}"
    assert "wrong-token" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "it should be a dict"),
        ({"TOKEN": {}}, "no option 'TOKEN'; did you mean 'TOKENS'?"),
        ({"TOKENS": []}, "TOKENS should be a dict"),
        ({"TOKENS": {"a b": {"digests": [digest("x")]}}}, "TOKENS['a b']: write a name"),
        ({"TOKENS": {5: {"digests": [digest("x")]}}}, "TOKENS[5]: write a name"),
        ({"TOKENS": {"a": digest("x")}}, "TOKENS['a']: write {"),
        ({"TOKENS": {"a": {}}}, "digests should list the SHA-256"),
        ({"TOKENS": {"a": {"digests": []}}}, "digests should list the SHA-256"),
        ({"TOKENS": {"a": {"digests": [TOKEN]}}}, "digests should list the SHA-256"),
        ({"TOKENS": {"a": {"digests": digest("x")}}}, "digests should be a list of texts, not str"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "verb": []}}}, "no option 'verb'; did you mean 'verbs'?"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "verbs": ["chek"]}}}, "no verb 'chek'; did you mean 'check'?"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "verbs": "check"}}}, "verbs should be a list"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "policies": ["serach"]}}}, "no policy 'serach'; did you mean"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "limit": "caller"}}}, "no policy 'caller'; did you mean"),
        ({"TOKENS": {"a": {"digests": [digest("x")], "limit": 5}}}, "no policy 5"),
    ],
)
@pytest.mark.usefixtures("no_views")
def test_a_mistake_in_the_settings_is_found_by_the_system_checks(configure, options, message):
    configure(POLICIES=POLICIES, SERVICE=options)
    (found,) = check_settings()
    assert found.id == "rlaas_django.E020"
    assert message in found.msg
    assert TOKEN not in found.msg
    with pytest.raises(ImproperlyConfigured):
        conf.config()


@pytest.mark.usefixtures("no_views")
def test_an_authenticate_that_cannot_be_called_is_found_by_the_system_checks(configure):
    for value in ("no.such.function", 5):
        configure(SERVICE={"AUTHENTICATE": value})
        assert [message.id for message in check_settings()] == ["rlaas_django.E010"]


# The site's own authentication


@csrf_exempt
def by_header(request):
    """Return who sends a header, as a site's API key would be read."""
    name = request.headers.get("X-Api-Key")
    return None if name is None else Caller(name, verbs=frozenset({"check"}), policies=frozenset({"search"}))


@csrf_exempt
async def by_header_async(request):
    return by_header(request)


def by_session(request):
    return Caller(f"user-{request.user.pk}", frozenset(VERBS)) if request.user.is_authenticated else None


@pytest.mark.parametrize("function", [by_header, by_header_async, "tests.service.test_auth.by_header"])
def test_the_site_says_who_calls(service, configure, function):
    configure(SERVICE={"AUTHENTICATE": function})
    nobody = service.as_caller(None)
    body = {"userId": "alice", "policy": "search"}
    assert_problem(nobody.post("check", body), 401, "not authenticated")
    assert nobody.post("check", body, headers={"X-Api-Key": "billing"}).status_code == 200
    assert nobody.get("check?userId=alice&policy=search", headers={"X-Api-Key": "billing"}).status_code == 200
    assert_problem(nobody.post("reset", body, headers={"X-Api-Key": "billing"}), 403, "'billing' may not 'reset'")
    assert_problem(
        nobody.post("check", {"userId": "a"}, headers={"X-Api-Key": "b"}), 404, "There is no policy 'default'."
    )


def test_tokens_and_the_sites_own_authentication_work_together(service, configure):
    configure(SERVICE={"TOKENS": TOKENS, "AUTHENTICATE": by_header})
    assert service.post("check", {"userId": "alice"}).status_code == 200
    nobody = service.as_caller(None)
    response = nobody.post("check", {"userId": "a", "policy": "search"}, headers={"X-Api-Key": "b"})
    assert response.status_code == 200
    assert_problem(nobody.post("check", {"userId": "a"}), 401)


def test_what_is_no_caller_is_a_mistake_of_the_site(service, configure):
    configure(SERVICE={"AUTHENTICATE": csrf_exempt(lambda request: "billing")})
    with pytest.raises(TypeError, match="should return a Caller"):
        service.as_caller(None).post("check", {"userId": "alice"})


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("middleware", [[*AUTHENTICATION], [*AUTHENTICATION, CSRF]])
def test_a_session_needs_the_csrf_token(service, configure, settings, django_user_model, middleware):
    settings.MIDDLEWARE = middleware
    configure(SERVICE={"AUTHENTICATE": by_session, "TOKENS": TOKENS})
    user = django_user_model.objects.create_user("ann")
    client = (AsyncClient if service.handler == "asgi" else Client)(enforce_csrf_checks=True)
    client.force_login(user)
    session = service.as_caller(None)
    body = {"userId": "alice"}
    assert_problem(session.post("check", body, client=client), 403, "CSRF")
    assert_problem(session.get("check?userId=alice", client=client), 403, "check by POST")
    assert_problem(session.post("reset", body, client=client), 403, "CSRF")
    assert peek("alice").current_count == 0
    assert session.get("usage?userId=alice", client=client).status_code == 200
    secret = "a" * 32
    client.cookies[settings.CSRF_COOKIE_NAME] = secret
    assert session.post("check", body, client=client, headers={"X-CSRFToken": secret}).status_code == 200
    assert peek("alice").current_count == 1
    assert service.post("check", body, client=client).status_code == 200  # a token needs none


# The callers' own limit


def test_a_caller_is_limited_by_its_token(service, configure):
    tokens = {name: {**entry, "limit": "callers"} for name, entry in TOKENS.items()}
    configure(SERVICE={"TOKENS": tokens})
    responses = [service.get("usage?userId=alice") for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert_problem(responses[2], 429, "its own limit, 'callers'")
    assert responses[2].headers["Retry-After"] == "60"
    assert service.as_caller(LESSER).get("check?userId=alice").status_code == 200
    assert peek("tester", "callers").current_count == 2


@pytest.fixture
def limited(service, configure):
    """A caller that may have five checks a minute."""
    configure(POLICIES={**POLICIES, "callers": {"rate": "5/m"}})
    configure(SERVICE={"TOKENS": {"tester": {**TOKENS["tester"], "limit": "callers"}}})
    return service


def batch(service, size, item=None):
    return service.post("check/batch", {"checks": [item or {"userId": "alice", "policy": "search"}] * size})


def test_a_batch_costs_its_caller_as_much_as_its_checks(limited, clock):
    assert batch(limited, 2).status_code == 200
    assert peek("tester", "callers").current_count == 2
    clock.tick(1_000)
    assert limited.get("check?userId=bob").status_code == 200
    assert batch(limited, 2).status_code == 200
    assert peek("tester", "callers").current_count == 5
    assert_problem(limited.get("check?userId=bob"), 429, "its own limit")


def test_a_batch_that_costs_more_than_is_left_is_refused_whole(limited, clock):
    assert batch(limited, 3).status_code == 200
    clock.tick(1_000)
    used = peek("alice", "search").current_count
    response = batch(limited, 3, {"userId": "bob"})
    assert_problem(response, 429, "its own limit, 'callers'; nothing was checked.")
    assert response.headers["Retry-After"] == "59"
    assert (peek("alice", "search").current_count, peek("bob").current_count) == (used, 0)
    assert peek("tester", "callers").current_count == 3
    assert batch(limited, 2).status_code == 200


def test_a_batch_that_can_never_fit_says_so(limited):
    response = batch(limited, 6)
    assert_problem(response, 429, "Send at most 5 checks at once.")
    assert "Retry-After" not in response.headers
    assert "inf" not in f"{response.headers} {response.content!r}"
    assert peek("tester", "callers").current_count == 0


@pytest.mark.parametrize(
    ("body", "status", "cost"),
    [
        ({"checks": []}, 200, 1),
        ({"checks": [{}, "bob", None, {"userId": "a", "policy": "no"}]}, 200, 4),
        ({"checks": [{}] * 1001}, 400, 1),
        ({"checks": "x" * 1001}, 400, 1),
        ("{", 400, 1),
        ("x" * 1_000_001, 413, 1),
    ],
)
def test_no_batch_is_free(limited, body, status, cost):
    assert limited.post("check/batch", body).status_code == status
    assert peek("tester", "callers").current_count == cost


def test_a_batch_costs_as_much_under_every_algorithm(limited, configure, algo):
    configure(USE_ALGO=algo, POLICIES={**POLICIES, "callers": {"rate": "1500/h"}})
    items = [{"userId": "alice", "policy": "search"}] * 1000
    assert limited.post("check/batch", {"checks": items}).status_code == 200
    assert_problem(limited.post("check/batch", {"checks": items}), 429)
    assert limited.post("check/batch", {"checks": items[:500]}).status_code == 200


@pytest.mark.usefixtures("redis_unavailable")
def test_a_limit_of_callers_that_fails_closed_is_unavailable(service, configure):
    configure(POLICIES={"callers": {"rate": "2/m", "on_failure": "closed"}, "search": {"rate": "2/m"}})
    configure(SERVICE={"TOKENS": {"tester": {**TOKENS["tester"], "limit": "callers"}}})
    assert_problem(service.get("usage?userId=alice"), 503, "fails closed")
