"""A rule of the middleware and the decorators of the view: checks of their own, which know of each other."""

from __future__ import annotations

import functools

import pytest
from django.http import HttpResponse
from django.test import Client
from django.utils.decorators import method_decorator
from django.views import View
from rlaas_django import Policy, peek, rate_limit

from tests.support.http import OURS, assert_refusal, both_ways, ok
from tests.support.internals import YEAR, refusal_cache
from tests.support.observation import commands_sent

CSRF = "django.middleware.csrf.CsrfViewMiddleware"
CLIENT = {"ip": "203.0.113.9", "global": ""}
OWN, OUTER = Policy("own", (2, YEAR), key="ip"), Policy("outer", "9/h", key="ip")


@pytest.fixture
def site(site, configure):
    policies = {"site": {"rate": "100/h", "key": "global"}}
    configure(POLICIES=policies, MIDDLEWARE=[{"path": "/", "policies": ["site"]}], LOCAL_REFUSALS=False)
    return site


def charged(*policies) -> list[int]:
    return [peek(CLIENT, policy).current_count for policy in policies]


def calls_of(site, server, method: str = "get") -> int:
    """Return how many calls of a script a request takes."""
    site.request(method)  # connects, and loads the scripts
    with commands_sent(server.url) as names:
        site.request(method)
    return names.count("EVALSHA")


def deferred(limit):
    """Put another decorator above a limit."""

    def decorate(view):
        limited = limit(view)

        @functools.wraps(limited)
        def above(request, *args, **kwargs):
            return HttpResponse(status=403) if "rejected" in request.GET else limited(request, *args, **kwargs)

        return above

    return decorate


@both_ways
def test_the_rule_and_each_decorator_are_checked_one_after_the_other(own, site):
    site.serve(rate_limit(OUTER)(rate_limit(OWN)(site.view(ok))), middleware=[OURS])
    assert calls_of(site, own) == 3
    assert charged("site", OUTER, OWN) == [2, 2, 2]


@both_ways
@pytest.mark.parametrize("limit", [rate_limit("site"), rate_limit("site", OWN)], ids=["alone", "with another"])
def test_a_policy_that_the_rule_and_the_decorator_name_is_charged_once(site, limit):
    site.serve(limit(site.view(ok)), middleware=[OURS])
    assert site.statuses(2) == [200, 200]
    assert charged("site") == [2]


@both_ways
def test_a_decorator_with_nothing_of_its_own_takes_no_call(own, site):
    site.serve(rate_limit("site")(site.view(ok)), middleware=[OURS])
    assert calls_of(site, own) == 1


@both_ways
def test_a_request_that_the_decorator_refuses_is_refunded_to_the_rule(site):
    site.serve(rate_limit(OUTER)(rate_limit(OWN)(site.view(ok))), middleware=[OURS])
    assert site.statuses(5) == [200, 200, 429, 429, 429]
    assert charged("site", OUTER, OWN) == [2, 2, 2]


def test_such_a_refund_leaves_the_cached_refusals_of_other_clients(own, site, configure, monkeypatch):
    """So that an attack on a view below a rule stays cheap."""
    monkeypatch.setattr(refusal_cache, "MAX_AGE", 60.0)
    configure(POLICIES={"site": {"rate": (3, YEAR), "key": "ip"}}, LOCAL_REFUSALS=True)
    site.serve({"": ok, "limited": rate_limit(OWN)(ok)}, middleware=[OURS])
    assert site.statuses(4) == [200, 200, 200, 429]
    assert site.statuses(3, "/limited", address="198.51.100.7") == [200, 200, 429]
    with commands_sent(own.url) as names:
        assert site.statuses(3) == [429] * 3
    assert names.count("EVALSHA") == 0


@both_ways
def test_a_request_that_the_rule_refuses_never_reaches_the_decorator(own, site, configure):
    configure(POLICIES={"site": {"rate": "1/h", "key": "global"}})
    site.serve(rate_limit(OWN)(site.view(ok)), middleware=[OURS])
    site.get()
    with commands_sent(own.url) as names:
        refused = [site.get() for _ in range(3)]
    assert names.count("EVALSHA") == 3
    assert charged("site", OWN) == [1, 1]
    for response in refused:
        assert_refusal(response, policies=["site"], violated=["site"])


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(rate_limit, id="the default policy"),
        pytest.param(deferred(rate_limit(OWN)), id="below another decorator"),
        pytest.param(rate_limit(OUTER, cost=2), id="another cost"),
        pytest.param(rate_limit(OWN, block=False), id="block=False"),
        pytest.param(rate_limit(OWN, charge_when=lambda response: True), id="charge_when"),
        pytest.param(rate_limit(OWN, charge_on_error=False), id="charge_on_error"),
        pytest.param(rate_limit(OWN, response=lambda request, decision: HttpResponse("later")), id="response"),
        pytest.param(rate_limit("2/h", key=lambda request: "x", group="by-function"), id="a function as key"),
        pytest.param(rate_limit(rate=lambda request: "2/h", group="by-rate"), id="a function as rate"),
        pytest.param(method_decorator(rate_limit(OWN), name="dispatch"), id="a class"),
    ],
)
def test_whatever_the_decorator_is_it_is_a_check_of_its_own(own, site, limit):
    class Page(View):
        def get(self, request):
            return ok(request)

    view = limit(Page).as_view() if "method_decorator" in repr(limit) else limit(ok)
    site.serve(view, middleware=[OURS])
    assert calls_of(site, own) == 2
    assert charged("site") == [2]


def test_a_request_that_does_not_get_to_the_limit_is_not_charged(site):
    site.serve(deferred(rate_limit(OWN))(ok), middleware=[OURS])
    assert site.get("/?rejected").status_code == 403
    assert charged("site", OWN) == [1, 0]


def test_a_method_that_the_decorator_does_not_limit_is_not_charged(site):
    site.serve(rate_limit(OWN, method="POST")(site.view(ok)), middleware=[OURS])
    assert site.get().status_code == 200
    assert charged("site", OWN) == [1, 0]


def test_a_page_of_another_site_cannot_use_up_the_limits_of_a_form(site):
    site.serve(rate_limit(OWN)(ok), middleware=[CSRF, OURS])
    client = Client(enforce_csrf_checks=True, REMOTE_ADDR=CLIENT["ip"])
    assert [client.post("/").status_code for _ in range(3)] == [403] * 3
    assert charged("site", OWN) == [3, 0]


def test_a_policy_of_the_same_name_is_the_rule_s(site):
    site.serve(rate_limit(Policy("site", "1/h", key="global"))(ok), middleware=[OURS])
    assert site.statuses(3) == [200] * 3


class Callable:
    __slots__ = ()
    __hash__ = None

    def __call__(self, request):
        return ok(request)


def test_a_view_may_be_any_callable(site):
    site.serve({"": rate_limit(OWN)(ok), "other": Callable()}, middleware=[OURS])
    assert site.get("/other").status_code == 200


def test_a_path_without_a_view_is_limited_by_the_rule(site, configure):
    site.serve({"page": rate_limit(OWN)(ok)}, middleware=[OURS])
    assert site.get("/nowhere").status_code == 404
    assert charged("site", OWN) == [1, 0]
