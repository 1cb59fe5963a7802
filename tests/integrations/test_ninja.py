"""Throttles for django-ninja: as its own, without state on an instance that requests share, and without blocking."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path

ninja = pytest.importorskip("ninja")

from ninja import throttling  # noqa: E402
from ninja.conf import settings as ninja_settings  # noqa: E402
from ninja.decorators import decorate_view  # noqa: E402
from ninja.security import APIKeyHeader, HttpBearer  # noqa: E402
from ninja.testing import TestAsyncClient, TestClient  # noqa: E402
from rlaas_django import Policy, backend, peek, rate_limit  # noqa: E402
from rlaas_django.integrations import ninja as ours  # noqa: E402
from rlaas_django.integrations.ninja import (  # noqa: E402
    AnonRateThrottle,
    AuthRateThrottle,
    PolicyThrottle,
    SimpleRateThrottle,
    UserRateThrottle,
    throttled,
)
from rlaas_django.runtime.clock import script_time  # noqa: E402
from rlaas_django.signals import rate_limited  # noqa: E402

from tests.support.http import OURS, PRIMARY_KEYS, as_kind  # noqa: E402
from tests.support.http import Site as HttpSite  # noqa: E402
from tests.support.internals import observers, overrides  # noqa: E402
from tests.support.observation import commands_sent, hanging  # noqa: E402
from tests.support.parallel import in_processes, in_threads  # noqa: E402

ROOT = Path(__file__).parents[2]
numbers = itertools.count()
COMPACT = "sliding-window-compact-algo"


def make_api(**options):
    return ninja.NinjaAPI(urls_namespace=f"api-{next(numbers)}", docs_url=None, **options)


class Site:
    """An API with one operation, `def` or `async def`, called by ninja's test clients."""

    def __init__(self, kind: str, runner: asyncio.Runner):
        self.is_async, self.runner = kind == "async", runner

    def serve(self, *throttles, auth=None, view=None, decorated=True, decorate=lambda view: view, **options):
        api = make_api()
        if decorated:
            api.add_decorator(throttled, mode="view")
        if self.is_async:

            async def operation(request, number: int = 0):
                return view(request) if view else "hello"
        else:

            def operation(request, number: int = 0):
                return view(request) if view else "hello"

        api.get("/", throttle=[*throttles], auth=auth or ninja.constants.NOT_SET, **options)(decorate(operation))
        self.client = (TestAsyncClient if self.is_async else TestClient)(api)
        return self

    def get(self, path="/", user=None, **options):
        if isinstance(user, SimpleNamespace):
            options["user"] = user
        elif user is not None:
            options["user"] = SimpleNamespace(pk=user, is_authenticated=True)
        response = self.client.get(path, **options)
        return self.runner.run(response) if self.is_async else response

    def statuses(self, count, user=None, **options):
        return [self.get(user=user, **options).status_code for _ in range(count)]


@pytest.fixture(params=["sync", "async"])
def site(request):
    with asyncio.Runner() as runner:
        yield Site(request.param, runner)


# As ninja's own


@pytest.mark.parametrize(
    "name", ["BaseThrottle", "SimpleRateThrottle", "AnonRateThrottle", "AuthRateThrottle", "UserRateThrottle"]
)
def test_a_throttle_has_the_name_the_bases_and_the_attributes_of_ninja_s(name):
    mine, theirs = getattr(ours, name), getattr(throttling, name)
    assert issubclass(mine, theirs)
    assert all(hasattr(mine, attribute) for attribute in dir(theirs))


@pytest.mark.parametrize(
    ("rate", "parsed"),
    [
        *(("3/s", (3, 1)), ("3/sec", (3, 1)), ("3/m", (3, 60)), ("3/min", (3, 60)), ("3/hour", (3, 3600))),
        *(("3/day", (3, 86_400)), ("3/10m", (3, 600)), ("3/90", (3, 90)), (None, (None, None))),
    ],
)
def test_rates_are_parsed_as_ninja_s(rate, parsed):
    throttle = AnonRateThrottle("1/s")
    assert throttle.parse_rate(rate) == parsed
    assert throttling.AnonRateThrottle("1/s").parse_rate(rate) == parsed


def test_the_rate_of_a_scope_comes_from_ninja_s_settings():
    assert AnonRateThrottle().rate == ninja_settings.DEFAULT_THROTTLE_RATES["anon"]
    assert UserRateThrottle("5/m").rate == "5/m"
    with pytest.raises(ValueError, match="'5/month' is not a rate"):
        UserRateThrottle("5/month")


def test_users_on_one_throttle_keep_their_own_counts(site, clock):
    site.serve(UserRateThrottle("2/m"))
    users = ["alice", "bob", "alice", "bob", "alice", "bob", None]
    assert [site.get(user=user).status_code for user in users] == [200] * 4 + [429, 429, 200]


def test_a_refusal_tells_each_its_own_wait(site, clock):
    site.serve(UserRateThrottle("1/m"))
    site.get(user="alice")
    clock.tick(20_000)
    site.get(user="bob")
    clock.tick(10_000)
    alice, bob = site.get(user="alice"), site.get(user="bob")
    assert (alice["Retry-After"], bob["Retry-After"]) == ("30", "50")
    assert alice.json() == {"detail": "Too many requests."}


def test_threads_on_one_throttle_get_their_own_waits():
    throttle = UserRateThrottle("1/h")

    def ask(n):
        request = RequestFactory().get("/")
        request.user = SimpleNamespace(pk=n % 4, is_authenticated=True)
        return throttle.allow_request(request), throttle.wait()

    found = in_threads(ask, 16)
    assert sum(allowed for allowed, _ in found) == 4
    assert all(3590 < wait <= 3600 for _, wait in found)


def test_anonymous_throttles_leave_clients_with_credentials_alone(site, clock):
    site.serve(AnonRateThrottle("1/m"), auth=lambda request: request.headers.get("X-Key") or "anonymous")
    assert site.statuses(3, headers={"X-Key": "secret"}) == [200] * 3
    site.serve(AnonRateThrottle("1/m"))
    assert site.statuses(2) == [200, 429]


def test_credentials_are_counted_and_kept_as_digests(site, clock, client):
    class Key(APIKeyHeader):
        param_name = "X-Key"

        def authenticate(self, request, key):
            return key

    site.serve(AuthRateThrottle("2/m"), auth=Key())
    assert site.statuses(3, headers={"X-KEY": "first-secret"}) == [200, 200, 429]
    assert site.statuses(1, headers={"X-KEY": "second-secret"}) == [200]
    assert site.statuses(1) == [401]
    keys = b" ".join(client.keys())
    assert b"token=" in keys
    assert b"secret" not in keys


def test_a_key_of_the_site_s_own_is_what_is_counted(site, clock):
    class ByTenant(SimpleRateThrottle):
        scope = "tenant"

        def get_cache_key(self, request):
            return request.headers.get("X-Tenant")

    site.serve(ByTenant("1/m"))
    assert site.statuses(2, headers={"X-TENANT": "a"}) == [200, 429]
    assert site.statuses(1, headers={"X-TENANT": "b"}) == [200]
    assert site.statuses(3) == [200] * 3


def test_scopes_that_differ_only_outside_ascii_do_not_share_a_counter(site, clock):
    for name in ("поиск", "загрузка", "a b", "a/b"):

        class Scoped(UserRateThrottle):
            scope = name

        site.serve(Scoped("1/m"))
        assert site.statuses(2, "alice") == [200, 429]


def test_throttles_of_an_operation_count_as_ninja_s_do(site, clock):
    """Each counts every request that it admits, also one that another refuses."""
    site.serve(UserRateThrottle("2/m"), UserRateThrottle("4/h"))
    assert site.statuses(5, "alice") == [200, 200, 429, 429, 429]
    clock.tick(60_000)
    assert site.statuses(1, "alice") == [429]


@pytest.mark.parametrize("user", [None, "alice"])
def test_it_refuses_as_ninja_s_does(site, clock, monkeypatch, user):
    class Theirs(throttling.UserRateThrottle):
        cache = caches["locmem"]

        def timer(self):
            return clock.ms / 1000

    caches["locmem"].clear()
    model = Site("sync", site.runner).serve(Theirs("3/m"), decorated=False)
    site.serve(UserRateThrottle("3/m"))
    for tick in [0, 5, 5, 5, 30, 20, 1, 1, 60]:
        clock.tick(tick * 1000)
        mine, theirs = site.get(user=user), model.get(user=user)
        assert (mine.status_code, mine.content) == (theirs.status_code, theirs.content)
        assert mine.get("Retry-After") == theirs.get("Retry-After")


def test_throttles_of_the_api_and_of_routers_apply(clock):
    api, router = make_api(throttle=[AnonRateThrottle("1/m")]), ninja.Router()
    api.get("/a")(lambda request: "a")
    router.get("/b")(lambda request: "b")
    api.add_router("/r", router, throttle=AnonRateThrottle("2/h"))
    client = TestClient(api)
    assert [client.get("/a").status_code for _ in range(2)] == [200, 429]
    assert [client.get("/r/b").status_code for _ in range(3)] == [200, 200, 429]


def test_the_address_is_that_behind_trusted_proxies_unless_ninja_is_told_their_number(configure, monkeypatch):
    meta = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "1.1.1.1, 203.0.113.9"}
    request, throttle = SimpleNamespace(META=meta), AnonRateThrottle("1/m")
    assert throttle.get_ident(request) == "10.0.0.1"
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert throttle.get_ident(request) == "203.0.113.9"
    monkeypatch.setattr(ninja_settings, "NUM_PROXIES", 2)
    assert throttle.get_ident(request) == "1.1.1.1"


# PolicyThrottle


def test_named_policies_are_all_or_nothing(site, configure, clock):
    configure(POLICIES={"small": {"rate": "1/m", "key": "user"}, "large": {"rate": "9/m", "key": "user"}})
    site.serve(PolicyThrottle("large", "small"))
    assert site.statuses(3, "alice") == [200, 429, 429]
    assert peek("alice", "large").current_count == 1


def test_without_names_it_is_the_default_policy(site, configure, clock):
    configure(MAX_REQUESTS=1)
    site.serve(PolicyThrottle())
    assert site.statuses(2, "alice") == [200, 429]


def test_a_policy_of_several_throttles_is_charged_once(site, clock):
    shared = Policy("shared", "3/m", key="global")
    site.serve(PolicyThrottle(shared), PolicyThrottle(shared, Policy("other", "9/m", key="global")))
    assert site.statuses(4) == [200] * 3 + [429]


# Async


def test_async_operations_wait_without_blocking_the_loop(own, clock):
    async def beats_while_redis_hangs(client) -> int:
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        task = asyncio.create_task(beat())
        await client.get("/")
        task.cancel()
        return beats

    with asyncio.Runner() as runner:
        client = Site("async", runner).serve(AnonRateThrottle("9/m"), PolicyThrottle()).client
        runner.run(client.get("/"))
        with hanging(own, 0.5):
            assert runner.run(beats_while_redis_hangs(client)) > 10


def test_all_throttles_of_an_async_operation_take_one_round_trip(own, monkeypatch, clock):
    messages, run = [], backend.aexecute_each
    monkeypatch.setattr(backend, "aexecute_each", lambda *args: messages.append(1) or run(*args))
    with asyncio.Runner() as runner:
        site = Site("async", runner).serve(UserRateThrottle("9/m"), UserRateThrottle("99/h"), PolicyThrottle())
        site.get(user="alice")
        messages.clear()
        with commands_sent(own.url) as names:
            assert site.get(user="alice").status_code == 200
    assert names == ["EVALSHA"] * 3
    assert len(messages) == 1


def test_interleaved_requests_of_one_loop_keep_their_own_counts(clock):
    async def ask(client):
        user = {name: SimpleNamespace(pk=name, is_authenticated=True) for name in ("alice", "bob", "carol")}
        asked = [client.get("/", user=user[name]) for name in ["alice", "bob", "carol"] * 5]
        return [response.status_code for response in await asyncio.gather(*asked)]

    with asyncio.Runner() as runner:
        client = Site("async", runner).serve(UserRateThrottle("2/m")).client
        found = runner.run(ask(client))
    assert all(found[i::3].count(200) == 2 for i in range(3))


def test_a_request_that_is_not_valid_is_counted(site, clock):
    site.serve(UserRateThrottle("2/m"))
    assert [site.get("/?number=x", user="alice").status_code for _ in range(3)] == [422, 422, 429]
    assert site.get(user="alice")["Retry-After"] == "60"


def test_without_the_decorator_async_operations_are_limited_and_the_log_tells_what_to_write(clock, log_lines):
    ours._warn.cache_clear()
    with asyncio.Runner() as runner:
        site = Site("async", runner).serve(UserRateThrottle("2/m"), decorated=False)
        assert site.statuses(3, "alice") == [200, 200, 429]
    assert len(log_lines("waits for Redis in the event loop")) == 1


def test_the_decorator_is_for_operations():
    with pytest.raises(TypeError, match=r"api.add_decorator\(throttled, mode"):
        throttled(lambda request: None)


@pytest.mark.django_db(transaction=True)
def test_a_user_of_the_session_and_a_key_that_uses_the_database_are_found(settings, clock):
    from django.contrib.auth.models import User

    def name(request):
        return User.objects.values_list("username", flat=True).get()

    api = make_api(throttle=[UserRateThrottle("2/m"), PolicyThrottle(Policy("named", "9/m", key=name))])
    api.add_decorator(throttled, mode="view")

    @api.get("/")
    async def operation(request):
        return request.user.username

    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("", api.urls)]})
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ]
    user, client = User.objects.create(username="alice"), AsyncClient()

    async def ask():
        await client.aforce_login(user)
        return [(await client.get("/")).status_code for _ in range(3)]

    assert asyncio.run(ask()) == [200, 200, 429]
    assert peek("alice", Policy("named", "9/m", key=name)).current_count == 3


def test_streams_are_limited(clock):
    api = make_api()
    api.add_decorator(throttled, mode="view")

    @api.get("/", throttle=[AnonRateThrottle("1/m")], response=ninja.streaming.JSONL[int])
    async def numbers_(request):
        yield 1

    with asyncio.Runner() as runner:
        client = TestAsyncClient(api)
        found = [runner.run(client.get("/")) for _ in range(2)]
        assert [response.status_code for response in found] == [200, 429]


# Responses and operation


def test_the_decorator_adds_the_headers(site, clock):
    site.serve(UserRateThrottle("1/m"))
    assert site.get(user="alice")["RateLimit"] == '"ninja.user-60s";r=0;t=60'
    refused = site.get(user="alice")
    assert (refused["RateLimit"], refused["Retry-After"]) == ('"ninja.user-60s";r=0;t=60', "60")


def test_the_middleware_adds_the_headers(settings, configure, clock):
    configure(MAX_REQUESTS=50)
    api = make_api(throttle=[AnonRateThrottle("1/m")])
    api.get("/")(lambda request: "hello")
    settings.ROOT_URLCONF, settings.MIDDLEWARE = type("urls", (), {"urlpatterns": [path("", api.urls)]}), [OURS]
    assert Client().get("/")["RateLimit"] == '"default";r=49;t=60, "ninja.anon-60s";r=0;t=60'
    refused = Client().get("/")
    assert (refused.status_code, refused["Retry-After"]) == (429, "60")


def test_where_nothing_limits_there_are_no_headers(settings, configure, clock):
    configure(POLICIES={"search": {"rate": "3/m"}}, MIDDLEWARE=[{"path": "/search/", "policies": ["search"]}])
    api = make_api(auth=lambda request: "secret", throttle=[AnonRateThrottle("1/m")])
    api.add_decorator(throttled, mode="view")
    api.get("/")(lambda request: "hello")
    settings.ROOT_URLCONF, settings.MIDDLEWARE = type("urls", (), {"urlpatterns": [path("", api.urls)]}), [OURS]
    response = Client().get("/")
    assert response.status_code == 200
    assert [name for name in response.headers if "ratelimit" in name.lower()] == []


def test_refusals_are_signalled(site, clock):
    seen = []
    rate_limited.connect(receiver := lambda decision, **_: seen.append(decision.policy.name))
    site.serve(UserRateThrottle("1/m")).statuses(2, "alice")
    rate_limited.disconnect(receiver)
    assert seen == ["ninja.user-60s"]


@pytest.fixture
def observed():
    """Collect the results of the observations."""
    results = []

    def observe(observation):
        results.append(observation.result)

    observers.add(observe)
    yield results
    observers.remove(observe)


def limited_view(kind):
    limit = rate_limit("2/m", key="ip", group="own")
    if kind == "def":

        @limit
        def operation(request):
            return "hello"
    else:

        @limit
        async def operation(request):
            return "hello"

    return operation


def serve_with_throttle(settings, kind, *, decorated):
    """Serve an operation with a throttle and a limit."""
    api = make_api(throttle=[AnonRateThrottle("9/m")])
    if decorated:
        api.add_decorator(throttled, mode="view")
    api.get("/")(limited_view(kind))
    site = HttpSite("wsgi, def" if kind == "def" else "asgi, async def", settings)
    site.serve({"": api.urls})
    return site


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_with_the_decorator_a_throttle_and_a_limit_are_one_request_in_the_statistics(settings, clock, kind, observed):
    site = serve_with_throttle(settings, kind, decorated=True)
    assert site.statuses(3) == [200, 200, 429]
    assert observed == ["allowed", "allowed", "refused"]


def test_without_the_decorator_a_throttle_is_observed_by_itself(settings, clock, observed):
    site = serve_with_throttle(settings, "def", decorated=False)
    assert site.statuses(1) == [200]
    assert observed == ["allowed", "allowed"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_the_limit_refuses_is_refunded_to_the_throttle(settings, clock, kind):
    site = serve_with_throttle(settings, kind, decorated=True)
    refused = [site.get() for _ in range(4)][-1]
    assert refused["RateLimit"] == '"ninja.anon-60s";r=7;t=60, "own";r=0;t=60'
    throttle = Policy("ninja.anon-60s", "9/m", key="ip", algo=COMPACT)
    assert peek("203.0.113.9", throttle).current_count == 2


# As django-ninja's own tests read and replace what a throttle has


@pytest.mark.parametrize("pk", PRIMARY_KEYS, ids=str)
def test_a_user_s_primary_key_may_be_of_any_type(site, clock, pk):
    site.serve(UserRateThrottle("2/m"))
    assert site.statuses(3, pk) == [200, 200, 429]
    assert site.statuses(1, "another") == [200]
    assert peek(str(pk), Policy("ninja.user-60s", "2/m", algo=COMPACT)).remaining == 0  # as @rate_limit counts


@pytest.mark.parametrize("pk", [None, ""])
def test_a_user_without_a_primary_key_is_counted_by_address(site, clock, pk):
    site.serve(UserRateThrottle("2/m"))
    user = SimpleNamespace(pk=pk, is_authenticated=True)
    assert [site.get(user=each).status_code for each in (user, None, user)] == [200, 200, 429]


@pytest.mark.parametrize("key", PRIMARY_KEYS, ids=str)
def test_a_key_of_the_site_s_own_may_be_of_any_type(site, clock, key):
    class ByKey(SimpleRateThrottle):
        scope = "key"

        def get_cache_key(self, request):
            return key

    site.serve(ByKey("2/m"))
    assert site.statuses(3) == [200, 200, 429]


def test_what_authenticates_may_be_an_object_of_any_kind(site, clock):
    class Key:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"key of {self.name}"

    site.serve(AuthRateThrottle("1/m"), auth=lambda request: Key(request.headers["X-Name"]))
    assert site.statuses(2, headers={"X-NAME": "alice"}) == [200, 429]
    assert site.statuses(2, headers={"X-NAME": "bob"}) == [200, 429]


@pytest.mark.parametrize("on", ["class", "instance"])
def test_a_timer_of_a_test_is_the_time(site, on):
    class Timed(UserRateThrottle):
        scope = "timed"

    throttle = Timed("2/m")
    site.serve(throttle)
    found = []
    for seconds in (0, 0, 59, 59, 60, 60, 60):
        if on == "class":
            Timed.timer = lambda self, seconds=seconds: seconds
        else:
            throttle.timer = lambda seconds=seconds: seconds
        response = site.get(user="alice")
        found.append((response.status_code, response.get("Retry-After")))
    assert found == [(200, None), (200, None), (429, "1"), (429, "1"), (200, None), (200, None), (429, "60")]


def test_requests_at_once_under_a_timer_leave_the_clock_as_it_was():
    throttle = UserRateThrottle("2/m")
    throttle.timer = lambda: 7

    async def ask_at_once(client):
        user = SimpleNamespace(pk="alice", is_authenticated=True)
        return await asyncio.gather(*[client.get("/", user=user) for _ in range(9)])

    with asyncio.Runner() as runner:
        responses = runner.run(ask_at_once(Site("async", runner).serve(throttle).client))
    assert sorted(response.status_code for response in responses) == [200] * 2 + [429] * 7
    assert script_time() == ""


def admit(throttle, user="alice"):
    request = RequestFactory().get("/")
    request.user = SimpleNamespace(pk=user, is_authenticated=True)
    return throttle.allow_request(request)


def test_the_wait_after_an_admitted_request_is_ninja_s(clock):
    """Where the requests come at once; otherwise it is never shorter."""

    class Theirs(throttling.UserRateThrottle):
        cache = caches["locmem"]

        def timer(self):
            return clock.ms / 1000

    caches["locmem"].clear()
    mine, model = UserRateThrottle("4/h"), Theirs("4/h")
    for _ in range(4):
        assert (admit(mine), admit(model)) == (True, True)
        assert mine.wait() == model.wait()
    assert (admit(mine), admit(model)) == (False, False)
    assert mine.wait() == model.wait() == 3600
    clock.tick(3_599_000)
    assert (admit(mine), mine.wait()) == (False, 1)
    clock.tick(1_000)
    assert (admit(mine), mine.wait()) == (True, 900)


def test_the_wait_is_of_the_throttle_that_is_asked(clock):
    first, second = UserRateThrottle("1/m"), UserRateThrottle("1/h")
    assert admit(second)
    assert not admit(second)
    assert first.wait() is None
    assert second.wait() == 3600


def test_the_operation_finds_the_wait_after_an_admitted_request(site, clock):
    throttle = UserRateThrottle("2/m")
    site.serve(throttle, view=lambda request: str(throttle.wait()))
    assert site.get(user="alice").json() == "30.0"


def test_the_wait_by_history_is_ninja_s():
    throttle = SimpleRateThrottle("1/m")
    throttle.history = []
    assert throttle.wait() == 30.0
    throttle.now = throttle.timer()
    throttle.history = [throttle.now] * 3
    assert throttle.wait() is None


def test_a_throttle_of_the_site_s_own_decides_and_has_no_wait(site, clock):
    class OnlyOnce(ours.BaseThrottle):
        called = False

        def allow_request(self, request):
            before, self.called = self.called, True
            return not before

    assert [admit(UserRateThrottle("1/m")) for _ in range(2)] == [True, False]
    site.serve(OnlyOnce())
    responses = [site.get() for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 429]
    assert responses[1].get("Retry-After") is None
    assert "BaseThrottle" in ours.__all__


def test_a_throttle_that_does_not_say_what_it_allows_is_an_error():
    with pytest.raises(NotImplementedError):
        ours.BaseThrottle().allow_request(RequestFactory().get("/"))
    with pytest.raises(NotImplementedError):
        SimpleRateThrottle("1/m").allow_request(RequestFactory().get("/"))


def test_a_scope_without_a_rate_is_an_error_and_none_is_no_limit(site, clock):
    class Scoped(UserRateThrottle):
        THROTTLE_RATES = MappingProxyType({"none": None})

    with pytest.raises(ImproperlyConfigured, match="No default throttle rate set for 'user' scope"):
        Scoped()
    Scoped.scope = None
    with pytest.raises(ImproperlyConfigured, match=r"either `\.scope` or `\.rate` for 'Scoped'"):
        Scoped()
    Scoped.scope = "none"
    assert site.serve(Scoped()).statuses(3, "alice") == [200] * 3


def test_ninja_s_settings_are_read_at_each_request(monkeypatch):
    replaced = ninja_settings.model_copy(update={"NUM_PROXIES": 2})
    request = SimpleNamespace(META={"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "1.1.1.1, 203.0.113.9"})
    throttle = AnonRateThrottle("1/m")
    monkeypatch.setattr("ninja.conf.settings", replaced)
    assert throttle.get_ident(request) == "1.1.1.1"


# Decorators of a site's own


def plain(run):
    """A decorator without functools.wraps."""

    def decorated(request, **kwargs):
        decorated.calls += 1
        return run(request, **kwargs)

    decorated.calls = 0
    return decorated


def awaiting(run):
    async def decorated(request, **kwargs):
        return await run(request, **kwargs)

    return decorated


class Called:
    """A decorator that is a class."""

    def __init__(self, run):
        self.run = run

    def __call__(self, request, **kwargs):
        return self.run(request, **kwargs)


@pytest.mark.parametrize("decorators", [[plain], [Called], [Called, plain]])
def test_a_decorated_view_without_functools_wraps_is_limited(site, clock, monkeypatch, decorators):
    def no_wait(*args):
        raise AssertionError("It waits for Redis in the event loop.")

    if site.is_async:
        monkeypatch.setattr("rlaas_django.integrations.ninja.decide", no_wait)
        decorators = [awaiting, *decorators]
    site.serve(UserRateThrottle("1/m"), decorate=decorate_view(*decorators))
    first, second = site.get(user="alice"), site.get(user="alice")
    assert (first.status_code, first["RateLimit"]) == (200, '"ninja.user-60s";r=0;t=60')
    assert (second.status_code, second["Retry-After"]) == (429, "60")


def test_an_override_of_a_user_applies(site, clock):
    site.serve(UserRateThrottle("9/m"))
    overrides.publish("alice", [overrides.Override("alice", "*", overrides.BLOCK, clock.ms + 90_000)])
    assert site.get(user="alice")["Retry-After"] == "90"
    assert site.get(user="bob").status_code == 200


def test_nothing_is_limited_while_rate_limiting_is_off(site, configure):
    configure(ENABLED=False)
    site.serve(UserRateThrottle("1/m"), PolicyThrottle())
    assert site.statuses(9, "alice") == [200] * 9


def test_without_redis_a_throttle_fails_open_or_closed(site, redis_unavailable, clock):
    class Closed(UserRateThrottle):
        on_failure = "closed"

    assert site.serve(UserRateThrottle("1/m")).statuses(3, "alice") == [200] * 3
    assert site.serve(Closed("1/m")).statuses(1, "alice") == [429]


@pytest.mark.slow
def test_sixteen_processes_admit_exactly_the_limit():
    assert sum(in_processes(admitted, 16)) == 100


def admitted(_) -> int:
    with asyncio.Runner() as runner:
        return Site("sync", runner).serve(UserRateThrottle("100/h")).statuses(60, "alice").count(200)


# The page


class Token(HttpBearer):
    def authenticate(self, request, token):
        return token if token == "right" else None


def serve_with_tokens(settings, kind, middleware=()):
    api = make_api(auth=Token(), throttle=[AuthRateThrottle("2/m"), AnonRateThrottle("2/m")])
    api.add_decorator(throttled, mode="view")
    api.get("/")(as_kind(kind, lambda request: "hello"))
    site = HttpSite("wsgi, def" if kind == "def" else "asgi, async def", settings)
    site.own_body = True
    site.serve({"api/": api.urls}, middleware)
    return site


RIGHT, WRONG = {"Authorization": "Bearer right"}, {"Authorization": "Bearer wrong"}


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_throttle_does_not_count_wrong_tokens(settings, clock, kind):
    site = serve_with_tokens(settings, kind)
    assert site.statuses(5, "/api/", headers=WRONG) == [401] * 5
    assert site.statuses(3, "/api/", headers=RIGHT) == [200, 200, 429]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_rule_of_the_page_counts_wrong_tokens(settings, configure, clock, kind):
    text = (ROOT / "docs" / "ninja.md").read_text()
    (block,) = re.findall(r"^```python\n([^`]*\bRATE_LIMITER = .*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict = {"MIDDLEWARE": []}
    exec(compile(block, "ninja.md", "exec"), names)
    configure(**names["RATE_LIMITER"])
    site = serve_with_tokens(settings, kind, names["MIDDLEWARE"])
    assert site.statuses(2, "/api/", headers=RIGHT) == [200, 200]
    assert peek({"ip": site.address}, "wrong-tokens").current_count == 0
    assert site.statuses(100, "/api/", headers=WRONG) == [401] * 100
    assert site.statuses(2, "/api/", headers=WRONG) == [429] * 2
    assert site.statuses(1, "/api/", headers=RIGHT) == [429]
    site.address = "198.51.100.7"
    assert site.statuses(1, "/api/") == [401]
    assert peek({"ip": site.address}, "wrong-tokens").current_count == 1


def test_the_examples_of_the_page_run(configure, clock):
    configure(POLICIES={"search": {"rate": "2/m", "key": "ip"}})
    text = (ROOT / "docs" / "ninja.md").read_text()
    names: dict = {"__name__": "documented", "MIDDLEWARE": []}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "ninja.md", "exec"), names)
    with asyncio.Runner() as runner:
        client = TestAsyncClient(names["api"])
        found = [runner.run(client.get("/search")) for _ in range(3)]
        assert [response.status_code for response in found] == [200, 200, 429]
        assert found[0].json() == {"remaining": 1}
        assert found[2]["Retry-After"] == "60"
        assert [runner.run(client.get("/users")).status_code for _ in range(11)] == [*[200] * 10, 429]
