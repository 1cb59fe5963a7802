"""What a client is told: by header and body, when refused and when Redis is gone."""

from __future__ import annotations

import logging
import math
import random
from types import SimpleNamespace

import pytest
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory
from django.utils import translation

from rlaas_django import Policy, log, rate_limit, responses
from rlaas_django.policy import FIXED_WINDOW, TOKEN_BUCKET
from rlaas_django.responses import whole_seconds
from tests.http import (
    AUTHENTICATION,
    BOTH_WAYS,
    BROWSER,
    OURS,
    PROBLEM_JSON,
    Site,
    as_kind,
    assert_refusal,
    assert_waiting_helps,
    call,
    caller,
    ok,
    rate_limit_fields,
)

JSON, HTML, TEXT = PROBLEM_JSON, "text/html", "text/plain"


@pytest.fixture(params=BOTH_WAYS)
def site(request, settings):
    return Site(request.param, settings)


@pytest.fixture
def full(site, clock):
    """A site that has nothing left, for an hour."""
    site.serve(rate_limit("1/h", key="ip", group="g")(site.view(ok)))
    site.get()
    return site


def refused(site, accept=None, **options):
    headers = {} if accept is None else {"Accept": accept}
    return site.get(headers={**headers, **options.pop("headers", {})}, **options)


# By Accept


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (None, JSON),
        ("*/*", JSON),
        ("application/json", JSON),
        ("application/problem+json", JSON),
        ("application/*", JSON),
        ("APPLICATION/JSON", JSON),
        ("application/json, text/plain, */*", JSON),  # axios
        ("image/avif,image/webp,image/png,*/*;q=0.8", JSON),  # an <img> in a browser
        ("text/html;q=0.5, application/json", JSON),
        (BROWSER, HTML),
        ("text/html", HTML),
        ("text/*", HTML),
        ("Text/HTML", HTML),
        ("application/json;q=0.1, text/html;q=0.2", HTML),
        ("text/html, application/json;q=0.9", HTML),
        ("text/plain", TEXT),
        ("text/plain, text/html;q=0.5", TEXT),
        ("text/html;q=0, text/plain", TEXT),
        ("image/png", TEXT),
        ("application/xml", TEXT),
        ("*/*;q=0", TEXT),
        ("", TEXT),
        ("garbage", TEXT),
    ],
)
def test_the_body_is_what_the_client_prefers(full, accept, media_type):
    assert_refusal(refused(full, accept), policies={"g": (1, 3600)}, wait=3600, media_type=media_type)


@pytest.mark.parametrize(
    "accept",
    [
        "/",
        ";;;,,,",
        "text",
        "text/",
        "/html",
        "*",
        "text/html;q=",
        "text/html; charset=utf-8",
        "text/html;q=nan",
        "text/html;q=-1",
        "text/html;q=1e400",
        "text/html;q=" + "9" * 5000,
        "text/html;q*=nonsense''%20",
        "text/html;q*=utf-8''%ff",
        "text/html;q*0=1;q*1=2",
        'text/html;a="b;c="',
        "text/html;=;=;",
        "\xff\xfe/\x80",
        "text/html\x0b",
        "a/b," * 2000,
        "text/html;" * 2000,
    ],
    ids=lambda accept: repr(accept[:24]),
)
def test_garbage_for_accept_is_a_refusal_all_the_same(full, accept):
    assert_refusal(refused(full, accept), policies={"g": (1, 3600)}, wait=3600)


def test_a_head_request_has_the_headers_and_no_body(full):
    response = full.ask("head", "/")
    assert_refusal(response, policies={"g": (1, 3600)}, wait=3600)
    assert response.content == b""


def test_the_problem_tells_which_policies_refused_and_how_long(site, clock):
    trial = Policy("trial", "1/m", shadow=True)
    site.serve(rate_limit("1/m", "2/h", "9/d", trial, key="ip", group="g")(site.view(ok)))
    site.get()
    clock.tick(60_000)
    site.get()
    response = site.get()
    assert_refusal(response, policies=["g-60s", "g-3600s", "g-86400s"], violated=["g-60s", "g-3600s"], wait=3540)
    assert response.json() == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too many requests",
        "status": 429,
        "detail": "Try again in 3540 seconds.",
        "violated-policies": ["g-60s", "g-3600s"],
    }


# Told again


def test_a_problem_says_how_long_it_is(full):
    response = full.get()
    assert response.headers["Content-Length"] == str(len(response.content))


def test_a_refusal_told_again_is_a_response_of_its_own(full):
    one, other = full.get(), full.get()
    del one.headers["retry-after"]
    one.headers["Vary"] = "Cookie"
    one["X-Mine"] = "1"
    for name, value in (("RETRY-AFTER", "3600"), ("vary", "Accept"), ("X-Mine", None)):
        assert other.headers.get(name) == value
        assert full.get().headers.get(name) == value
    assert dict(other.items()) == {name: other.headers[name] for name in other.headers}


def test_what_is_kept_to_be_told_again_is_bounded(site, clock, monkeypatch):
    monkeypatch.setattr(responses, "MOST_PROBLEMS", 3)
    site.serve(rate_limit("1/h", key="ip", group="g")(site.view(ok)))
    site.get()
    for _ in range(9):
        clock.tick(60_000)
        site.get()
        assert len(responses._problems) <= 3


def test_a_refusal_told_again_tells_the_settings_of_now(full, configure):
    full.get()
    configure(HEADERS=["RateLimit"])
    assert "X-RateLimit-Limit" not in full.get().headers


@pytest.mark.parametrize(
    ("room", "level", "lines"), [(100, logging.INFO, 3), (1, logging.INFO, 1), (1, logging.ERROR, 3)]
)
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_django_writes_a_line_about_a_refusal_unless_there_was_no_room_for_ours(
    full, configure, caplog, monkeypatch, accept, room, level, lines
):
    configure(LOG_LINES_PER_SECOND=room)
    caplog.set_level(level, logger="rlaas_django")
    caplog.handler.setLevel(logging.NOTSET)
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: 5_000_000.0 + room + level))
    monkeypatch.setattr(log, "_left_out", 0)
    for _ in range(3):
        refused(full, accept)
    assert len([record for record in caplog.records if record.name == "django.request"]) == lines


# Languages


@pytest.mark.parametrize("language", ["en", "de", "fr", "ja", "ar", "pl", "zh-hans", "nowhere"])
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_every_language_can_be_refused_in(full, language, accept):
    with translation.override(language):
        assert_refusal(refused(full, accept), policies=["g"], wait=3600, media_type=accept)


def test_a_site_that_translates_chooses_the_language_by_itself(site, clock):
    limited = rate_limit("1/h", group="g")(site.view(ok))
    site.serve(limited, middleware=["django.middleware.locale.LocaleMiddleware", OURS])
    with translation.override("en"):  # Django leaves a request's language to the next one
        site.get()
        response = refused(site, HTML, headers={"Accept-Language": "de"})
    assert_refusal(response, policies=["default", "g"], media_type=HTML)
    assert b'<html lang="de">' in response.content
    assert {"Accept", "Accept-Language"} <= {name.strip() for name in response.headers["Vary"].split(",")}


def test_the_same_refusal_is_told_in_each_language(full):
    def told(language):
        with translation.override(language):
            return refused(full, JSON).json()["title"]

    titles = [told(language) for language in ("en", "de", "en", "de")]
    assert titles[0] == "Too many requests"
    assert titles[1] != titles[0]
    assert titles[2:] == titles[:2]


def test_a_site_without_translations(full, settings):
    settings.USE_I18N = False
    assert b"Try again in 3600 seconds." in refused(full, TEXT).content


def test_one_second_is_one_second(site, clock):
    site.serve(rate_limit("1/s", group="g")(site.view(ok)))
    site.get()
    assert refused(site, TEXT).content == b"Too many requests. Try again in 1 second.\n"


# Responses of the site's own


def own(request, decision):
    return JsonResponse({"error": "slow down", "wait": decision.retry_after}, status=429)


async def aown(request, decision):
    return own(request, decision)


@pytest.mark.parametrize("response", [own, aown, "tests.test_responses.own", "tests.test_responses.aown"])
@pytest.mark.parametrize("middleware", [[], [OURS]])
def test_the_site_s_own_response_gets_the_headers_too(site, configure, clock, response, middleware):
    site.own_body = True
    configure(RESPONSE=response, MAX_REQUESTS=1)
    site.serve(rate_limit(site.view(ok)), middleware=middleware)
    site.get()
    got = site.get()
    assert_refusal(got, policies={"default": (1, 60)}, wait=60, own_body=True)
    assert got.json() == {"error": "slow down", "wait": 60.0}


def test_a_view_s_own_response_comes_before_the_site_s(site, configure):
    site.own_body = True
    configure(RESPONSE=own)
    mine = rate_limit("1/m", group="g", response=lambda request, decision: HttpResponse("mine", status=429))
    site.serve(mine(site.view(ok)))
    site.get()
    got = site.get()
    assert_refusal(got, policies=["g"], own_body=True)
    assert got.content == b"mine"


def test_a_response_of_one_s_own_may_have_another_status(site):
    site.serve(rate_limit("1/m", group="g", response=lambda r, d: HttpResponse(status=403))(site.view(ok)))
    site.get()
    got = site.get()
    assert got.status_code == 403
    assert "g" in rate_limit_fields(got)[0]


# Which headers


@pytest.mark.parametrize("families", [["RateLimit", "X-RateLimit"], ["RateLimit"], ["X-RateLimit"], []])
def test_the_setting_chooses_the_headers(full, configure, families):
    configure(HEADERS=families)
    assert_refusal(full.get(), policies={"g": (1, 3600)}, wait=3600, families=families)
    allowed = full.get(address="203.0.113.1")
    assert allowed.status_code == 200
    assert ("RateLimit" in allowed.headers, "RateLimit-Policy" in allowed.headers) == ("RateLimit" in families,) * 2
    assert ("X-RateLimit-Limit" in allowed.headers) == ("X-RateLimit" in families)


def test_every_enforced_policy_is_listed_and_the_strictest_is_in_the_older_headers(site, clock):
    site.serve(rate_limit("9/m", "5/h", "7/d", Policy("trial", "1/m", shadow=True), group="g")(site.view(ok)))
    response = site.get()
    assert rate_limit_fields(response) == (
        {"g-60s": (9, 60), "g-3600s": (5, 3600), "g-86400s": (7, 86400)},
        {"g-60s": (8, 60), "g-3600s": (4, 3600), "g-86400s": (6, 86400)},
    )
    assert [response.headers[f"X-RateLimit-{name}"] for name in ("Limit", "Remaining", "Reset")] == ["5", "4", "3600"]


def test_a_name_of_any_characters_a_name_may_have_can_be_parsed(site):
    name = "A-z_0.9-" * 12
    site.serve(rate_limit(Policy(name, "1/m"))(site.view(ok)))
    site.get()
    assert_refusal(site.get(), policies={name: (1, 60)})


def test_a_large_quota_fits_a_structured_field(site):
    """RFC 9651 has whole numbers of up to 15 digits."""
    largest = 2**52 // 1000
    site.serve(rate_limit((largest, 1), algo=FIXED_WINDOW, group="g")(site.view(ok)))
    assert rate_limit_fields(site.get())[0] == {"g": (largest, 1)}


def test_a_request_that_can_never_pass_has_no_retry_after(site, algo, clock):
    site.serve(rate_limit("5/m", cost=6, algo=algo, group="g")(site.view(ok)))
    told = assert_refusal(site.get(), policies={"g": (5, 60)}, violated=["g"], wait=None)
    assert told.usage == {"g": (5, 0)}
    for accept in (HTML, TEXT):
        assert (
            "more than its limit can ever give"
            in assert_refusal(refused(site, accept), policies=["g"], wait=None, media_type=accept).body
        )


# The page


def templates(files):
    loaders = [("django.template.loaders.locmem.Loader", files)]
    return [{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {"loaders": loaders}}]


def test_the_page_tells_what_a_person_needs(full):
    page = assert_refusal(refused(full, BROWSER), policies=["g"], media_type=HTML).body
    assert "<title>Too many requests</title>" in page
    assert "Try again in 3600 seconds." in page


def test_a_site_may_have_a_page_of_its_own(full, settings):
    page = "<!DOCTYPE html>{{ status }} {{ title }} {{ detail }} {{ decision.policy }} {{ request.path }}</html>"
    settings.TEMPLATES = templates({"rlaas_django/429.html": page})
    settings.TEMPLATES[0]["OPTIONS"]["context_processors"] = ["django.template.context_processors.request"]
    response = refused(full, BROWSER)
    assert_refusal(response, policies=["g"], media_type=HTML)
    assert response.content == b"<!DOCTYPE html>429 Too many requests Try again in 3600 seconds. g /</html>"


@pytest.mark.parametrize("engines", [[], templates({})])
def test_a_site_without_templates_gets_text(full, settings, engines):
    settings.TEMPLATES = engines
    assert_refusal(refused(full, BROWSER), policies=["g"], media_type=TEXT)


@pytest.mark.parametrize("middleware", [[], [OURS]])
@pytest.mark.django_db
def test_a_page_whose_site_asks_for_the_user_in_its_templates(full, settings, middleware):
    """As Django's own context processor does; the async handler must not be caught reaching for the database."""
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    settings.MIDDLEWARE = [*AUTHENTICATION, *middleware]
    settings.TEMPLATES = templates({"rlaas_django/429.html": "<!DOCTYPE html>{{ user }} {{ detail }}</html>"})
    settings.TEMPLATES[0]["OPTIONS"]["context_processors"] = ["django.contrib.auth.context_processors.auth"]
    response = refused(full, BROWSER)
    assert b"AnonymousUser" in response.content


# Without Redis


@pytest.fixture(params=["unix:///nowhere.sock", "redis://127.0.0.1:1/0"])
def gone(request, settings):
    """Redis cannot be reached."""
    entry = {**settings.CACHES["default"], "LOCATION": request.param}
    settings.CACHES = {**settings.CACHES, "default": entry}


@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_a_closed_policy_answers_503_when_redis_is_gone(site, gone, accept):
    site.serve(rate_limit("5/m", on_failure="closed", group="g")(site.view(ok)))
    assert_refusal(refused(site, accept), status=503, violated=["g"], wait=1, media_type=accept)


def test_an_open_policy_lets_pass_and_says_so_when_redis_is_gone(site, gone):
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(rate_limit("1/m")(site.view(view)))
    responses = [site.get() for _ in range(3)]
    assert [response.status_code for response in responses] == [200] * 3
    assert all(decision.degraded and decision.allowed for decision in seen)
    assert not [name for name in responses[0].headers if "ratelimit" in name.lower()]


def test_one_closed_policy_among_open_ones_is_enough(site, gone):
    site.serve(rate_limit(Policy("a", "1/m"), Policy("b", "1/m", on_failure="closed"))(site.view(ok)))
    assert_refusal(site.get(), status=503, violated=["b"], wait=1)


def test_a_closed_shadow_refuses_nobody_when_redis_is_gone(site, gone):
    site.serve(rate_limit("1/m", on_failure="closed", shadow=True)(site.view(ok)))
    assert site.get().status_code == 200


def test_a_charge_that_cannot_be_given_back_breaks_nothing(site, settings, clock):
    def view(request):
        entry = {**settings.CACHES["default"], "LOCATION": "unix:///nowhere.sock"}
        settings.CACHES = {**settings.CACHES, "default": entry}
        return HttpResponse("ok")

    site.serve(rate_limit("5/m", charge_when=lambda response: False)(site.view(view)))
    response = site.get()
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (200, "4")


def test_a_refusal_after_a_gate_that_could_not_ask_is_a_429(site, settings, configure, clock):
    """Redis was gone for the middleware and back for the view: what the view was told, it was told by Redis."""
    configure(POLICIES={"outer": {"rate": "9/m", "key": "ip"}}, MIDDLEWARE=[{"policies": ["outer"]}])
    there = settings.CACHES
    limited = rate_limit("1/m", group="g")(as_kind("def", ok))

    def view(request):
        settings.CACHES = there
        return limited(request)

    site.serve(view, middleware=[OURS])
    call(limited, RequestFactory().get("/", REMOTE_ADDR=site.address))
    settings.CACHES = {**there, "default": {**there["default"], "LOCATION": "unix:///nowhere.sock"}}
    assert site.get().status_code == 429


# Never early


@pytest.mark.parametrize(
    ("wait", "told"), [(0.001, 1), (0.999, 1), (1.0, 1), (1.001, 2), (59.5, 60), (60.0, 60), (31_536_000.0, 31_536_000)]
)
def test_seconds_are_rounded_up(wait, told):
    assert whole_seconds(wait) == told


@pytest.mark.parametrize(("kind", "seed"), [*(("def", n) for n in range(8)), ("async def", 8), ("async def", 9)])
def test_who_waits_as_long_as_told_is_admitted_whatever_happened_before(algo, clock, kind, seed):
    """And nobody is told a second too much: a second earlier, the same request is refused."""
    rng = random.Random(f"{algo}-{kind}-{seed}")
    burst = {"burst": rng.randint(1, 12)} if algo == TOKEN_BUCKET and seed % 2 else {}
    limit, window = rng.randint(1, 9), rng.choice([1, 2, 7, 60, 90, 3600])
    capacity = burst.get("burst", limit)
    cost = 1
    limited = rate_limit((limit, window), algo=algo, group="g", cost=lambda request: cost, key="global", **burst)
    view = limited(as_kind(kind, ok))
    refusals = 0
    with caller() as call_one:
        for _ in range(100):
            cost = rng.randint(1, capacity)
            response = call_one(view)
            if response.status_code == 429:
                refusals += 1
                told = (capacity, math.ceil(window * capacity / limit))  # a bucket's window is the time that fills it
                seconds = assert_refusal(response, policies={"g": told}).retry_after
                clock.tick((seconds - 1) * 1000)
                assert seconds == 1 or call_one(view).status_code == 429
                clock.tick(-(seconds - 1) * 1000)
                assert_waiting_helps(response, lambda: call_one(view), clock)
            clock.tick(rng.choice([0, 1, rng.randint(0, window * 300), rng.randint(0, window * 1500)]))
    assert refusals


@pytest.mark.parametrize("seed", range(5))
def test_the_wait_is_long_enough_for_all_of_several_policies(site, clock, seed):
    rng = random.Random(seed)
    policies = [
        Policy("a", (rng.randint(1, 3), 10), key="ip", algo=TOKEN_BUCKET),
        Policy("b", (rng.randint(2, 5), 60), key="ip"),
        Policy("c", (rng.randint(3, 7), 100), key="ip", algo=FIXED_WINDOW),
    ]
    site.serve(rate_limit(*policies)(site.view(ok)))
    for _ in range(15):
        response = site.get()
        if response.status_code == 429:
            assert_refusal(response, policies=["a", "b", "c"])
            assert_waiting_helps(response, site.get, clock)
        clock.tick(rng.randint(0, 3000))
