"""What a site sees of its limits, for each kind of view, each option and limits around one another.

These tests pin behaviour, not the way to it: responses, what the view finds on the request, what is charged afterwards
and how the statistics count the request. They do not count calls to Redis.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
from asgiref.sync import iscoroutinefunction
from django.http import Http404, HttpResponse
from django.utils.decorators import method_decorator, sync_and_async_middleware
from django.views import View
from rlaas_django import Policy, peek, rate_limit
from rlaas_django.signals import rate_limited

from tests.support.http import OURS, as_kind, assert_clean_headers, assert_refusal, both_ways, rate_limit_fields
from tests.support.internals import SITE_STATISTICS, flush_statistics, observers, read_minutes, total

CLIENT = {"ip": "203.0.113.9", "global": ""}
OWN = Policy("own", "2/m", key="ip")
POLICIES = {
    "site": {"rate": "100/h", "key": "global"},
    "wide": {"rate": "5/m", "key": "ip"},
    "narrow": {"rate": "1/m", "key": "ip"},
}


@pytest.fixture(autouse=True)
def _policies(configure, clock):
    configure(POLICIES=POLICIES)


@pytest.fixture
def observations():
    """Collect what the statistics are told of."""
    observed = []
    observers.add(observed.append)
    yield observed
    observers.remove(observed.append)


@pytest.fixture
def signals():
    """Collect the names of the policies that `rate_limited` was sent for."""
    sent = []

    def receiver(decision, **_):
        sent.append(str(decision.policy))

    rate_limited.connect(receiver)
    yield sent
    rate_limited.disconnect(receiver)


@pytest.fixture
def seen():
    """Collect the decisions that the view found on its requests."""
    return []


@pytest.fixture
def page(seen):
    """A view that responds as the query says: `?status=404`, `?raises`, `?missing`."""

    def page(request):
        seen.append(request.rate_limit)
        if "raises" in request.GET:
            raise RuntimeError
        if "missing" in request.GET:
            raise Http404
        return HttpResponse("ok", status=int(request.GET.get("status", "200")))

    return page


def charged(*policies) -> list[int]:
    return [peek(CLIENT, policy).current_count for policy in policies]


def our_headers(response) -> dict[str, str]:
    """Return the headers that are ours, and Vary."""
    vary = {"vary": response.headers["Vary"]} if "Vary" in response.headers else {}
    return {**assert_clean_headers(response), **vary}


def remaining(response, policy: str = "own") -> int | None:
    """Return what a response says is left of a policy; None where it does not list it."""
    if "RateLimit" not in response.headers:
        return None
    left, _ = rate_limit_fields(response)[1].get(policy, (None, None))
    return left


def results(observations) -> list[str]:
    return [observation.result for observation in observations]


def results_by_policy(observation) -> dict[str, str]:
    return {outcome.policy.name: result for outcome, result in observation.results()}


def counted_for_the_site() -> tuple[int, int]:
    """Return the requests that the statistics have as allowed and as refused, each once."""
    flush_statistics()
    counts = total(read_minutes([SITE_STATISTICS])[SITE_STATISTICS])
    return counts.allowed, counts.refused


# Kinds of views


def class_of(page, kind: str) -> type:
    def get(self, request):
        return page(request)

    return type("Page", (View,), {"get": as_kind(kind, get)})


FORMS = {
    "function": lambda limit, page, kind: limit(as_kind(kind, page)),
    "a limit on a partial": lambda limit, page, kind: limit(functools.partial(as_kind(kind, page))),
    "a partial of a limited view": lambda limit, page, kind: functools.partial(limit(as_kind(kind, page))),
    "class": lambda limit, page, kind: limit(class_of(page, kind)).as_view(),
    "as_view": lambda limit, page, kind: limit(class_of(page, kind).as_view()),
    "dispatch": lambda limit, page, kind: method_decorator(limit, name="dispatch")(class_of(page, kind)).as_view(),
    "get": lambda limit, page, kind: method_decorator(limit, name="get")(class_of(page, kind)).as_view(),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

# What is around the view: the middleware's rules; None without the middleware.
AROUND = {
    "no middleware": None,
    "no rule": [{"path": "/elsewhere/", "policies": ["site"]}],
    "rule": [{"path": "/", "policies": ["site"]}],
}


@pytest.fixture(
    params=[
        "no middleware",
        pytest.param("no rule", marks=pytest.mark.slow),  # as without the middleware, but for the pages of exceptions
        "rule",
    ]
)
def rules(request):
    return AROUND[request.param]


@pytest.fixture
def serve(site, configure, rules, page):
    """`serve(limit)`: the page within a limit, below the rules."""
    site.own_body = True

    def serve_one(limit, form=FORMS["function"]):
        configure(MIDDLEWARE=rules or [])
        middleware = [] if rules is None else [OURS]
        site.serve(form(limit, page, site.kind), middleware=middleware)
        return site

    return serve_one


def has_rule(rules) -> bool:
    return rules == AROUND["rule"]


def listed(rules, of_rule: str, of_view: str) -> str:
    """Return a header that lists the policy of the rule, if there is one, and the view's."""
    return f"{of_rule}, {of_view}" if has_rule(rules) else of_view


@both_ways
@every_form
def test_an_allowed_response_has_the_headers_of_rule_and_view(serve, rules, form):
    site = serve(rate_limit(OWN), form)
    assert our_headers(site.get()) == {
        "ratelimit-policy": listed(rules, '"site";q=100;w=3600', '"own";q=2;w=60'),
        "ratelimit": listed(rules, '"site";r=99;t=3600', '"own";r=1;t=60'),
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "1",
        "x-ratelimit-reset": "60",
    }


@both_ways
@every_form
def test_a_refusal_has_the_headers_of_rule_and_view(serve, rules, form):
    site = serve(rate_limit(OWN), form)
    site.statuses(2)
    assert our_headers(site.get()) == {
        "ratelimit-policy": listed(rules, '"site";q=100;w=3600', '"own";q=2;w=60'),
        "ratelimit": listed(rules, '"site";r=98;t=60', '"own";r=0;t=60'),
        "x-ratelimit-limit": "2",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": "60",
        "retry-after": "60",
        "cache-control": "no-store",
        "vary": "Accept",
    }


@both_ways
@every_form
def test_the_view_finds_the_decision_and_does_not_run_when_it_is_refused(serve, form, seen):
    site = serve(rate_limit(OWN), form)
    assert site.statuses(3) == [200, 200, 429]
    assert [(decision.allowed, str(decision.policy), decision.remaining) for decision in seen] == [
        (True, "own", 1),
        (True, "own", 0),
    ]


@both_ways
@every_form
def test_a_refused_request_is_charged_neither_to_the_view_nor_to_the_rule(serve, rules, form):
    site = serve(rate_limit(OWN), form)
    site.statuses(4)
    assert charged(OWN, "site") == [2, 2 if has_rule(rules) else 0]


@both_ways
@every_form
def test_each_request_is_observed_once(serve, form, observations):
    site = serve(rate_limit(OWN), form)
    site.statuses(3)
    assert results(observations) == ["allowed", "allowed", "refused"]


@both_ways
@every_form
def test_the_statistics_of_the_site_count_each_request_once(serve, form):
    """Without another observer, which would keep the statistics from their shortcut for allowed requests."""
    site = serve(rate_limit(OWN), form)
    site.statuses(3)
    assert counted_for_the_site() == (2, 1)


@every_form
def test_an_observation_tells_the_policies_of_rule_and_view(serve, rules, form, observations):
    site = serve(rate_limit(OWN), form)
    site.statuses(3)
    by_rule = {"site": "allowed"} if has_rule(rules) else {}
    assert results_by_policy(observations[0]) == {**by_rule, "own": "allowed"}
    assert results_by_policy(observations[2]) == {**dict.fromkeys(by_rule, "other"), "own": "refused"}


@every_form
def test_an_observation_has_the_address_of_a_client_over_the_limit_alone(serve, form, observations):
    site = serve(rate_limit(OWN), form)
    [site.get("/?q=1", headers={"User-Agent": "curl"}) for _ in range(3)]
    told = [(each.method, each.path, each.address, each.user_agent) for each in observations]
    assert told == [("GET", "/", "", "")] * 2 + [("GET", "/", "203.0.113.9", "curl")]


@both_ways
@every_form
def test_a_refusal_sends_one_signal(serve, form, signals):
    site = serve(rate_limit(OWN), form)
    site.statuses(4)
    assert signals == ["own", "own"]


@both_ways
@every_form
@pytest.mark.parametrize(("query", "status"), [("?status=404", 404), ("?missing", 404), ("?raises", 500)])
def test_a_response_that_is_an_error_is_charged_and_observed_as_allowed(
    serve, rules, form, query, status, observations
):
    site = serve(rate_limit(OWN), form)
    site.raises = False
    assert site.get(f"/{query}").status_code == status
    assert charged(OWN, "site") == [1, 1 if has_rule(rules) else 0]
    assert results(observations) == ["allowed"]


@both_ways
@every_form
@pytest.mark.parametrize("query", ["?missing", "?raises"])
def test_a_page_that_django_makes_of_an_exception_has_the_headers_below_the_middleware_alone(serve, rules, form, query):
    site = serve(rate_limit(OWN), form)
    site.raises = False
    assert remaining(site.get(f"/{query}")) == (None if rules is None else 1)


@both_ways
@every_form
@pytest.mark.parametrize(
    ("query", "units"), [("", 1), ("?status=404", 1), ("?status=500", 1), ("?missing", 0), ("?raises", 0)]
)
def test_charge_on_error_false_refunds_exceptions_and_not_error_responses(serve, rules, form, query, units):
    site = serve(rate_limit(OWN, charge_on_error=False), form)
    site.raises = False
    site.get(f"/{query}")
    assert charged(OWN, "site") == [units, 1 if has_rule(rules) else 0]


@both_ways
@every_form
@pytest.mark.parametrize(("query", "units"), [("", 0), ("?status=404", 1), ("?missing", 1), ("?raises", 1)])
def test_charge_when_judges_responses_and_exceptions_stay_charged(serve, rules, form, query, units):
    site = serve(rate_limit(OWN, charge_when=lambda response: response.status_code == 404), form)
    site.raises = False
    site.get(f"/{query}")
    assert charged(OWN, "site") == [units, 1 if has_rule(rules) else 0]


@both_ways
@every_form
def test_a_request_that_charge_when_refunds_is_observed_as_allowed(serve, form, observations):
    site = serve(rate_limit(OWN, charge_when=lambda response: False), form)
    site.statuses(3)
    assert results(observations) == ["allowed"] * 3


@both_ways
@pytest.mark.parametrize(("form", "units"), [("class", 1), ("as_view", 1), ("dispatch", 1), ("get", 0)])
def test_a_method_that_a_class_does_not_have_is_charged_around_its_dispatch(serve, form, units):
    site = serve(rate_limit(OWN), FORMS[form])
    assert site.post().status_code == 405
    assert charged(OWN) == [units]


@both_ways
def test_a_subclass_of_a_limited_class_shares_its_limit(site, page):
    base = rate_limit(OWN)(class_of(page, site.kind))
    derived = type("Derived", (base,), {})
    site.serve({"base": base.as_view(), "derived": derived.as_view()})
    assert site.statuses(1, "/base") + site.statuses(2, "/derived") == [200, 200, 429]


@both_ways
def test_the_base_of_a_limited_class_is_not_limited(site):
    base = class_of(lambda request: HttpResponse("ok"), site.kind)
    limited = rate_limit(OWN)(type("Derived", (base,), {}))
    site.serve({"base": base.as_view(), "limited": limited.as_view()})
    assert our_headers(site.get("/base")) == {}
    assert charged(OWN) == [0]


@both_ways
def test_a_limited_subclass_of_a_limited_class_has_both_limits(site, page):
    base = rate_limit(OWN)(class_of(page, site.kind))
    site.serve(rate_limit("wide")(type("Derived", (base,), {})).as_view())
    assert site.get().headers["RateLimit"] == '"wide";r=4;t=60, "own";r=1;t=60'


@pytest.mark.parametrize("query", ["?missing", "?raises"])
def test_below_the_middleware_without_a_rule_the_page_of_an_exception_has_the_headers(site, configure, page, query):
    configure(MIDDLEWARE=AROUND["no rule"])
    site.raises = False
    site.serve(rate_limit(OWN)(site.view(page)), middleware=[OURS])
    assert site.get(f"/{query}").headers["RateLimit"] == '"own";r=1;t=60'


def test_after_an_exception_that_was_refunded_the_headers_show_what_remains(site, configure, page):
    configure(MIDDLEWARE=AROUND["rule"])
    site.serve(rate_limit(OWN, charge_on_error=False)(site.view(page)), middleware=[OURS])
    assert remaining(site.get("/?missing")) == 2


# Options


class Course(NamedTuple):
    """What three requests get, of a limit of two."""

    limit: Any
    statuses: list[int]
    remaining: list[int | None]
    saw: list[tuple[bool, int]]  # what the view found: allowed, remaining
    units: int  # charged afterwards
    results: list[str]


def teapot(request, decision):
    return HttpResponse("later", status=418)


def limit(**options):
    return rate_limit("2/m", group="own", **{"key": "ip", **options})


ALLOWED_TWICE = [(True, 1), (True, 0)]
COURSES = {
    "plain": Course(limit(), [200, 200, 429], [1, 0, 0], ALLOWED_TWICE, 2, ["allowed", "allowed", "refused"]),
    "block=False": Course(
        limit(block=False), [200] * 3, [1, 0, 0], [*ALLOWED_TWICE, (False, 0)], 2, ["allowed", "allowed", "over"]
    ),
    "response": Course(
        limit(response=teapot), [200, 200, 418], [1, 0, 0], ALLOWED_TWICE, 2, ["allowed", "allowed", "refused"]
    ),
    "charge_when, True": Course(
        limit(charge_when=lambda response: True),
        [200, 200, 429],
        [1, 0, 0],
        ALLOWED_TWICE,
        2,
        ["allowed", "allowed", "refused"],
    ),
    "charge_when, False": Course(
        limit(charge_when=lambda response: False), [200] * 3, [2, 2, 2], [(True, 1)] * 3, 0, ["allowed"] * 3
    ),
    "charge_on_error=False": Course(
        limit(charge_on_error=False), [200, 200, 429], [1, 0, 0], ALLOWED_TWICE, 2, ["allowed", "allowed", "refused"]
    ),
    "cost": Course(limit(cost=2), [200, 429, 429], [0, 0, 0], [(True, 0)], 2, ["allowed", "refused", "refused"]),
    "cost, a function": Course(
        limit(cost=lambda request: 2), [200, 429, 429], [0, 0, 0], [(True, 0)], 2, ["allowed", "refused", "refused"]
    ),
    "cost, a function returning 0": Course(
        limit(cost=lambda request: 0), [200] * 3, [2, 2, 2], [(True, 2)] * 3, 0, ["allowed"] * 3
    ),
    "another method": Course(limit(method="POST"), [200] * 3, [None] * 3, [], 0, []),
    "rate, a function returning None": Course(
        rate_limit(rate=lambda request: None, key="ip", group="own"), [200] * 3, [None] * 3, [], 0, []
    ),
    "rate, a function": Course(
        rate_limit(rate=lambda request: "2/m", key="ip", group="own"),
        [200, 200, 429],
        [1, 0, 0],
        ALLOWED_TWICE,
        2,
        ["allowed", "allowed", "refused"],
    ),
}
every_course = pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)


@both_ways
@every_course
def test_an_option_decides_who_is_refused(serve, course):
    assert serve(course.limit).statuses(3) == course.statuses


@both_ways
@every_course
def test_an_option_shows_in_what_remains(serve, course):
    site = serve(course.limit)
    assert [remaining(site.get()) for _ in range(3)] == course.remaining


@both_ways
@every_course
def test_retry_after_is_on_refusals_alone(serve, course):
    site = serve(course.limit)
    responses = [site.get() for _ in range(3)]
    assert ["Retry-After" in response.headers for response in responses] == [
        status == 429 for status in course.statuses
    ]


@both_ways
@every_course
def test_cache_control_is_on_refusals_alone(serve, course):
    site = serve(course.limit)
    responses = [site.get() for _ in range(3)]
    assert [response.headers.get("Cache-Control") for response in responses] == [
        None if status == 200 else "no-store" for status in course.statuses
    ]


@both_ways
@every_course
def test_an_option_decides_what_the_view_finds_on_the_request(serve, course, seen):
    serve(course.limit).statuses(3)
    found = [
        [(each.allowed, each.remaining) for each in decision.outcomes if each.policy.name == "own"] for decision in seen
    ]
    assert [outcome for outcomes in found for outcome in outcomes] == course.saw
    assert len(seen) == course.statuses.count(200)


@both_ways
@every_course
def test_an_option_decides_what_is_charged(serve, rules, course):
    serve(course.limit).statuses(3)
    admitted = course.statuses.count(200)
    assert charged(OWN, "site") == [course.units, admitted if has_rule(rules) else 0]


@both_ways
@every_course
def test_an_option_decides_the_result_in_the_statistics(serve, rules, course, observations):
    serve(course.limit).statuses(3)
    by_rule_alone = ["allowed"] * 3 if has_rule(rules) else []
    assert results(observations) == (course.results or by_rule_alone)


@both_ways
def test_a_shadow_policy_is_counted_as_over_and_seen_by_the_view_alone(serve, rules, seen, observations):
    site = serve(limit(shadow=True))
    responses = [site.get() for _ in range(3)]
    assert [response.status_code for response in responses] == [200] * 3
    assert [remaining(response) for response in responses] == [None] * 3
    assert [decision.allowed for decision in seen] == [True] * 3
    assert [results_by_policy(each)["own"] for each in observations] == ["allowed", "allowed", "over"]
    assert charged(OWN, "site") == [2, 3 if has_rule(rules) else 0]


@both_ways
def test_a_shadow_policy_over_its_limit_sends_the_signal(serve, signals):
    serve(limit(shadow=True)).statuses(3)
    assert len(signals) == 1


@both_ways
def test_a_limit_that_does_not_block_sends_the_signal(serve, signals):
    serve(limit(block=False)).statuses(3)
    assert signals == ["own"]


@both_ways
def test_a_key_function_decides_who_is_charged(serve):
    site = serve(limit(key=lambda request: request.headers["X-Tenant"]))
    statuses = [site.get(headers={"X-Tenant": tenant}).status_code for tenant in ("a", "a", "b", "a")]
    assert statuses == [200, 200, 200, 429]
    assert charged(OWN) == [0]


@both_ways
def test_where_nothing_was_checked_the_view_finds_the_default_policy_s_figures(site, page, seen):
    site.serve(limit(method="POST")(site.view(page)))
    site.get()
    assert [(decision.allowed, str(decision.policy), decision.remaining) for decision in seen] == [(True, "default", 5)]


@both_ways
def test_an_own_response_is_given_the_decision_of_its_limits_and_finds_that_of_all(serve, rules):
    found = []

    def respond(request, decision):
        found.append(([str(each.policy) for each in decision.outcomes], request.rate_limit.allowed))
        return HttpResponse("later", status=429)

    serve(limit(response=respond)).statuses(3)
    assert found == [(["own"], False)]


LEFT_BEHIND: list[Any] = []  # what requests had as `rate_limit` once they had their responses


@sync_and_async_middleware
def watching(get_response):
    """Middleware of the site's that looks at the decision last."""
    if iscoroutinefunction(get_response):

        async def watch(request):
            response = await get_response(request)
            LEFT_BEHIND.append(request.rate_limit)
            return response
    else:

        def watch(request):
            response = get_response(request)
            LEFT_BEHIND.append(request.rate_limit)
            return response

    return watch


def left_behind(site, count: int) -> list[list[tuple[str, bool, int]]]:
    """Return policy, allowed and remaining of each outcome that requests have after their responses."""
    LEFT_BEHIND.clear()
    site.settings.MIDDLEWARE = [f"{__name__}.watching", *site.settings.MIDDLEWARE]
    site.statuses(count)
    return [[(str(each.policy), each.allowed, each.remaining) for each in found.outcomes] for found in LEFT_BEHIND]


@both_ways
def test_after_the_response_the_request_has_the_decision_without_what_was_refunded(site, page):
    site.serve(limit(charge_when=lambda response: False)(site.view(page)))
    assert left_behind(site, 1) == [[("own", True, 2)]]


@both_ways
def test_after_a_refusal_the_request_has_the_decision_without_what_was_refunded(site, page):
    site.serve(rate_limit("wide")(rate_limit("narrow")(site.view(page))))
    assert left_behind(site, 2) == [
        [("wide", True, 4), ("narrow", True, 0)],
        [("wide", True, 4), ("narrow", False, 0)],
    ]


# The middleware alone


@pytest.fixture
def ruled(site, configure, page):
    """A site whose view has no limits, below a rule of one per minute."""
    configure(MIDDLEWARE=[{"path": "/", "policies": ["narrow"]}])
    site.serve(site.view(page), middleware=[OURS])
    site.raises = False
    return site


@both_ways
def test_a_rule_refuses_before_the_view(ruled, seen):
    assert ruled.statuses(3) == [200, 429, 429]
    assert len(seen) == 1


@both_ways
@pytest.mark.parametrize("where", ["/", "/?missing", "/?raises", "/?status=404", "/nowhere"])
def test_whatever_the_response_is_a_rule_charges_and_observes_the_request(ruled, where, observations):
    response = ruled.get(where)
    assert remaining(response, "narrow") == 0
    assert charged("narrow") == [1]
    assert results(observations) == ["allowed"]


@both_ways
def test_an_unknown_path_is_refused_as_any_other(ruled, observations):
    assert ruled.statuses(2, "/nowhere") == [404, 429]
    assert results(observations) == ["allowed", "refused"]


@both_ways
@pytest.mark.parametrize(("where", "units"), [("/", 0), ("/?missing", 1), ("/?status=404", 1), ("/nowhere", 1)])
def test_charge_when_of_a_rule_sees_the_page_that_django_makes_of_an_exception(ruled, configure, where, units):
    rule = {"path": "/", "policies": ["narrow"], "charge_when": f"{__name__}.is_missing"}
    configure(MIDDLEWARE=[rule])
    response = ruled.get(where)
    assert charged("narrow") == [units]
    assert remaining(response, "narrow") == 1 - units


def is_missing(response):
    return response.status_code == 404


@both_ways
def test_charge_when_of_a_rule_sees_the_page_of_an_error(ruled, configure):
    configure(MIDDLEWARE=[{"path": "/", "policies": ["narrow"], "charge_when": f"{__name__}.is_missing"}])
    assert ruled.get("/?raises").status_code == 500
    assert charged("narrow") == [0]


@both_ways
@pytest.mark.parametrize("options", [{"MIDDLEWARE": [{"path": "/", "exempt": True}]}, {"ENABLED": False}])
def test_a_request_that_nothing_limits_is_not_observed(ruled, configure, options, observations):
    configure(**options)
    assert our_headers(ruled.get()) == {}
    assert observations == []


# Limits around one another


def two_decorators(site, configure, page, outer, inner):
    site.serve(rate_limit(outer)(inner(site.view(page))))


def rule_and_decorator(site, configure, page, outer, inner):
    configure(MIDDLEWARE=[{"path": "/", "policies": [outer]}])
    site.serve(inner(site.view(page)), middleware=[OURS])


def rule_and_class(site, configure, page, outer, inner):
    configure(MIDDLEWARE=[{"path": "/", "policies": [outer]}])
    site.serve(inner(class_of(page, site.kind)).as_view(), middleware=[OURS])


def class_and_method(site, configure, page, outer, inner):
    limited = method_decorator(inner, name="get")(class_of(page, site.kind))
    site.serve(rate_limit(outer)(limited).as_view())


LAYERS = {each.__name__: each for each in (two_decorators, rule_and_decorator, rule_and_class, class_and_method)}
every_layering = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@pytest.fixture
def stack(site, configure, page):
    """`stack(layer, outer, inner)`: the page within two limits, each the name of a policy or a decorator."""

    def stack_two(layer, outer, inner):
        decorator = rate_limit(inner) if isinstance(inner, str) else inner
        layer(site, configure, page, outer, decorator)
        return site

    return stack_two


@both_ways
@every_layering
def test_the_headers_list_the_outer_policy_first_and_x_ratelimit_is_the_strictest_s(stack, layer):
    site = stack(layer, "wide", "narrow")
    assert our_headers(site.get()) == {
        "ratelimit-policy": '"wide";q=5;w=60, "narrow";q=1;w=60',
        "ratelimit": '"wide";r=4;t=60, "narrow";r=0;t=60',
        "x-ratelimit-limit": "1",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": "60",
    }


@both_ways
@every_layering
def test_the_view_finds_the_decision_of_both_limits(stack, layer, seen):
    stack(layer, "wide", "narrow").get()
    assert [(str(each.policy), each.remaining) for each in seen[0].outcomes] == [("wide", 4), ("narrow", 0)]


@both_ways
@every_layering
def test_a_refusal_by_the_inner_limit_refunds_the_outer_one(stack, layer):
    site = stack(layer, "wide", "narrow")
    assert site.statuses(4) == [200, 429, 429, 429]
    assert charged("wide", "narrow") == [1, 1]


@both_ways
@every_layering
def test_a_refusal_by_the_inner_limit_shows_the_outer_one_without_the_request(stack, layer):
    site = stack(layer, "wide", "narrow")
    site.get()
    refusal = assert_refusal(site.get(), policies={"wide": (5, 60), "narrow": (1, 60)}, violated=["narrow"], wait=60)
    assert refusal.usage == {"wide": (4, 60), "narrow": (0, 60)}


@both_ways
@every_layering
def test_a_refusal_by_the_inner_limit_is_observed_once(stack, layer, observations):
    site = stack(layer, "wide", "narrow")
    site.statuses(2)
    assert [results_by_policy(each) for each in observations] == [
        {"wide": "allowed", "narrow": "allowed"},
        {"wide": "other", "narrow": "refused"},
    ]


@both_ways
@every_layering
@pytest.mark.parametrize(("outer", "inner"), [("wide", "narrow"), ("narrow", "wide"), ("narrow", "narrow")])
def test_the_statistics_of_the_site_count_a_request_within_two_limits_once(stack, layer, outer, inner):
    stack(layer, outer, inner).statuses(3)
    assert counted_for_the_site() == (1, 2)


@both_ways
@every_layering
@pytest.mark.parametrize(("outer", "inner"), [("wide", "narrow"), ("narrow", "wide")])
def test_a_refusal_by_either_limit_sends_one_signal(stack, layer, outer, inner, signals):
    stack(layer, outer, inner).statuses(3)
    assert signals == ["narrow", "narrow"]


@both_ways
@every_layering
def test_a_request_that_the_outer_limit_refuses_is_not_charged_to_the_inner_one(stack, layer):
    site = stack(layer, "narrow", "wide")
    assert site.statuses(3) == [200, 429, 429]
    assert charged("narrow", "wide") == [1, 1]


@both_ways
@every_layering
def test_a_refusal_by_the_outer_limit_lists_it_alone(stack, layer):
    site = stack(layer, "narrow", "wide")
    site.get()
    assert_refusal(site.get(), policies={"narrow": (1, 60)}, violated=["narrow"], wait=60)


@both_ways
@every_layering
def test_a_refusal_by_the_outer_limit_is_observed_once(stack, layer, observations):
    site = stack(layer, "narrow", "wide")
    site.statuses(2)
    assert [results_by_policy(each) for each in observations] == [
        {"narrow": "allowed", "wide": "allowed"},
        {"narrow": "refused"},
    ]


@both_ways
@every_layering
def test_a_policy_of_both_limits_is_listed_charged_and_observed_once(stack, layer, observations):
    site = stack(layer, "wide", "wide")
    assert site.get().headers["RateLimit"] == '"wide";r=4;t=60'
    assert charged("wide") == [1]
    assert [results_by_policy(each) for each in observations] == [{"wide": "allowed"}]


@both_ways
@every_layering
def test_a_policy_of_both_limits_refuses_once(stack, layer, observations, signals):
    site = stack(layer, "narrow", "narrow")
    site.get()
    assert_refusal(site.get(), policies={"narrow": (1, 60)}, violated=["narrow"], wait=60)
    assert results(observations) == ["allowed", "refused"]
    assert signals == ["narrow"]


@both_ways
@every_layering
@pytest.mark.parametrize("options", [{"cost": 3}, {"charge_when": lambda response: False}], ids=["cost", "charge_when"])
def test_of_a_policy_of_both_limits_the_outer_one_decides_the_charge(stack, layer, options):
    stack(layer, "wide", rate_limit("wide", **options)).get()
    assert charged("wide") == [1]


@both_ways
@every_layering
def test_an_inner_limit_with_more_policies_charges_those_that_the_outer_one_did_not(stack, layer):
    site = stack(layer, "wide", rate_limit("wide", "narrow"))
    assert site.statuses(3) == [200, 429, 429]
    assert charged("wide", "narrow") == [1, 1]


@both_ways
@every_layering
def test_what_charge_when_does_not_count_stays_charged_to_the_outer_limit(stack, layer):
    site = stack(layer, "wide", rate_limit("narrow", charge_when=lambda response: False))
    assert site.get().headers["RateLimit"] == '"wide";r=4;t=60, "narrow";r=1;t=60'
    assert charged("wide", "narrow") == [1, 0]


@both_ways
@every_layering
def test_an_exception_that_the_inner_limit_does_not_charge_stays_charged_to_the_outer_one(stack, layer, observations):
    site = stack(layer, "wide", rate_limit("narrow", charge_on_error=False))
    site.raises = False
    assert site.statuses(2, "/?raises") == [500, 500]
    assert charged("wide", "narrow") == [2, 0]
    assert results(observations) == ["allowed", "allowed"]


@both_ways
@every_layering
def test_an_inner_limit_that_does_not_block_leaves_the_outer_charge(stack, layer, observations):
    site = stack(layer, "wide", rate_limit("narrow", block=False))
    assert site.statuses(3) == [200] * 3
    assert charged("wide", "narrow") == [3, 1]
    assert results_by_policy(observations[2]) == {"wide": "allowed", "narrow": "over"}


@both_ways
@every_layering
def test_an_own_response_of_the_inner_limit_refunds_the_outer_one(stack, layer):
    site = stack(layer, "wide", rate_limit("narrow", response=teapot))
    assert site.statuses(3) == [200, 418, 418]
    assert charged("wide", "narrow") == [1, 1]


@both_ways
@every_layering
def test_an_inner_limit_of_another_cost_is_charged_its_own(stack, layer):
    site = stack(layer, "narrow", rate_limit("wide", cost=3))
    site.get()
    assert charged("narrow", "wide") == [1, 3]


@both_ways
@every_layering
def test_an_inner_limit_that_is_not_for_the_method_leaves_the_outer_one(stack, layer, observations):
    site = stack(layer, "wide", rate_limit("narrow", method="POST"))
    assert site.get().headers["RateLimit"] == '"wide";r=4;t=60'
    assert [results_by_policy(each) for each in observations] == [{"wide": "allowed"}]


@both_ways
def test_an_outer_limit_that_does_not_block_is_refunded_by_a_refusal_inside(site, page):
    view = rate_limit("narrow")(site.view(page))
    site.serve(rate_limit("wide", block=False)(view))
    assert site.statuses(3) == [200, 429, 429]
    assert charged("wide", "narrow") == [1, 1]


@both_ways
def test_an_inner_limit_refuses_by_a_policy_that_an_outer_one_only_counted(site, page):
    view = rate_limit("narrow", "wide")(site.view(page))
    site.serve(rate_limit("narrow", block=False)(view))
    assert site.statuses(3) == [200, 429, 429]
    assert charged("narrow", "wide") == [1, 1]


@both_ways
def test_an_outer_limit_that_does_not_block_is_over_beside_a_refusal_inside(site, page, observations):
    view = rate_limit(Policy("own", "1/m", key="ip"))(site.view(page))
    site.serve(rate_limit("narrow", block=False)(view))
    site.get()
    assert_refusal(site.get(), policies=["narrow", "own"], violated=["own"])
    assert results_by_policy(observations[1]) == {"narrow": "over", "own": "refused"}


@both_ways
def test_the_innermost_of_three_limits_refunds_both_around_it(site, configure, page, observations):
    configure(MIDDLEWARE=[{"path": "/", "policies": ["site"]}])
    view = rate_limit("wide")(rate_limit("narrow")(site.view(page)))
    site.serve(view, middleware=[OURS])
    assert site.statuses(3) == [200, 429, 429]
    assert charged("site", "wide", "narrow") == [1, 1, 1]
    assert results_by_policy(observations[1]) == {"site": "other", "wide": "other", "narrow": "refused"}


@both_ways
def test_charge_when_of_the_outer_limit_decides_for_a_policy_of_both(site, page):
    view = rate_limit("wide")(site.view(page))
    site.serve(rate_limit("wide", charge_when=lambda response: False)(view))
    site.get()
    assert charged("wide") == [0]


@both_ways
def test_charge_when_of_the_outer_limit_is_asked_about_a_refusal_inside(site, page):
    judged = []
    view = rate_limit("narrow")(site.view(page))
    site.serve(rate_limit("wide", charge_when=lambda response: judged.append(response.status_code))(view))
    site.statuses(2)
    assert judged == [200, 429]


@both_ways
def test_a_refusal_inside_and_charge_when_do_not_refund_twice(site, page):
    refunding = rate_limit("wide", charge_when=lambda response: False)
    view = refunding(rate_limit("narrow")(site.view(page)))
    site.serve({"": view, "other": rate_limit("wide")(site.view(page))})
    site.statuses(2, "/other")
    assert site.statuses(3) == [200, 429, 429]
    assert charged("wide") == [2]


def test_a_refusal_by_the_inner_limit_writes_one_log_line(stack, log_lines):
    stack(rule_and_decorator, "wide", "narrow").statuses(2)
    assert len(log_lines("narrow")) == 1
