"""django-ratelimit's API on our counters; its own tests are run by tests/integrations/test_conformance.py."""

from __future__ import annotations

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from hypothesis import given
from hypothesis import strategies as st
from rlaas_django.integrations.django_ratelimit import (
    ALL,
    UNSAFE,
    Ratelimited,
    get_usage,
    is_ratelimited,
    ratelimit,
)
from rlaas_django.operators import usage as panel
from rlaas_django.signals import rate_limited
from rlaas_django.testing import frozen_clock, reset_all

from tests.support.http import OURS
from tests.support.internals import overrides, recorder, statistics_totals
from tests.support.observation import commands_sent
from tests.support.parallel import in_processes

ROOT = Path(__file__).parents[2]
MIDDLEWARE = "rlaas_django.integrations.django_ratelimit.RatelimitMiddleware"
factory = RequestFactory()


def limited_view(**options):
    @ratelimit(**{"key": "ip", "rate": "2/m", "block": False, **options})
    def view(request):
        return request.limited

    return view


def ask(view, count=1, method="get", **options):
    return [view(getattr(factory, method)("/", **options)) for _ in range(count)]


def usage(increment=False, **options):
    request = factory.get("/", headers=options.pop("headers", {}))
    return get_usage(request, **{"group": "g", "key": "ip", "rate": "2/m", **options}, increment=increment)


# The real one as the model


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 20), st.sampled_from(["a", "b"]), st.sampled_from(["0/m", "1/m", "3/2m"])
        ),
        max_size=40,
    )
)
def test_usage_is_the_same_as_django_ratelimit_s(steps):
    """`count` apart, which stops at the first request over the limit."""
    core = pytest.importorskip("django_ratelimit.core")
    reset_all()
    caches["locmem"].clear()
    with frozen_clock(1_700_000_001_000) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "caches", {"default": caches["locmem"]})
        patch.setattr(core, "time", SimpleNamespace(time=lambda: clock.ms / 1000))
        patch.setattr(core, "zlib", SimpleNamespace(crc32=lambda value: 0))  # it moves each client's windows
        for increment, ticks, name, rate in steps:
            clock.tick(2_000 * ticks)  # at odd seconds, as its windows end a second after a minute
            options = {
                "group": "g",
                "key": lambda group, request, name=name: name,
                "rate": rate,
                "increment": increment,
            }
            mine, model = get_usage(factory.get("/"), **options), core.get_usage(factory.get("/"), **options)
            assert mine == {**model, "count": min(model["count"], model["limit"] + 1)}


# What is limited


def test_a_view_is_limited_and_blocked(clock):
    view = limited_view(block=True)
    assert ask(view, 2) == [False, False]
    with pytest.raises(Ratelimited):
        ask(view)
    assert issubclass(Ratelimited, PermissionDenied)


def test_a_look_tells_that_the_limit_was_exceeded_and_not_that_it_is_used_up(clock):
    assert [usage(increment=True)["count"] for _ in range(2)] == [1, 2]
    assert usage() == {"count": 2, "limit": 2, "should_limit": False, "time_left": 40}
    assert usage(increment=True)["should_limit"]
    assert usage() == {"count": 3, "limit": 2, "should_limit": True, "time_left": 40}
    clock.tick(40_000)
    assert usage() == {"count": 0, "limit": 2, "should_limit": False, "time_left": 60}


def test_refusals_beyond_the_first_are_cached(own):
    for _ in range(4):
        usage(increment=True)
    with commands_sent(own.url) as names:
        assert [usage(increment=True)["should_limit"] for _ in range(5)] == [True] * 5
    assert not names


def test_methods_groups_and_rates_have_counters_of_their_own(clock):
    assert usage(increment=True, method="GET")["count"] == 1
    assert usage(increment=True, method=["GET", "POST"])["count"] == 1
    assert usage(increment=True, method=("post", "get"))["count"] == 2
    assert usage(increment=True, group="other")["count"] == 1
    assert usage(increment=True, rate="3/m")["count"] == 1
    assert usage(increment=True, method=UNSAFE) is None
    assert usage(increment=True, method=ALL)["count"] == 1


@pytest.mark.parametrize(("one", "other"), [("a b", "a-b"), ("a/b", "a:b"), ("x" * 200, "y" + "x" * 199), ("ä", "ö")])
def test_no_two_groups_share_a_counter(clock, one, other):
    usage(increment=True, group=one)
    assert usage(group=other)["count"] == 0
    assert usage(group=one)["count"] == 1


def test_views_are_counted_apart_also_of_one_class(clock):
    class First(View):
        @method_decorator(ratelimit(key="ip", rate="1/m", block=False))
        def get(self, request):
            return request.limited

        @method_decorator(ratelimit(key="ip", rate="1/m", block=False))
        def post(self, request):
            return request.limited

    class Second(First):
        pass

    for view in (First.as_view(), Second.as_view()):
        assert ask(view, 2) == [False, True]
        assert ask(view, 2, "post") == [False, True]


# Keys


def test_users_are_counted_and_anonymous_ones_by_address(clock):
    view = limited_view(key="user", rate="1/m")

    def as_user(user, address="203.0.113.9"):
        request = factory.get("/", REMOTE_ADDR=address)
        request.user = user
        return view(request)

    alice = SimpleNamespace(pk=1, is_authenticated=True)
    assert [as_user(alice), as_user(alice)] == [False, True]
    assert [as_user(AnonymousUser()), as_user(AnonymousUser())] == [False, True]
    assert as_user(AnonymousUser(), "203.0.113.10") is False


def test_headers_are_counted_as_digests_and_those_without_together(clock, client):
    view = limited_view(key="header:X-Api-Key", rate="1/m")
    assert ask(view, 2, headers={"X-Api-Key": "secret"}) == [False, True]
    assert ask(view, 2) == [False, True]
    assert b"secret" not in b" ".join(client.keys())


@pytest.mark.parametrize("key", [None, "", "unknown", "meta:x", "get", 5])
def test_what_is_no_key_is_an_error(key):
    with pytest.raises(ImproperlyConfigured):
        usage(key=key)


def test_addresses_are_those_behind_trusted_proxies_or_of_ip_meta_key(clock, configure, settings, client):
    proxied = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "203.0.113.9", "HTTP_X_REAL_IP": "203.0.113.7"}

    def counted():
        get_usage(factory.get("/", **proxied), group="g", key="ip", rate="9/m", increment=True)
        return {key.decode().partition("=")[2].partition(":")[0] for key in client.keys("rlaas:rate_limit:*")}

    assert counted() == {"10.0.0.1"}
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted() == {"10.0.0.1", "203.0.113.9"}
    settings.RATELIMIT_IP_META_KEY = "HTTP_X_REAL_IP"
    assert counted() == {"10.0.0.1", "203.0.113.9", "203.0.113.7"}
    settings.RATELIMIT_IPV4_MASK = 24
    assert "203.0.113.0%2F24" in counted()
    settings.RATELIMIT_IP_META_KEY = lambda request: "198.51.100.7"
    assert "198.51.100.0%2F24" in counted()
    settings.RATELIMIT_IP_META_KEY = "HTTP_X_UNKNOWN"
    with pytest.raises(ImproperlyConfigured, match="is not an address; see RATELIMIT_IP_META_KEY"):
        counted()


def test_a_counter_needs_a_name():
    with pytest.raises(ImproperlyConfigured, match="Write `group`, or `fn`"):
        get_usage(factory.get("/"), key="ip", rate="9/m")


# Rates


@pytest.mark.parametrize("rate", ["5/month", "5/", "/m", "five/m", "5/0s", "-1/m"])
def test_a_mistake_in_a_rate_is_an_error_when_the_module_is_imported(rate):
    with pytest.raises(ImproperlyConfigured, match="is not a rate"):
        ratelimit(key="ip", rate=rate)


@pytest.mark.parametrize("rate", [(5, 0), (5, -1), ("x", 60), lambda group, request: "5/month"])
def test_a_mistake_in_a_rate_of_a_function_is_an_error_of_the_request(rate):
    with pytest.raises(ImproperlyConfigured):
        usage(rate=rate)


def test_a_rate_of_zero_refuses_everything_and_none_nothing(clock):
    assert usage(increment=True, rate="0/m") == {"count": 1, "limit": 0, "should_limit": True, "time_left": 40}
    assert usage(increment=True, rate=(0, 60))["should_limit"]
    assert usage(increment=True, rate="05/m")["limit"] == 5
    assert usage(increment=True, rate=None) is None
    assert usage(increment=True, rate=lambda group, request: None) is None


def test_functions_get_the_group_and_the_request(clock):
    seen = []

    def rate(group, request):
        seen.append((group, request.path))
        return "1/m"

    usage(rate=rate, key=lambda group, request: seen.append((group, request.path)) or "someone")
    assert seen == [("g", "/"), ("g", "/")]


# Settings


def test_it_can_be_turned_off(settings, configure):
    settings.RATELIMIT_ENABLE = False
    assert usage(increment=True) is None
    settings.RATELIMIT_ENABLE = True
    configure(ENABLED=False)
    assert is_ratelimited(factory.get("/"), group="g", key="ip", rate="0/m", increment=True) is False


def test_another_cache_can_be_used(clock, settings, client):
    settings.RATELIMIT_USE_CACHE = "fakeredis"
    assert [usage(increment=True)["count"] for _ in range(2)] == [1, 2]
    assert not client.keys("rlaas:rate_limit:*")


def test_without_redis_it_fails_closed_or_open(redis_unavailable, settings):
    assert usage(increment=True) == {"count": 0, "limit": 0, "should_limit": True, "time_left": -1}
    assert usage()["should_limit"] is False
    settings.RATELIMIT_FAIL_OPEN = True
    assert usage(increment=True) is None


class TooMuchError(Exception):
    pass


@pytest.mark.parametrize("given", [TooMuchError, f"{__name__}.TooMuchError"])
def test_the_exception_can_be_the_site_s_own(clock, settings, given):
    settings.RATELIMIT_EXCEPTION_CLASS = given
    with pytest.raises(TooMuchError):
        ask(limited_view(rate="0/m", block=True))


def sorry(request, exception):
    return HttpResponse(f"sorry, {type(exception).__name__}", status=429)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_the_middleware_responds_with_the_view_of_the_settings(clock, settings, kind):
    @ratelimit(key="ip", rate="1/m")
    def view(request):
        return HttpResponse("hello")

    @ratelimit(key="ip", rate="1/m")
    async def aview(request):
        return HttpResponse("hello")

    settings.MIDDLEWARE, settings.RATELIMIT_VIEW = [OURS, MIDDLEWARE], f"{__name__}.sorry"
    chosen = view if kind == "wsgi" else aview
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("", chosen)]})
    if kind == "wsgi":
        found = [Client().get("/") for _ in range(2)]
    else:

        async def ask_twice():
            return [await AsyncClient().get("/") for _ in range(2)]

        found = asyncio.run(ask_twice())
    assert [response.content for response in found] == [b"hello", b"sorry, Ratelimited"]
    assert '"view";r=0;t=40' in found[0]["RateLimit"] or '"aview";r=0;t=40' in found[0]["RateLimit"]


async def test_an_async_view_is_limited(clock):
    @ratelimit(key="ip", rate="1/m", block=False)
    async def view(request):
        return request.limited

    assert [await view(AsyncRequestFactory().get("/")) for _ in range(2)] == [False, True]


# Operation


def test_decisions_are_recorded_and_shown_with_the_limit_that_was_written(clock):
    seen = []
    rate_limited.connect(receiver := lambda request, decision, **_: seen.append((request.path, decision.limit)))
    for _ in range(4):
        usage(increment=True)
    rate_limited.disconnect(receiver)
    assert seen == [("/", 2)] * 2
    recorder.flush()
    assert statistics_totals() == {("g-2.60s", "allowed"): 2, ("g-2.60s", "refused"): 2}
    assert str(panel.policies()["g-2.60s"].rate) == "2/m"


def test_overrides_apply(clock):
    def override(kind, limit=None):
        what = overrides.Override("1", "*", kind, clock.ms + 90_000, limit)
        overrides.publish("1", [what])

    def as_alice():
        request = factory.get("/")
        request.user = SimpleNamespace(pk=1, is_authenticated=True)
        return get_usage(request, group="g", key="user", rate="1/m", increment=True)

    override(overrides.LIMIT, 3)
    assert [as_alice()["should_limit"] for _ in range(4)] == [False, False, False, True]
    override(overrides.EXEMPT)
    assert [as_alice()["should_limit"] for _ in range(2)] == [False, False]
    override(overrides.BLOCK)
    assert as_alice()["should_limit"]


@pytest.mark.slow
def test_sixteen_processes_admit_exactly_the_limit():
    with frozen_clock(1_700_000_000_000):
        assert sum(in_processes(admitted, 16)) == 100


def admitted(_) -> int:
    return ask(limited_view(rate="100/h"), 60).count(False)


# The page


def test_the_example_of_the_page_is_what_type_checkers_read():
    text = (ROOT / "docs" / "django-ratelimit.md").read_text()
    example = re.search(r"^# after\n.*?(^@ratelimit\(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    assert example in (ROOT / "tests" / "typing" / "django_ratelimit.py").read_text()


def test_the_sets_of_methods_are_on_the_decorator_and_the_functions():
    for public in (ratelimit, is_ratelimited, get_usage):
        assert (public.ALL, public.UNSAFE) == (ALL, UNSAFE)


def test_the_examples_of_the_page_run(clock):
    text = (ROOT / "docs" / "django-ratelimit.md").read_text()
    names: dict = {"__name__": "documented"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "from django_ratelimit" not in block or find_spec("django_ratelimit"):
            exec(compile(block, "django-ratelimit.md", "exec"), names)
    login, request = names["login"], factory.post("/")
    assert [login(request).status_code for _ in range(5)] == [200] * 5
    with pytest.raises(Ratelimited):
        login(request)
    assert [names["search"](factory.get("/")).content for _ in range(31)] == [*[b"results"] * 30, b"slow down"]
