"""@rate_limit on a view of Django REST framework: what each place for it sees, counts and responds.

There are three kinds of places. On a *class*, limits know what the framework does: those without a user are checked
before authentication, those by user after it, and wrong credentials count. *Inside*, next to the handler, limits are
checked when the framework has done all that comes before it. *Outside*, around the whole view, they know nothing of the
framework: a user of its own is not known there, and the address is counted.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_login_failed
from django.http import HttpResponse
from django.test import Client
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.decorators import api_view, authentication_classes, permission_classes, throttle_classes
from rest_framework.exceptions import AuthenticationFailed, NotFound
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler
from rest_framework.viewsets import ViewSet
from rlaas_django import Policy, login_failed, peek, rate_limit
from rlaas_django.integrations.drf import PolicyThrottle, UserRateThrottle
from rlaas_django.signals import rate_limited

from tests.support.cancellation import assert_soon_charged
from tests.support.http import (
    AUTHENTICATION,
    OURS,
    PROBLEM_JSON,
    Site,
    assert_clean_headers,
    assert_refusal,
    counters,
    rate_limit_fields,
)
from tests.support.internals import SITE_STATISTICS, check_settings, flush_statistics, observers, read_minutes, total

ADDRESS = "ip=203.0.113.9"
RIGHT, WRONG = "41", "?"
AUTHENTICATED: list[str | None] = []  # the credentials that were looked at


class ByHeader(BaseAuthentication):
    """Authenticates by a header, as a token would; `X-User: ?` is a wrong one."""

    def authenticate(self, request):
        user = request.headers.get("X-User")
        AUTHENTICATED.append(user)
        if user == WRONG:
            raise AuthenticationFailed
        return (SimpleNamespace(pk=user, is_authenticated=True), None) if user else None

    def authenticate_header(self, request):
        return "Header"


def page(request):
    """Respond as the query says: `?status=404`, `?missing`, `?raises`."""
    if "raises" in request.GET:
        raise RuntimeError
    if "missing" in request.GET:
        raise NotFound
    return Response({"remaining": request.rate_limit.remaining}, status=int(request.GET.get("status", "200")))


OPTIONS = {"authentication_classes": [ByHeader], "permission_classes": [], "throttle_classes": []}


def handler(self, request):
    return page(request)


def api_class(**options):
    return type("Api", (APIView,), {**OPTIONS, "get": handler, "post": handler, **options})


def viewset(**options):
    return type("Api", (ViewSet,), {**OPTIONS, "list": handler, **options})


def function_view(view=page, **options):
    options = {**OPTIONS, **options}
    view = throttle_classes(options["throttle_classes"])(view)
    view = permission_classes(options["permission_classes"])(view)
    return api_view(["GET", "POST"])(authentication_classes(options["authentication_classes"])(view))


def limited_method(limit, **options):
    return api_class(get=limit(handler), post=limit(handler), **options).as_view()


def limited_methods_by_name(limit, **options):
    by_get = method_decorator(limit, name="get")(api_class(**options))
    return method_decorator(limit, name="post")(by_get).as_view()


def limited_dispatch(limit, **options):
    return method_decorator(limit, name="dispatch")(api_class(**options)).as_view()


ON_CLASS = {
    "class": lambda limit, **options: limit(api_class(**options)).as_view(),
    "viewset": lambda limit, **options: limit(viewset(**options)).as_view({"get": "list", "post": "list"}),
}
INSIDE = {
    "below api_view": lambda limit, **options: function_view(limit(page), **options),
    "method": limited_method,
    "method by name": limited_methods_by_name,
    "viewset, list": lambda limit, **options: viewset(list=limit(handler), **options).as_view(
        {"get": "list", "post": "list"}
    ),
}
OUTSIDE = {
    "above api_view": lambda limit, **options: limit(function_view(**options)),
    "as_view": lambda limit, **options: limit(api_class(**options).as_view()),
    "viewset, as_view": lambda limit, **options: limit(viewset(**options).as_view({"get": "list", "post": "list"})),
    "dispatch": limited_dispatch,
}
FORMS = {**ON_CLASS, **INSIDE, **OUTSIDE}


def forms(*groups):
    """Parametrise by the forms of some groups."""
    parameters = [pytest.param(form, id=name) for group in groups for name, form in group.items()]
    return pytest.mark.parametrize("form", parameters)


every_form = forms(ON_CLASS, INSIDE, OUTSIDE)
on_class = forms(ON_CLASS)
inside = forms(INSIDE)
outside = forms(OUTSIDE)
around_the_handler = forms(ON_CLASS, OUTSIDE)
every_key = pytest.mark.parametrize("key", ["ip", pytest.param("user", marks=pytest.mark.slow), "user_or_ip"])
by_user = pytest.mark.parametrize("key", ["user", "user_or_ip"])


@pytest.fixture(autouse=True)
def _frozen(clock):
    AUTHENTICATED.clear()


@pytest.fixture
def site(settings):
    site = Site("wsgi, def", settings)
    site.own_body = True
    site.raises = False
    return site


@pytest.fixture
def observations():
    """Collect what the statistics are told of."""
    observed = []
    observers.add(observed.append)
    yield observed
    observers.remove(observed.append)


@pytest.fixture
def signals():
    """Collect the policies that `rate_limited` was sent for."""
    sent = []

    def receiver(decision, **_):
        sent.append(str(decision.policy))

    rate_limited.connect(receiver)
    yield sent
    rate_limited.disconnect(receiver)


def limit(key="ip", **options):
    return rate_limit("2/m", key=key, group="own", **options)


def get(site, user=None, where="/", **headers):
    """Send a request with these credentials."""
    credentials = {"X-User": user} if user else {}
    return site.get(where, headers={**credentials, **headers})


def statuses(site, *users, where="/"):
    return [get(site, user, where).status_code for user in users]


def identities(client):
    """Return whom the counters count."""
    return [key.rpartition("/")[2] for key in counters(client)]


def charged(policy, **identity):
    """Return what the client was charged; `user=` is for a policy by user, whose client is known."""
    return peek({"ip": "203.0.113.9", "global": "", **identity}, policy).current_count


def results(observations):
    return [observation.result for observation in observations]


def remaining(response):
    """Return what a response says is left; None where it does not."""
    return response.headers.get("X-RateLimit-Remaining")


def counted_for_the_site() -> tuple[int, int]:
    """Return the requests that the statistics have as allowed and as refused, each once."""
    flush_statistics()
    counts = total(read_minutes([SITE_STATISTICS])[SITE_STATISTICS])
    return counts.allowed, counts.refused


# Whom each key counts


@every_form
@pytest.mark.parametrize("user", [RIGHT, None])
def test_the_address_is_counted_whoever_the_user_is(site, client, form, user):
    site.serve(form(limit("ip")))
    assert statuses(site, user, user, user) == [200, 200, 429]
    assert identities(client) == [ADDRESS]


@forms(ON_CLASS, INSIDE)
@by_user
def test_on_a_class_and_inside_the_user_is_whom_the_framework_authenticated(site, client, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, RIGHT, RIGHT, RIGHT, "42") == [200, 200, 429, 200]
    assert identities(client) == ["41", "42"]


@outside
@by_user
def test_outside_a_key_by_user_counts_the_address(site, client, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, RIGHT, "42", RIGHT) == [200, 200, 429]
    assert identities(client) == [ADDRESS]


@every_form
@by_user
def test_without_credentials_the_address_is_counted(site, client, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, None, None, None) == [200, 200, 429]
    assert identities(client) == [ADDRESS]


@around_the_handler
@every_key
def test_on_a_class_and_outside_wrong_credentials_count_the_address(site, client, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, WRONG, WRONG, WRONG) == [401, 401, 429]
    assert identities(client) == [ADDRESS]


@inside
@every_key
def test_inside_wrong_credentials_do_not_get_to_the_limit(site, client, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, WRONG, WRONG, WRONG) == [401, 401, 401]
    assert identities(client) == []


@around_the_handler
@every_key
def test_on_a_class_and_outside_missing_credentials_count_the_address(site, client, form, key):
    site.serve(form(limit(key), permission_classes=[IsAuthenticated]))
    assert statuses(site, None, None, None) == [401, 401, 429]
    assert identities(client) == [ADDRESS]


@inside
@every_key
def test_inside_missing_credentials_do_not_get_to_the_limit(site, client, form, key):
    site.serve(form(limit(key), permission_classes=[IsAuthenticated]))
    assert statuses(site, None, None, None) == [401, 401, 401]
    assert identities(client) == []


@on_class
@by_user
def test_on_a_class_wrong_credentials_do_not_use_up_the_limit_of_a_user(site, form, key):
    site.serve(form(limit(key)))
    assert statuses(site, WRONG, WRONG, RIGHT, WRONG) == [401, 401, 200, 429]


@pytest.mark.django_db
@every_form
@by_user
def test_the_user_of_a_session_is_known_everywhere(site, client, form, key):
    user = User.objects.create_user("ann")
    site.log_in(user)
    site.serve(form(limit(key), authentication_classes=[SessionAuthentication]), middleware=AUTHENTICATION)
    assert statuses(site, None, None, None) == [200, 200, 429]
    assert identities(client) == [str(user.pk)]


@pytest.mark.django_db
@every_form
def test_with_a_session_the_address_is_counted_where_it_is_the_key(site, client, form):
    site.log_in(User.objects.create_user("ann"))
    site.serve(form(limit("ip"), authentication_classes=[SessionAuthentication]), middleware=AUTHENTICATION)
    assert statuses(site, None) == [200]
    assert identities(client) == [ADDRESS]


@pytest.mark.django_db
@on_class
@by_user
def test_on_a_class_a_session_without_a_csrf_token_counts_the_address(site, client, form, key):
    site.log_in(User.objects.create_user("ann"))
    site.serve(form(limit(key), authentication_classes=[SessionAuthentication]), middleware=AUTHENTICATION)
    browser = Client(enforce_csrf_checks=True, REMOTE_ADDR="203.0.113.9")
    browser.cookies = site.cookies
    assert [browser.post("/").status_code for _ in range(3)] == [403, 403, 429]
    assert identities(client) == [ADDRESS]


@forms(ON_CLASS, INSIDE)
def test_on_a_class_and_inside_functions_of_the_site_read_the_framework_s_user(site, form):
    functions = {
        "rate": lambda request: "4/m" if request.user.pk == RIGHT else "1/m",
        "key": lambda request: request.user.pk,
        "cost": lambda request: 2 if request.user.pk == RIGHT else 1,
    }
    site.serve(form(rate_limit(group="own", **functions)))
    assert [remaining(get(site, user)) for user in (RIGHT, RIGHT, "42")] == ["2", "0", "0"]


@every_form
@every_key
def test_a_method_that_is_not_limited_is_neither_charged_nor_observed(site, client, form, key, observations):
    site.serve(form(limit(key, method="POST")))
    response = get(site, RIGHT)
    assert (response.status_code, remaining(response)) == (200, None)
    assert identities(client) == []
    assert observations == []


@every_key
def test_a_subclass_of_a_limited_class_shares_its_limit(site, key):
    base = limit(key)(api_class())
    derived = type("Derived", (base,), {"get": handler})
    site.serve({"base": base.as_view(), "derived": derived.as_view()})
    assert [get(site, RIGHT, where).status_code for where in ("/base", "/derived", "/derived")] == [200, 200, 429]


@every_key
def test_the_base_of_a_limited_class_is_not_limited(site, client, key):
    base = api_class()
    limited = limit(key)(type("Derived", (base,), {}))
    site.serve({"base": base.as_view(), "limited": limited.as_view()})
    statuses(site, RIGHT, where="/base")
    assert identities(client) == []


@every_key
def test_a_limited_subclass_of_a_limited_class_has_both_limits(site, key):
    base = limit(key)(api_class())
    derived = rate_limit("9/m", key=key, group="derived")(type("Derived", (base,), {}))
    site.serve(derived.as_view())
    assert rate_limit_fields(get(site, RIGHT))[1] == {"derived": (8, 60), "own": (1, 60)}


# Authentication


@around_the_handler
def test_on_a_class_and_outside_a_limit_by_address_refuses_before_authentication(site, form):
    site.serve(form(limit("ip")))
    assert statuses(site, RIGHT, WRONG, RIGHT, WRONG) == [200, 401, 429, 429]
    assert AUTHENTICATED == [RIGHT, WRONG]


@inside
def test_inside_a_refused_request_was_authenticated(site, form):
    site.serve(form(limit("ip")))
    assert statuses(site, RIGHT, RIGHT, RIGHT) == [200, 200, 429]
    assert AUTHENTICATED == [RIGHT] * 3


@every_form
@every_key
@pytest.mark.parametrize("user", [RIGHT, WRONG])
def test_a_request_is_authenticated_once(site, form, key, user):
    site.serve(form(limit(key)))
    get(site, user)
    assert len(AUTHENTICATED) == 1


@on_class
def test_of_one_decorator_the_policies_without_a_user_refuse_before_authentication(site, form):
    site.serve(form(rate_limit(Policy("address", "1/m", key="ip"), Policy("user", "9/m", key="user"))))
    assert statuses(site, RIGHT, RIGHT, WRONG) == [200, 429, 429]
    assert AUTHENTICATED == [RIGHT]


@forms(ON_CLASS, INSIDE)
def test_of_one_decorator_a_policy_by_user_that_refuses_costs_the_address_nothing(site, form):
    address, user = Policy("address", "9/m", key="ip"), Policy("user", "1/m", key="user")
    site.serve(form(rate_limit(address, user)))
    assert statuses(site, RIGHT, RIGHT, "42") == [200, 429, 200]
    assert charged(address) == 2


@on_class
def test_of_one_decorator_wrong_credentials_are_charged_to_every_policy(site, form):
    address, user = Policy("address", "9/m", key="ip"), Policy("user", "9/m", key="user")
    site.serve(form(rate_limit(address, user)))
    assert statuses(site, WRONG) == [401]
    assert [charged(address), charged(user)] == [1, 1]


@on_class
def test_of_one_decorator_the_headers_list_its_policies_in_its_order(site, form):
    site.serve(form(rate_limit(Policy("address", "9/m", key="ip"), Policy("user", "8/m", key="user"))))
    response = get(site, RIGHT)
    assert response.headers["RateLimit"] == '"address";r=8;t=60, "user";r=7;t=60'


@on_class
def test_the_policies_of_one_decorator_are_one_request_in_the_statistics(site, form, observations):
    site.serve(form(rate_limit(Policy("address", "9/m", key="ip"), Policy("user", "1/m", key="user"))))
    statuses(site, RIGHT, RIGHT)
    assert results(observations) == ["allowed", "refused"]


# Responses


@every_form
@every_key
def test_an_allowed_response_has_the_headers_and_the_view_the_decision(site, form, key):
    site.serve(form(limit(key)))
    response = get(site, RIGHT)
    assert response.json() == {"remaining": 1}
    assert assert_clean_headers(response) == {
        "ratelimit-policy": '"own";q=2;w=60',
        "ratelimit": '"own";r=1;t=60',
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-reset": "60",
    }


@every_form
@every_key
def test_a_refusal_has_the_headers(site, form, key):
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT)
    assert assert_clean_headers(get(site, RIGHT)) == {
        "ratelimit-policy": '"own";q=2;w=60',
        "ratelimit": '"own";r=0;t=60',
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": "60",
        "retry-after": "60",
        "cache-control": "no-store",
    }


@forms(INSIDE, OUTSIDE)
@every_key
def test_inside_and_outside_a_refusal_has_our_body(site, form, key):
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT)
    refused = get(site, RIGHT)
    assert_refusal(refused, policies={"own": (2, 60)}, violated=["own"], wait=60, media_type=PROBLEM_JSON)


@on_class
@every_key
def test_on_a_class_a_refusal_has_the_framework_s_body(site, form, key):
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT)
    refused = get(site, RIGHT)
    assert refused.headers["Content-Type"] == "application/json"
    assert refused.json() == {"detail": "Request was throttled. Expected available in 60 seconds."}


@on_class
@every_key
def test_on_a_class_the_site_s_exception_handler_makes_the_refusal(site, settings, form, key):
    def own_handler(error, context):
        response = exception_handler(error, context)
        response.data = {"code": error.status_code}
        return response

    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": own_handler}
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT)
    refused = get(site, RIGHT)
    assert refused.json() == {"code": 429}
    assert_refusal(refused, policies={"own": (2, 60)}, wait=60, own_body=True)


@forms(INSIDE, OUTSIDE)
def test_inside_and_outside_the_site_s_exception_handler_does_not_hear_of_a_refusal(site, settings, form):
    heard = []
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": lambda error, context: heard.append(error)}
    site.serve(form(limit("ip")))
    assert statuses(site, RIGHT, RIGHT, RIGHT) == [200, 200, 429]
    assert heard == []


@every_form
@every_key
def test_a_response_of_the_site_s_own_is_the_refusal(site, form, key):
    site.serve(form(limit(key, response=lambda request, decision: HttpResponse("later", status=418))))
    statuses(site, RIGHT, RIGHT)
    refused = get(site, RIGHT)
    assert (refused.status_code, refused.content) == (418, b"later")
    assert remaining(refused) == "0"


@every_form
def test_the_setting_response_is_the_refusal(site, configure, form):
    configure(RESPONSE=f"{__name__}.teapot")
    site.serve(form(limit("ip")))
    assert statuses(site, RIGHT, RIGHT, RIGHT) == [200, 200, 418]


def teapot(request, decision):
    return HttpResponse("later", status=418)


@on_class
@every_key
def test_on_a_class_a_response_of_the_site_s_own_may_be_one_of_the_framework(site, form, key):
    site.serve(form(limit(key, response=lambda request, decision: Response({"wait": 60}, status=429))))
    assert statuses(site, RIGHT, RIGHT) == [200, 200]
    assert get(site, RIGHT).json() == {"wait": 60}


@every_form
@every_key
def test_a_limit_that_does_not_block_lets_the_view_respond(site, form, key, observations):
    site.serve(form(limit(key, block=False)))
    assert statuses(site, RIGHT, RIGHT, RIGHT) == [200] * 3
    assert results(observations) == ["allowed", "allowed", "over"]


@around_the_handler
@every_key
@pytest.mark.parametrize(("user", "where", "status"), [(WRONG, "/", 401), (RIGHT, "/?missing", 404)])
def test_on_a_class_and_outside_the_response_of_an_exception_has_the_headers(site, form, key, user, where, status):
    site.serve(form(limit(key)))
    response = get(site, user, where)
    assert (response.status_code, remaining(response)) == (status, "1")


@inside
@every_key
def test_inside_the_response_of_an_exception_has_no_headers(site, form, key):
    site.serve(form(limit(key)))
    response = get(site, RIGHT, "/?missing")
    assert (response.status_code, remaining(response)) == (404, None)


@inside
def test_inside_the_middleware_adds_them(site, form, configure):
    configure(MIDDLEWARE=[{"path": "/elsewhere", "policies": ["default"]}])
    site.serve(form(limit("ip")), middleware=[OURS])
    assert remaining(get(site, RIGHT, "/?missing")) == "1"


@every_form
@every_key
def test_without_redis_a_policy_that_fails_closed_is_a_503(site, redis_unavailable, form, key, observations):
    site.serve(form(limit(key, on_failure="closed")))
    response = get(site, RIGHT)
    assert response.status_code == 503
    assert assert_clean_headers(response) == {"retry-after": "1", "cache-control": "no-store"}
    assert results(observations) == ["degraded"]


@every_form
@every_key
def test_without_redis_a_policy_that_fails_open_admits(site, redis_unavailable, form, key, observations):
    site.serve(form(limit(key)))
    response = get(site, RIGHT)
    assert (response.status_code, remaining(response)) == (200, None)
    assert results(observations) == ["degraded"]


# Statistics and signals


@every_form
@every_key
def test_each_request_is_observed_once(site, form, key, observations):
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT, RIGHT)
    assert results(observations) == ["allowed", "allowed", "refused"]
    assert [(each.method, each.path) for each in observations] == [("GET", "/")] * 3


@every_form
@every_key
def test_the_statistics_of_the_site_count_each_request_once(site, form, key):
    site.serve(form(limit(key)))
    statuses(site, RIGHT, RIGHT, RIGHT)
    assert counted_for_the_site() == (2, 1)


@around_the_handler
@every_key
def test_on_a_class_and_outside_wrong_credentials_are_observed_once(site, form, key, observations):
    site.serve(form(limit(key)))
    statuses(site, WRONG, WRONG, WRONG)
    assert results(observations) == ["allowed", "allowed", "refused"]


@inside
@every_key
def test_inside_wrong_credentials_are_not_observed(site, form, key, observations):
    site.serve(form(limit(key)))
    statuses(site, WRONG)
    assert observations == []


@every_form
@every_key
@pytest.mark.parametrize(("where", "status"), [("/?missing", 404), ("/?raises", 500), ("/?status=500", 500)])
def test_an_error_of_the_view_is_charged_and_observed_as_allowed(site, form, key, where, status, observations):
    site.serve(form(limit(key)))
    assert statuses(site, RIGHT, RIGHT, RIGHT, where=where) == [status, status, 429]
    assert results(observations) == ["allowed", "allowed", "refused"]


@every_form
@every_key
def test_a_refusal_sends_one_signal(site, form, key, signals):
    site.serve(form(limit(key)))
    statuses(site, *[RIGHT] * 4)
    assert signals == ["own", "own"]


# charge_when and charge_on_error


def judge(site, form, key, user, where):
    """Return the statuses of the responses that `charge_when` is asked about."""
    judged = []
    site.serve(form(limit(key, charge_when=lambda response: judged.append(response.status_code))))
    get(site, user, where)
    return judged


@around_the_handler
@every_key
@pytest.mark.parametrize(
    ("user", "where", "judged"),
    [
        (RIGHT, "/", [200]),
        (WRONG, "/", [401]),
        (RIGHT, "/?missing", [404]),
        (RIGHT, "/?status=500", [500]),
        (RIGHT, "/?raises", []),
    ],
)
def test_on_a_class_and_outside_charge_when_sees_what_the_framework_makes_of_exceptions(
    site, client, form, key, user, where, judged
):
    assert judge(site, form, key, user, where) == judged
    assert len(identities(client)) == (where == "/?raises")  # what is judged is refunded here


@inside
@every_key
@pytest.mark.parametrize(
    ("user", "where", "judged"),
    [
        (RIGHT, "/", [200]),
        (WRONG, "/", []),
        (RIGHT, "/?missing", []),
        (RIGHT, "/?status=500", [500]),
        (RIGHT, "/?raises", []),
    ],
)
def test_inside_charge_when_sees_what_the_view_returns(site, form, key, user, where, judged):
    assert judge(site, form, key, user, where) == judged


@every_form
@every_key
def test_charge_when_reads_the_data_of_the_response(site, form, key):
    judged = []
    site.serve(form(limit(key, charge_when=lambda response: judged.append(response.data))))
    get(site, RIGHT)
    assert judged == [{"remaining": 1}]


@every_form
@every_key
def test_charge_when_is_not_asked_about_a_refusal_of_its_own(site, form, key):
    judged = []
    site.serve(form(limit(key, charge_when=lambda response: judged.append(response.status_code) or True)))
    assert statuses(site, RIGHT, RIGHT, RIGHT) == [200, 200, 429]
    assert judged == [200, 200]


@every_form
@every_key
def test_what_charge_when_does_not_count_shows_in_the_headers(site, form, key):
    site.serve(form(limit(key, charge_when=lambda response: False)))
    assert [remaining(get(site, RIGHT)) for _ in range(3)] == ["2", "2", "2"]


@around_the_handler
@every_key
@pytest.mark.parametrize(
    ("user", "where", "count"),
    [(RIGHT, "/", 1), (WRONG, "/", 1), (RIGHT, "/?missing", 1), (RIGHT, "/?raises", 0)],
)
def test_on_a_class_and_outside_only_an_exception_without_a_response_is_an_error(
    site, client, form, key, user, where, count
):
    site.serve(form(limit(key, charge_on_error=False)))
    get(site, user, where)
    assert len(identities(client)) == count


@inside
@every_key
@pytest.mark.parametrize(("where", "count"), [("/", 1), ("/?missing", 0), ("/?raises", 0), ("/?status=500", 1)])
def test_inside_every_exception_is_an_error(site, client, form, key, where, count):
    site.serve(form(limit(key, charge_on_error=False)))
    get(site, RIGHT, where)
    assert len(identities(client)) == count


@on_class
@every_key
def test_on_a_class_a_view_that_returns_no_response_is_an_error(site, form, key, observations):
    nothing = {"get": lambda self, request: None, "list": lambda self, request: None}
    site.serve(form(limit(key, charge_on_error=False), **nothing))
    assert statuses(site, RIGHT) == [500]
    assert charged(Policy("own", "2/m", key=key), user=RIGHT) == 0
    assert results(observations) == ["allowed"]


LOG_INS = ("/", "/?wrong", "/", "/?wrong", "/")  # the fifth is refused, after two wrong passwords


@on_class
@every_key
def test_on_a_class_charge_when_knows_of_failed_log_ins(site, form, key):
    def log_in(self, request):
        if "wrong" in request.GET:
            user_login_failed.send(sender=None, credentials={}, request=request)
        return Response({})

    site.serve(form(limit(key, charge_when=login_failed), get=log_in, list=log_in))
    assert [get(site, RIGHT, where).status_code for where in LOG_INS] == [200, 200, 200, 200, 429]


@every_key
def test_limits_on_a_class_and_on_its_method_know_of_each_other(site, key, observations):
    inner = rate_limit("1/m", key=key, group="inner")
    site.serve(limit(key)(api_class(get=inner(handler))).as_view())
    assert statuses(site, RIGHT, RIGHT) == [200, 429]
    assert charged(Policy("own", "2/m", key=key), user=RIGHT) == 1
    assert get(site, RIGHT).headers["RateLimit"] == '"own";r=1;t=60, "inner";r=0;t=60'
    assert results(observations) == ["allowed", "refused", "refused"]


# With the middleware, and with throttles


@pytest.fixture
def rule(configure):
    """A rule for every path."""
    configure(POLICIES={"site": {"rate": "9/h", "key": "global"}}, MIDDLEWARE=[{"path": "/", "policies": ["site"]}])


@pytest.mark.usefixtures("rule")
@every_form
@every_key
def test_below_a_rule_the_headers_list_both(site, form, key):
    site.serve(form(limit(key)), middleware=[OURS])
    assert rate_limit_fields(get(site, RIGHT))[1] == {"site": (8, 3600), "own": (1, 60)}


@pytest.mark.usefixtures("rule")
@every_form
@every_key
def test_below_a_rule_a_refusal_refunds_it_and_shows_both(site, form, key):
    site.serve(form(limit(key)), middleware=[OURS])
    statuses(site, *[RIGHT] * 4)
    assert charged("site") == 2
    assert rate_limit_fields(get(site, RIGHT))[1] == {"site": (7, 60), "own": (0, 60)}


@pytest.mark.usefixtures("rule")
@every_form
@every_key
def test_below_a_rule_each_request_is_observed_once(site, form, key, observations):
    site.serve(form(limit(key)), middleware=[OURS])
    statuses(site, RIGHT, RIGHT, RIGHT)
    assert results(observations) == ["allowed", "allowed", "refused"]


@pytest.mark.usefixtures("rule")
@every_form
def test_a_policy_of_the_rule_and_of_the_view_is_charged_once(site, form):
    site.serve(form(rate_limit("site")), middleware=[OURS])
    get(site, RIGHT)
    assert charged("site") == 1


class NinePerHour(UserRateThrottle):
    rate = "9/hour"


class OnePerHour(UserRateThrottle):
    rate = "1/hour"


class BySite(PolicyThrottle):
    policies = (Policy("shared", "9/h", key="global"),)


THROTTLE = Policy("drf.user-3600s", "9/h", key="user", algo="sliding-window-compact-algo")


@every_form
@pytest.mark.parametrize("key", ["ip", "user"])
def test_with_a_throttle_the_headers_list_both(site, form, key):
    site.serve(form(limit(key), throttle_classes=[NinePerHour]))
    assert rate_limit_fields(get(site, RIGHT))[1] == {"own": (1, 60), "drf.user-3600s": (8, 3600)}


@every_form
@pytest.mark.parametrize("key", ["ip", "user"])
def test_with_a_throttle_a_refusal_by_the_decorator_shows_what_refused(site, form, key):
    site.serve(form(limit(key), throttle_classes=[NinePerHour]))
    statuses(site, RIGHT, RIGHT)
    refused = get(site, RIGHT)
    assert rate_limit_fields(refused)[1]["own"] == (0, 60)
    assert (remaining(refused), refused.headers["Retry-After"]) == ("0", "60")


@every_form
@pytest.mark.parametrize("key", ["ip", "user"])
def test_a_throttle_and_a_decorator_are_one_request_in_the_statistics(site, form, key, observations):
    site.serve(form(limit(key), throttle_classes=[NinePerHour]))
    statuses(site, RIGHT, RIGHT, RIGHT)
    assert results(observations) == ["allowed", "allowed", "refused"]


@every_form
@pytest.mark.parametrize("key", ["ip", "user"])
def test_with_a_throttle_the_statistics_of_the_site_count_each_request_once(site, form, key):
    site.serve(form(limit(key), throttle_classes=[NinePerHour]))
    statuses(site, RIGHT, RIGHT, RIGHT)
    assert counted_for_the_site() == (2, 1)


@every_form
@every_key
def test_what_the_decorator_refuses_costs_nothing_under_a_throttle(site, form, key):
    site.serve(form(limit(key), throttle_classes=[NinePerHour]))
    assert statuses(site, *[RIGHT] * 4) == [200, 200, 429, 429]
    assert charged(THROTTLE, user=RIGHT) == 2


def throttled(site, count):
    """Return the responses to some requests, whose refusals are the framework's."""
    client = site.client()
    return [client.get("/", headers={"X-User": RIGHT}) for _ in range(count)]


@every_form
@every_key
def test_a_throttle_refuses_as_it_does_without_a_decorator(site, form, key, signals):
    site.serve(form(limit(key), throttle_classes=[OnePerHour]))
    refused = throttled(site, 2)[1]
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3600")
    assert refused.json() == {"detail": "Request was throttled. Expected available in 3600 seconds."}
    assert signals == ["drf.user-3600s"]


@inside
@every_key
def test_inside_a_request_that_a_throttle_refuses_does_not_get_to_the_limit(site, form, key):
    site.serve(form(limit(key), throttle_classes=[OnePerHour]))
    throttled(site, 3)
    assert charged(Policy("own", "2/m", key=key), user=RIGHT) == 1


@around_the_handler
def test_a_limit_by_address_around_a_throttle_that_refuses_stays_charged(site, form):
    site.serve(form(rate_limit("9/m", key="ip", group="own"), throttle_classes=[OnePerHour]))
    throttled(site, 3)
    assert charged(Policy("own", "9/m", key="ip")) == 3


@around_the_handler
@every_key
def test_a_request_that_a_throttle_refuses_is_observed_once(site, form, key, observations):
    site.serve(form(rate_limit("9/m", key=key, group="own"), throttle_classes=[OnePerHour]))
    throttled(site, 3)
    assert results(observations) == ["allowed", "refused", "refused"]


@every_form
def test_a_policy_of_a_throttle_and_of_the_decorator_is_charged_once(site, form):
    site.serve(form(rate_limit(*BySite.policies), throttle_classes=[BySite]))
    get(site, RIGHT)
    assert charged(BySite.policies[0]) == 1


def test_a_throttle_alone_is_observed_once(site, observations):
    site.serve(api_class(throttle_classes=[NinePerHour, BySite]).as_view())
    statuses(site, RIGHT)
    assert results(observations) == ["allowed"]


# Async views


class AsyncApi(APIView):
    """An async view, as adrf has them."""

    authentication_classes = (ByHeader,)
    permission_classes = ()

    async def dispatch_async(self, request, *args, **kwargs):
        self.args, self.kwargs, self.headers = args, kwargs, {}
        self.request = request = self.initialize_request(request, *args, **kwargs)
        try:
            await sync_to_async(self.initial)(request, *args, **kwargs)
            found = getattr(self, request.method.lower(), self.http_method_not_allowed)
            called = found if iscoroutinefunction(found) else sync_to_async(found)
            response = await called(request, *args, **kwargs)
        except Exception as error:
            response = self.handle_exception(error)
        return self.finalize_response(request, response, *args, **kwargs)

    def dispatch(self, request, *args, **kwargs):
        return self.dispatch_async(request, *args, **kwargs)

    async def get(self, request):
        return page(request)


def async_class(**options):
    return type("Api", (AsyncApi,), options)


@pytest.fixture
def async_site(settings):
    site = Site("asgi, async def", settings)
    site.own_body = True
    site.raises = False
    return site


@every_key
@pytest.mark.parametrize(("user", "status"), [(RIGHT, 200), (WRONG, 401), (None, 200)])
def test_an_async_class_counts_as_a_class(async_site, client, key, user, status, observations):
    async_site.serve(limit(key)(async_class()).as_view())
    assert statuses(async_site, user, user, user) == [status, status, 429]
    assert identities(client) == [RIGHT if user == RIGHT and key != "ip" else ADDRESS]
    assert results(observations) == ["allowed", "allowed", "refused"]


@every_key
def test_an_async_class_has_the_headers(async_site, key):
    async_site.serve(limit(key)(async_class()).as_view())
    assert [remaining(get(async_site, RIGHT)) for _ in range(3)] == ["1", "0", "0"]


@every_key
@pytest.mark.parametrize(
    ("user", "where", "judged"),
    [(RIGHT, "/", [200]), (WRONG, "/", [401]), (RIGHT, "/?missing", [404]), (RIGHT, "/?raises", [])],
)
def test_charge_when_of_an_async_class_sees_what_the_framework_makes_of_exceptions(
    async_site, key, user, where, judged
):
    def on_async_class(limit):
        return limit(async_class()).as_view()

    assert judge(async_site, on_async_class, key, user, where) == judged


async def aget(site, user, where="/"):
    """Send a request from the event loop of the test, which goes on for what is refunded later."""
    return await site.client().get(where, headers={"X-User": user})


@every_key
async def test_charge_when_of_an_async_class_knows_of_failed_log_ins(async_site, key):
    async def log_in(self, request):
        if "wrong" in request.GET:
            await user_login_failed.asend(sender=None, credentials={}, request=request)
        return Response({})

    async_site.serve(limit(key, charge_when=login_failed)(async_class(get=log_in)).as_view())
    own = Policy("own", "2/m", key=key)
    responses = []
    for where, units in zip(LOG_INS, (0, 1, 1, 2, 2), strict=True):
        responses.append(await aget(async_site, RIGHT, where))
        await assert_soon_charged({"ip": "203.0.113.9", "user": RIGHT}, own, units, "after the response")
    assert [response.status_code for response in responses] == [200, 200, 200, 200, 429]


@every_key
@pytest.mark.parametrize(("where", "units"), [("/", 1), ("/?missing", 1), ("/?raises", 0)])
async def test_charge_on_error_of_an_async_class(async_site, key, where, units):
    async_site.serve(limit(key, charge_on_error=False)(async_class()).as_view())
    await aget(async_site, RIGHT, where)
    own = Policy("own", "2/m", key=key)
    await assert_soon_charged({"ip": "203.0.113.9", "user": RIGHT}, own, units, "after the response")


@every_key
async def test_what_charge_when_does_not_count_of_an_async_class_is_refunded(async_site, key):
    async_site.serve(limit(key, charge_when=lambda response: False)(async_class()).as_view())
    await aget(async_site, RIGHT)
    own = Policy("own", "2/m", key=key)
    await assert_soon_charged({"ip": "203.0.113.9", "user": RIGHT}, own, 0, "after the response")


@every_key
async def test_what_charge_when_does_not_count_of_an_async_class_shows_in_the_headers(async_site, key):
    async_site.serve(limit(key, charge_when=lambda response: False)(async_class()).as_view())
    assert remaining(await aget(async_site, RIGHT)) == "2"


async def test_a_cancelled_request_of_an_async_class_is_observed_by_the_middleware(async_site, observations, configure):
    """The framework has no hook for it, so without the middleware it is not (docs/drf.md)."""

    async def hang_up(self, request):
        raise asyncio.CancelledError

    configure(MIDDLEWARE=[{"path": "/", "exempt": True}])
    async_site.serve(limit("ip")(async_class(get=hang_up)).as_view(), middleware=[OURS])
    with pytest.raises(asyncio.CancelledError):
        await aget(async_site, RIGHT)
    assert results(observations) == ["allowed"]


@every_key
def test_inside_an_async_class_the_limit_is_checked_after_authentication(async_site, client, key):
    async_site.serve(async_class(get=limit(key)(AsyncApi.get)).as_view())
    assert statuses(async_site, WRONG, RIGHT, RIGHT, RIGHT) == [401, 200, 200, 429]
    assert identities(client) == [ADDRESS if key == "ip" else RIGHT]


# The system check


@pytest.fixture
def warnings(settings, no_views):
    """`warnings(view)`: how often W013 is reported."""

    def count(view):
        Site("wsgi, def", settings).serve(view)
        return [message.id for message in check_settings()].count("rlaas_django.W013")

    return count


@forms(ON_CLASS, INSIDE)
@by_user
def test_on_a_class_and_inside_a_key_by_user_is_no_warning(warnings, form, key):
    assert warnings(form(limit(key))) == 0


@outside
@by_user
def test_outside_a_key_by_user_is_a_warning(warnings, form, key):
    assert warnings(form(limit(key))) == 1


@outside
def test_outside_a_key_by_address_is_no_warning(warnings, form):
    assert warnings(form(limit("ip"))) == 0


@outside
@by_user
def test_outside_a_key_by_user_is_no_warning_where_authentication_is_by_session(warnings, form, key):
    assert warnings(form(limit(key), authentication_classes=[SessionAuthentication])) == 0


def test_the_site_s_response_gets_the_request_itself_where_its_body_cannot_be_parsed(site):
    requests = []

    def respond(request, decision):
        requests.append(type(request))
        return HttpResponse("later", status=429)

    @rate_limit(Policy("own", "1/m", key="post:name"), response=respond)
    class View(APIView):
        authentication_classes = ()
        permission_classes = ()

    site.serve(View.as_view())
    options = {"data": "x", "content_type": "text/csv"}
    assert [site.request("post", **options).status_code for _ in range(2)] == [415, 429]
    assert requests == [Request]
