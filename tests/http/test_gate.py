"""Limits around one request: several of them, and the parts of a request that async code must not touch."""

from __future__ import annotations

import threading

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.functional import SimpleLazyObject
from rlaas_django import Decision, Policy, PolicyError, rate_limit
from rlaas_django.middleware import RateLimitMiddleware

from tests.support.cancellation import MOMENTS, assert_soon_charged, cancelled
from tests.support.http import KINDS, as_kind, call
from tests.support.internals import observers


def ok(request):
    return HttpResponse("ok")


async def aok(request):
    return HttpResponse("ok")


def test_two_stacked_rates_are_two_limits(clock):
    view = rate_limit("100/h", key="ip")(rate_limit("2/m", key="ip")(ok))
    assert [view(RequestFactory().get("/")).status_code for _ in range(3)] == [200, 200, 429]


def test_a_rate_in_words_is_a_rate_and_not_the_name_of_a_policy(clock):
    view = rate_limit("2 per minute", "1_000/day", key="ip")(ok)
    assert [view(RequestFactory().get("/")).status_code for _ in range(3)] == [200, 200, 429]


def test_a_rate_for_each_method_has_a_counter_for_each_method(clock):
    view = rate_limit("50/m", key="ip", method="GET")(rate_limit("3/m", key="ip", method="POST")(ok))
    assert [view(RequestFactory().get("/")).status_code for _ in range(5)] == [200] * 5
    assert [view(RequestFactory().post("/")).status_code for _ in range(4)] == [200] * 3 + [429]


def test_two_equal_stacked_rates_keep_their_own_options(clock):
    view = rate_limit("2/m", key="ip")(rate_limit("2/m", key="ip", charge_when=lambda response: False)(ok))
    responses = [view(RequestFactory().get("/")) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[1].headers["RateLimit"].count("r=2") == 1  # the inner one charged nothing


def test_stacked_limits_of_one_group_share_a_counter(clock):
    view = rate_limit("5/m", key="ip", group="g")(rate_limit("5/m", key="ip", group="g")(ok))
    assert view(RequestFactory().get("/")).headers["X-RateLimit-Remaining"] == "4"


@pytest.mark.parametrize(
    "limit", [rate_limit(rate=lambda request: None), rate_limit("5/m", method="POST"), rate_limit("5/m", block=False)]
)
async def test_every_view_finds_a_decision_on_the_request(limit):
    seen = []

    def look(request):
        seen.append(request.rate_limit)
        return ok(request)

    async def alook(request):
        return look(request)

    limit(look)(RequestFactory().get("/"))
    await limit(alook)(AsyncRequestFactory().get("/"))
    assert [isinstance(each, Decision) and each.allowed for each in seen] == [True, True]


def test_an_exempt_path_has_a_decision_and_no_headers(configure):
    configure(MIDDLEWARE=[{"path": "/", "exempt": True}])
    request = RequestFactory().get("/")
    response = RateLimitMiddleware(ok)(request)
    assert request.rate_limit.allowed
    assert not [name for name in response.headers if "RateLimit" in name]


async def test_a_user_set_by_another_middleware_is_kept():
    """By a middleware for tokens, say; the session's user is another."""
    request = AsyncRequestFactory().get("/")
    request.user = User(pk=7)

    async def session_user():
        return AnonymousUser()

    request.auser = session_user
    await rate_limit("5/m", key="user")(aok)(request)
    assert request.user.pk == 7
    assert request.rate_limit.outcomes[0].identity == "7"


async def test_a_lazy_user_is_loaded_in_a_thread_and_stays_the_view_s():
    """Also one that another middleware set: by a token, or verified by a second factor. `auser()` is the session's."""
    request, threads = AsyncRequestFactory().get("/"), []

    def verified_user():
        threads.append(threading.current_thread())
        user = User(pk=7)
        user.otp_device = "a key"
        return user

    async def session_user():
        return AnonymousUser()

    request.user, request.auser = SimpleLazyObject(verified_user), session_user
    await rate_limit("5/m", key="user")(aok)(request)
    assert request.rate_limit.outcomes[0].identity == "7"
    assert request.user.otp_device == "a key"
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_lazy_user_that_is_none_counts_by_address():
    request = AsyncRequestFactory().get("/")
    request.user = SimpleLazyObject(lambda: None)
    await rate_limit("5/m", key="user")(aok)(request)
    assert request.rate_limit.outcomes[0].identity == "ip=127.0.0.1"


def test_a_refusal_does_not_refund_a_function_that_has_run(clock):
    """As of the resolvers of a GraphQL request, which are limited one after the other."""
    runs = []
    expensive = rate_limit("2/m", key="ip", group="expensive")(lambda request: runs.append(1) or ok(request))
    other = rate_limit("1/m", key="ip", group="other")(ok)
    for _ in range(5):
        request = RequestFactory().get("/")
        expensive(request)
        other(request)
    assert len(runs) == 2


@pytest.fixture
def observed():
    """Collect the policies and the result of each observation."""
    observations = []

    def observe(observation):
        policies = [str(outcome.policy) for outcome in observation.decision.outcomes]
        observations.append((policies, observation.result))

    observers.add(observe)
    yield observations
    observers.remove(observe)


def resolve(request):
    """Call limited functions one after the other, as a GraphQL view does."""
    rate_limit("9/m", key="ip", group="books")(ok)(request)
    return rate_limit("1/m", key="ip", group="authors")(ok)(request)


def test_functions_one_after_the_other_are_observed_one_by_one(clock, observed):
    for _ in range(2):
        resolve(RequestFactory().get("/"))
    books = (["books"], "allowed")
    assert observed == [books, (["authors"], "allowed"), books, (["authors"], "refused")]


@pytest.mark.parametrize(
    "around", [RateLimitMiddleware, rate_limit("9/m", key="ip", group="around")], ids=["middleware", "decorator"]
)
def test_within_other_limits_they_are_one_request(clock, configure, observed, around):
    configure(MIDDLEWARE=[{"path": "/elsewhere/", "policies": ["default"]}])
    limited = around(resolve)
    for _ in range(2):
        limited(RequestFactory().get("/"))
    assert [result for _, result in observed] == ["allowed", "refused"]
    assert {"books", "authors"} <= set(observed[0][0])


async def test_a_cancelled_function_is_refunded_and_one_that_has_run_is_not(clock):
    site = Policy("site", "9/m", key="ip")
    expensive, other = rate_limit("9/m", key="ip", group="expensive")(aok), rate_limit(site)(aok)
    request = AsyncRequestFactory().get("/")
    await expensive(request)
    await cancelled(other(request), 0, MOMENTS[0])
    await assert_soon_charged({"ip": "127.0.0.1"}, site, 0, "cancelled")
    assert request.rate_limit.policy.name == "expensive"
    await assert_soon_charged({"ip": "127.0.0.1"}, Policy("expensive", "9/m", key="ip"), 1, "has run")


def rate_from_the_database(request):
    return "5/m" if User.objects.count() >= 0 else None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "limit",
    [
        rate_limit(rate=rate_from_the_database, key="ip"),
        rate_limit("5/m", key=lambda request: f"of {User.objects.count()}"),
        rate_limit("5/m", cost=lambda request: 1 + User.objects.count(), key="ip"),
    ],
)
async def test_functions_of_an_async_view_s_limit_may_use_the_database(limit):
    request = AsyncRequestFactory().get("/")
    assert (await limit(aok)(request)).status_code == 200
    assert request.rate_limit.remaining == 4


class Broken:
    """A function of the site that raises."""

    def __init__(self, error):
        self.error = error

    def __call__(self, request):
        raise self.error


ERRORS = [
    KeyError("NOT_THERE"),  # not taken for a missing value
    StopIteration(),  # which a future cannot carry
    RuntimeError("\x1b[2J\nsecond line"),
    PermissionDenied(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(
    ("option", "remaining", "instead"),
    [
        ("key", 2, "counted by IP address instead"),
        ("rate", 4, "the default policy's rate applies"),
        ("cost", 2, "1 is charged"),
        ("charge_when", 2, "the request stays charged"),
    ],
)
def test_a_function_of_the_site_that_raises_is_logged_and_the_request_counts(
    kind, error, option, remaining, instead, log_lines
):
    limit = rate_limit(**{"rate": "3/m", "key": "ip", "group": "g", option: Broken(error)})
    request = RequestFactory().get("/")
    response = call(limit(as_kind(kind, ok)), request)
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (200, str(remaining))
    assert request.rate_limit.outcomes[0].identity == "ip=127.0.0.1"
    (line,) = log_lines(instead)
    assert type(error).__name__ in line
    assert line.isprintable()


def test_functions_that_always_raise_still_limit_and_do_not_flood_the_log(configure, log_lines):
    configure(LOG_LINES_PER_SECOND=3)
    broken = Broken(RuntimeError())
    view = rate_limit(rate=broken, key=broken, cost=broken)(ok)
    assert [call(view).status_code for _ in range(9)] == [200] * 5 + [429] * 4
    assert len(log_lines("raised RuntimeError")) <= 6  # two seconds, perhaps


def test_a_key_that_cannot_be_imported_counts_by_address(log_lines):
    request = RequestFactory().get("/")
    rate_limit("5/m", key="no.such.key")(ok)(request)
    assert request.rate_limit.outcomes[0].identity == "ip=127.0.0.1"
    assert log_lines("The key no.such.key raised ModuleNotFoundError")


def test_an_unsaved_user_counts_by_address():
    request = RequestFactory().get("/")
    request.user = User(username="unsaved")
    rate_limit("5/m", key="user")(ok)(request)
    assert request.rate_limit.outcomes[0].identity == "ip=127.0.0.1"


def test_retry_after_is_for_429_and_503_only(clock):
    view = rate_limit("1/m", key="ip", response=lambda request, decision: HttpResponse("later", status=200))(ok)
    view(RequestFactory().get("/"))
    assert "Retry-After" not in view(RequestFactory().get("/")).headers


def test_an_async_cost_is_an_error_at_import():
    with pytest.raises(PolicyError, match="async function"):
        rate_limit("5/m", cost=aok)


async def test_a_request_that_is_not_limited_does_not_load_its_user():
    """To load it takes the session and the database, and makes the response vary by cookie."""

    @rate_limit("5/m", key="user", method="POST")
    async def view(request):
        return HttpResponse()

    request = AsyncRequestFactory().get("/")
    request.user = SimpleLazyObject(lambda: pytest.fail("loaded"))
    assert (await view(request)).status_code == 200
