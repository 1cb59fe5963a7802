"""Throttles for Django REST framework: they count as its own do, exactly, and in one round trip."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from django.core.cache import caches
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.urls import path
from django.utils.module_loading import import_string
from hypothesis import given
from hypothesis import strategies as st
from rest_framework import throttling
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.views import APIView
from rlaas_django import Policy, backend, peek, rate_limit
from rlaas_django.integrations import drf
from rlaas_django.integrations.drf import (
    AnonRateThrottle,
    BaseThrottle,
    PolicyThrottle,
    ScopedRateThrottle,
    SimpleRateThrottle,
    UserRateThrottle,
)
from rlaas_django.operators import usage as panel
from rlaas_django.signals import rate_limited
from rlaas_django.testing import frozen_clock, reset_all

from tests.support.http import OURS, PRIMARY_KEYS
from tests.support.internals import overrides, recorder, statistics_totals
from tests.support.observation import commands_sent
from tests.support.parallel import in_processes

ROOT = Path(__file__).parents[2]
factory = APIRequestFactory()
COMPACT = "sliding-window-compact-algo"


class ByHeader(BaseAuthentication):
    """The user that a header names, without a database."""

    def authenticate(self, request):
        name = request.headers.get("X-User")
        return (SimpleNamespace(pk=name, is_authenticated=True), None) if name else None


def make_view(*throttles: type, handler=None, **attributes):
    """Return a view with these throttles."""

    class View(APIView):
        authentication_classes = (ByHeader,)
        throttle_classes = throttles

        def get(self, request):
            return Response("hello") if handler is None else handler(request)

    for name, value in attributes.items():
        setattr(View, name, value)
    return View.as_view()


def get(view, user: str | None = None, **options):
    response = view(factory.get("/", headers={"X-User": user} if user else {}, **options))
    response.render()
    return response


def statuses(view, count: int, user: str | None = None) -> list[int]:
    return [get(view, user).status_code for _ in range(count)]


def decided(view, user: str | None = None):
    """Return the decision of all throttles."""
    return get(view, user).renderer_context["request"].rate_limit


def use_site(settings, view, *middleware: str) -> Client:
    """Serve a view at /."""
    settings.ROOT_URLCONF, settings.MIDDLEWARE = type("urls", (), {"urlpatterns": [path("", view)]}), [*middleware]
    return Client()


class TwoPerMinute(UserRateThrottle):
    rate = "2/min"


class AnonymousOnly(AnonRateThrottle):
    rate = "2/min"


class FourPerHour(UserRateThrottle):
    rate = "4/hour"


# The names, attributes and settings of DRF


@pytest.mark.parametrize(
    "name", ["BaseThrottle", "SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"]
)
def test_a_throttle_has_the_name_the_bases_and_the_attributes_of_drf_s(name):
    ours, theirs = getattr(drf, name), getattr(throttling, name)
    assert issubclass(ours, theirs)
    assert issubclass(ours, BaseThrottle)
    assert all(hasattr(ours, attribute) for attribute in dir(theirs))


def test_the_rates_of_scopes_come_from_the_settings_of_drf():
    assert SimpleRateThrottle.THROTTLE_RATES is api_settings.DEFAULT_THROTTLE_RATES

    class Burst(UserRateThrottle):
        scope = "burst"
        THROTTLE_RATES = MappingProxyType({"burst": "60/min"})

    throttle = Burst()
    assert (throttle.rate, throttle.num_requests, throttle.duration) == ("60/min", 60, 60)
    assert throttle.get_rate() == "60/min"


@pytest.mark.parametrize(
    ("rate", "parsed"),
    [
        *(("3/s", (3, 1)), ("3/sec", (3, 1)), ("3/m", (3, 60)), ("3/min", (3, 60)), ("3/hour", (3, 3600))),
        *(("3/d", (3, 86_400)), ("3/day", (3, 86_400)), (None, (None, None))),
    ],
)
def test_rates_are_parsed_as_drf_documents_them(rate, parsed):
    throttle = TwoPerMinute()
    assert throttle.parse_rate(rate) == parsed
    assert throttling.SimpleRateThrottle.parse_rate(throttle, rate) == parsed


@pytest.mark.parametrize("text", ["1000/month", "0/day", "5/fortnight", "many/day"])
def test_what_is_no_rate_is_an_error_and_a_month_is_not_taken_for_a_minute(text):
    class Wrong(UserRateThrottle):
        rate = text

    with pytest.raises(ValueError, match=f"'{text}' is not a rate"):
        Wrong()


def test_a_scope_without_a_rate_is_an_error_and_none_is_no_limit():
    class Unknown(UserRateThrottle):
        scope = "unknown"

    class Unlimited(UserRateThrottle):
        scope = "unlimited"
        THROTTLE_RATES = MappingProxyType({"unlimited": None})

    with pytest.raises(ImproperlyConfigured, match="unknown"):
        Unknown()
    assert statuses(make_view(Unlimited), 5) == [200] * 5


def test_the_cache_key_is_drf_s():
    request = Request(factory.get("/", REMOTE_ADDR="203.0.113.9"))
    assert TwoPerMinute().get_cache_key(request, None) == "throttle_user_203.0.113.9"
    request.user = SimpleNamespace(pk=42, is_authenticated=True)
    assert TwoPerMinute().get_cache_key(request, None) == "throttle_user_42"


# What is counted


def test_users_and_addresses_have_counters_of_their_own(clock):
    view = make_view(TwoPerMinute)
    assert statuses(view, 3, "alice") == [200, 200, 429]
    assert statuses(view, 3, "bob") == [200, 200, 429]
    assert statuses(view, 3) == [200, 200, 429]
    assert get(view, REMOTE_ADDR="203.0.113.9").status_code == 200


def test_anonymous_throttles_leave_users_alone(clock):
    class Anonymous(AnonRateThrottle):
        rate = "2/min"

    view = make_view(Anonymous)
    assert statuses(view, 3) == [200, 200, 429]
    assert statuses(view, 5, "alice") == [200] * 5


def test_a_scoped_throttle_counts_by_the_scope_of_the_view(clock):
    class Scoped(ScopedRateThrottle):
        THROTTLE_RATES = MappingProxyType({"uploads": "1/min", "contacts": "2/min"})

    uploads, contacts = (make_view(Scoped, throttle_scope=scope) for scope in ("uploads", "contacts"))
    assert statuses(uploads, 2, "alice") == [200, 429]
    assert statuses(contacts, 3, "alice") == [200, 200, 429]
    assert statuses(make_view(Scoped), 5, "alice") == [200] * 5


def test_scopes_that_differ_only_outside_ascii_do_not_share_a_counter(clock):
    scopes = ("поиск", "загрузка", "a b", "a/b")

    class Scoped(ScopedRateThrottle):
        THROTTLE_RATES = MappingProxyType(dict.fromkeys(scopes, "1/min"))

    views = [make_view(Scoped, throttle_scope=scope) for scope in scopes]
    assert [statuses(view, 2, "alice") for view in views] == [[200, 429]] * 4


def test_a_key_of_the_site_s_own_is_what_is_counted(clock, client):
    class ByTenant(SimpleRateThrottle):
        rate = "2/min"

        def get_cache_key(self, request, view):
            return request.headers.get("X-Tenant")

    view = make_view(ByTenant)
    ask = [view(factory.get("/", headers={"X-Tenant": name})).status_code for name in ["a: b/", "a: b/", "a: b/", "c"]]
    assert ask == [200, 200, 429, 200]
    assert statuses(view, 5) == [200] * 5  # no key, no limit
    assert b"rlaas:rate_limit:drf.ByTenant-60s/key=a%3A%20b%2F:log" in client.keys()


@pytest.mark.parametrize("pk", PRIMARY_KEYS, ids=str)
def test_a_user_s_primary_key_may_be_of_any_type(clock, pk):
    view = make_view(TwoPerMinute)

    def ask(pk):
        request = factory.get("/")
        force_authenticate(request, SimpleNamespace(pk=pk, is_authenticated=True))
        return view(request).status_code

    assert [ask(pk) for _ in range(3)] == [200, 200, 429]
    assert ask("another") == 200
    assert peek(str(pk), Policy("drf.user-60s", "2/m", algo=COMPACT)).remaining == 0  # as @rate_limit counts


@pytest.mark.parametrize("pk", [None, ""])
def test_a_user_without_a_primary_key_is_counted_by_address(clock, pk):
    view = make_view(TwoPerMinute)
    request = factory.get("/")
    force_authenticate(request, SimpleNamespace(pk=pk, is_authenticated=True))
    assert [view(request).status_code for _ in range(3)] == [200, 200, 429]
    assert statuses(view, 1) == [429]


@pytest.mark.parametrize("key", PRIMARY_KEYS, ids=str)
def test_a_key_of_the_site_s_own_may_be_of_any_type(clock, key):
    class ByKey(SimpleRateThrottle):
        rate = "2/min"

        def get_cache_key(self, request, view):
            return key

    assert statuses(make_view(ByKey), 3) == [200, 200, 429]


def test_a_format_of_the_site_s_own_is_what_is_counted(clock, client):
    class Shared(UserRateThrottle):
        rate = "1/min"
        cache_format = "all-of-%(scope)s"

    view = make_view(Shared)
    assert [get(view, "alice").status_code, get(view, "bob").status_code] == [200, 429]


def test_two_throttles_that_inherit_a_scope_do_not_share_a_counter(clock):
    view = make_view(TwoPerMinute, FourPerHour)
    assert statuses(view, 3, "alice") == [200, 200, 429]
    clock.tick(60_000)
    assert statuses(view, 2, "alice") == [200, 429]


def test_raising_a_rate_keeps_the_usage(clock):
    view = make_view(TwoPerMinute)
    assert statuses(view, 3, "alice") == [200, 200, 429]

    class TwoPerMinuteRaised(UserRateThrottle):
        rate = "3/min"

    assert statuses(make_view(TwoPerMinuteRaised), 2, "alice") == [200, 429]


def test_the_address_is_that_behind_trusted_proxies_unless_drf_is_told_their_number(configure, monkeypatch):
    request = Request(factory.get("/", REMOTE_ADDR="10.0.0.1", headers={"X-Forwarded-For": "1.1.1.1, 203.0.113.9"}))
    throttle = TwoPerMinute()
    assert throttle.get_ident(request) == "10.0.0.1"
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert throttle.get_ident(request) == "203.0.113.9"
    monkeypatch.setattr(api_settings, "NUM_PROXIES", 2)
    assert throttle.get_ident(request) == "1.1.1.1"
    monkeypatch.setattr(api_settings, "NUM_PROXIES", 0)
    assert throttle.get_ident(request) == "10.0.0.1"


# DRF's own throttles as the model


class TheirTwo(throttling.UserRateThrottle):
    rate, scope, cache = "2/min", "two", caches["locmem"]


class TheirFour(throttling.UserRateThrottle):
    rate, scope, cache = "4/hour", "four", caches["locmem"]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["alice", "bob", None])), min_size=1, max_size=30))
def test_two_throttles_count_as_drf_s_do(requests):
    """Each counts every request that it admits, also one that the other refuses; waits and bodies are the same."""
    ours, theirs = make_view(TwoPerMinute, FourPerHour), make_view(TheirTwo, TheirFour)
    reset_all()
    caches["locmem"].clear()
    with frozen_clock(1_700_000_000_000) as clock, pytest.MonkeyPatch.context() as patch:
        for each in (TheirTwo, TheirFour):
            patch.setattr(each, "timer", lambda self: clock.ms / 1000)
        for seconds, user in requests:
            clock.tick(seconds * 1000)
            mine, model = get(ours, user), get(theirs, user)
            assert (mine.status_code, mine.content) == (model.status_code, model.content)
            assert mine.get("Retry-After") == model.get("Retry-After")


def test_the_wait_after_an_admitted_request_is_drf_s(clock, monkeypatch):
    """Where the requests come at once; otherwise it is never shorter."""
    monkeypatch.setattr(TheirFour, "timer", lambda self: clock.ms / 1000)
    caches["locmem"].clear()

    def waits():
        request = Request(factory.get("/"))
        request.user = None
        throttles = [FourPerHour(), TheirFour()]
        assert [throttle.allow_request(request, APIView()) for throttle in throttles] == [True, True]
        return [throttle.wait() for throttle in throttles]

    assert waits() == [900.0, 900.0]
    assert waits() == [1200.0, 1200.0]
    clock.tick(60_000)
    assert waits() == [1800.0, 1770.0]


def test_there_is_no_wait_where_nothing_is_decided(configure):
    configure(ENABLED=False)
    throttle = TwoPerMinute()
    assert throttle.allow_request(Request(factory.get("/")), APIView())
    assert throttle.wait() is None


def test_a_timer_of_a_test_is_the_time(client):
    class Timed(UserRateThrottle):
        rate, scope, now = "1/min", "timed", 0

        def timer(self):
            return self.now

    view = make_view(Timed, TwoPerMinute)
    assert statuses(view, 2, "alice") == [200, 429]
    Timed.now = 59
    assert get(view, "alice")["Retry-After"] == "1"
    Timed.now = 60
    assert statuses(view, 1, "alice") == [200]


def test_the_hooks_of_drf_are_called(clock):
    seen = []

    class Hooked(UserRateThrottle):
        rate = "1/min"

        def throttle_success(self):
            seen.append("success")
            return super().throttle_success()

        def throttle_failure(self):
            seen.append("failure")
            return super().throttle_failure()

    statuses(make_view(Hooked), 2)
    assert seen == ["success", "failure"]


# Round trips


@pytest.fixture
def round_trips(monkeypatch):
    """Count the messages to Redis."""
    counts = []
    for name in ("execute", "execute_each"):
        run = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *args, run=run: counts.append(1) or run(*args))
    return counts


class Search(PolicyThrottle):
    policies = (
        Policy("search", "9/m", key="user"),
        Policy("site", "9/m", key="global"),
    )


class SiteAgain(PolicyThrottle):
    policies = (Policy("site", "9/m", key="global"),)


@pytest.mark.parametrize(
    ("throttles", "calls"),
    [([TwoPerMinute, FourPerHour], 2), ([TwoPerMinute, Search, FourPerHour], 3), ([Search], 1)],
)
def test_all_throttles_of_a_view_take_one_round_trip(own, round_trips, throttles, calls, clock):
    view = make_view(*throttles)
    get(view, "alice")
    round_trips.clear()
    with commands_sent(own.url) as names:
        assert get(view, "alice").status_code == 200
    assert names == ["EVALSHA"] * calls
    assert len(round_trips) == 1


def test_a_refusal_that_is_cached_takes_none(own, round_trips):
    view = make_view(TwoPerMinute)
    statuses(view, 3, "alice")
    round_trips.clear()
    with commands_sent(own.url) as names:
        assert statuses(view, 5, "alice") == [429] * 5
    assert not names


def test_a_throttle_that_lets_some_requests_pass_counts_only_the_others(clock):
    class Writes(UserRateThrottle):
        rate = "9/min"

        def allow_request(self, request, view):
            return request.method == "GET" or super().allow_request(request, view)

    view = make_view(TwoPerMinute, Writes)
    statuses(view, 2, "alice")
    assert peek("alice", Policy("drf.user-60s", "9/m", algo="sliding-window-compact-algo")).current_count == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_throttle_with_a_rate_for_each_request_is_checked_by_itself(clock, first):
    class PerUser(UserRateThrottle):
        rate = "9/min"

        def allow_request(self, request, view):
            self.rate = "3/min" if request.user.pk == "alice" else "1/min"
            self.num_requests, self.duration = self.parse_rate(self.rate)
            return super().allow_request(request, view)

    view = make_view(*((PerUser, FourPerHour) if first else (FourPerHour, PerUser)))
    assert statuses(view, 4, "alice") == [200, 200, 200, 429]
    assert statuses(view, 2, "bob") == [200, 429]
    assert peek("alice", Policy("drf.user-3600s", "9/h", algo="sliding-window-compact-algo")).current_count == 4


def test_throttles_that_are_checked_twice_are_charged_twice(clock):
    def handler(request):
        request.parser_context["view"].check_throttles(request)
        return Response()

    view = make_view(TwoPerMinute, FourPerHour, handler=handler)
    assert get(view, "alice")["RateLimit"] == '"drf.user-60s";r=0;t=60, "drf.user-3600s";r=2;t=3600'


def test_two_throttles_of_a_class_count_as_two(clock):
    view = make_view(FourPerHour, FourPerHour)
    assert statuses(view, 3, "alice") == [200, 200, 429]


def test_what_a_decorator_refuses_costs_nothing_under_any_number_of_throttles(clock, client):
    class ByKey(PolicyThrottle):
        policies = (Policy("key", "9/m", key="header:X-User"), Policy("all", "9/m", key="global"))

    view = rate_limit("1/m", key="user")(make_view(FourPerHour, ByKey))
    requests = [factory.get("/", headers={"X-User": "alice"}) for _ in range(3)]
    assert [view(request).status_code for request in requests] == [200, 429, 429]
    assert peek("", Policy("all", "9/m", key="global")).current_count == 1


def test_throttles_of_drf_and_of_the_site_work_beside_ours(clock):
    caches["locmem"].clear()

    class Never(throttling.BaseThrottle):
        def allow_request(self, request, view):
            return request.headers.get("X-User") != "eve"

    view = make_view(TheirFour, Never, TwoPerMinute)
    assert statuses(view, 3, "alice") == [200, 200, 429]
    assert statuses(view, 1, "eve") == [429]


# PolicyThrottle


def test_named_policies_are_all_or_nothing(configure, clock):
    configure(POLICIES={"small": {"rate": "1/m", "key": "user"}, "large": {"rate": "9/m", "key": "user"}})

    class Both(PolicyThrottle):
        policies = (
            "large",
            "small",
        )

    view = make_view(Both)
    assert statuses(view, 4, "alice") == [200, 429, 429, 429]
    assert peek("alice", "large").current_count == 1
    assert get(view, "alice")["Retry-After"] == "60"


def test_without_names_it_is_the_default_policy(configure, clock):
    configure(MAX_REQUESTS=2)
    assert statuses(make_view(PolicyThrottle), 3, "alice") == [200, 200, 429]


def test_a_policy_of_several_throttles_is_charged_once(clock):
    view = make_view(Search, SiteAgain)
    get(view, "alice")
    assert peek("", SiteAgain.policies[0]).current_count == 1
    assert statuses(view, 9, "alice") == [200] * 8 + [429]

    class SiteAndMore(PolicyThrottle):
        policies = (*SiteAgain.policies, Policy("more", "9/m", key="user"))

    view = make_view(TwoPerMinute, SiteAndMore, Search)
    assert (
        get(view, "bob")["RateLimit"] == '"drf.user-60s";r=1;t=60, "site";r=0;t=60, "more";r=9;t=0, "search";r=8;t=60'
    )


def test_a_policy_that_the_middleware_charged_is_not_charged_again(configure, settings, clock):
    configure(POLICIES={"site": {"rate": "2/m", "key": "ip"}}, MIDDLEWARE=[{"path": "/", "policies": ["site"]}])

    class Site(PolicyThrottle):
        policies = ("site",)

    client = use_site(settings, make_view(Site, TwoPerMinute), OURS)
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]


def test_an_unknown_policy_is_found_by_the_system_checks(no_views):
    class Typo(PolicyThrottle):
        policies = ("serach",)

    (message,) = [each.msg for each in run_checks() if each.id == "rlaas_django.E013"]
    assert "Typo is limited by policy 'serach'" in message


# Responses


def test_every_response_has_the_headers(clock):
    def handler(request):
        if "missing" in request.GET:
            raise NotFound
        return Response("hello")

    view = make_view(TwoPerMinute, FourPerHour, handler=handler)
    first = get(view, "alice")
    assert first["RateLimit-Policy"] == '"drf.user-60s";q=2;w=60, "drf.user-3600s";q=4;w=3600'
    assert first["RateLimit"] == '"drf.user-60s";r=1;t=60, "drf.user-3600s";r=3;t=3600'
    missing = view(factory.get("/?missing=1", headers={"X-User": "alice"}))
    assert (missing.status_code, missing["X-RateLimit-Remaining"]) == (404, "0")
    refused = get(view, "alice")
    assert refused.status_code == 429
    assert refused["RateLimit"] == '"drf.user-60s";r=0;t=60, "drf.user-3600s";r=1;t=60'
    assert json.loads(refused.content) == {"detail": "Request was throttled. Expected available in 60 seconds."}


def test_with_the_middleware_the_headers_have_its_policies_too(configure, settings, clock):
    configure(MAX_REQUESTS=50)
    client = use_site(settings, make_view(TwoPerMinute), OURS)
    assert client.get("/")["RateLimit"] == '"default";r=49;t=60, "drf.user-60s";r=1;t=60'


def test_where_nothing_limits_there_are_no_headers(configure, settings, clock):
    """Not those of the default policy, of which `request.rate_limit` has the figures then."""
    configure(POLICIES={"search": {"rate": "3/m"}}, MIDDLEWARE=[{"path": "/search/", "policies": ["search"]}])
    client = use_site(settings, make_view(AnonymousOnly), OURS)
    assert client.get("/")["RateLimit"] == '"drf.anon-60s";r=1;t=60'
    response = client.get("/", headers={"X-User": "alice"})
    assert [name for name in response.headers if "ratelimit" in name.lower()] == []


def test_the_view_can_read_the_decision(clock):
    seen = []
    view = make_view(TwoPerMinute, FourPerHour, handler=lambda request: seen.append(request.rate_limit) or Response())
    get(view, "alice")
    assert [outcome.remaining for outcome in seen[0].outcomes] == [1, 3]


def test_refusals_are_signalled_and_counted_in_the_statistics(clock):
    seen = []
    rate_limited.connect(receiver := lambda request, decision, **_: seen.append((request.path, decision.policy.name)))
    statuses(make_view(TwoPerMinute), 3, "alice")
    rate_limited.disconnect(receiver)
    assert seen == [("/", "drf.user-60s")]
    recorder.flush()
    assert statistics_totals() == {("drf.user-60s", "allowed"): 2, ("drf.user-60s", "refused"): 1}


def test_under_attack_the_log_stays_short(configure, settings, clock, caplog):
    configure(LOG_LINES_PER_SECOND=1)
    client = use_site(settings, make_view(TwoPerMinute))
    assert [client.get("/").status_code for _ in range(30)].count(429) == 28
    by_django = [record for record in caplog.records if record.name == "django.request"]
    assert len(by_django) < 10


# Operation


def test_an_override_of_a_user_applies(clock):
    view = make_view(TwoPerMinute)
    overrides.publish("alice", [overrides.Override("alice", "*", overrides.BLOCK, clock.ms + 90_000)])
    assert get(view, "alice")["Retry-After"] == "90"
    assert get(view, "bob").status_code == 200


def test_nothing_is_limited_while_rate_limiting_is_off(configure, client):
    configure(ENABLED=False)
    view = make_view(TwoPerMinute, Search)
    assert statuses(view, 12, "alice") == [200] * 12
    assert "RateLimit" not in get(view, "alice")


def test_without_redis_a_throttle_fails_open_closed_or_local(redis_unavailable, clock):
    class Closed(UserRateThrottle):
        rate, on_failure = "2/min", "closed"

    class Local(UserRateThrottle):
        rate, on_failure = "2/min", "local"

    assert statuses(make_view(TwoPerMinute), 3, "alice") == [200] * 3
    refused = get(make_view(Closed), "alice")
    assert (refused.status_code, refused["Retry-After"]) == (503, "1")
    assert json.loads(refused.content) == {"detail": "Service temporarily unavailable"}
    assert statuses(make_view(Local), 3, "alice") == [200, 200, 429]


def test_the_admin_and_the_checks_know_the_policies_of_throttles():
    statuses(make_view(TwoPerMinute), 1)
    assert str(panel.policies()["drf.user-60s"].rate) == "2/m"


@pytest.mark.slow
def test_sixteen_processes_admit_exactly_the_limit():
    assert sum(in_processes(admitted, 16)) == 100


def admitted(_) -> int:
    class Hundred(UserRateThrottle):
        rate = "100/hour"

    return statuses(make_view(Hundred), 60, "alice").count(200)


# The page


def test_the_examples_of_the_page_run(configure, clock):
    configure(POLICIES={"search": {"rate": "2/m", "key": "ip"}})
    text = (ROOT / "docs" / "drf.md").read_text()
    names: dict = {"__name__": "documented"}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "drf.md", "exec"), names)
    rates = names["REST_FRAMEWORK"]["DEFAULT_THROTTLE_RATES"]
    assert all(import_string(name) for name in names["REST_FRAMEWORK"]["DEFAULT_THROTTLE_CLASSES"])
    burst = type("Burst", (names["BurstRateThrottle"],), {"THROTTLE_RATES": rates})
    assert statuses(make_view(burst, type("S", (names["SustainedRateThrottle"],), {"THROTTLE_RATES": rates})), 61) == [
        *[200] * 60,
        429,
    ]
    search = names["SearchView"].as_view()
    assert [get(search).data for _ in range(2)] == [{"remaining": 1}, {"remaining": 0}]
    assert get(search).status_code == 429
