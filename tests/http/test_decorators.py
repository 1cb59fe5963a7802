"""@rate_limit in every form, on views of every kind."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from asgiref.sync import iscoroutinefunction
from django.core import checks
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.test import RequestFactory, override_settings
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, authentication_classes
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet
from rlaas_django import Decision, Policy, PolicyError, Rate, peek, rate_limit

from tests.support.http import (
    KINDS,
    Site,
    as_kind,
    assert_refusal,
    assert_waiting_helps,
    both_ways,
    call,
    counters,
    ok,
    own_policy,
    rate_limit_fields,
    templates,
)
from tests.support.internals import FIXED_WINDOW, TOKEN_BUCKET

ADDRESS = "203.0.113.9"
POLICIES = {"login": {"rate": "2/m", "key": "ip"}, "hourly": {"rate": "3/h", "key": "ip"}}


@pytest.fixture(autouse=True)
def _policies(configure):
    configure(POLICIES=POLICIES)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def charged(policy, identity=ADDRESS):
    """Return the units that an identity, by default the client's address, was charged under a policy."""
    return peek({"ip": identity}, policy).current_count


def tenant(request):
    return request.headers.get("X-Tenant")


# Forms


@pytest.mark.parametrize(
    ("limit", "policies"),
    [
        (rate_limit, {"default": (5, 60)}),
        (rate_limit(), {"default": (5, 60)}),
        (rate_limit("login"), {"login": (2, 60)}),
        (rate_limit("login", "hourly"), {"login": (2, 60), "hourly": (3, 3600)}),
        (rate_limit(Policy("own", "2/10s", key="ip")), {"own": (2, 10)}),
        (rate_limit("login", Policy("own", "5/m")), {"login": (2, 60), "own": (5, 60)}),
        (rate_limit("3/m", group="g"), {"g": (3, 60)}),
        (rate_limit("3/10s", key="ip", group="g"), {"g": (3, 10)}),
        (rate_limit("3/60", group="g"), {"g": (3, 60)}),
        (rate_limit((3, 60), group="g"), {"g": (3, 60)}),
        (rate_limit(Rate(3, 60), group="g"), {"g": (3, 60)}),
        (rate_limit(rate=lambda request: "3/m", group="g"), {"g": (3, 60)}),
        (rate_limit(rate="3/minute", group="g"), {"g": (3, 60)}),
        (rate_limit(rate=(3, 60), key="ip", group="g"), {"g": (3, 60)}),
        (rate_limit("login", rate="3/min", group="g"), {"login": (2, 60), "g": (3, 60)}),
        (rate_limit("2/s", "3/h", group="g"), {"g-1s": (2, 1), "g-3600s": (3, 3600)}),
        (rate_limit("2/s", "login", group="g"), {"g": (2, 1), "login": (2, 60)}),
        (rate_limit("3/m", algo=TOKEN_BUCKET, burst=4, group="g"), {"g": (4, 80)}),
        (rate_limit("3/m", algo=FIXED_WINDOW, group="g"), {"g": (3, 60)}),
    ],
)
def test_each_form_admits_its_quota_and_then_refuses(site, clock, limit, policies):
    site.serve(limit(site.view(ok)))
    quota = min(quota for quota, _ in policies.values())
    assert site.statuses(quota) == [200] * quota
    refused = site.get()
    assert_refusal(refused, policies=policies)
    assert_waiting_helps(refused, site.get, clock)


def test_a_rate_function_as_a_keyword_is_never_taken_for_the_view(kind):
    """`rate_limit(rate=rate_of_plan)` is a decorator, whatever is passed to it."""
    view = rate_limit(rate=rate_of_plan)(as_kind(kind, ok))
    assert iscoroutinefunction(view) == (kind == "async def")
    assert view.__name__ == "ok"


def test_a_rate_on_a_view_is_counted_under_the_name_of_the_view(site, client):
    view = site.serve(rate_limit("1/m")(site.view(ok)))
    site.get()
    assert counters(client) == ["rlaas:rate_limit:tests.support.http.ok/ip=203.0.113.9"]
    assert own_policy(view) == "tests.support.http.ok"


# Labels


def page(request):
    return HttpResponse("ok")


def hourly(request):
    return HttpResponse("ok")


class Page(View):
    def get(self, request):
        return HttpResponse("ok")

    def post(self, request):
        return HttpResponse("ok")


def labels_of(view, request=None):
    """Return the labels in the headers of an allowed response and in those and the body of a refusal."""
    seen = []
    while True:
        response = call(view, request or RequestFactory().get("/"))
        seen += [re.findall(r'"([^"]*)"', response.headers[name]) for name in ("RateLimit-Policy", "RateLimit")]
        if response.status_code == 429:
            seen.append(json.loads(response.content)["violated-policies"])
            return seen


@pytest.mark.parametrize(
    ("view", "label"),
    [
        (rate_limit("1/m")(page), "page"),
        (rate_limit("1/m", group="auth")(page), "auth"),
        (rate_limit("1/m", group="auth.by-address")(page), "auth.by-address"),
        (rate_limit("1/m", label="Log-ins (by address)")(page), "Log-ins (by address)"),
        (rate_limit("1/m", group="auth", label="a;b, c")(page), "a;b, c"),
        (rate_limit("1/m")(as_kind("async def", page)), "page"),
        (rate_limit("1/m")(lambda request: HttpResponse("ok")), "lambda"),
        (rate_limit("1/m")(functools.partial(page)), "page"),
        (rate_limit("1/m")(type("Page", (Page,), {})).as_view(), "Page"),
        (rate_limit("1/m")(Page.as_view()), "Page"),
        (method_decorator(rate_limit("1/m"), name="dispatch")(type("Page", (Page,), {})).as_view(), "Page"),
        (method_decorator(rate_limit("1/m"), name="get")(type("Page", (Page,), {})).as_view(), "Page-get"),
        (type("Page", (Page,), {"get": rate_limit("1/m")(Page.get)}).as_view(), "Page-get"),
        (rate_limit("1/m")(api_view()(lambda request: Response("ok"))), "lambda"),
        (rate_limit(Policy("p", "1/m"))(page), "p"),
        (rate_limit(Policy("p", "1/m", label="shown"))(page), "shown"),
        (rate_limit("labelled")(page), "Search"),
    ],
)
def test_clients_see_a_label_and_never_a_python_path(configure, view, label):
    configure(POLICIES={"labelled": {"rate": "1/m", "label": "Search"}})
    assert labels_of(view) == [[label]] * 5


def test_of_several_rates_each_label_has_its_window():
    view = rate_limit("9/s", "1/h", label="log-ins")(page)
    assert labels_of(view)[:2] == [["log-ins-1s", "log-ins-3600s"]] * 2


@pytest.mark.parametrize(
    ("view", "labels"),
    [
        (rate_limit("hourly", "9/d")(page), ["hourly", "page"]),
        (rate_limit("hourly", "9/d", key="ip")(hourly), ["hourly", "hourly-2"]),
        (rate_limit("9/h")(rate_limit("9/d")(page)), ["page-2", "page"]),
        (rate_limit("9/h", label="x")(rate_limit("9/d", label="x")(page)), ["x", "x-2"]),
    ],
)
def test_two_policies_of_a_request_have_two_labels(view, labels):
    response = call(view)
    assert re.findall(r'"([^"]*)"', response.headers["RateLimit"]) == labels
    assert re.findall(r'"([^"]*)"', response.headers["RateLimit-Policy"]) == labels


def test_a_label_does_not_change_the_counter(client):
    for label in ("one", "other"):
        call(rate_limit("9/m", label=label)(page))
    assert len(counters(client)) == 1


@pytest.mark.parametrize("label", ['a"b', "a\\b", "ä", "a\nb", "a" * 101, 5])
def test_a_label_that_a_header_cannot_carry_is_an_error_at_import(label):
    with pytest.raises(PolicyError, match="label"):
        rate_limit("5/m", label=label)


@both_ways
def test_several_rates_are_decided_together_and_charged_all_or_none(site, clock):
    site.serve(rate_limit("2/10s", "3/h", key="ip", group="g")(site.view(ok)))
    assert site.statuses(4) == [200, 200, 429, 429]
    clock.tick(10_000)
    assert site.get().status_code == 200
    assert_refusal(site.get(), policies=["g-10s", "g-3600s"], violated=["g-3600s"], wait=3590)
    assert charged(Policy("g-3600s", "3/h", key="ip")) == 3


def test_the_algorithm_is_the_one_that_was_chosen(site, algo, clock, client):
    site.serve(rate_limit("3/m", algo=algo, group="g")(site.view(ok)))
    assert site.statuses(4) == [200, 200, 200, 429]
    assert peek({"ip": ADDRESS}, Policy("g", "3/m", algo=algo)).current_count == 3


def test_a_burst_is_admitted_at_once_and_refilled_at_the_rate(site, clock):
    site.serve(rate_limit("1/s", algo=TOKEN_BUCKET, burst=3)(site.view(ok)))
    assert site.statuses(4) == [200, 200, 200, 429]
    clock.tick(1000)
    assert site.statuses(2) == [200, 429]


def test_an_allowed_response_has_the_headers(site, clock):
    site.serve(rate_limit("3/m", group="g")(site.view(ok)))
    response = site.get()
    assert response.headers["RateLimit-Policy"] == '"g";q=3;w=60'
    assert response.headers["RateLimit"] == '"g";r=2;t=60'
    assert [response.headers[f"X-RateLimit-{name}"] for name in ("Limit", "Remaining", "Reset")] == ["3", "2", "60"]
    assert "Retry-After" not in response.headers
    assert "Cache-Control" not in response.headers


# Keys


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("ip", {"address": "203.0.113.1"}, {"address": "203.0.113.2"}),
        ("user_or_ip", {"address": "203.0.113.1"}, {"address": "203.0.113.2"}),
        ("user", {"address": "203.0.113.1"}, {"address": "203.0.113.2"}),
        ("token", {"headers": {"Authorization": "Bearer one"}}, {"headers": {"Authorization": "Bearer other"}}),
        ("header:X-Api-Key", {"headers": {"X-Api-Key": "one"}}, {"headers": {"X-Api-Key": "other"}}),
        ("get:q", {"query_params": {"q": "one"}}, {"query_params": {"q": "other"}}),
        (tenant, {"headers": {"X-Tenant": "one"}}, {"headers": {"X-Tenant": "other"}}),
        (
            "tests.http.test_decorators.tenant",
            {"headers": {"X-Tenant": "one"}},
            {"headers": {"X-Tenant": "other"}},
        ),
    ],
)
def test_each_key_has_a_counter_for_each_identity(site, key, one, other):
    site.serve(rate_limit("1/m", key=key)(site.view(ok)))
    assert site.statuses(2, **one) == [200, 429]
    assert site.statuses(2, **other) == [200, 429]


@both_ways
def test_a_field_of_a_form_is_a_key(site):
    site.serve(rate_limit("1/m", key="post:name")(site.view(lambda request: HttpResponse(request.POST["name"]))))
    statuses = [site.post(data={"name": name}).status_code for name in ("ann", "ann", "bob", "ann")]
    assert statuses == [200, 429, 200, 429]


@both_ways
def test_a_field_of_a_json_body_is_a_key_and_the_view_can_read_the_body(site):
    site.serve(rate_limit("1/m", key="post:name")(site.view(lambda request: JsonResponse(json.loads(request.body)))))
    options = {"content_type": "application/json"}
    bodies = [json.dumps({"name": name, "more": ["x"] * 10_000}) for name in ("ann", "ann", "bob", "ann")]
    assert [site.post(data=body, **options).status_code for body in bodies] == [200, 429, 200, 429]
    assert site.post(data=json.dumps({"name": "x" * 3_000_000}), **options).status_code == 400  # as with forms


def test_the_global_key_is_one_counter_for_all(site):
    site.serve(rate_limit("1/m", key="global")(site.view(ok)))
    assert [site.get(address=f"203.0.113.{n}").status_code for n in range(3)] == [200, 429, 429]


# Methods


@pytest.mark.parametrize(
    ("method", "limited"),
    [
        ("POST", {"post"}),
        ("post", {"post"}),
        (["POST", "put"], {"post", "put"}),
        ("GET", {"get", "head"}),
        (("GET", "DELETE"), {"get", "head", "delete"}),
        (None, {"get", "head", "post", "put", "delete", "options"}),
    ],
)
def test_only_the_named_methods_are_limited_and_head_goes_with_get(site, method, limited):
    site.serve(rate_limit("1/m", method=method)(site.view(ok)))
    for n, each in enumerate(("get", "head", "post", "put", "delete", "options")):
        address = f"203.0.113.{n}"
        responses = [site.request(each, address=address) for _ in range(2)]
        assert [response.status_code for response in responses] == [200, 429 if each in limited else 200]
        assert ("RateLimit" in responses[0].headers) == (each in limited)
        if each in limited:
            assert_refusal(responses[1], policies=["ok"])


# Cost


@both_ways
@pytest.mark.parametrize("cost", [2, lambda request: int(request.headers.get("X-Cost", "2"))])
def test_a_request_is_charged_its_cost(site, cost, clock):
    site.serve(rate_limit("5/m", cost=cost)(site.view(ok)))
    responses = [site.get() for _ in range(3)]
    assert [response.headers["X-RateLimit-Remaining"] for response in responses] == ["3", "1", "1"]
    assert_refusal(responses[2], policies={"ok": (5, 60)}, wait=60)


def test_a_cost_of_0_charges_nothing(site, client):
    site.serve(rate_limit("5/m", cost=0)(site.view(ok)))
    assert site.get().headers["X-RateLimit-Remaining"] == "5"
    assert counters(client) == []


def test_a_cost_over_the_limit_is_refused_without_retry_after(site):
    site.serve(rate_limit("5/m", cost=lambda request: 6)(site.view(ok)))
    assert_refusal(site.get(), policies={"ok": (5, 60)}, wait=None)


@pytest.mark.parametrize("cost", [-1, 1.5, "2", None, True, object()])
def test_an_invalid_cost_of_a_function_is_logged_and_counts_as_1(site, configure, caplog, cost):
    configure(LOG_LINES_PER_SECOND=1000)
    site.serve(rate_limit("5/m", cost=lambda request: cost)(site.view(ok)))
    assert site.get().headers["X-RateLimit-Remaining"] == "4"
    assert "is not a whole number of at least 0" in caplog.text


def test_a_cost_of_a_function_that_is_too_large_for_the_algorithm_is_logged_and_counts_as_the_most(site, caplog):
    site.serve(rate_limit("20000/m", cost=lambda request: 10_001, algo="sliding-window-algo")(site.view(ok)))
    assert site.get().headers["X-RateLimit-Remaining"] == "10000"
    assert "the cost 10001 is over 10000" in caplog.text
    assert "10000 is charged." in caplog.text


# Groups and counters


def test_the_views_of_a_group_share_a_counter(site):
    limit = rate_limit("3/m", group="auth")
    other = rate_limit("3/m", group="auth")
    site.serve({"a": limit(site.view(ok)), "b": other(site.view(ok))})
    assert site.statuses(2, "/a") + site.statuses(2, "/b") == [200, 200, 200, 429]


def test_the_views_of_a_named_policy_share_a_counter(site):
    site.serve({"a": rate_limit("login")(site.view(ok)), "b": rate_limit("hourly", "login")(site.view(ok))})
    assert site.statuses(2, "/a") + site.statuses(1, "/b") == [200, 200, 429]


def two_functions(limit, kind):
    def one(request):
        return HttpResponse()

    def other(request):
        return HttpResponse()

    return limit(as_kind(kind, one)), limit(as_kind(kind, other))


def two_classes(decorate):
    def views(limit, kind):
        pages = [type(name, (View,), {"get": as_kind(kind, ok_method)}) for name in ("One", "Other")]
        return [decorate(limit, page) for page in pages]

    return views


def two_methods(limit, kind):
    class Page(View):
        get = method_decorator(limit)(as_kind(kind, method("get")))
        post = method_decorator(limit)(as_kind(kind, method("post")))

    def view_of(name):
        def view(request):
            request.method = name
            return Page.as_view()(request)

        async def aview(request):
            request.method = name
            return await Page.as_view()(request)

        return view if kind == "def" else aview

    return view_of("GET"), view_of("POST")


def method(name):
    def handler(self, request, *args, **kwargs):
        return HttpResponse("ok")

    handler.__name__, handler.__qualname__ = name, f"Page.{name}"
    return handler


ok_method = method("get")


@pytest.mark.parametrize(
    "views",
    [
        two_functions,
        two_classes(lambda limit, view: limit(view).as_view()),
        two_classes(lambda limit, view: limit(view.as_view())),
        two_classes(lambda limit, view: method_decorator(limit, name="dispatch")(view).as_view()),
        two_classes(lambda limit, view: method_decorator([limit, csrf_exempt], name="dispatch")(view).as_view()),
        two_classes(lambda limit, view: method_decorator([csrf_exempt, limit], name="dispatch")(view).as_view()),
        two_methods,
    ],
    ids=["functions", "classes", "as_view", "dispatch", "before another", "after another", "methods"],
)
def test_each_view_has_a_counter_of_its_own(settings, kind, views):
    site = Site(f"asgi, {kind}", settings)
    one, other = views(rate_limit("1/m"), kind)
    site.serve({"one": one, "other": other})
    assert site.statuses(2, "/one") + site.statuses(2, "/other") == [200, 429, 200, 429]


def test_each_api_view_has_a_counter_of_its_own(settings):
    site = Site("wsgi, def", settings)

    def one(request):
        return Response("ok")

    def other(request):
        return Response("ok")

    site.serve({view.__name__: rate_limit("1/m")(api_view()(view)) for view in (one, other)})
    assert site.statuses(2, "/one") + site.statuses(2, "/other") == [200, 429, 200, 429]


def test_one_class_at_two_urls_has_one_counter(settings, kind):
    site = Site(f"asgi, {kind}", settings)
    page = rate_limit("1/m")(class_view(kind))
    site.serve({"one": page.as_view(), "other": page.as_view()})
    assert site.statuses(1, "/one") + site.statuses(1, "/other") == [200, 429]


# block, shadow


@both_ways
def test_block_false_only_annotates_the_request(site, clock):
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(rate_limit("2/m", block=False, group="g")(site.view(view)))
    responses = [site.get() for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    assert [decision.allowed for decision in seen] == [True, True, False, False]
    assert [response.headers["RateLimit"] for response in responses] == [f'"g";r={r};t=60' for r in (1, 0, 0, 0)]
    assert "Retry-After" not in responses[3].headers
    assert charged(Policy("g", "2/m", key="ip")) == 2


@both_ways
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, rate_limit("2/m", block=False)),
        ({"ENABLED": False}, rate_limit("2/m", block=False)),
        ({}, rate_limit("2/m", block=False, method="POST")),
        ({}, rate_limit(rate=lambda request: None, block=False)),
        ({}, rate_limit("2/m", block=False, cost=0)),
    ],
    ids=["limited", "disabled", "another method", "no rate", "cost 0"],
)
def test_a_view_always_finds_a_decision_on_the_request(site, configure, options, limit):
    """So that a view can say `if not request.rate_limit.allowed` without a check for None."""
    configure(**options)
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(limit(site.view(view)))
    site.get()
    assert isinstance(seen[0], Decision)
    assert seen[0].allowed


def test_a_blocking_limit_annotates_the_request(site):
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(rate_limit("5/m", group="g")(site.view(view)))
    site.get()
    assert (seen[0].allowed, seen[0].policy.name, seen[0].remaining) == (True, "g", 4)


def test_a_shadow_policy_is_charged_and_never_refuses(site, clock):
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(rate_limit("2/m", shadow=True, group="g")(site.view(view)))
    responses = [site.get() for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    assert [decision.allowed for decision in seen] == [True] * 4
    assert [decision.outcomes[0].allowed for decision in seen] == [True, True, False, False]
    assert charged(Policy("g", "2/m")) == 2
    assert not [name for name in responses[3].headers if "ratelimit" in name.lower()]


def test_a_shadow_policy_changes_neither_decision_nor_headers_of_an_enforced_one(site, clock):
    site.serve(rate_limit("3/m", Policy("trial", "1/m", key="ip", shadow=True), group="g")(site.view(ok)))
    assert site.statuses(3) == [200, 200, 200]
    assert_refusal(site.get(), policies={"g": (3, 60)}, violated=["g"], wait=60)
    assert charged(Policy("trial", "1/m", key="ip")) == 1


# charge_when


def login(request, entered=None):
    if entered is not None:
        entered.append(request)
    right = request.headers.get("X-Password") == "right"
    return HttpResponse("ok" if right else "no", status=200 if right else 401)


def failed(response):
    return response.status_code == 401


@both_ways
def test_charge_when_charges_only_the_responses_it_names(site, clock):
    site.serve(rate_limit("3/m", charge_when=failed, group="g")(site.view(login)))
    right, wrong = {"headers": {"X-Password": "right"}}, {"headers": {"X-Password": "wrong"}}
    assert site.statuses(10, **right) == [200] * 10
    assert charged(Policy("g", "3/m")) == 0
    assert site.statuses(4, **wrong) == [401, 401, 401, 429]
    assert_refusal(site.get(**right), policies={"g": (3, 60)}, wait=60)


@both_ways
def test_the_headers_show_what_remains_after_a_refund(site, clock):
    site.serve(rate_limit("3/m", charge_when=failed)(site.view(login)))
    remaining = [
        site.get(headers={"X-Password": password}).headers["X-RateLimit-Remaining"]
        for password in ("right", "wrong", "right")
    ]
    assert remaining == ["3", "2", "2"]


@both_ways
@pytest.mark.parametrize(("charge_on_error", "units"), [(True, 3), (False, 0)])
def test_a_view_that_raises_is_charged_unless_charge_on_error_is_false(site, clock, charge_on_error, units):
    def view(request):
        raise RuntimeError

    limit = rate_limit("5/m", charge_when=failed, charge_on_error=charge_on_error, group="g")
    site.serve(limit(site.view(view)))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            site.get()
    assert charged(Policy("g", "5/m")) == units


@both_ways
def test_charge_on_error_works_without_charge_when(site, clock):
    def view(request):
        raise RuntimeError

    site.serve(rate_limit("5/m", charge_on_error=False, group="g")(site.view(view)))
    with pytest.raises(RuntimeError):
        site.get()
    assert charged(Policy("g", "5/m")) == 0


def test_charge_when_refunds_its_own_charge_alone(site, clock):
    limits = rate_limit("5/m", group="outer"), rate_limit("5/m", charge_when=failed, cost=2, group="inner")
    site.serve(limits[0](limits[1](site.view(login))))
    site.statuses(2, headers={"X-Password": "right"})
    assert (charged(Policy("outer", "5/m")), charged(Policy("inner", "5/m"))) == (2, 0)


def test_32_parallel_wrong_passwords_reach_a_sync_view_3_times(settings):
    """No view is done before all were checked, so to check first and charge later would let all 32 in."""
    site, entered, done = Site("wsgi, def", settings), [], threading.Event()

    def view(request):
        entered.append(request)
        assert done.wait(30)
        return HttpResponse(status=401)

    site.serve(rate_limit("3/h", charge_when=failed, group="g")(view))
    refused = threading.Semaphore(0)

    def attempt(_):
        response = site.get()
        if response.status_code == 429:
            refused.release()
        return response

    with ThreadPoolExecutor(32) as executor:
        attempts = [executor.submit(attempt, n) for n in range(32)]
        for _ in range(29):
            assert refused.acquire(timeout=30)
        done.set()
        responses = [each.result() for each in attempts]
    assert len(entered) == 3
    for response in responses:
        if response.status_code != 401:
            assert_refusal(response, policies={"g": (3, 3600)})
    assert charged(Policy("g", "3/h")) == 3


async def test_32_parallel_wrong_passwords_reach_an_async_view_3_times(settings):
    site, entered, done = Site("asgi, async def", settings), [], asyncio.Event()

    async def view(request):
        entered.append(request)
        await asyncio.wait_for(done.wait(), 30)
        return HttpResponse(status=401)

    site.serve(rate_limit("3/h", charge_when=failed, group="g")(view))
    refused = []

    async def attempt():
        response = await site.client().get("/")
        if response.status_code == 429:
            refused.append(response)
        if len(refused) == 29:
            done.set()
        return response

    responses = await asyncio.gather(*(attempt() for _ in range(32)))
    assert len(entered) == 3
    assert [response.status_code for response in responses].count(401) == 3
    for response in refused:
        assert_refusal(response, policies={"g": (3, 3600)})


# Rates that depend on the request


def rate_of_plan(request):
    return {"free": "1/m", "paid": (3, 60), "own": None}[request.headers["X-Plan"]]


@both_ways
@pytest.mark.parametrize("limit", [rate_limit(rate=rate_of_plan), rate_limit(rate=rate_of_plan, key="ip")])
def test_a_rate_may_depend_on_the_request(site, limit):
    site.serve(limit(site.view(ok)))
    for n, (plan, admitted) in enumerate([("free", 1), ("paid", 3)]):
        statuses = site.statuses(4, headers={"X-Plan": plan}, address=f"203.0.113.{n}")
        assert statuses == [200] * admitted + [429] * (4 - admitted)


def test_a_rate_function_may_return_none_for_no_limit(site, client):
    site.serve(rate_limit(rate=rate_of_plan, key="ip")(site.view(ok)))
    responses = [site.get(headers={"X-Plan": "own"}) for _ in range(9)]
    assert {response.status_code for response in responses} == {200}
    assert "RateLimit" not in responses[0].headers
    assert counters(client) == []


def test_a_client_whose_rate_changes_keeps_its_usage(site, clock):
    site.serve(rate_limit(rate=rate_of_plan, key="ip")(site.view(ok)))
    assert site.statuses(2, headers={"X-Plan": "free"}) == [200, 429]
    assert site.statuses(3, headers={"X-Plan": "paid"}) == [200, 200, 429]


@pytest.mark.parametrize("rate", ["5/month", "", 5, (1,), object(), "0/m", (10**30, 60)])
def test_an_invalid_rate_of_a_function_is_logged_and_the_default_rate_holds(site, configure, caplog, rate):
    configure(LOG_LINES_PER_SECOND=1000)
    site.serve(rate_limit(rate=lambda request: rate, key="ip", group="g")(site.view(ok)))
    assert site.statuses(6) == [200] * 5 + [429]
    assert "is not a rate" in caplog.text


@pytest.mark.parametrize("limit", [rate_limit("2/m"), rate_limit("2/m", response=None)])
def test_a_bare_rate_function_is_not_taken_for_a_view(limit, kind):
    """`rate_limit(rate=rate_of_plan)` looks like `rate_limit(view)` until it is put on one."""
    view = rate_limit(rate=rate_of_plan)(as_kind(kind, ok))
    assert iscoroutinefunction(view) == (kind == "async def")


# Own responses


def sorry(request, decision):
    return JsonResponse({"wait": decision.retry_after, "policy": str(decision.policy)}, status=429)


async def asorry(request, decision):
    await asyncio.sleep(0)
    return sorry(request, decision)


@both_ways
@pytest.mark.parametrize("response", [sorry, asorry])
def test_an_own_response_gets_the_headers(site, clock, response):
    site.own_body = True
    site.serve(rate_limit("1/m", response=response, group="g")(site.view(ok)))
    site.get()
    refused = site.get()
    assert_refusal(refused, policies={"g": (1, 60)}, wait=60, own_body=True)
    assert refused.json() == {"wait": 60.0, "policy": "g"}


def next_of_nothing(request, decision):
    return next(iter(()))


def broken(request, decision):
    raise RuntimeError


async def abroken(request, decision):
    raise RuntimeError


@pytest.mark.parametrize(
    ("kind", "response", "error"),
    [
        ("def", broken, RuntimeError),
        ("def", abroken, RuntimeError),
        ("def", next_of_nothing, StopIteration),
        ("async def", broken, RuntimeError),
        ("async def", abroken, RuntimeError),
    ],
)
def test_an_own_response_that_raises_admits_nobody(kind, response, error):
    entered = []

    def view(request):
        entered.append(request)
        return HttpResponse("ok")

    limited = rate_limit("1/m", response=response)(as_kind(kind, view))
    call(limited)
    with pytest.raises(error):
        call(limited)
    assert len(entered) == 1


@both_ways
def test_an_own_response_may_be_a_template_response(site, clock, settings):
    site.own_body = True
    settings.TEMPLATES = templates({"sorry.html": "Wait {{ wait }}"})
    own = rate_limit(
        "1/m", response=lambda r, d: TemplateResponse(r, "sorry.html", {"wait": d.retry_after}, status=429)
    )
    site.serve(own(site.view(ok)))
    site.get()
    refused = site.get()
    assert_refusal(refused, policies=["ok"], own_body=True)
    assert refused.content == b"Wait 60.0"


# Kinds of views


def class_view(kind):
    class Page(View):
        get = as_kind(kind, ok_method)

    return Page


def plain_method(limit, kind):
    class Page(View):
        get = limit(as_kind(kind, ok_method))

    return Page.as_view()


def decorated_method(*limits_and_kind):
    *limits, kind = limits_and_kind
    get = as_kind(kind, ok_method)
    for limit in reversed(limits):
        get = method_decorator(limit)(get)
    return type("Page", (View,), {"get": get}).as_view()


CLASS_BASED = {
    "class": lambda limit, kind: limit(class_view(kind)).as_view(),
    "as_view": lambda limit, kind: limit(class_view(kind).as_view()),
    "dispatch": lambda limit, kind: method_decorator(limit, name="dispatch")(class_view(kind)).as_view(),
    "dispatch, listed": lambda limit, kind: method_decorator([limit, csrf_exempt], name="dispatch")(
        class_view(kind)
    ).as_view(),
    "dispatch, listed last": lambda limit, kind: method_decorator([csrf_exempt, limit], name="dispatch")(
        class_view(kind)
    ).as_view(),
    "method by name": lambda limit, kind: method_decorator(limit, name="get")(class_view(kind)).as_view(),
    "method": decorated_method,
    "method, plainly": plain_method,
}


STACKED = {
    "on the method": lambda outer, inner, kind: decorated_method(outer, inner, kind),
    "on the class": lambda outer, inner, kind: method_decorator(outer, name="get")(
        method_decorator(inner, name="get")(class_view(kind))
    ).as_view(),
    "on dispatch": lambda outer, inner, kind: method_decorator(outer, name="dispatch")(
        method_decorator(inner, name="dispatch")(class_view(kind))
    ).as_view(),
    "listed": lambda outer, inner, kind: method_decorator([outer, inner], name="get")(class_view(kind)).as_view(),
}


@both_ways
@pytest.mark.parametrize("stack", STACKED.values(), ids=STACKED)
@pytest.mark.parametrize("rates", [("100/h", "2/m"), ("2/m", "100/h"), ("2/m", "100/m")])
def test_each_of_two_method_decorators_is_in_force(site, stack, rates):
    site.serve(stack(*map(rate_limit, rates), site.kind))
    assert len(site.get().headers["RateLimit-Policy"].split(", ")) == 2
    assert site.statuses(2) == [200, 429]


@both_ways
@pytest.mark.parametrize(
    ("limit", "quotas"),
    [(rate_limit, [(5, 60)]), (rate_limit("5/m"), [(5, 60)]), (rate_limit("hourly", "5/m"), [(3, 3600), (5, 60)])],
)
@pytest.mark.parametrize("decorate", CLASS_BASED.values(), ids=CLASS_BASED)
def test_class_based_views(site, decorate, limit, quotas):
    site.serve(decorate(limit, site.kind))
    admitted = quotas[0][0]
    assert site.statuses(admitted) == [200] * admitted
    refused = site.get()
    refusal = assert_refusal(refused, policies=policies_of(refused))
    assert [*refusal.policies.values()] == quotas


def policies_of(response):
    return [*rate_limit_fields(response)[0]]


@pytest.mark.parametrize("decorate", CLASS_BASED.values(), ids=CLASS_BASED)
def test_a_class_based_view_stays_sync_or_async(kind, decorate):
    view = decorate(rate_limit("5/m"), kind)
    assert iscoroutinefunction(view) == (kind == "async def")


def test_a_decorated_class_is_the_same_class(kind):
    page = class_view(kind)
    assert rate_limit("5/m")(page) is page
    assert page.dispatch.__name__ == "dispatch"


def test_a_class_that_is_no_view_is_an_error_at_import():
    with pytest.raises((TypeError, PolicyError), match="Thing"):

        @rate_limit("5/m")
        class Thing:
            pass


@pytest.mark.parametrize("bare", [True, False])
def test_a_decorated_function_keeps_its_kind_name_and_signature(kind, bare):
    def page(request, number: int = 1):
        """Shows a page."""

    page.csrf_exempt = True
    view = (rate_limit if bare else rate_limit("5/m"))(as_kind(kind, page))
    assert iscoroutinefunction(view) == (kind == "async def")
    assert inspect.iscoroutinefunction(view) == (kind == "async def")
    assert (view.__name__, view.__doc__, view.csrf_exempt) == ("page", "Shows a page.", True)
    assert view.__module__ == __name__
    assert list(inspect.signature(view).parameters) == ["request", "number"]


@both_ways
def test_arguments_of_the_url_reach_the_view(site):
    site.serve(
        {
            "<int:year>/<slug>": rate_limit("5/m")(
                site.view(lambda request, year, slug: JsonResponse([year, slug], safe=False))
            )
        }
    )
    assert site.get("/2024/x").json() == [2024, "x"]


class Callable:
    def __call__(self, request):
        return HttpResponse("ok")

    def view(self, request):
        return HttpResponse("ok")

    def partly(self, name, request):
        return HttpResponse("ok")


@pytest.mark.parametrize(
    "view",
    [
        Callable(),
        Callable().view,
        functools.partial(ok),
        functools.partial(Callable().partly, "x"),
        lambda request: HttpResponse("ok"),
    ],
    ids=["instance", "bound method", "partial", "partial of a bound method", "lambda"],
)
def test_any_callable_view_can_be_limited(settings, view):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit("1/m")(view))
    assert site.statuses(2) == [200, 429]


@both_ways
@pytest.mark.parametrize("make", [lambda: StreamingHttpResponse([b"ok"]), lambda: HttpResponse(status=204)])
def test_responses_of_every_kind_get_the_headers(site, make):
    site.serve(rate_limit("5/m")(site.view(lambda request: make())))
    assert site.get().headers["X-RateLimit-Remaining"] == "4"


@both_ways
def test_a_template_response_is_rendered_later_and_has_the_headers(site, settings):
    settings.TEMPLATES = templates({"page.html": "{{ request.rate_limit.remaining }} left"})
    site.serve(
        rate_limit("5/m")(site.view(lambda request: TemplateResponse(request, "page.html", {"request": request})))
    )
    response = site.get()
    assert (response.content, response.headers["X-RateLimit-Remaining"]) == (b"4 left", "4")


@both_ways
def test_a_view_that_returns_none_gets_django_s_error(site):
    site.serve(rate_limit("5/m")(site.view(lambda request: None)))
    with pytest.raises(ValueError, match=r"returned None instead|didn't return an HttpResponse"):
        site.get()


# Django REST framework


def api_below(limit):
    @limit
    @api_view(["GET"])
    def view(request):
        return Response({"remaining": request.rate_limit.remaining})

    return view


def api_above(limit):
    @api_view(["GET"])
    @limit
    def view(request):
        return Response({"remaining": request.rate_limit.remaining})

    return view


def handler(self, request):
    return Response({"remaining": request.rate_limit.remaining})


def api_class(limit):
    return limit(type("Api", (APIView,), {"get": handler})).as_view()


def api_dispatch(limit):
    return method_decorator(limit, name="dispatch")(type("Api", (APIView,), {"get": handler})).as_view()


def api_method(limit):
    return type("Api", (APIView,), {"get": method_decorator(limit)(handler)}).as_view()


def viewset_list(limit):
    return type("Api", (ViewSet,), {"list": limit(handler)}).as_view({"get": "list"})


def viewset_list_method(limit):
    return type("Api", (ViewSet,), {"list": method_decorator(limit)(handler)}).as_view({"get": "list"})


def viewset_action(limit):
    class Api(ViewSet):
        @action(detail=False)
        @limit
        def recent(self, request):
            return handler(self, request)

    return Api.as_view({"get": "recent"})


def viewset_action_outside(limit):
    class Api(ViewSet):
        @method_decorator(limit)
        @action(detail=False)
        def recent(self, request):
            return handler(self, request)

    assert [each.__name__ for each in Api.get_extra_actions()] == ["recent"]
    return Api.as_view({"get": "recent"})


@pytest.mark.parametrize(
    "make",
    [
        api_below,
        api_above,
        api_class,
        api_dispatch,
        api_method,
        viewset_list,
        viewset_list_method,
        viewset_action,
        viewset_action_outside,
    ],
)
@pytest.mark.parametrize("limit", [rate_limit, rate_limit("5/m")])
@pytest.mark.parametrize("handler", ["wsgi", pytest.param("asgi", marks=pytest.mark.slow)])
def test_django_rest_framework(settings, clock, make, limit, handler):
    site = Site(f"{handler}, def", settings)
    site.own_body = make is api_class  # the framework's
    view = site.serve(make(limit))
    assert view.csrf_exempt
    responses = [site.get() for _ in range(6)]
    assert [response.status_code for response in responses] == [200] * 5 + [429]
    assert [response.json()["remaining"] for response in responses[:5]] == [4, 3, 2, 1, 0]
    assert [response.headers["X-RateLimit-Remaining"] for response in responses[:5]] == ["4", "3", "2", "1", "0"]
    assert_refusal(responses[5], policies=policies_of(responses[5]), wait=60, own_body=site.own_body)


class ByHeader(BaseAuthentication):
    def authenticate(self, request):
        return SimpleNamespace(pk=request.headers["X-User"], is_authenticated=True), None


def test_below_api_view_the_user_is_rest_framework_s(settings, client):
    site = Site("wsgi, def", settings)

    @api_view(["GET"])
    @authentication_classes([ByHeader])
    @rate_limit("1/m", key="user", group="g")
    def view(request):
        return Response("ok")

    site.serve(view)
    assert [site.get(headers={"X-User": user}).status_code for user in ("41", "41", "42")] == [200, 429, 200]
    assert counters(client) == ["rlaas:rate_limit:g/41", "rlaas:rate_limit:g/42"]


def test_rest_framework_s_error_responses_are_charged(settings, clock):
    site = Site("wsgi, def", settings)

    @rate_limit("5/m", group="g")
    @api_view(["GET"])
    def view(request):
        raise PermissionDenied

    site.serve(view)
    response = site.get()
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (403, "4")


# Errors


@pytest.mark.parametrize(
    "limit", [rate_limit, rate_limit("9/m"), rate_limit("9/m", charge_when=failed, charge_on_error=False)]
)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *itertools.product(KINDS, (ValueError, KeyError, Http404, PermissionDenied, SystemExit)),
        ("def", StopIteration),  # in a coroutine, Python itself makes a RuntimeError of it
    ],
)
def test_a_view_s_exception_propagates_and_the_view_ran_once(kind, limit, error):
    runs, error = [], error("x")

    def view(request):
        runs.append(request)
        raise error

    with pytest.raises(type(error)) as caught:
        call(limit(as_kind(kind, view)))
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert len(runs) == 1


@both_ways
@pytest.mark.parametrize(("error", "status"), [(Http404, 404), (PermissionDenied, 403)])
def test_django_s_error_responses_are_charged(site, error, status):
    def view(request):
        raise error

    site.serve(rate_limit("2/m")(site.view(view)))
    assert site.statuses(3) == [status, status, 429]


async def test_a_cancelled_request_stays_charged_and_cancelled():
    begun = asyncio.Event()

    @rate_limit("5/m", group="g")
    async def view(request):
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(view(RequestFactory().get("/", REMOTE_ADDR=ADDRESS)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert charged(Policy("g", "5/m")) == 1


# Several decorators on a view


@both_ways
def test_a_policy_of_several_decorators_is_charged_once(site, clock):
    site.serve(rate_limit("login")(rate_limit("hourly", "login")(rate_limit("login")(site.view(ok)))))
    site.get()
    assert (charged("login"), charged("hourly")) == (1, 1)
    assert_refusal(
        [site.get() for _ in range(2)][1],
        policies={"login": (2, 60)},
        violated=["login"],
    )


def test_the_headers_list_the_policies_of_all_decorators(site, clock):
    site.serve(rate_limit("login")(rate_limit("5/m", group="g")(site.view(ok))))
    response = site.get()
    assert rate_limit_fields(response)[0] == {"login": (2, 60), "g": (5, 60)}
    assert response.headers["X-RateLimit-Remaining"] == "1"


@both_ways
def test_a_refusal_refunds_what_outer_decorators_charged(site, clock):
    view = rate_limit("9/m", group="c")(site.view(ok))
    view = rate_limit("1/m", group="b")(view)
    view = rate_limit("5/m", "9/h", group="a", cost=2)(view)
    site.serve(view)
    assert site.get().status_code == 200
    for _ in range(3):
        refused = site.get()
        refusal = assert_refusal(refused, policies=["a-60s", "a-3600s", "b"], violated=["b"], wait=60)
        assert (refusal.usage["a-60s"][0], refusal.usage["a-3600s"][0]) == (3, 7)
    counts = [charged(Policy(name, rate)) for name, rate in (("a-60s", "5/m"), ("a-3600s", "9/h"), ("c", "9/m"))]
    assert counts == [2, 2, 1]


@both_ways
def test_an_inner_decorator_refuses_what_an_outer_one_only_annotated(site, clock):
    """The same policy, decided once: block=False outside, blocking inside."""
    view = rate_limit(Policy("g", "1/m"), block=False)(rate_limit(Policy("g", "1/m"))(site.view(ok)))
    site.serve(view)
    assert site.get().status_code == 200
    assert_refusal(site.get(), policies={"g": (1, 60)}, wait=60)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (["5/month"], {}, "5/month"),
        (["5 per month"], {}, "5 per month"),
        ([], {"rate": "5/month"}, "5/month"),
        ([], {"rate": "login"}, "login"),
        (["5/m "], {}, "5/m "),
        (["/m"], {}, "/m"),
        (["0/m"], {}, "0/m"),
        ([(5, "m")], {}, "m"),
        ([5], {}, "5"),
        ([None], {}, "None"),
        (["log in"], {}, "log in"),
        (["5/m"], {"algo": "leaky"}, "leaky"),
        (["5/m"], {"key": "adress"}, "adress"),
        (["5/m"], {"key": "header:"}, "header:"),
        (["5/m"], {"key": 5}, "5"),
        (["5/m"], {"burst": 9, "algo": FIXED_WINDOW}, FIXED_WINDOW),
        (["5/m"], {"burst": 0, "algo": TOKEN_BUCKET}, "0"),
        (["5/m"], {"on_failure": "shut"}, "shut"),
        ([], {"key": "ip"}, "key"),
        (["abc"], {"key": "ip"}, "'abc' names a policy"),
        (["5"], {"group": "g"}, "'5' names a policy"),
        (["5/m"], {"method": "PSOT"}, "'PSOT' is not known; did you mean 'POST'?"),
        (["5/m"], {"method": ["GET", 5]}, "The HTTP method 5"),
        (["5/m"], {"method": []}, "[]"),
        (["5/m"], {"method": ""}, "''"),
        (["5/m"], {"method": 5}, "5"),
        (["5/m"], {"group": 5}, "5"),
        (["5/m"], {"block": "no"}, "block 'no'"),
        (["5/m"], {"charge_on_error": None}, "charge_on_error None"),
        (["5/m"], {"charge_when": 401}, "charge_when 401"),
        (["5/m"], {"charge_when": "401"}, "charge_when '401'"),
        (["5/m"], {"charge_when": asorry}, "async function"),
        (["5/m"], {"response": "later"}, "response 'later'"),
        (["5/m"], {"response": HttpResponse()}, "response <HttpResponse"),
        (["5/m"], {"cost": 6}, "5/m: the cost 6 exceeds 5"),
        (["5/m", "10/h"], {"cost": 6}, "5/m: the cost 6 exceeds 5"),
        (["5/m"], {"cost": 10, "algo": TOKEN_BUCKET, "burst": 9}, "the cost 10 exceeds 9"),
        ([Policy("p", "5/m")], {"cost": 6}, "the cost 6 exceeds 5"),
        (["login"], {"algo": TOKEN_BUCKET}, "algo"),
        (["login"], {"shadow": True}, "shadow"),
        (["login"], {"label": "Log-ins"}, "label"),
        ([Policy("p", "5/m")], {"group": "g"}, "group"),
        (["5/m", "6/60"], {}, "6/m"),
        (["login", "login"], {}, "login"),
    ],
)
def test_a_mistake_is_an_error_at_import(arguments, options, text):
    with pytest.raises(PolicyError) as caught:
        rate_limit(*arguments, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("cost", [-1, "1", 1.5, True])
def test_an_invalid_cost_is_an_error_at_import(cost):
    with pytest.raises(PolicyError, match="cost"):
        rate_limit("5/m", cost=cost)


def two(request):
    return 2


def test_functions_may_be_given_by_their_dotted_path(site, clock):
    site.own_body = True
    here = f"{__name__}."
    limit = rate_limit("5/m", cost=f"{here}two", response=f"{here}sorry", charge_when=f"{here}failed", group="g")
    site.serve(limit(site.view(login)))
    assert site.statuses(9, headers={"X-Password": "right"}) == [200] * 9
    assert site.statuses(3) == [401, 401, 429]
    assert site.get().json() == {"wait": 60.0, "policy": "g"}
    assert charged(Policy("g", "5/m")) == 4


@pytest.mark.parametrize("view", [ok, View], ids=["function", "class"])
def test_a_rate_function_that_is_not_given_as_rate_is_an_error_when_it_is_applied(view):
    def rate_for(request):
        return "5/m"

    with pytest.raises(TypeError, match="rate="):
        rate_limit(rate_for)(view)


def test_a_rate_function_beside_other_limits_is_an_error():
    with pytest.raises(PolicyError, match="rate="):
        rate_limit("5/m", rate_of_plan)


def test_a_function_without_a_request_is_an_error():
    with pytest.raises(TypeError, match="no request among the arguments"):
        rate_limit("5/m")(lambda number: number)(5)


def test_an_unknown_policy_is_an_error_at_the_request_and_in_the_checks(site):
    view = site.serve(rate_limit("logn")(site.view(ok)))
    with pytest.raises(ImproperlyConfigured, match="no policy 'logn'; did you mean 'login'"):
        site.get()
    messages = [each for each in checks.run_checks(tags=["caches"]) if each.id == "rlaas_django.E013"]
    assert [each.msg for each in messages if "tests.support.http.ok" in each.msg and "logn" in each.msg]
    assert view is not None


def test_the_checks_name_the_class_of_a_method_decorator_with_an_unknown_policy(configure, kind):
    configure(POLICIES=POLICIES)
    page = method_decorator(rate_limit("hourlie"), name="dispatch")(class_view(kind))
    messages = [each.msg for each in checks.run_checks(tags=["caches"]) if "hourlie" in each.msg]
    assert messages
    assert not [message for message in messages if "dummy" in message]
    assert page is not None


def test_the_checks_accept_two_classes_with_rates_of_their_own(kind):
    pages = [method_decorator(rate_limit(rate), name="dispatch")(class_view(kind)) for rate in ("5/m", "6/m")]
    assert not [each.msg for each in checks.run_checks(tags=["caches"]) if "dummy" in each.msg]
    assert pages


# ENABLED


@both_ways
def test_disabled_nothing_is_checked(site, configure, client):
    site.serve(rate_limit("1/m")(site.view(ok)))
    configure(ENABLED=False)
    responses = [site.get() for _ in range(3)]
    assert [response.status_code for response in responses] == [200] * 3
    assert not [name for name in responses[0].headers if "ratelimit" in name.lower()]
    assert counters(client) == []
    configure(ENABLED=True)
    assert site.statuses(2) == [200, 429]


def test_override_settings_disables_and_enables(site):
    site.serve(rate_limit("1/m")(site.view(ok)))
    assert site.statuses(2) == [200, 429]
    with override_settings(RATE_LIMITER={"TIMEOUT": 20, "ENABLED": False}):
        assert site.statuses(3) == [200] * 3
    assert site.statuses(1) == [429]


def test_disabled_redis_is_not_needed(site, use, configure):
    site.serve(rate_limit("1/m", on_failure="closed", charge_when=failed)(site.view(ok)))
    configure(ENABLED=False)
    use("unix:///nowhere.sock")
    assert site.statuses(2) == [200, 200]


def test_other_decorators_around_and_inside(site):
    site.own_body = True  # never_cache writes a Cache-Control of its own
    site.serve(never_cache(rate_limit("1/m")(never_cache(site.view(ok)))))
    assert "max-age=0" in site.get().headers["Cache-Control"]
    refused = site.get()
    assert refused.status_code == 429
    assert "no-store" in refused.headers["Cache-Control"]
