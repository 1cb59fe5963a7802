"""Log-in protection: failures are charged whatever the view answers, by address and by the user name that was tried."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import aauthenticate, authenticate
from django.contrib.auth.backends import BaseBackend
from django.contrib.auth.forms import UsernameField
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_login_failed
from django.contrib.auth.views import LoginView
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import include
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authtoken.views import obtain_auth_token
from rlaas_django import Policy, login_failed, peek, rate_limit

from tests.support.http import AUTHENTICATION, OURS, Site, assert_refusal, both_ways, call, counters
from tests.support.internals import fold

MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware", OURS]
ADDRESS = "203.0.113.9"
FAILURES = {"method": "POST", "charge_when": "rlaas_django.login_failed"}
POLICIES = {
    "login_address": {"rate": "3/h", "key": "ip"},
    "login_name": {"rate": "3/h", "key": "post:username"},
}
RULES = [{"path": path, "policies": [*POLICIES], **FAILURES} for path in ("/login/", "/admin/login/")]
RIGHT, WRONG = {"username": "ann", "password": "right"}, {"username": "ann", "password": "wrong"}


@pytest.fixture
def login_site(settings, configure):
    """A site whose rules charge failed log-ins."""
    configure(POLICIES=POLICIES, MIDDLEWARE=RULES)
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"  # which need no database
    settings.TEMPLATES = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {
                "loaders": [
                    ("django.template.loaders.locmem.Loader", {"registration/login.html": "{{ form.errors }}"}),
                    "django.template.loaders.app_directories.Loader",
                ],
                "context_processors": ["django.template.context_processors.request"],
            },
        }
    ]
    site = Site("wsgi, def", settings)
    site.serve({"login/": LoginView.as_view(next_page="/"), "admin/": admin.site.urls}, middleware=MIDDLEWARE)
    return site


def charged(policy, **identity):
    return peek({"ip": ADDRESS, **identity}, policy).current_count


# One after the other


@pytest.fixture
def ann(db):
    return User.objects.create_superuser("ann", password="right")


@pytest.mark.parametrize("where", ["/login/", "/admin/login/"])
def test_wrong_passwords_are_charged_though_the_response_is_200(login_site, ann, where):
    assert [login_site.post(where, WRONG).status_code for _ in range(12)] == [200] * 3 + [429] * 9
    assert login_site.post(where, RIGHT).status_code == 429  # until the window is over


@pytest.mark.parametrize("where", ["/login/", "/admin/login/"])
def test_right_passwords_and_the_page_itself_are_not_charged(login_site, ann, client, where):
    for _ in range(5):
        assert login_site.post(where, RIGHT).status_code == 302
        assert login_site.get(where).status_code == 200
        assert login_site.post(where, {}).status_code == 200  # an empty form tries no password
    assert counters(client) == []


def test_the_page_is_shown_to_those_who_are_over_the_limit(login_site, ann):
    assert [login_site.post("/login/", WRONG).status_code for _ in range(4)] == [200] * 3 + [429]
    assert login_site.get("/login/").status_code == 200


def test_failures_count_without_redis_where_the_policy_falls_back_to_local_counting(
    login_site, ann, configure, redis_unavailable
):
    local = {name: {**policy, "on_failure": "local"} for name, policy in POLICIES.items()}
    configure(POLICIES=local, MIDDLEWARE=RULES)
    assert [login_site.post("/login/", RIGHT).status_code for _ in range(5)] == [302] * 5
    assert [login_site.post("/login/", WRONG).status_code for _ in range(8)] == [200] * 3 + [429] * 5


def test_a_name_is_limited_from_any_address_and_an_address_for_any_name(login_site, ann):
    def attempt(n, name):
        return login_site.post("/login/", {"username": name, "password": "x"}, address=f"203.0.113.{n}").status_code

    assert [attempt(n, "ann") for n in range(5)] == [200] * 3 + [429] * 2
    assert [attempt(99, f"name-{n}") for n in range(5)] == [200] * 3 + [429] * 2
    assert attempt(50, "bob") == 200


def test_rest_framework_s_token_view(login_site, ann):
    login_site.serve({"login/": obtain_auth_token}, middleware=MIDDLEWARE)
    options = [{"data": WRONG}, {"data": WRONG, "content_type": "application/json"}]
    statuses = [login_site.post("/login/", **options[n % 2]).status_code for n in range(5)]
    assert statuses == [400] * 3 + [429] * 2
    assert charged("login_name", **{"post:username": "ann"}) == 3


# In parallel


class WaitingBackend(BaseBackend):
    """Refuses every password, but not before all other attempts were decided."""

    entered: list[str]
    refused: threading.Semaphore
    done: threading.Event

    @classmethod
    def expect(cls):
        cls.entered, cls.refused, cls.done = [], threading.Semaphore(0), threading.Event()

    def authenticate(self, request, **credentials):
        self.entered.append(credentials.get("username") or credentials.get("email"))
        assert self.done.wait(60)


VIEWS = {  # what is served where, where to log in, the field of the name, and how it is sent
    "LoginView": ("login/", lambda: LoginView.as_view(), "/login/", "username", None),
    "admin": ("admin/", lambda: admin.site.urls, "/admin/login/", "username", None),
    "token, form": ("login/", lambda: obtain_auth_token, "/login/", "username", None),
    "token, JSON": ("login/", lambda: obtain_auth_token, "/login/", "username", "application/json"),
    "allauth": ("", lambda: include("allauth.account.urls"), "/login/", "login", None),
}
SPELLINGS = ("ann", " ann", "ANN ", "\uff41\uff4e\uff4e", "a\u0301nn", "an\u200bn", "Ann\u00ad", "\u3000ann")


@pytest.fixture
def with_allauth(settings):
    """Install allauth; afterwards, remove what it has registered with the admin."""

    def install() -> None:
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "allauth", "allauth.account"]
        settings.ACCOUNT_RATE_LIMITS = False  # its own

    yield install
    if apps.is_installed("allauth.account"):
        for model in apps.get_app_config("account").get_models():
            if admin.site.is_registered(model):
                admin.site.unregister(model)


@pytest.mark.parametrize("by", ["address", "name"])
@pytest.mark.parametrize("view", VIEWS)
def test_32_parallel_wrong_passwords_are_tried_3_times(login_site, settings, with_allauth, configure, view, by):
    """Nobody is done before all were decided, so to check first and charge later would let all 32 in."""
    middleware = MIDDLEWARE
    if view == "allauth":
        middleware = settings.MIDDLEWARE = [*MIDDLEWARE, "allauth.account.middleware.AccountMiddleware"]
        with_allauth()
    route, make, where, field, content_type = VIEWS[view]
    configure(POLICIES={**POLICIES, "login_name": {**POLICIES["login_name"], "key": f"post:{field}"}})
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_login.WaitingBackend"]
    login_site.serve({route: make()}, middleware)
    options = {} if content_type is None else {"content_type": content_type}
    WaitingBackend.expect()

    def attempt(n):
        name, address = (f"name-{n}", ADDRESS) if by == "address" else (SPELLINGS[n % 8], f"198.51.100.{n}")
        response = login_site.post(where, {field: name, "password": f"wrong-{n}"}, address=address, **options)
        if response.status_code == 429:
            WaitingBackend.refused.release()
        return response

    with ThreadPoolExecutor(32) as executor:
        attempts = [executor.submit(attempt, n) for n in range(32)]
        for _ in range(29):
            assert WaitingBackend.refused.acquire(timeout=60)
        WaitingBackend.done.set()
        responses = [each.result() for each in attempts]
    assert len(WaitingBackend.entered) == 3
    assert [response.status_code for response in responses].count(429) == 29
    label = "login_address" if by == "address" else "login_name"
    for response in responses:
        if response.status_code == 429:
            assert_refusal(response, violated=[label])


async def test_32_parallel_wrong_passwords_are_tried_3_times_in_an_async_view(settings):
    entered, refused, done = [], [], asyncio.Event()

    @rate_limit("3/h", key="ip", charge_when=login_failed, group="g")
    async def view(request):
        entered.append(request)
        await asyncio.wait_for(done.wait(), 60)
        await aauthenticate(request, username="ann", password="wrong")
        return HttpResponse("Wrong password.")

    settings.AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.RemoteUserBackend"]
    site = Site("asgi, async def", settings)
    site.serve(view)

    async def attempt():
        response = await site.client().get("/")
        if response.status_code == 429:
            refused.append(response)
        if len(refused) == 29:
            done.set()
        return response

    responses = await asyncio.gather(*(attempt() for _ in range(32)))
    assert len(entered) == 3
    assert [response.status_code for response in responses].count(429) == 29
    assert (await site.client().get("/")).status_code == 429  # the three stay charged


# login_failed


def attempt_view(request):
    """Log in without passing the request on, as many sites do."""
    authenticate(username="ann", password=request.POST.get("password"))
    return HttpResponse("ok")


class OneBackend(BaseBackend):
    def authenticate(self, request, username=None, password=None):
        return User(username=username) if password == "right" else None


@pytest.fixture
def _one_backend(settings):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_login.OneBackend"]


one_backend = pytest.mark.usefixtures("_one_backend")


@one_backend
@both_ways
@pytest.mark.parametrize(
    "charge_when",
    [
        login_failed,
        "rlaas_django.login_failed",
        lambda response: login_failed(response) and response.status_code == 200,
    ],
)
def test_the_request_need_not_be_passed_to_authenticate(site, charge_when):
    site.serve(rate_limit("2/h", key="ip", charge_when=charge_when)(site.view(attempt_view)))
    statuses = [
        site.post(data={"password": password}).status_code for password in ("right", "x", "right", "x", "right")
    ]
    assert statuses == [200, 200, 200, 200, 429]


@one_backend
def test_each_request_is_judged_by_its_own_log_in(site):
    """Also on the same thread, and after a failure that was charged."""
    site.serve(rate_limit("9/h", key="ip", charge_when=login_failed, group="g")(site.view(attempt_view)))
    for password in ("x", "right", "x", "right", "right"):
        site.post(data={"password": password})
    assert charged(Policy("g", "9/h", key="ip")) == 2
    assert not login_failed(HttpResponse())


@one_backend
@both_ways
def test_a_failure_is_charged_by_every_limit_around_the_view(site, configure):
    configure(
        POLICIES={"rule": {"rate": "9/h", "key": "ip"}},
        MIDDLEWARE=[{"policies": ["rule"], "charge_when": login_failed}],
    )
    inner = Policy("inner", "9/h", key="ip")
    site.serve(rate_limit(inner, charge_when=login_failed)(site.view(attempt_view)), middleware=[OURS])
    for password in ("x", "right", "x"):
        site.post(data={"password": password})
    assert (charged("rule"), charged(inner)) == (2, 2)


@one_backend
def test_a_task_that_outlives_its_request_charges_nobody():
    charges = []

    @rate_limit("9/h", key="ip", charge_when=login_failed, group="g")
    async def view(request):
        async def later():
            await asyncio.sleep(0)
            await view_of_another_request(RequestFactory().post("/", {"password": "right"}))
            charges.append(await sync_to_async(charged)(Policy("g", "9/h", key="ip"), ip="127.0.0.1"))

        await sync_to_async(attempt_view)(request)
        view.task = asyncio.create_task(later())
        return HttpResponse("ok")

    @rate_limit("9/h", key="ip", charge_when=login_failed, group="g")
    async def view_of_another_request(request):
        await sync_to_async(attempt_view)(request)
        return HttpResponse("ok")

    async def run():
        await view(RequestFactory().post("/", {"password": "x"}))
        await view.task

    asyncio.run(run())
    assert charges == [1]


async def test_an_async_receiver_s_sender_is_heard():
    @rate_limit("1/h", key="ip", charge_when=login_failed)
    async def view(request):
        await asyncio.create_task(user_login_failed.asend(sender=None, credentials={}, request=request))
        return HttpResponse("ok")

    assert [(await view(RequestFactory().get("/"))).status_code for _ in range(2)] == [200, 429]


@one_backend
def test_a_forged_request_does_not_use_up_the_limit(login_site, settings):
    """Django rejects it before the view, so that no password is tried."""
    site = login_site
    site.serve({"login/": LoginView.as_view()}, ["django.middleware.csrf.CsrfViewMiddleware", *MIDDLEWARE])
    for _ in range(5):
        client = site.client()
        client.handler.enforce_csrf_checks = True
        assert client.post("/login/", WRONG).status_code == 403
    assert charged("login_address") == 0


# The same options of rules and of decorators


def two(request):
    return 2


def refused_password(response):
    return response.status_code == 401


def answer(request):
    return HttpResponse("ok", status=int(request.GET.get("status", "200")))


def statuses_of(site, *status, method="get"):
    return [site.request(method, f"/?status={each}").status_code for each in status]


@pytest.fixture(params=["rule", "decorator"])
def limit(request, site, configure):
    """`limit(rate, **options)`: the view within a policy, by a rule or by a decorator."""

    def limit_view(rate, **options):
        configure(POLICIES={"p": {"rate": rate, "key": "ip"}})
        view = site.view(csrf_exempt(answer))
        if request.param == "decorator":
            site.serve(rate_limit("p", **options)(view))
        else:
            configure(MIDDLEWARE=[{"policies": ["p"], **options}])
            site.serve(view, middleware=[OURS])

    return limit_view


@both_ways
@pytest.mark.parametrize("charge_when", [refused_password, "tests.http.test_login.refused_password"])
def test_charge_when_of_a_rule_or_a_decorator(site, limit, charge_when):
    limit("2/h", charge_when=charge_when)
    assert statuses_of(site, 200, 401, 200, 401, 200) == [200, 401, 200, 401, 429]


@both_ways
@pytest.mark.parametrize("cost", [2, two, "tests.http.test_login.two"])
def test_the_cost_of_a_rule_or_a_decorator(site, limit, cost):
    limit("5/h", cost=cost)
    assert site.statuses(3) == [200, 200, 429]
    assert charged("p") == 4


@both_ways
@pytest.mark.parametrize("method", ["POST", ["POST", "PUT"]])
def test_the_method_of_a_rule_or_a_decorator(site, limit, method):
    limit("1/h", method=method)
    assert site.statuses(3) == [200] * 3
    assert [site.post().status_code for _ in range(2)] == [200, 429]
    assert "RateLimit" not in site.get().headers


@both_ways
def test_of_a_policy_that_both_name_the_rule_s_options_hold(site, configure):
    configure(
        POLICIES={"p": {"rate": "9/h", "key": "ip"}},
        MIDDLEWARE=[{"policies": ["p"], "cost": 2, "charge_when": refused_password}],
    )
    site.serve(rate_limit("p", cost=3)(site.view(answer)), middleware=[OURS])
    assert statuses_of(site, 401, 200) == [401, 200]
    assert charged("p") == 2


# User names


@pytest.mark.parametrize(
    "spelling",
    [
        *("ann", "Ann", "ANN", " ann ", "\tann\n", "ann\u00a0", "\u3000ann", "\uff21\uff2e\uff2e"),
        *("\u00e1nn", "a\u0301nn", "an\u0308\u0308\u0308n", "a\u200bnn", "\u2060ann\ufeff", "a\u00adnn", "a\x00nn"),
        *("\u1d43\u207f\u207f", "\U0001d41a\U0001d427\U0001d427", "\u24d0\u24dd\u24dd"),
    ],
    ids=ascii,
)
def test_a_name_is_counted_once_however_it_is_spelled(spelling):
    assert fold(spelling) == "ann"
    assert fold(UsernameField().to_python(spelling)) == "ann"


@pytest.mark.parametrize("name", ["ann.lee", "ann@example.com", "ann-1", "anna", "\u092e\u0940\u0930\u093e", "\u674e"])
def test_different_names_stay_different(name):
    assert fold(name) != fold("ann")
    assert fold(name)
    assert fold(fold(name)) == fold(name)


def test_letters_of_other_scripts_stay_different_and_their_marks_do_not():
    assert fold("\u0915\u093f") == fold("\u0915\u0940") != fold("\u0916\u093f")


def test_a_name_that_is_too_long_to_be_one_is_counted_with_all_others():
    assert fold("a" * 1000) == "a" * 1000
    assert fold("a" * 1001) == fold("\u200b" * 5000 + "ann") == "LONG"


def identity_of(data, content_type):
    request = RequestFactory().generic("POST", "/", data, content_type)
    call(rate_limit("9/m", key="post:username")(answer), request)
    return request.rate_limit.outcomes[0].identity


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"username": "Ann"}', "application/json"),
        (b'{"username": "ANN", "username": "ann"}', "application/json"),
        ('{"username": "ann"}'.encode("utf-16"), "application/json; charset=utf-16"),
        (b'{"username": "ann"}', "application/json; charset=no-charset"),
        (b'{"username": "Ann"}', "text/plain"),
        (b'{"username": "Ann"}', "application/x-www-form-urlencoded"),
        (b'{"username": "Ann"}', ""),
        (b"username=Ann+", "application/x-www-form-urlencoded"),
        (b"username=ANN&username=ann", "application/x-www-form-urlencoded"),
    ],
)
def test_a_name_is_read_as_the_view_reads_it(body, content_type):
    assert identity_of(body, content_type) == "post=ann"


@pytest.mark.parametrize("value", [None, True, [], ["ann"], {"a": 1}, "", " ", "\u200b"])
def test_without_a_name_the_address_counts(value):
    assert identity_of(json.dumps({"username": value}), "application/json") == "ip=127.0.0.1"


@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", "text/plain"])
def test_a_large_body_does_not_fail_a_view_that_reads_it_in_parts(settings, content_type):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
    assert identity_of(b'{"username": "ann"}', content_type) == "ip=127.0.0.1"


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
def test_a_client_that_hangs_up_while_it_sends_the_body_counts_by_address(content_type):
    class HungUp(io.BytesIO):
        def read(self, *args):
            raise ConnectionResetError

    request = RequestFactory().generic("POST", "/", b"username=ann", content_type, **{"wsgi.input": HungUp()})
    call(rate_limit("9/m", key="post:username")(answer), request)
    assert request.rate_limit.outcomes[0].identity == "ip=127.0.0.1"


@pytest.mark.parametrize(("value", "name"), [(5, "5"), (1.5, "1.5"), (-0, "0")])
def test_a_number_is_a_name(value, name):
    assert identity_of(json.dumps({"username": value}), "application/json") == f"post={name}"
