"""A rule of the middleware and the decorators of the view: decided in one call where that is certain to be right."""

from __future__ import annotations

import functools

import pytest
from django.http import HttpResponse
from django.test import Client
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rlaas_django import Policy, peek, rate_limit

from tests.support.http import OURS, both_ways, ok
from tests.support.internals import YEAR
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
def test_the_rule_and_the_decorators_take_one_call(own, site):
    site.serve(rate_limit(OUTER)(rate_limit(OWN)(site.view(ok))), middleware=[OURS])
    assert calls_of(site, own) == 1
    assert charged("site", OUTER, OWN) == [2, 2, 2]


@both_ways
def test_a_request_that_the_decorator_refuses_is_never_charged_to_the_rule(own, site):
    site.serve(rate_limit(OWN)(site.view(ok)), middleware=[OURS])
    assert site.statuses(2) == [200, 200]
    with commands_sent(own.url) as names:
        assert site.statuses(3) == [429] * 3
    assert names.count("EVALSHA") == 3
    assert charged("site", OWN) == [2, 2]


def test_a_bare_decorator_is_decided_with_the_rule(own, site):
    site.serve(rate_limit(site.view(ok)), middleware=[OURS])
    assert calls_of(site, own) == 1
    assert charged("site", "default") == [2, 2]


@pytest.mark.parametrize(
    "limit",
    [
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
def test_other_limits_are_decided_by_themselves(own, site, limit):
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


def test_posts_that_need_no_csrf_token_take_one_call(own, site):
    site.serve(rate_limit(OWN)(csrf_exempt(ok)), middleware=[OURS])
    assert calls_of(site, own, "post") == 1


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
