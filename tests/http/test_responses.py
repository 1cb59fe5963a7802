"""Responses: the headers of every request, the body of a refusal, and the 503 of a policy that fails closed."""

from __future__ import annotations

import json
import logging
import math
import random
import re
import time

import pytest
from django.core.cache import caches
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory
from django.utils import translation
from django.views.decorators.cache import cache_page
from rlaas_django import Policy, check, peek, rate_limit

from tests.support.http import (
    AUTHENTICATION,
    BROWSER,
    KINDS,
    OURS,
    PROBLEM_JSON,
    as_kind,
    assert_refusal,
    assert_waiting_helps,
    both_ways,
    call,
    caller,
    ok,
    rate_limit_fields,
    templates,
)
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    overrides,
    whole_seconds,
)

JSON, HTML, TEXT = PROBLEM_JSON, "text/html", "text/plain"


@pytest.fixture
def full(site, clock):
    """A site whose limit is used up, for an hour."""
    site.serve(rate_limit("1/h", key="ip", group="g")(site.view(ok)))
    site.get()
    return site


@pytest.fixture
def refuse(clock):
    """Return the response to a refused request with this Accept header, from a view without a handler around it."""
    view = rate_limit("1/h", key="ip", group="g")(ok)
    view(RequestFactory().get("/"))

    def response(accept=None):
        return view(RequestFactory().get("/", headers={} if accept is None else {"Accept": accept}))

    return response


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
def test_the_body_is_of_the_media_type_that_the_client_prefers(refuse, accept, media_type):
    assert_refusal(refuse(accept), policies={"g": (1, 3600)}, wait=3600, media_type=media_type)


@both_ways
@pytest.mark.parametrize("media_type", [JSON, HTML, TEXT])
def test_each_media_type_through_a_handler(full, media_type):
    assert_refusal(refused(full, media_type), policies={"g": (1, 3600)}, wait=3600, media_type=media_type)


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
        "text/html;q*=garbage''%20",
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
def test_an_invalid_accept_header_is_refused_as_any_other(refuse, accept):
    assert_refusal(refuse(accept), policies={"g": (1, 3600)}, wait=3600)


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("text/html" + " " * 247, HTML),
        ("text/html" + " " * 248, JSON),
        ("text/html" + ",a/b" * 19, HTML),
        ("text/html" + ",a/b" * 20, JSON),
        ("text/plain" + ",a/b;q=0.1" * 800, JSON),
    ],
    ids=lambda text: f"{text[:10]} {len(text)}",
)
def test_a_long_accept_header_is_not_weighed(refuse, accept, media_type):
    assert_refusal(refuse(accept), policies={"g": (1, 3600)}, wait=3600, media_type=media_type)


@pytest.mark.parametrize("accept", ["a/b;q=0.{}," * 800, "a/b" + ";c=d{}" * 1300], ids=["types", "parameters"])
def test_a_long_accept_header_takes_no_longer_than_a_short_one(refuse, accept):
    """Each of the 50 is another one, so that none is remembered."""
    began = time.thread_time()
    for n in range(50):
        refuse(accept.replace("{}", str(n)))
    assert time.thread_time() - began < 0.2


def test_a_head_request_has_the_headers_and_no_body(full):
    response = full.request("head")
    assert_refusal(response, policies={"g": (1, 3600)}, wait=3600)
    assert response.content == b""


def test_the_problem_lists_the_violated_policies_and_the_wait(site, clock):
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
        "detail": "Try again in 59 minutes.",
        "violated-policies": ["g-60s", "g-3600s"],
    }


# Refusals again and again


def test_a_problem_has_a_content_length(full):
    response = full.get()
    assert response.headers["Content-Length"] == str(len(response.content))


@both_ways
def test_a_repeated_refusal_is_a_response_of_its_own(full):
    """What a middleware does to one does not show in the next."""
    one, other = full.get(), full.get()
    del one.headers["retry-after"]
    one.headers["Vary"] = "Cookie"
    one["X-Mine"] = "1"
    for name, value in (("RETRY-AFTER", "3600"), ("vary", "Accept"), ("X-Mine", None)):
        assert other.headers.get(name) == value
        assert full.get().headers.get(name) == value
    assert dict(other.items()) == {name: other.headers[name] for name in other.headers}


def test_a_repeated_refusal_follows_the_settings(full, configure):
    full.get()
    configure(HEADERS=["RateLimit"])
    assert "X-RateLimit-Limit" not in full.get().headers


@pytest.mark.parametrize(
    ("lines_per_second", "level", "lines"),
    [(1000, logging.INFO, 3), (0, logging.INFO, 0), (0, logging.ERROR, 3)],
)
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_django_logs_a_refusal_unless_the_limit_of_our_log_lines_was_reached(
    full, configure, caplog, accept, lines_per_second, level, lines
):
    configure(LOG_LINES_PER_SECOND=lines_per_second)
    caplog.set_level(level, logger="rlaas_django")
    caplog.handler.setLevel(logging.NOTSET)
    for _ in range(3):
        refused(full, accept)
    assert len([record for record in caplog.records if record.name == "django.request"]) == lines


# Vary


VARIES = {"user": True, "user_or_ip": True, "ip": False, "header:X-Api-Key": False, "token": False, "global": False}
VARIES |= {"get:q": False, "post:q": False}


@both_ways
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("key", VARIES)
@pytest.mark.parametrize("place", ["decorator", "rule"])
@pytest.mark.parametrize("logged_in", [False, True])
def test_a_response_varies_by_cookie_where_the_user_is_counted(
    site, clock, configure, django_user_model, key, place, logged_in
):
    """Django says so of each response for which the session was read, as the table of docs/headers.md does."""
    configure(POLICIES={"one": {"rate": "1/h", "key": key}}, MIDDLEWARE=[{"path": "/", "policies": ["one"]}])
    if place == "decorator":
        site.serve(rate_limit("one")(site.view(ok)), AUTHENTICATION)
    else:
        site.serve(site.view(ok), [*AUTHENTICATION, OURS])
    if logged_in:
        site.log_in(django_user_model.objects.create_user("ann"))
    allowed = site.get()
    refused = site.get(headers={"Accept": HTML})
    assert (allowed.status_code, refused.status_code) == (200, 429)
    assert allowed.headers.get("Vary") == ("Cookie" if VARIES[key] else None)
    assert refused.headers["Vary"] == ("Accept, Cookie" if VARIES[key] else "Accept")


# Languages


@pytest.mark.parametrize("language", ["en", "de", "fr", "ja", "ar", "pl", "zh-hans", "nowhere"])
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_a_refusal_in_any_language(refuse, language, accept):
    with translation.override(language):
        assert_refusal(refuse(accept), policies=["g"], wait=3600, media_type=accept)


@both_ways
def test_the_page_is_in_the_language_that_locale_middleware_chooses(site, clock):
    limited = rate_limit("1/h", group="g")(site.view(ok))
    site.serve(limited, middleware=["django.middleware.locale.LocaleMiddleware", OURS])
    with translation.override("en"):  # Django leaves a request's language to the next one
        site.get()
        response = refused(site, HTML, headers={"Accept-Language": "de"})
    assert_refusal(response, policies=["default", "g"], media_type=HTML)
    assert b'<html lang="de">' in response.content
    assert {"Accept", "Accept-Language"} <= {name.strip() for name in response.headers["Vary"].split(",")}


def test_a_repeated_refusal_follows_the_language(refuse):
    def title(language):
        with translation.override(language):
            return json.loads(refuse(JSON).content)["title"]

    titles = [title(language) for language in ("en", "de", "en", "de")]
    assert titles[0] == "Too many requests"
    assert titles[1] != titles[0]
    assert titles[2:] == titles[:2]


def test_a_site_without_translations(refuse, settings):
    settings.USE_I18N = False
    assert b"Try again in 1 hour." in refuse(TEXT).content


def test_one_second_is_in_the_singular(site, clock):
    site.serve(rate_limit("1/s", group="g")(site.view(ok)))
    site.get()
    assert refused(site, TEXT).content == b"Too many requests. Try again in 1 second.\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (119, "119 seconds"),
        (120, "2 minutes"),
        (121, "3 minutes"),
        (3540, "59 minutes"),
        (3541, "1 hour"),
        (3600, "1 hour"),
        (3601, "1 hour, 1 minute"),
        (5400, "1 hour, 30 minutes"),
        (86_399, "1 day"),
        (86_400, "1 day"),
        (86_401, "1 day, 1 hour"),
        (14 * 86_400, "14 days"),
        (365 * 86_400, "365 days"),
    ],
)
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_a_long_wait_is_told_in_words_and_rounded_up(clock, seconds, text, accept):
    view = rate_limit((1, seconds), key="ip")(ok)
    view(RequestFactory().get("/"))
    response = view(RequestFactory().get("/", headers={"Accept": accept}))
    assert f"Try again in {text}." in response.content.decode()
    assert response.headers["Retry-After"] == str(seconds)


def test_a_long_wait_is_told_in_the_client_s_language(refuse):
    with translation.override("de"):
        assert "1 Stunde" in refuse(TEXT).content.decode()
    with translation.override("fr"):
        assert "1 heure" in refuse(TEXT).content.decode()


# Blocked clients


@both_ways
@pytest.mark.parametrize("used", [0, 1, 3])
@pytest.mark.parametrize(("rate", "seconds", "text"), [("3/m", 3600, "1 hour"), ("3/d", 7200, "2 hours")])
def test_a_blocked_client_is_told_the_end_of_the_block_everywhere(site, clock, used, rate, seconds, text):
    site.serve(rate_limit(rate, key="ip", group="g")(site.view(ok)))
    site.statuses(used)
    identity = "ip=203.0.113.9"
    overrides.publish(identity, [overrides.Override(identity, "*", "block", clock.ms + seconds * 1000)])
    if used == 3 and rate == "3/d":  # it could not pass at the end of the block either
        seconds, text = 86_400, "1 day"
    for accept in (JSON, HTML, TEXT):
        response = refused(site, accept)
        refusal = assert_refusal(response, policies=["g"], wait=seconds)
        assert refusal.usage == {"g": (0, seconds)}
        assert response.headers["X-RateLimit-Reset"] == str(seconds)
        assert response.headers["X-RateLimit-Remaining"] == "0"
        assert f"Try again in {text}." in response.content.decode()
    assert_waiting_helps(response, site.get, clock)


# The site's own response


def own(request, decision):
    return JsonResponse({"error": "slow down", "wait": decision.retry_after}, status=429)


async def aown(request, decision):
    return own(request, decision)


@both_ways
@pytest.mark.parametrize("response", [own, aown, "tests.http.test_responses.own", "tests.http.test_responses.aown"])
@pytest.mark.parametrize("middleware", [[], [OURS]])
def test_the_setting_response_is_the_body_and_gets_the_headers(site, configure, clock, response, middleware):
    site.own_body = True
    configure(RESPONSE=response, MAX_REQUESTS=1)
    site.serve(rate_limit(site.view(ok)), middleware=middleware)
    site.get()
    got = site.get()
    assert_refusal(got, policies={"default": (1, 60)}, wait=60, own_body=True)
    assert got.json() == {"error": "slow down", "wait": 60.0}


def test_a_view_s_own_response_comes_before_the_setting(site, configure):
    site.own_body = True
    configure(RESPONSE=own)
    mine = rate_limit("1/m", group="g", response=lambda request, decision: HttpResponse("mine", status=429))
    site.serve(mine(site.view(ok)))
    site.get()
    got = site.get()
    assert_refusal(got, policies=["g"], own_body=True)
    assert got.content == b"mine"


def test_an_own_response_may_have_another_status(site):
    site.serve(rate_limit("1/m", group="g", response=lambda r, d: HttpResponse(status=403))(site.view(ok)))
    site.get()
    got = site.get()
    assert got.status_code == 403
    assert "g" in rate_limit_fields(got)[0]


# Headers


@pytest.mark.parametrize("families", [["RateLimit", "X-RateLimit"], ["RateLimit"], ["X-RateLimit"], []])
def test_the_setting_headers_chooses_the_families(full, configure, families):
    configure(HEADERS=families)
    assert_refusal(full.get(), policies={"g": (1, 3600)}, wait=3600, families=families)
    allowed = full.get(address="203.0.113.1")
    assert allowed.status_code == 200
    assert ("RateLimit" in allowed.headers, "RateLimit-Policy" in allowed.headers) == ("RateLimit" in families,) * 2
    assert ("X-RateLimit-Limit" in allowed.headers) == ("X-RateLimit" in families)


def test_every_enforced_policy_is_listed_and_x_ratelimit_is_the_strictest(site, clock):
    site.serve(rate_limit("9/m", "5/h", "7/d", Policy("trial", "1/m", shadow=True), group="g")(site.view(ok)))
    response = site.get()
    assert rate_limit_fields(response) == (
        {"g-60s": (9, 60), "g-3600s": (5, 3600), "g-86400s": (7, 86400)},
        {"g-60s": (8, 60), "g-3600s": (4, 3600), "g-86400s": (6, 86400)},
    )
    assert [response.headers[f"X-RateLimit-{name}"] for name in ("Limit", "Remaining", "Reset")] == ["5", "4", "3600"]


def test_a_policy_name_is_a_valid_structured_field(site):
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
    site.serve(rate_limit("5/m", cost=lambda request: 6, algo=algo, group="g")(site.view(ok)))
    refusal = assert_refusal(site.get(), policies={"g": (5, 60)}, violated=["g"], wait=None)
    assert refusal.usage == {"g": (5, 0)}
    for accept in (HTML, TEXT):
        assert (
            "more than its limit can ever give"
            in assert_refusal(refused(site, accept), policies=["g"], wait=None, media_type=accept).body
        )


# The page


def test_the_page_has_a_title_and_the_wait(refuse):
    page = assert_refusal(refuse(BROWSER), policies=["g"], media_type=HTML).body
    assert "<title>Too many requests</title>" in page
    assert "Try again in 1 hour." in page


def test_the_page_has_the_name_of_the_site_the_time_and_a_link_to_try_again(full, clock):
    page = refused(full, BROWSER).content.decode()
    assert "<header>testserver</header>" in page
    assert re.search(r"allowed again from \d\d:\d\d:\d\d [A-Z]{3}\.", page)
    assert 'data-wait="3600"' in page
    assert '<a class="retry" href="/">' in page


def test_the_page_offers_no_link_where_it_would_not_repeat_the_request(site, clock):
    site.serve(rate_limit("1/h", key="ip", group="g")(site.view(ok)))
    page = [site.post(headers={"Accept": HTML}) for _ in range(2)][1].content.decode()
    assert 'class="retry"' not in page
    assert "go back, and send it again" in page


def test_the_number_of_seconds_in_the_page_is_for_a_script(full, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    assert b'data-wait="3600"' in refused(full, BROWSER).content


def test_the_page_needs_no_collected_static_files(full, settings, tmp_path):
    backend = "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"
    settings.STATIC_ROOT = tmp_path
    settings.STORAGES = {**settings.STORAGES, "staticfiles": {"BACKEND": backend}}
    response = refused(full, BROWSER)
    assert response.status_code == 429
    assert b"stylesheet" not in response.content
    settings.STATIC_URL = None
    assert refused(full, BROWSER).status_code == 429


def test_the_page_needs_no_allowed_host(full, settings):
    settings.ALLOWED_HOSTS = ["example.com"]
    response = refused(full, BROWSER, headers={"Host": "nonsense"})
    assert (response.status_code, b"<header>" in response.content) == (429, False)


def test_the_page_holds_under_a_strict_content_security_policy(full):
    page = refused(full, BROWSER).content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)", page)
    assert "//" not in page.replace("<!DOCTYPE html>", "")  # nothing from another host


@both_ways
def test_a_site_may_have_its_own_template(full, settings):
    page = "<!DOCTYPE html>{{ status }} {{ title }} {{ detail }} {{ decision.policy }} {{ request.path }}</html>"
    settings.TEMPLATES = templates({"rlaas_django/429.html": page}, "django.template.context_processors.request")
    response = refused(full, BROWSER)
    assert_refusal(response, policies=["g"], media_type=HTML)
    assert response.content == b"<!DOCTYPE html>429 Too many requests Try again in 1 hour. g /</html>"


@pytest.mark.parametrize("engines", [[], templates({})])
def test_a_site_without_templates_gets_text(full, settings, engines):
    settings.TEMPLATES = engines
    assert_refusal(refused(full, BROWSER), policies=["g"], media_type=TEXT)


@both_ways
@pytest.mark.parametrize("middleware", [[], [OURS]])
@pytest.mark.django_db
def test_a_template_that_shows_the_user(full, settings, middleware):
    """As Django's own context processor does; the async handler must not reach for the database."""
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    settings.MIDDLEWARE = [*AUTHENTICATION, *middleware]
    page = "<!DOCTYPE html>{{ user }} {{ detail }}</html>"
    settings.TEMPLATES = templates({"rlaas_django/429.html": page}, "django.contrib.auth.context_processors.auth")
    response = refused(full, BROWSER)
    assert b"AnonymousUser" in response.content


# While Redis is unavailable


@pytest.fixture(params=["unix:///nowhere.sock", "redis://127.0.0.1:1/0"])
def unavailable(request, use):
    """Redis cannot be reached."""
    use(request.param)


@both_ways
@pytest.mark.parametrize("accept", [JSON, HTML, TEXT])
def test_a_policy_that_fails_closed_is_a_503(site, unavailable, accept):
    site.serve(rate_limit("5/m", on_failure="closed", group="g")(site.view(ok)))
    assert_refusal(refused(site, accept), status=503, violated=["g"], wait=1, media_type=accept)


@both_ways
def test_a_policy_that_fails_open_admits_and_marks_the_decision_as_degraded(site, unavailable):
    seen = []

    def view(request):
        seen.append(request.rate_limit)
        return HttpResponse("ok")

    site.serve(rate_limit("1/m")(site.view(view)))
    responses = [site.get() for _ in range(3)]
    assert [response.status_code for response in responses] == [200] * 3
    assert all(decision.degraded and decision.allowed for decision in seen)
    assert not [name for name in responses[0].headers if "ratelimit" in name.lower()]


def test_one_policy_that_fails_closed_among_open_ones_is_enough(site, unavailable):
    site.serve(rate_limit(Policy("a", "1/m"), Policy("b", "1/m", on_failure="closed"))(site.view(ok)))
    assert_refusal(site.get(), status=503, violated=["b"], wait=1)


def test_a_shadow_policy_that_fails_closed_refuses_nobody(site, unavailable):
    site.serve(rate_limit("1/m", on_failure="closed", shadow=True)(site.view(ok)))
    assert site.get().status_code == 200


@both_ways
def test_a_refund_that_fails_breaks_nothing(site, own, clock):
    def view(request):
        own.kill()
        return HttpResponse("ok")

    site.serve(rate_limit("5/m", charge_when=lambda response: False)(site.view(view)))
    response = site.get()
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (200, "4")


@both_ways
def test_a_refusal_by_the_view_after_the_middleware_failed_open_is_a_429(site, settings, configure, clock):
    """Redis was unavailable for the middleware and available again for the view, whose decision is Redis' own."""
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


# Retry-After


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [(0.001, 1), (0.999, 1), (1.0, 1), (1.001, 2), (59.5, 60), (60.0, 60), (31_536_000.0, 31_536_000)],
)
def test_seconds_are_rounded_up(wait, seconds):
    assert whole_seconds(wait) == seconds


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_waits_for_retry_after_is_admitted_and_not_a_second_earlier(algo, clock, kind, scale):
    """Whatever happened before."""
    refusals = 0
    for seed in range(scale(5)):
        refusals += follow_retry_after(random.Random(f"{algo}-{kind}-{seed}"), algo, clock, kind, scale(100, least=40))
    assert refusals


def follow_retry_after(rng: random.Random, algo: str, clock, kind: str, steps: int) -> int:
    """Make requests of random costs at random times, and do what each refusal says; return how many there were."""
    burst = {"burst": rng.randint(1, 12)} if algo == TOKEN_BUCKET and rng.random() < 0.5 else {}
    limit, window = rng.randint(1, 9), rng.choice([1, 2, 7, 60, 90, 3600])
    capacity, cost, refusals = burst.get("burst", limit), 1, 0
    policy = Policy(f"p-{rng.randrange(10**9)}", (limit, window), algo=algo, key="global", **burst)
    view = rate_limit(policy, cost=lambda request: cost)(as_kind(kind, ok))
    with caller() as call_one:
        for _ in range(steps):
            cost = rng.randint(1, capacity)
            response = call_one(view)
            if response.status_code == 429:
                refusals += 1
                quota = (capacity, math.ceil(window * capacity / limit))  # a bucket's window is the time that fills it
                seconds = assert_refusal(response, policies={policy.name: quota}).retry_after
                clock.tick((seconds - 1) * 1000)
                assert seconds == 1 or call_one(view).status_code == 429
                clock.tick(-(seconds - 1) * 1000)
                assert_waiting_helps(response, lambda: call_one(view), clock)
            clock.tick(rng.choice([0, 1, rng.randint(0, window * 300), rng.randint(0, window * 1500)]))
    return refusals


def test_the_wait_is_long_enough_for_all_of_several_policies(site, clock, scale):
    for seed in range(scale(5)):
        rng = random.Random(seed)
        policies = [
            Policy(f"a-{seed}", (rng.randint(1, 3), 10), key="ip", algo=TOKEN_BUCKET),
            Policy(f"b-{seed}", (rng.randint(2, 5), 60), key="ip"),
            Policy(f"c-{seed}", (rng.randint(3, 7), 100), key="ip", algo=FIXED_WINDOW),
        ]
        site.serve(rate_limit(*policies)(site.view(ok)))
        for _ in range(15):
            response = site.get()
            if response.status_code == 429:
                assert_refusal(response, policies=[policy.name for policy in policies])
                assert_waiting_helps(response, site.get, clock)
            clock.tick(rng.randint(0, 3000))


# When more can be used

EXACT = [algo for algo in ALGORITHMS if algo != SLIDING_WINDOW]  # the ZSET says when it is full again


def usage_of(response) -> tuple[int, int]:
    """Return `r` and `t` of the only policy."""
    (usage,) = rate_limit_fields(response)[1].values()
    return usage


def ms_until(holds, clock, limit_ms: int = 10_000_000) -> int:
    """Return the first ms from now at which something holds that then holds on; the clock stays."""
    at, low, high = clock.ms, -1, limit_ms
    while high - low > 1:
        middle = (low + high) // 2
        clock.ms = at + middle
        low, high = (low, middle) if holds() else (middle, high)
    clock.ms = at
    return high


@pytest.mark.parametrize("store", ["default", "locmem"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_t_is_the_time_within_which_no_more_than_r_can_be_used(store, algo, clock, kind, scale):
    """In whole seconds, rounded up, for spaced requests and bursts of any cost; of a refusal it is Retry-After."""
    seen = set()
    for seed in range(scale(8, least=2)):
        rng = random.Random(f"{algo}-{seed}")
        limit, window, cost = rng.randint(1, 9), rng.choice([7, 60, 90, 3600]), 1
        burst = rng.choice([None, 12]) if algo == TOKEN_BUCKET else None
        policy = Policy(f"p-{rng.randrange(10**9)}", (limit, window), algo=algo, key="global", burst=burst)
        view = rate_limit(policy, cost=lambda request: cost)(as_kind(kind, ok))  # noqa: B023
        with caller() as call_one:
            for _ in range(scale(60, least=25)):
                cost = rng.randint(1, burst or limit)
                response = call_one(view)
                seen.add(response.status_code)
                assert_t_is_true(response, policy, clock)
                clock.tick(rng.choice([0, 1, rng.randint(0, window * 300), rng.randint(0, window * 1500)]))
    assert seen == {200, 429}


def assert_t_is_true(response, policy: Policy, clock) -> None:
    r, t = usage_of(response)
    if response.status_code == 429:
        assert t == int(response.headers["Retry-After"])
        return

    exact = ms_until(lambda: peek("anyone", policy, cost=r + 1).allowed, clock)
    if policy.algo == SLIDING_WINDOW:
        assert math.ceil(exact / 1000) <= t == int(response.headers["X-RateLimit-Reset"])
    else:
        assert t == math.ceil(exact / 1000)


@pytest.mark.parametrize(
    ("algo", "t", "reset"),
    [
        (TOKEN_BUCKET, 1, 5),
        (SLIDING_WINDOW_COUNTER, 7, 15),
        (SLIDING_WINDOW_COMPACT, 5, 10),
        (SLIDING_WINDOW, 10, 10),
        (FIXED_WINDOW, 5, 5),
    ],
)
def test_after_spaced_requests_t_is_the_next_unit_and_x_ratelimit_reset_the_full_quota(clock, algo, t, reset):
    """Five requests in 5 s, the first at the start of a window of 10 s."""
    clock.ms -= clock.ms % 10_000
    view = rate_limit("5/10s", algo=algo, group="g")(ok)
    view(RequestFactory().get("/"))
    for _ in range(4):
        clock.tick(1_250)
        response = view(RequestFactory().get("/"))
    assert (usage_of(response)[1], int(response.headers["X-RateLimit-Reset"])) == (t, reset)


@pytest.mark.parametrize("algo", EXACT)
def test_t_follows_a_limit_of_the_client_s_own(clock, algo):
    identity = "ip=127.0.0.1"
    overrides.publish(identity, [overrides.Override(identity, "*", "limit", clock.ms + 3_600_000, 50)])
    policy = Policy("p", "5/m", key="ip", algo=algo)
    view = rate_limit(policy)(ok)
    for _ in range(20):
        response = view(RequestFactory().get("/"))
        assert usage_of(response)[0] <= 49
        assert_t_is_true_for("127.0.0.1", response, policy, clock)
        clock.tick(700)


def assert_t_is_true_for(address: str, response, policy: Policy, clock) -> None:
    r, t = usage_of(response)
    exact = ms_until(lambda: peek({"ip": address}, policy, cost=r + 1).allowed, clock, 300_000)
    assert t == math.ceil(exact / 1000)


@both_ways
def test_where_nothing_is_used_t_is_0(site, clock, algo):
    site.serve(rate_limit("5/m", algo=algo, cost=lambda request: 0, group="g")(site.view(ok)))
    assert usage_of(site.get()) == (5, 0)


@both_ways
def test_no_policy_of_a_refused_request_has_a_t_beyond_retry_after(site, clock, algo):
    """Draft -11, section 6."""
    site.serve(rate_limit("1/10s", Policy("wide", "100/d", algo=algo), group="g")(site.view(ok)))
    assert site.statuses(2) == [200, 429]
    clock.tick(3_500)
    response = site.get()
    assert response.headers["Retry-After"] == "7"
    assert rate_limit_fields(response)[1] == {"g": (0, 7), "wide": (99, 7)}


@both_ways
def test_a_refunded_policy_does_not_say_too_early_that_there_is_more(site, clock):
    """The only unit of this window was refunded: one of 4 in the next is not there after a fifth of it."""
    policy = Policy("p", "4/m", key="ip", algo=SLIDING_WINDOW_COUNTER)
    site.serve(rate_limit(policy, charge_when=lambda response: False)(site.view(ok)))
    check({"ip": "203.0.113.9"}, policy, cost=1)
    r, t = usage_of(site.get())
    assert r == 3
    clock.tick(1000 * t)
    assert peek({"ip": "203.0.113.9"}, policy, cost=r + 1).allowed


def test_t_of_a_repeated_refusal_is_its_retry_after(site):
    """It is not the clock of the tests that moves, as nothing is repeated under that."""
    site.serve(rate_limit("1/h", key="ip", group="g")(site.view(ok)))
    site.get()
    for _ in range(3):
        response = site.get()
        assert usage_of(response) == (0, int(response.headers["Retry-After"]))
        time.sleep(0.01)


@pytest.mark.parametrize("used", [0, 1])
def test_a_block_ends_when_it_says_whatever_is_left_of_the_window(site, clock, algo, used):
    """A counter that would allow the request has no wait of its own."""
    site.serve(rate_limit("5/h", key="ip", algo=algo, group="g")(site.view(ok)))
    site.statuses(used)
    identity = "ip=203.0.113.9"
    overrides.publish(identity, [overrides.Override(identity, "*", "block", clock.ms + 2_000)])
    response = site.get()
    assert (usage_of(response), response.headers["Retry-After"]) == ((0, 2), "2")
    assert_waiting_helps(response, site.get, clock)


def test_a_client_without_limits_has_a_t_that_is_never_too_short(site, clock, algo):
    policy = Policy("p", "2/m", key="ip", algo=algo)
    site.serve(rate_limit(policy)(site.view(ok)))
    site.statuses(2)
    identity = "ip=203.0.113.9"
    overrides.publish(identity, [overrides.Override(identity, "*", "exempt", clock.ms + 1_000)])
    r, t = usage_of(site.get())
    assert (r, t > 0) == (0, True)
    clock.tick(1000 * t)
    assert peek({"ip": "203.0.113.9"}, policy).allowed


# Cached pages


OTHER = "198.51.100.7"  # another client
CACHE_MIDDLEWARE = [
    "django.middleware.cache.UpdateCacheMiddleware",
    OURS,
    "django.middleware.cache.FetchFromCacheMiddleware",
]
cached_by_decorator = pytest.mark.parametrize("site", ["wsgi, def", "asgi, def"], indirect=True)  # cache_page is sync


@pytest.fixture
def page():
    """A page that says how often it was made; the cache is emptied afterwards."""
    made = []

    def view(request):
        made.append(request)
        return HttpResponse(f"page {len(made)}")

    yield view
    caches["default"].clear()


@cached_by_decorator
def test_a_limit_outside_cache_page_counts_every_request_and_shows_its_own_figures(site, clock, page):
    site.serve(rate_limit("5/m", key="ip", group="own")(cache_page(60)(page)))
    responses = [site.get(), site.get(), site.get(address=OTHER)]
    assert [response.content for response in responses] == [b"page 1"] * 3
    figures = [response.headers["RateLimit"] for response in responses]
    assert figures == ['"own";r=4;t=60', '"own";r=3;t=60', '"own";r=4;t=60']


@cached_by_decorator
def test_below_cache_page_a_cached_page_repeats_the_figures_of_the_client_it_was_made_for(site, clock, page):
    site.serve(cache_page(60)(rate_limit("5/m", key="ip", group="own")(page)))
    responses = [site.get(), site.get(address=OTHER)]
    assert [response.headers["RateLimit"] for response in responses] == ['"own";r=4;t=60'] * 2


@cached_by_decorator
def test_the_figures_of_a_rule_replace_those_of_a_page_from_cache_page(site, clock, page):
    site.serve(cache_page(60)(rate_limit("9/m", key="ip", group="own")(page)), middleware=[OURS])
    figures = [site.get(address=address).headers["RateLimit"] for address in (None, None, OTHER)]
    assert figures == ['"default";r=4;t=60, "own";r=8;t=60', '"default";r=3;t=60', '"default";r=4;t=60']


@both_ways
def test_beside_the_cache_s_middleware_a_cached_page_has_the_rule_s_figures_of_this_client(site, clock, page):
    site.serve(rate_limit("9/m", key="ip", group="own")(site.view(page)), middleware=CACHE_MIDDLEWARE)
    responses = [site.get(), site.get(), site.get(address=OTHER)]
    assert [response.content for response in responses] == [b"page 1"] * 3
    figures = [response.headers["RateLimit"] for response in responses]
    assert figures == ['"default";r=4;t=60, "own";r=8;t=60', '"default";r=3;t=60', '"default";r=4;t=60']
    assert responses[2].headers["RateLimit-Policy"] == '"default";q=5;w=60'
    assert responses[2].headers["X-RateLimit-Remaining"] == "4"


@both_ways
def test_beside_the_cache_s_middleware_a_cached_page_of_an_exempt_path_has_no_figures(site, clock, configure, page):
    configure(MIDDLEWARE=[{"exempt": True}])
    site.serve(rate_limit("9/m", key="ip", group="own")(site.view(page)), middleware=CACHE_MIDDLEWARE)
    first, second = site.get(), site.get(address=OTHER)
    assert first.headers["RateLimit"] == '"own";r=8;t=60'
    assert second.content == b"page 1"
    assert not [name for name in second.headers if "ratelimit" in name.lower()]
