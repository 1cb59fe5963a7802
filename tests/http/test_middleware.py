"""RateLimitMiddleware: rules, users, and the headers of every response."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from asgiref.sync import iscoroutinefunction
from django.conf.urls.i18n import i18n_patterns
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import Http404, HttpResponse
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.urls import URLResolver, include, path, re_path
from django.utils import translation
from django.utils.datastructures import CaseInsensitiveMapping
from django.utils.decorators import method_decorator
from django.utils.functional import lazy
from django.utils.translation import get_language
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rlaas_django import Policy, peek, rate_limit, rate_limit_exempt
from rlaas_django.admin import RateLimitAdmin
from rlaas_django.middleware import RateLimitMiddleware
from rlaas_django.models import RateLimit

from tests.support.http import (
    AUTHENTICATION,
    KINDS,
    OURS,
    Site,
    as_kind,
    assert_clean_headers,
    assert_refusal,
    assert_waiting_helps,
    both_ways,
    counters,
    ok,
    rate_limit_fields,
    templates,
)
from tests.support.internals import forget_loaded_urls

ADDRESS = "203.0.113.9"
ADMIN_MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware"]
POLICIES = {
    "api": {"rate": "2/m", "key": "ip"},
    "login": {"rate": "1/m", "key": "ip"},
    "user": {"rate": "2/m", "key": "user"},
    "wide": {"rate": "100/m", "key": "ip"},
}
ROUTES = ("", "api", "api/", "api/<path:rest>", "apiary", "login/", "healthz", "static/<path:rest>", "other")
SESSIONS = "django.contrib.sessions.backends.signed_cookies"  # which need no database


@pytest.fixture
def site(site, configure):
    configure(POLICIES=POLICIES)
    site.serve({route: site.view(ok) for route in ROUTES}, middleware=[OURS])
    return site


def policies_at(site, where, method="get"):
    """Return the names of the policies that apply to a request."""
    response = site.request(method, where)
    return [*rate_limit_fields(response)[0]] if "RateLimit" in response.headers else []


def charged(policy, identity=ADDRESS):
    return peek({"ip": identity}, policy).current_count


# Rules


@both_ways
def test_without_a_rule_the_default_policy_applies_everywhere(site, clock):
    assert site.statuses(3, "/") + site.statuses(3, "/other") == [200] * 5 + [429]
    refused = site.get("/nowhere")
    assert_refusal(refused, policies={"default": (5, 60)}, violated=["default"], wait=60)
    assert_waiting_helps(refused, site.get, clock)


@pytest.mark.parametrize(
    ("rule", "paths", "others"),
    [
        ({"path": "/api"}, ["/api", "/api/", "/api/x", "/api/x/y?z=1", "/api//"], ["/", "/apiary", "/other"]),
        ({"path": "/api/"}, ["/api/", "/api/x"], ["/", "/apiary"]),
        ({"path": "/"}, ["/", "/api/x", "/nowhere"], []),
        ({"regex": r"^/api/\w+$"}, ["/api/x"], ["/api/x/y", "/api/", "/other"]),
        ({"regex": "y$"}, ["/apiary", "/api/x/y"], ["/api/"]),
        ({"regex": "(?i)^/API"}, ["/api/x", "/apiary"], ["/"]),
        ({}, ["/", "/other"], []),
    ],
)
def test_a_rule_matches_whole_segments_of_a_path_or_a_regex(site, configure, rule, paths, others):
    configure(MIDDLEWARE=[{**rule, "policies": ["wide"]}])
    assert [policies_at(site, where) for where in paths] == [["wide"]] * len(paths)
    assert [policies_at(site, where) for where in others] == [[]] * len(others)


@pytest.mark.parametrize(
    ("methods", "limited"),
    [(["POST"], {"post"}), (["get"], {"get", "head"}), (["GET", "PUT"], {"get", "head", "put"})],
)
def test_a_rule_may_be_for_some_methods_and_head_goes_with_get(site, configure, methods, limited):
    configure(MIDDLEWARE=[{"path": "/api", "methods": methods, "policies": ["wide"]}])
    for method in ("get", "head", "post", "put"):
        assert policies_at(site, "/api/", method) == (["wide"] if method in limited else [])


@both_ways
def test_an_exempt_path_is_not_counted_and_has_no_headers(site, configure, client):
    configure(MIDDLEWARE=[{"path": "/healthz", "exempt": True}])
    assert site.statuses(9, "/healthz") == [200] * 9
    assert policies_at(site, "/healthz") == []
    assert counters(client) == []


def test_the_first_matching_rule_applies(site, configure):
    configure(
        MIDDLEWARE=[
            {"path": "/api/open", "exempt": True},
            {"path": "/api", "methods": ["POST"], "policies": ["login", "wide"]},
            {"path": "/api", "policies": ["wide"]},
            {"path": "/api", "policies": ["login"]},
        ]
    )
    assert policies_at(site, "/api/open") == []
    assert policies_at(site, "/api/x", "post") == ["login", "wide"]
    assert policies_at(site, "/api/x") == ["wide"]
    assert policies_at(site, "/") == []


@both_ways
def test_with_rules_a_path_that_none_matches_is_not_limited(site, configure, client):
    configure(MIDDLEWARE=[{"path": "/healthz", "exempt": True}, {"path": "/api/", "policies": ["api"]}])
    assert site.statuses(9, "/other") == [200] * 9
    assert counters(client) == []
    configure(MIDDLEWARE=[{"path": "/healthz", "exempt": True}, {"path": "/", "policies": ["default"]}])
    assert site.statuses(6, "/other") == [200] * 5 + [429]


def test_the_rules_of_the_readme_leave_the_admin_alone(site, configure):
    configure(MIDDLEWARE=[{"path": "/healthz", "exempt": True}, {"path": "/api/", "policies": ["api"]}])
    site.serve({"admin/": admin.site.urls, "api/": site.view(ok)}, middleware=[*ADMIN_MIDDLEWARE, OURS])
    assert site.statuses(9, "/admin/login/") == [200] * 9
    assert site.statuses(3, "/api/") == [200, 200, 429]


# Views that the middleware leaves alone


@both_ways
def test_the_panel_s_own_pages_are_never_limited(site, client):
    other = admin.AdminSite(name="other")
    other.register(RateLimit, RateLimitAdmin)
    urls = {"admin/": admin.site.urls, "deep/er/": other.urls, "<path:rest>": site.view(ok)}
    site.serve(urls, middleware=[*ADMIN_MIDDLEWARE, OURS])
    for where in ("/admin/rlaas_django/ratelimit/", "/admin/rlaas_django/ratelimit/refusals/?page=2"):
        assert site.statuses(9, where) == [302] * 9  # to the login page
    assert site.statuses(9, "/deep/er/rlaas_django/ratelimit/") == [302] * 9
    assert counters(client) == []


@pytest.mark.parametrize("where", ["/x/rlaas_django/ratelimit/", "/admin/rlaas_django/", "/admin/", "/nowhere/x"])
def test_what_only_looks_like_the_panel_is_limited(site, where):
    """Also what is not found."""
    urls = {"admin/": admin.site.urls, "x/<path:rest>": site.view(ok), "": site.view(ok)}
    site.serve(urls, middleware=[*ADMIN_MIDDLEWARE, OURS])
    assert site.statuses(6, where)[5] == 429


class Health(View):
    def get(self, request):
        return HttpResponse("ok")


class Api(APIView):
    def get(self, request):
        return Response("ok")


EXEMPT = {
    "function": lambda view: rate_limit_exempt(view),
    "below another decorator": lambda view: never_cache(rate_limit_exempt(view)),
    "as_view": lambda view: rate_limit_exempt(Health.as_view()),
    "class": lambda view: rate_limit_exempt(type("Health", (Health,), {})).as_view(),
    "dispatch": lambda view: method_decorator(rate_limit_exempt, name="dispatch")(
        type("Health", (Health,), {})
    ).as_view(),
    "class of REST framework": lambda view: rate_limit_exempt(type("Api", (Api,), {})).as_view(),
    "api_view": lambda view: rate_limit_exempt(api_view()(lambda request: Response("ok"))),
}


@both_ways
@pytest.mark.parametrize("exempt", EXEMPT.values(), ids=EXEMPT)
def test_an_exempt_view_is_not_limited(site, client, exempt):
    view = exempt(site.view(ok))
    site.serve({"exempt": view, "": site.view(ok)}, middleware=[OURS])
    assert site.statuses(9, "/exempt") == [200] * 9
    assert policies_at(site, "/exempt") == []
    assert counters(client) == []
    assert site.statuses(6) == [200] * 5 + [429]


def about():
    """Return a route that is another text in each language."""
    return lazy(lambda: {"de": "ueber/"}.get(get_language(), "about/"), str)()


# Below the root: the routes of exempt views, and a path of each.
EXEMPT_ROUTES = {
    "with a parameter": (lambda view: path("<slug:shop>/health", view), "/bikes/health"),
    "by a regular expression": (lambda view: re_path(r"^colou?r/(x|y)$", view), "/color/x"),
    "by one that may match anywhere": (lambda view: re_path(r"health", view), "/any/health"),
    "by alternatives": (lambda view: re_path(r"^health|alive", view), "/is/alive"),
    "included": (lambda view: path("a/", include([path("b/", include([path("c", view)]))])), "/a/b/c"),
    "included below a parameter": (lambda view: path("<int:n>/", include([path("c", view)])), "/7/c"),
    "included below a regular expression": (lambda view: re_path(r"^v\d/", include([path("c", view)])), "/v2/c"),
    "in a language": (lambda view: i18n_patterns(path("health", view))[0], "/en/health"),
    "translated": (lambda view: path(about(), view), "/about/"),
}


@pytest.mark.parametrize(("route", "where"), EXEMPT_ROUTES.values(), ids=EXEMPT_ROUTES)
def test_an_exempt_view_is_found_by_any_route(site, settings, route, where):
    settings.LANGUAGE_CODE = "en"
    site.serve({"": ok}, middleware=[OURS])
    settings.ROOT_URLCONF.urlpatterns.append(route(rate_limit_exempt(site.view(ok))))
    assert policies_at(site, where) == []
    with translation.override("de"):
        assert policies_at(site, where.replace("/en/", "/de/").replace("about", "ueber")) == []
    assert policies_at(site, "/") == ["default"]


def test_a_url_is_resolved_once_beside_exempt_views(site, monkeypatch):
    resolved = []
    resolve = URLResolver.resolve
    monkeypatch.setattr(URLResolver, "resolve", lambda self, text: resolved.append(text) or resolve(self, text))
    site.serve({"healthz": rate_limit_exempt(ok), "shop": ok}, middleware=[OURS])
    assert policies_at(site, "/shop") == ["default"]
    assert resolved == ["/shop"]


def test_an_exempt_view_keeps_the_limits_of_its_decorators(site):
    for n, view in enumerate((rate_limit_exempt(rate_limit("login")(ok)), rate_limit("login")(rate_limit_exempt(ok)))):
        site.serve(view, middleware=[OURS])
        assert policies_at(site, "/") == ["login"]
        assert site.statuses(3, address=f"203.0.113.{n}") == [200, 429, 429]


def test_a_view_at_another_url_without_the_decorator_is_limited(site):
    site.serve({"exempt": rate_limit_exempt(ok), "": ok}, middleware=[OURS])
    assert [policies_at(site, where) for where in ("/", "/exempt")] == [["default"], []]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exempt_view_keeps_its_kind_and_name(kind):
    view = rate_limit_exempt(as_kind(kind, ok))
    assert iscoroutinefunction(view) == (kind == "async def")
    assert view.__name__ == "ok"


URLS = """
from django.http import HttpResponse
from django.urls import path
from rlaas_django import rate_limit_exempt
urlpatterns = [path("exempt", rate_limit_exempt(lambda request: HttpResponse("ok")))]
"""


def test_the_first_request_of_a_process_knows_which_views_are_exempt(settings, tmp_path, monkeypatch):
    """It comes before Django has imported the URLs, and with them the views."""
    (tmp_path / "urls_of_one_test.py").write_text(URLS)
    monkeypatch.syspath_prepend(tmp_path)
    site, settings.MIDDLEWARE, settings.ROOT_URLCONF = Site("wsgi, def", settings), [OURS], "urls_of_one_test"
    forget_loaded_urls()
    assert policies_at(site, "/exempt") == []


# Rules, continued


def test_the_paths_of_a_rule_share_one_counter(site, configure):
    configure(MIDDLEWARE=[{"path": "/api", "policies": ["api"]}])
    assert [site.get(f"/api/{n}").status_code for n in range(4)] == [200, 200, 429, 429]
    assert charged("api") == 2


@pytest.mark.parametrize(
    "spell",
    [
        "/api/x{}",
        "/api/x?{}",
        "/api/x?q={}",
        "/api/{}/../x",
        "/api//x{}",
        "/api/%2e%2e/x{}",
        "/api/x;{}",
        "/api/x%00{}",
    ],
)
def test_variations_of_the_path_or_the_query_do_not_evade_a_rule(site, configure, spell):
    configure(MIDDLEWARE=[{"path": "/api", "policies": ["api"]}])
    assert [site.get(spell.format(n)).status_code for n in range(4)][2:] == [429, 429]


def test_several_policies_of_a_rule_are_decided_together(site, configure, clock):
    configure(MIDDLEWARE=[{"path": "/api", "policies": ["wide", "login"]}])
    site.get("/api/")
    refused = site.get("/api/")
    assert_refusal(refused, policies={"wide": (100, 60), "login": (1, 60)}, violated=["login"], wait=60)
    assert charged("wide") == 1


def test_where_the_site_is_mounted_does_not_matter(settings, configure):
    """A rule matches the path inside the site."""
    configure(POLICIES=POLICIES, MIDDLEWARE=[{"path": "/api", "policies": ["wide"]}])
    site = Site("wsgi, def", settings)
    site.serve({"api/": ok}, middleware=[OURS])
    assert policies_at(site, "/api/") == ["wide"]
    response = site.get("/api/", SCRIPT_NAME="/mounted")
    assert [*rate_limit_fields(response)[0]] == ["wide"]


# With decorators


@both_ways
def test_a_policy_of_rule_and_decorator_is_charged_once(site, configure):
    configure(MIDDLEWARE=[{"path": "/", "policies": ["api"]}])
    site.serve(rate_limit("api")(site.view(ok)), middleware=[OURS])
    assert site.statuses(3) == [200, 200, 429]
    assert charged("api") == 2


def test_the_default_policy_of_both_is_charged_once(site):
    site.serve(rate_limit(site.view(ok)), middleware=[OURS])
    assert site.statuses(6) == [200] * 5 + [429]


@both_ways
def test_the_headers_list_both_and_a_refusal_refunds_what_the_rule_charged(site, configure, clock):
    configure(MIDDLEWARE=[{"path": "/", "policies": ["wide"]}])
    site.serve(rate_limit("1/m", key="ip", group="own")(site.view(ok)), middleware=[OURS])
    assert rate_limit_fields(site.get())[0] == {"wide": (100, 60), "own": (1, 60)}
    for _ in range(3):
        refusal = assert_refusal(site.get(), policies=["wide", "own"], violated=["own"], wait=60)
        assert refusal.usage["wide"][0] == 99
    assert charged("wide") == 1


def test_an_exempt_path_has_the_headers_of_a_decorator(site, configure):
    configure(MIDDLEWARE=[{"path": "/", "exempt": True}])
    site.serve(rate_limit("login")(site.view(ok)), middleware=[OURS])
    assert policies_at(site, "/") == ["login"]


@both_ways
def test_the_view_finds_the_middleware_s_decision(site, clock):
    site.serve(site.view(lambda request: HttpResponse(f"{request.rate_limit.remaining} left")), middleware=[OURS])
    assert site.get().content == b"4 left"


@both_ways
@pytest.mark.parametrize("options", [{"MIDDLEWARE": [{"exempt": True}]}, {"ENABLED": False}])
def test_the_view_finds_a_decision_also_when_nothing_was_checked(site, configure, options):
    configure(**options)
    site.serve(site.view(lambda request: HttpResponse(f"{request.rate_limit.allowed}")), middleware=[OURS])
    assert site.get().content == b"True"


# Headers on every response


def raising(error):
    def view(request):
        raise error

    return view


@both_ways
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Http404(), 404),
        (PermissionDenied(), 403),
        (SuspiciousOperation(), 400),
        (RuntimeError(), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
@pytest.mark.parametrize("decorated", [False, True])
def test_django_s_error_pages_have_the_headers(site, clock, error, status, decorated):
    site.raises = False
    view = site.view(raising(error))
    site.serve(rate_limit("9/m", group="own")(view) if decorated else view, middleware=[OURS])
    response = site.get()
    assert response.status_code == status
    assert_clean_headers(response)
    wanted = {"default": (5, 60), "own": (9, 60)} if decorated else {"default": (5, 60)}
    assert rate_limit_fields(response)[0] == wanted
    assert response.headers["X-RateLimit-Remaining"] == "4"


def test_an_unknown_path_has_the_headers(site):
    response = site.get("/nowhere")
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (404, "4")


@pytest.mark.parametrize("middleware", [[OURS], []])
def test_headers_that_a_view_has_set_are_replaced(site, clock, middleware):
    def view(request):
        mine = {"ratelimit": "x", "RateLimit-Policy": "x", "X-RateLimit-Limit": "x", "X-RATELIMIT-RESET": "x"}
        return HttpResponse("ok", headers=mine)

    site.serve(rate_limit("9/m", group="own")(site.view(view)), middleware=middleware)
    response = site.get()
    assert_clean_headers(response)
    assert "own" in rate_limit_fields(response)[0]
    assert response.headers["X-RateLimit-Limit"] == ("5" if middleware else "9")
    assert response.headers["X-RateLimit-Reset"] == "60"


def test_a_view_s_own_429_is_left_alone(site):
    site.own_body = True
    mine = {"Retry-After": "7", "Cache-Control": "no-store"}
    site.serve(site.view(lambda request: HttpResponse("mine", status=429, headers=mine)), middleware=[OURS])
    response = site.get()
    assert (response.content, response.headers["Retry-After"]) == (b"mine", "7")
    assert response.headers["X-RateLimit-Remaining"] == "4"


@both_ways
def test_a_template_response_is_rendered_and_has_the_headers(site, settings):
    settings.TEMPLATES = templates({"page.html": "page"})
    site.serve(site.view(lambda request: TemplateResponse(request, "page.html")), middleware=[OURS])
    response = site.get()
    assert (response.content, response.headers["X-RateLimit-Remaining"]) == (b"page", "4")


# Users


@pytest.fixture
def with_users(site, settings):
    settings.SESSION_ENGINE = SESSIONS
    site.serve({route: site.view(ok) for route in ROUTES}, middleware=[*AUTHENTICATION, OURS])
    return site


@pytest.fixture
def ann(db):
    return User.objects.create(username="ann", pk=41)


@pytest.fixture
def bob(db):
    return User.objects.create(username="bob", pk=42)


@both_ways
@pytest.mark.parametrize("policy", ["user", "default"])
def test_a_user_is_counted_by_primary_key_from_any_address(with_users, configure, client, ann, policy):
    configure(MIDDLEWARE=[{"policies": [policy]}])
    with_users.log_in(ann)
    assert [with_users.get(address=f"203.0.113.{n}").status_code for n in range(2)] == [200, 200]
    prefix = "" if policy == "default" else f"{policy}/"
    assert counters(client) == [f"rlaas:rate_limit:{prefix}41"]


def test_users_at_one_address_do_not_share_a_counter(with_users, configure, ann, bob):
    configure(MIDDLEWARE=[{"policies": ["user"]}])
    with_users.log_in(ann)
    assert with_users.statuses(3) == [200, 200, 429]
    with_users.log_in(bob)
    assert with_users.statuses(3) == [200, 200, 429]


@both_ways
@pytest.mark.parametrize("policy", ["user", "default"])
@pytest.mark.django_db
def test_anonymous_users_are_counted_by_address(with_users, configure, client, policy):
    configure(MIDDLEWARE=[{"policies": [policy]}])
    for n in (1, 2):
        assert with_users.get(address=f"203.0.113.{n}").status_code == 200
    assert [key.rpartition("=")[2] for key in counters(client)] == ["203.0.113.1", "203.0.113.2"]


def test_a_user_s_counter_is_never_an_address_s(with_users, configure, client, ann):
    configure(MIDDLEWARE=[{"policies": ["user"]}])
    with_users.get(address="0.0.0.41")
    with_users.log_in(ann)
    with_users.get()
    assert counters(client) == ["rlaas:rate_limit:user/41", "rlaas:rate_limit:user/ip=0.0.0.41"]


@both_ways
def test_the_user_is_not_loaded_for_a_policy_by_address(with_users, configure, ann, django_assert_num_queries):
    configure(MIDDLEWARE=[{"policies": ["api"]}])
    with_users.log_in(ann)
    with django_assert_num_queries(0):
        assert with_users.statuses(3) == [200, 200, 429]


def username(request):
    return HttpResponse(request.user.username)


async def ausername(request):
    return HttpResponse((await request.auser()).username)


@pytest.mark.parametrize(
    ("way", "view", "queries"),
    [
        ("wsgi, def", username, 1),
        ("asgi, def", username, 1),
        ("asgi, async def", username, 1),
        ("asgi, async def", ausername, 2),  # Django keeps what `user` and `auser()` load apart
    ],
)
def test_the_user_is_loaded_once_for_limit_and_view(settings, ann, django_assert_num_queries, way, view, queries):
    site = Site(way, settings)
    settings.SESSION_ENGINE = SESSIONS
    site.serve(rate_limit("9/m", key="user")(view), middleware=[*AUTHENTICATION, OURS])
    site.log_in(ann)
    with django_assert_num_queries(queries):
        assert site.get().content == b"ann"


@both_ways
def test_an_exempt_path_loads_no_user(with_users, configure, ann, django_assert_num_queries):
    configure(MIDDLEWARE=[{"exempt": True}])
    with_users.log_in(ann)
    with django_assert_num_queries(0):
        with_users.get()


@both_ways
def test_functions_for_rate_key_and_cost_may_read_the_user(with_users, ann, bob):
    """Also in an async view, where `request.user` must not reach for the database."""
    limit = rate_limit(
        rate=lambda request: "4/m" if request.user.username == "ann" else "2/m",
        key=lambda request: request.user.username,
        cost=lambda request: 2 if request.user.is_authenticated else 1,
    )
    with_users.serve(limit(with_users.view(ok)), middleware=AUTHENTICATION)
    with_users.log_in(ann)
    assert with_users.statuses(3) == [200, 200, 429]
    with_users.log_in(bob)
    assert with_users.statuses(2) == [200, 429]


def test_a_site_without_users_counts_by_address(site, client):
    site.get()
    assert counters(client) == ["rlaas:rate_limit:ip=203.0.113.9"]


# The class and the handlers


def test_the_middleware_is_sync_or_async_as_the_rest_of_the_chain():
    async def anext_in_line(request):
        return HttpResponse("ok")

    assert not iscoroutinefunction(RateLimitMiddleware(ok))
    assert iscoroutinefunction(RateLimitMiddleware(anext_in_line))
    assert RateLimitMiddleware.sync_capable
    assert RateLimitMiddleware.async_capable


def test_the_view_s_exception_propagates_and_the_view_ran_once():
    runs, error = [], RuntimeError()

    def view(request):
        runs.append(request)
        raise error

    with pytest.raises(RuntimeError) as caught:
        RateLimitMiddleware(view)(RequestFactory().get("/"))
    assert caught.value is error
    assert len(runs) == 1


@pytest.mark.django_db  # Django closes its connections after a request
def test_a_wsgi_server_gets_429s(settings):
    Site("wsgi, def", settings).serve(ok, middleware=[OURS])
    application, heads, bodies = WSGIHandler(), [], []
    for _ in range(6):
        environ = RequestFactory().get("/", REMOTE_ADDR=ADDRESS).environ
        body = application(environ, lambda status, headers: heads.append((status, dict(headers))))
        bodies.append(b"".join(body))
        body.close()
    assert [status for status, _ in heads] == ["200 OK"] * 5 + ["429 Too Many Requests"]
    refused = SimpleNamespace(status_code=429, headers=CaseInsensitiveMapping(heads[5][1]), content=bodies[5])
    assert_refusal(refused, policies={"default": (5, 60)})


@pytest.mark.django_db
async def test_an_asgi_server_gets_429s(settings):
    Site("asgi, async def", settings).serve(ok, middleware=[OURS])
    application, heads, bodies = ASGIHandler(), [], []

    async def receive():
        if not received:
            received.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            heads.append((message["status"], message["headers"]))
        else:
            bodies.append(message["body"])

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "client": (ADDRESS, 1)}
    for _ in range(6):
        received = []
        await application({**scope, "headers": [(b"host", b"testserver")]}, receive, send)
    assert [status for status, _ in heads] == [200] * 5 + [429]
    headers = {name.decode(): value.decode() for name, value in heads[5][1]}
    refused = SimpleNamespace(status_code=429, headers=CaseInsensitiveMapping(headers), content=bodies[5])
    assert_refusal(refused, policies={"default": (5, 60)})


def test_disabled_nothing_is_counted(site, configure, client):
    configure(ENABLED=False)
    assert site.statuses(9) == [200] * 9
    assert policies_at(site, "/") == []
    assert counters(client) == []


def test_a_shadow_policy_in_a_rule_refuses_nobody(site, configure):
    configure(POLICIES={"trial": {"rate": "1/m", "key": "ip", "shadow": True}}, MIDDLEWARE=[{"policies": ["trial"]}])
    assert site.statuses(4) == [200] * 4
    assert charged(Policy("trial", "1/m", key="ip")) == 1


@both_ways
def test_the_setting_response_may_give_a_template_response(site, configure, settings, clock):
    """Django renders a view's, not a middleware's."""
    site.own_body = True
    settings.TEMPLATES = templates({"sorry.html": "sorry"})
    configure(RESPONSE=lambda request, decision: TemplateResponse(request, "sorry.html", status=429))
    site.statuses(5)
    refused = site.get()
    assert_refusal(refused, policies=["default"], own_body=True)
    assert refused.content == b"sorry"


async def test_a_subclass_keeps_its_process_view():
    class Middleware(RateLimitMiddleware):
        async def process_view(self, request, *args):
            return "mine"

    async def get_response(request):
        return HttpResponse("ok")

    assert await Middleware(get_response).process_view(None) == "mine"
