"""`rlaas_django.auth`: every password comparison is limited, whatever view, form or framework asks for it."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import aauthenticate, authenticate, login
from django.contrib.auth.backends import BaseBackend
from django.contrib.auth.backends import ModelBackend as DjangoModelBackend
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied
from django.core.management import call_command
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory
from django.urls import include
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.security import HttpBasicAuth
from rest_framework.authentication import BasicAuthentication
from rest_framework.authtoken.views import ObtainAuthToken, obtain_auth_token
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.response import Response
from rest_framework.views import APIView
from rlaas_django import Policy, check, login_failed, peek, rate_limit
from rlaas_django.auth import LoginRateLimitMixin

from tests.support.deployments import wait_until
from tests.support.http import AUTHENTICATION, OURS, Site, assert_refusal, both_ways, counters
from tests.support.internals import flush_statistics
from tests.support.outages import faults_named

MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware", OURS]
ADDRESS = "203.0.113.9"
pytestmark = pytest.mark.django_db
BACKEND = "tests.http.test_auth.CountingBackend"


class Counting:
    """Counts the comparisons of a password, below the mixin."""

    compared: ClassVar[list[str]] = []
    lock = threading.Lock()

    def authenticate(self, request, username=None, password=None, **kwargs):
        if password is not None:
            with self.lock:
                self.compared.append(str(username or kwargs.get("email")))
        return super().authenticate(request, username, password, **kwargs)

    async def aauthenticate(self, request, username=None, password=None, **kwargs):
        if password is not None:
            with self.lock:
                self.compared.append(str(username or kwargs.get("email")))
        return await super().aauthenticate(request, username, password, **kwargs)


class CountingBackend(LoginRateLimitMixin, Counting, DjangoModelBackend):
    pass


class ByEmail:
    """Finds users by their e-mail address, as allauth does."""

    def authenticate(self, request, username=None, password=None, email=None):
        Counting.compared.append(str(username or email))
        user = User.objects.filter(email__iexact=email or username).first()
        return user if user and user.check_password(password) else None


class EmailBackend(LoginRateLimitMixin, ByEmail, BaseBackend):
    pass


class InMemory:
    """Reaches no database, which threads of a test would keep from each other."""

    def get_user_id(self, credentials):
        return "1" if credentials["username"] == "alice" else None

    def authenticate(self, request, username, password):
        with Counting.lock:
            Counting.compared.append(username)
        return User(pk=1, username=username) if (username, password) == ("alice", "right") else None


class AsyncInMemory(InMemory):
    async def aauthenticate(self, request, username, password):
        await asyncio.sleep(0)
        return self.authenticate(request, username, password)


class ThreadsBackend(LoginRateLimitMixin, InMemory, BaseBackend):
    get_user_id = InMemory.get_user_id


class TasksBackend(LoginRateLimitMixin, AsyncInMemory, BaseBackend):
    get_user_id = InMemory.get_user_id


@pytest.fixture(autouse=True)
def _cheap_passwords(settings):
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.AUTHENTICATION_BACKENDS = [BACKEND]
    Counting.compared.clear()


@pytest.fixture(params=["ThreadsBackend", "TasksBackend"])
def without_database(request, settings):
    settings.AUTHENTICATION_BACKENDS = [f"tests.http.test_auth.{request.param}"]


@pytest.fixture
def alice(db):
    return User.objects.create_superuser("alice", "alice@example.com", "right")


@pytest.fixture(autouse=True)
def _users(request):
    if "without_database" not in request.fixturenames:
        request.getfixturevalue("alice")


@pytest.fixture
def _limited(configure):
    """No rule of the middleware limits anything, so that only attempts are."""
    configure(MIDDLEWARE=[{"path": "/", "exempt": True}])


@pytest.fixture
def login_site(settings, _limited):
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
    return Site("wsgi, def", settings)


def attempt(password="wrong", name="alice", request=None):
    return authenticate(request, username=name, password=password)


def from_address(address):
    return RequestFactory(REMOTE_ADDR=address).post("/login/")


# What is compared


def test_wrong_passwords_are_compared_five_times():
    assert [attempt(f"wrong-{n}") for n in range(50)] == [None] * 50
    assert len(Counting.compared) == 5


def test_after_five_wrong_passwords_the_right_one_waits(clock):
    for n in range(5):
        attempt(f"wrong-{n}")
    assert attempt("right") is None
    clock.tick(300_000)
    assert attempt("right").username == "alice"


def test_right_passwords_are_never_counted(alice):
    for n in range(4):
        attempt(f"wrong-{n}")
    assert [attempt("right") for _ in range(20)] == [alice] * 20
    assert attempt("wrong") is None
    assert len(Counting.compared) == 25


def test_fifty_parallel_guesses_are_five_comparisons(without_database):
    with ThreadPoolExecutor(50) as executor:
        list(executor.map(lambda n: attempt(f"wrong-{n}"), range(50)))
    assert len(Counting.compared) == 5


async def test_fifty_parallel_guesses_are_five_comparisons_async(without_database):
    await asyncio.gather(*(aauthenticate(username="alice", password=f"wrong-{n}") for n in range(50)))
    assert len(Counting.compared) == 5


async def test_right_passwords_are_never_counted_async(without_database):
    for _ in range(20):
        assert await aauthenticate(username="alice", password="right") is not None
    for n in range(10):
        await aauthenticate(username="alice", password=f"wrong-{n}")
    assert len(Counting.compared) == 25


def test_a_hundred_parallel_requests_with_a_password_that_was_right_are_not_counted(without_database):
    assert attempt("right")
    with ThreadPoolExecutor(30) as executor:
        users = list(executor.map(lambda _: attempt("right"), range(100)))
    assert all(users)


def test_a_password_that_was_right_takes_no_round_trip(client, alice):
    attempt("right")
    before = client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
    assert attempt("right") == alice
    assert client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"] == before


def test_a_password_that_was_right_and_is_changed_counts(alice):
    attempt("right")
    alice.set_password("new")
    alice.save()
    for _ in range(10):
        attempt("right")
    assert len(Counting.compared) == 1 + 5


@pytest.mark.parametrize("name", ["alice@example.com", "ALICE@example.com"])
def test_name_and_email_of_a_user_are_one_counter(settings, name):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_auth.EmailBackend"]
    for n in range(3):
        attempt(f"wrong-{n}")
    for n in range(10):
        authenticate(email=name, password=f"wrong-{n}")
    assert len(Counting.compared) == 5


@pytest.mark.parametrize("spelling", ["nobody", "NOBODY", " nobody ", "n\u00f3body", "no\u200bbody"])
def test_spellings_of_a_name_that_nobody_has_are_one_counter(spelling):
    for n in range(4):
        attempt(f"wrong-{n}", "nobody")
    for n in range(4):
        attempt(f"more-{n}", spelling)
    assert len(Counting.compared) == 5


def test_names_that_nobody_has_are_stored_as_digests(client):
    attempt("x", "my-secret-password")
    keys = b" ".join(client.keys("*"))
    assert b"secret" not in keys
    assert b"login-name/name=" in keys


def test_one_address_does_not_lock_the_user_out_of_another():
    attacker = from_address("198.51.100.1")
    for n in range(200):
        attempt(f"wrong-{n}", request=attacker)
    assert attempt("right", request=from_address("198.51.100.2")) is not None


def test_many_addresses_share_the_wide_limit_of_a_name(clock):
    for n in range(200):
        attempt(f"wrong-{n}", request=from_address(f"198.51.100.{n}"))
    assert len(Counting.compared) == 100


def test_one_address_is_limited_for_all_names():
    attacker = from_address("198.51.100.1")
    for n in range(200):
        attempt("12345", f"user-{n}", request=attacker)
    assert len(Counting.compared) == 100


@pytest.mark.parametrize("proxies", [None, []])
def test_a_private_address_counts_where_the_proxies_are_known(configure, proxies, caplog):
    configure(TRUSTED_PROXIES=proxies)
    for n in range(110):
        attempt("12345", f"user-{n}", request=from_address("10.0.0.1"))
    assert len(Counting.compared) == (110 if proxies is None else 100)
    assert ("TRUSTED_PROXIES" in caplog.text) == (proxies is None)


# The response


def basic(password, name="alice"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def json_view(request):
    data = json.loads(request.body)
    user = authenticate(username=data["username"], password=data["password"])  # without the request
    return JsonResponse({"ok": user is not None}, status=200 if user else 401)


@api_view(["POST"])
@authentication_classes([BasicAuthentication])
def basic_view(request):
    return Response({"user": request.user.username})


class ApiLogin(APIView):
    """Responds by itself, without an exception."""

    def post(self, request):
        user = authenticate(request, **request.data)
        return Response({"ok": bool(user)})


class Basic(HttpBasicAuth):
    def authenticate(self, request, username, password):
        return authenticate(username=username, password=password)


def ninja_api():
    api = NinjaAPI(urls_namespace=f"api-{id(object())}", auth=Basic())

    @api.post("/login/")
    def operation(request):
        return "ok"

    return api.urls


VIEWS = {  # what is served where, and how a password is sent
    "LoginView": ({"login/": lambda: LoginView.as_view(next_page="/")}, "/login/", "form"),
    "admin": ({"admin/": lambda: admin.site.urls}, "/admin/login/", "form"),
    "allauth": ({"": lambda: include("allauth.account.urls")}, "/login/", "allauth"),
    "allauth, headless": ({"": lambda: include("allauth.headless.urls")}, "/app/v1/auth/login", "JSON"),
    "token, form": ({"login/": lambda: obtain_auth_token}, "/login/", "form"),
    "token, JSON": ({"login/": lambda: obtain_auth_token}, "/login/", "JSON"),
    "basic": ({"login/": lambda: basic_view}, "/login/", "basic"),
    "ninja": ({"": ninja_api}, "/login/", "basic"),
    "JSON": ({"login/": lambda: json_view}, "/login/", "JSON"),
}


def send(site, where, form, password, address=None):
    data = {"username": "alice", "password": password}
    if form == "form":
        return site.post(where, data, address=address)
    if form == "allauth":
        return site.post(where, {"login": "alice", "password": password}, address=address)
    if form == "JSON":
        return site.post(where, data, content_type="application/json", address=address)
    return site.post(where, headers={"Authorization": basic(password)}, address=address)


@pytest.fixture
def with_allauth(settings):
    """Install allauth; afterwards, remove what it has registered with the admin."""

    def install() -> None:
        settings.MIDDLEWARE = [*MIDDLEWARE, "allauth.account.middleware.AccountMiddleware"]
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "allauth", "allauth.account", "allauth.headless"]
        settings.ACCOUNT_RATE_LIMITS = False  # its own

    yield install
    if apps.is_installed("allauth.account"):
        for model in apps.get_app_config("account").get_models():
            if admin.site.is_registered(model):
                admin.site.unregister(model)


@pytest.mark.parametrize("view", VIEWS)
def test_the_sixth_wrong_password_is_a_429_in_every_view(login_site, settings, with_allauth, view, clock):
    routes, where, form = VIEWS[view]
    middleware = MIDDLEWARE
    if view.startswith("allauth"):
        with_allauth()
        middleware = settings.MIDDLEWARE
    login_site.serve({route: make() for route, make in routes.items()}, middleware)
    responses = [send(login_site, where, form, f"wrong-{n}") for n in range(8)]
    assert [response.status_code == 429 for response in responses] == [False] * 5 + [True] * 3
    assert len(Counting.compared) == 5
    assert_refusal(responses[-1], violated=["login-name-and-address-300s"])
    assert responses[-1].headers["Retry-After"] == "300"


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        ("application/x-www-form-urlencoded", '{"x": "&username=decoy%d&", "username": "alice", "password": "%d"}'),
        ("application/json; charset=utf-7", '{"username": "alice", "password": "%d %d"}'),
        ("text/plain", '{"username": "decoy%d", "username": "alice", "password": "%d"}'),
    ],
)
def test_however_a_body_is_spelled_its_password_is_compared_five_times(login_site, content_type, text):
    login_site.serve({"login/": csrf_exempt(json_view)}, MIDDLEWARE)
    for n in range(50):
        login_site.post("/login/", (text % (n, n)).encode(), content_type=content_type)
    assert Counting.compared == ["alice"] * 5


@both_ways
def test_a_decorator_is_enough_for_the_429(site, without_database):
    def view(request):
        return HttpResponse(str(attempt(request.POST["password"], request=request)))

    async def async_view(request):
        user = await aauthenticate(request, username="alice", password=request.POST["password"])
        return HttpResponse(str(user))

    site.serve(rate_limit("100/m", key="ip")(view if site.kind == "def" else async_view))
    statuses = [site.post(data={"password": f"wrong-{n}"}).status_code for n in range(7)]
    assert statuses == [200] * 5 + [429] * 2


@both_ways
def test_a_view_that_denies_a_refused_login_gets_the_429_from_its_decorator(site, without_database):
    def view(request):
        if attempt(request.POST["password"], request=request) is None:
            raise PermissionDenied
        return HttpResponse()

    async def async_view(request):
        if await aauthenticate(request, username="alice", password=request.POST["password"]) is None:
            raise PermissionDenied
        return HttpResponse()

    site.serve(rate_limit("100/m", key="ip")(view if site.kind == "def" else async_view))
    responses = [site.post(data={"password": f"wrong-{n}"}) for n in range(7)]
    assert [response.status_code for response in responses] == [403] * 5 + [429] * 2
    assert responses[-1].headers["Retry-After"] == "300"


@rate_limit("100/m", key="ip")
class LimitedTokenView(ObtainAuthToken):
    """A view class of REST framework, which its adapter limits."""


@pytest.mark.parametrize("view", [LimitedTokenView, rate_limit("100/m", key="user", group="class")(ApiLogin)])
def test_a_decorator_on_a_class_of_rest_framework_is_enough(login_site, view):
    login_site.own_body = True
    login_site.serve({"login/": view.as_view()}, AUTHENTICATION)
    responses = [send(login_site, "/login/", "JSON", f"wrong-{n}") for n in range(7)]
    assert [response.status_code == 429 for response in responses] == [False] * 5 + [True] * 2
    assert responses[-1].headers["Retry-After"] == "300"


def test_without_middleware_and_decorator_it_is_an_ordinary_failed_login(login_site):
    login_site.serve({"login/": LoginView.as_view()}, AUTHENTICATION)
    responses = [send(login_site, "/login/", "form", f"wrong-{n}") for n in range(7)]
    assert [response.status_code for response in responses] == [200] * 7
    assert b"Please enter a correct username" in responses[-1].content
    assert len(Counting.compared) == 5


def test_a_request_in_which_another_login_succeeds_is_not_refused(login_site):
    def view(request):
        first = attempt(request.POST["password"], "bob")
        return HttpResponse(str(first or attempt("right")))

    login_site.serve({"login/": view}, MIDDLEWARE)
    statuses = [login_site.post("/login/", {"password": f"x{n}"}).status_code for n in range(7)]
    assert statuses == [200] * 7
    assert Counting.compared.count("bob") == 5


def test_our_refusal_is_no_failed_login_of_charge_when(login_site):
    view = rate_limit("100/h", key="ip", charge_when=login_failed, group="failures")(
        lambda request: HttpResponse(str(attempt(request.POST["password"])))
    )
    login_site.serve({"login/": view}, MIDDLEWARE)
    for n in range(20):
        login_site.post("/login/", {"password": f"wrong-{n}"})
    assert peek({"ip": ADDRESS}, Policy("failures", "100/h", key="ip")).current_count == 5


# The database


@pytest.mark.parametrize(("name", "queries"), [("alice", 2), ("nobody", 2), ("alice@example.com", 3), ("x@y.z", 3)])
def test_known_and_unknown_names_take_as_many_queries(django_assert_num_queries, name, queries):
    """One more than Django's own; with an @ the address is looked up, too."""
    with django_assert_num_queries(queries):
        attempt("wrong", name)


@pytest.mark.parametrize("name", ["a\x00b", "x" * 5_000, 42, "*[?]:{}/"])
def test_any_name_is_counted(name, client):
    for n in range(10):
        attempt(f"wrong-{n}", name)
    assert len(Counting.compared) == 5
    assert all(len(key) < 200 for key in client.keys("*"))


class AnyName:
    """Compares the first name that it is given, whatever it is called."""

    def authenticate(self, request, **credentials):
        Counting.compared.append(str(credentials))


class AnyNameBackend(LoginRateLimitMixin, AnyName, BaseBackend):
    pass


@pytest.mark.parametrize(
    "names",
    [
        lambda n: {"username": f"decoy{n}", "email": "alice@example.com"},
        lambda n: {"username": "alice", "email": f"decoy{n}@example.com"},
        lambda n: {"phone": "+49 30 123456"},
        lambda n: {"login": "alice"},
    ],
    ids=["decoy name", "decoy address", "phone", "another field"],
)
def test_whichever_name_a_backend_takes_it_is_counted(settings, names):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_auth.AnyNameBackend"]
    for n in range(50):
        assert authenticate(password=f"wrong-{n}", **names(n)) is None
    assert len(Counting.compared) == 5


def test_accounts_named_like_the_address_of_somebody_do_not_multiply_guesses(settings, alice):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_auth.EmailBackend"]
    spellings = ["Alice@example.com", "aLice@example.com", "alIce@example.com"]
    for name in spellings:
        User.objects.create_user(name)
    for n in range(30):
        attempt(f"wrong-{n}", spellings[n % 3])
    assert len(Counting.compared) == 5


class Hidden:
    """A password that does not show itself, as that of some libraries."""

    def __repr__(self):
        return "**********"


def test_passwords_that_do_not_show_themselves_are_not_taken_for_one(settings):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_auth.AnyNameBackend"]
    for _ in range(50):
        authenticate(username="alice", password=Hidden())
    assert len(Counting.compared) == 5


def test_the_context_keeps_no_request_and_no_password_of_a_failed_login():
    request = from_address(ADDRESS)
    reference = weakref.ref(request)
    attempt("wrong", request=request)
    del request
    gc.collect()
    assert reference() is None


def test_a_request_that_was_never_left_does_not_silence_the_next(login_site):
    class Broken(APIView):
        def get(self, request):
            raise KeyboardInterrupt

    login_site.serve(
        {"broken/": rate_limit("9/m", key="ip")(Broken).as_view(), "login/": rate_limit("99/m", key="ip")(json_view)}
    )
    with pytest.raises(KeyboardInterrupt):
        login_site.get("/broken/")
    statuses = [send(login_site, "/login/", "JSON", f"wrong-{n}").status_code for n in range(7)]
    assert statuses == [401] * 5 + [429] * 2


# Several backends


def test_several_backends_are_one_reservation(settings):
    settings.AUTHENTICATION_BACKENDS = [BACKEND, "tests.http.test_auth.EmailBackend"]
    for n in range(10):
        attempt(f"wrong-{n}")
    assert len(Counting.compared) == 10  # five by each backend


def test_success_in_the_second_backend_is_not_counted(settings, alice):
    class_path = "tests.http.test_auth.EmailBackend"
    settings.AUTHENTICATION_BACKENDS = [BACKEND, class_path]
    for _ in range(20):
        assert attempt("right", "alice@example.com") == alice


def test_one_backend_object_counts_each_call():
    backend = CountingBackend()
    for _ in range(5):
        assert backend.authenticate(None, "alice", "wrong") is None  # by position, as some callers do
    with pytest.raises(PermissionDenied):
        backend.authenticate(None, "alice", "wrong")
    assert len(Counting.compared) == 5


def test_credentials_without_a_name_are_not_counted(settings, client):
    settings.AUTHENTICATION_BACKENDS = [
        "tests.http.test_auth.StrictBackend",
        "django.contrib.auth.backends.RemoteUserBackend",
    ]
    for _ in range(10):
        assert authenticate(token="x") is None
        assert authenticate(remote_user="bob") is not None
    assert counters(client) == []


class Strict:
    def authenticate(self, request, token):
        return None


class StrictBackend(LoginRateLimitMixin, Strict, BaseBackend):
    pass


def test_a_backend_that_takes_other_credentials_is_left_out(settings, alice):
    settings.AUTHENTICATION_BACKENDS = ["tests.http.test_auth.StrictBackend", BACKEND]
    assert attempt("right") == alice
    assert attempt("wrong") is None


# What is as before


def test_login_after_sign_up_and_permissions_work_as_before(login_site, alice):
    request = from_address(ADDRESS)
    request.session = login_site.client().session
    login(request, User.objects.create_user("bob", password="x"))
    assert User.objects.with_perm("auth.add_user").get() == alice
    assert alice.has_perm("auth.add_user")


def test_force_login_works(login_site, alice):
    login_site.serve({"login/": lambda request: HttpResponse(request.user.username)}, MIDDLEWARE)
    client = login_site.client()
    client.force_login(alice)
    assert client.get("/login/").content == b"alice"


# Without Redis, shadow, off


def test_attempts_are_counted_while_redis_is_unavailable(redis_unavailable):
    for n in range(20):
        attempt(f"wrong-{n}")
    assert len(Counting.compared) == 5
    assert attempt("right", "nobody") is None


def test_each_phase_of_an_outage_has_five_comparisons(target, use_url):
    """Redis is up, away and back; what it counted before is still there. Each process counts by itself meanwhile."""
    (fault,) = faults_named("connections refused")
    use_url(target.url(fault))

    def compared_in(phase):
        Counting.compared.clear()
        for n in range(20):
            attempt(f"{phase} {n}")
        return len(Counting.compared)

    assert compared_in("up") == 5
    with fault.applied(target):
        assert compared_in("away") <= 5
        for n in range(3):
            attempt(f"still away {n}")
    wait_until(lambda: not check("somebody", Policy("probe", "1000/m")).degraded, "Redis is available again")
    assert compared_in("back") == 0


def test_shadow_counts_and_refuses_nobody(configure, caplog, alice):
    configure(LOGIN={"shadow": True})
    for n in range(10):
        attempt(f"wrong-{n}")
    assert len(Counting.compared) == 10
    assert "would be refused" in caplog.text
    assert attempt("right") == alice


@pytest.mark.parametrize("off", [{"LOGIN": False}, {"ENABLED": False}])
def test_it_can_be_turned_off(configure, off):
    configure(**off)
    for n in range(10):
        attempt(f"wrong-{n}")
    assert len(Counting.compared) == 10


def test_a_list_is_of_name_and_address(configure):
    configure(LOGIN=["2/h"])
    for n in range(10):
        attempt(f"wrong-{n}")
    assert len(Counting.compared) == 2


# Operators


def lock_out(name="alice"):
    for address in ("198.51.100.1", "198.51.100.2"):
        for n in range(6):
            attempt(f"wrong-{n}", name, from_address(address))


@pytest.mark.parametrize("name", ["alice", "nobody"])
def test_an_operator_sees_and_resets_the_logins_of_a_user(name, capsys):
    lock_out(name)
    flush_statistics()
    call_command("rlaas", "show", name)
    shown = capsys.readouterr().out
    assert "login-name-and-address-300s at 198.51.100.1" in shown
    assert "login-name " in shown

    Counting.compared.clear()
    call_command("rlaas", "reset", name)
    attempt("wrong", name, from_address("198.51.100.1"))
    attempt("wrong", name, from_address("198.51.100.2"))
    assert len(Counting.compared) == 2


def test_top_lists_logins_as_the_commands_take_them(capsys, alice):
    lock_out()
    flush_statistics()
    call_command("rlaas", "top")
    assert f"login={alice.pk}@198.51.100.1" in capsys.readouterr().out
    call_command("rlaas", "reset", f"login={alice.pk}@198.51.100.1")
    Counting.compared.clear()
    lock_out()
    assert len(Counting.compared) == 5


def test_the_panel_names_the_user_and_the_address(login_site, alice):
    lock_out()
    flush_statistics()
    login_site.serve({"admin/": admin.site.urls}, MIDDLEWARE)
    client = login_site.client()
    client.force_login(alice)
    refusals = client.get("/admin/rlaas_django/ratelimit/refusals/").content.decode()
    assert "alice at 198.51.100.1" in refusals
    page = client.get("/admin/rlaas_django/ratelimit/identity/", {"id": str(alice.pk)}).content.decode()
    assert "at 198.51.100.2" in page
    section = page[page.index("Recently refused") :]
    assert "5 of 5 in 5" in section
