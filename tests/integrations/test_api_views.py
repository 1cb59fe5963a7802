"""`key="user"` is the user whom the framework authenticated: Django REST framework's, and django-ninja's.

On a class of REST framework, that is. Outside of it the framework has not authenticated the request yet, and the
address counts.
"""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import include, re_path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from ninja import NinjaAPI
from ninja.security import HttpBearer, django_auth
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.exceptions import AuthenticationFailed, NotAcceptable, ValidationError
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.versioning import AcceptHeaderVersioning
from rest_framework.views import APIView, exception_handler
from rest_framework.viewsets import ViewSet
from rlaas_django import Policy, peek, rate_limit, rate_limit_exempt

from tests.support.http import OURS, Site, assert_refusal, counters, rate_limit_fields
from tests.support.internals import check_settings

AUTHENTICATED: list[str] = []  # the users that an authenticator was asked for


class ByHeader(BaseAuthentication):
    """Authenticates by a header, as a token would; `X-User: ?` is a wrong one."""

    def authenticate(self, request):
        user = request.headers.get("X-User")
        AUTHENTICATED.append(user)
        if user == "?":
            raise AuthenticationFailed
        return user and (SimpleNamespace(pk=user, is_authenticated=True), None)

    def authenticate_header(self, request):
        return "Header"


class Failing(BaseAuthentication):
    """Authenticates nobody, by a mistake."""

    def authenticate(self, request):
        raise ZeroDivisionError


class OneVersion(AcceptHeaderVersioning):
    allowed_versions = ("1",)


class ReadsNoUser(BasePermission):
    """Allows all, without a look at the user."""


def fail_early(self, request, *args, **kwargs):
    raise NotAcceptable


def handler(self, request, **kwargs):
    status = int(request.GET.get("status", "200"))
    if status >= 400:
        raise ValidationError({"status": status})
    remaining = request.rate_limit.remaining if hasattr(request, "rate_limit") else None
    return Response({"user": getattr(request.user, "pk", None), "remaining": remaining})


OPTIONS = {"authentication_classes": [ByHeader], "permission_classes": [], "get": handler, "post": handler}


def api_class(**options):
    return type("Api", (APIView,), {**OPTIONS, **options})


def function_view(**options):
    @api_view(["GET", "POST"])
    @authentication_classes([ByHeader])
    @permission_classes(options.get("permission_classes", []))
    def view(request):
        return handler(None, request)

    return view


def viewset(**options):
    return type("Api", (ViewSet,), {**OPTIONS, "list": handler, "create": handler, **options})


ON_CLASS = {
    "class": lambda limit, **options: limit(api_class(**options)).as_view(),
    "viewset": lambda limit, **options: limit(viewset(**options)).as_view({"get": "list", "post": "create"}),
}
OUTSIDE = {
    "dispatch": lambda limit, **options: method_decorator(limit, name="dispatch")(api_class(**options)).as_view(),
    "dispatch, listed": lambda limit, **options: method_decorator([never_cache, limit], name="dispatch")(
        api_class(**options)
    ).as_view(),
    "as_view": lambda limit, **options: limit(api_class(**options).as_view()),
    "api_view": lambda limit, **options: limit(function_view(**options)),
    "viewset, as_view": lambda limit, **options: limit(viewset(**options).as_view({"get": "list", "post": "create"})),
}
FORMS = {**ON_CLASS, **OUTSIDE}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
on_class = pytest.mark.parametrize("form", ON_CLASS.values(), ids=ON_CLASS)
outside = pytest.mark.parametrize("form", OUTSIDE.values(), ids=OUTSIDE)


@pytest.fixture
def site(settings):
    AUTHENTICATED.clear()
    site = Site("wsgi, def", settings)
    site.own_body = True  # never_cache, in one of the forms, writes a Cache-Control of its own
    return site


def as_user(site, user, **options):
    return site.get(headers={"X-User": user} if user else {}, **options)


def names(client):
    """Return whom the counters count."""
    return [key.rpartition("/")[2] for key in counters(client)]


# Django REST framework


@on_class
@pytest.mark.parametrize("key", ["user", "user_or_ip", lambda request: request.user.pk], ids=["user", "default", "own"])
def test_the_user_is_the_one_whom_rest_framework_authenticated(site, client, form, key):
    site.serve(form(rate_limit("1/m", key=key, group="g")))
    assert [as_user(site, user).status_code for user in ("41", "41", "42")] == [200, 429, 200]
    assert [name.removeprefix("key=") for name in names(client)] == ["41", "42"]


@outside
@pytest.mark.parametrize("key", ["user", "user_or_ip"])
def test_outside_of_the_framework_a_limit_by_user_counts_the_address(site, client, form, key):
    site.serve(form(rate_limit("2/m", key=key, group="g")))
    assert [as_user(site, user).status_code for user in ("41", "42", "41", "?")] == [200, 200, 429, 429]
    assert names(client) == ["ip=203.0.113.9"]


@outside
def test_outside_of_the_framework_functions_of_the_site_find_no_user(site, client, form):
    site.serve(form(rate_limit("1/m", key=lambda request: getattr(request, "user", None) and "41", group="g")))
    assert [as_user(site, user).status_code for user in ("41", "42")] == [200, 429]
    assert names(client) == ["ip=203.0.113.9"]


@on_class
def test_the_rate_function_reads_the_user_of_rest_framework(site, form):
    site.serve(form(rate_limit(rate=lambda request: "1/m" if request.user.pk == "41" else "2/m", key="user")))
    assert [as_user(site, "41").status_code for _ in range(2)] == [200, 429]
    assert [as_user(site, "42").status_code for _ in range(3)] == [200, 200, 429]


@every_form
def test_the_view_and_the_headers_have_the_decision(site, clock, form):
    site.serve(form(rate_limit("3/m", key="user", group="g")))
    response = as_user(site, "41")
    assert response.json() == {"user": "41", "remaining": 2}
    assert response.headers["RateLimit"] == '"g";r=2;t=60'
    [as_user(site, "41") for _ in range(2)]
    assert_refusal(as_user(site, "41"), policies={"g": (3, 60)}, wait=60, own_body=True)


@on_class
def test_a_request_without_or_with_wrong_credentials_counts_by_address(site, client, form):
    """Otherwise credentials could be tried without a limit."""
    site.serve(form(rate_limit("3/m", key="user", group="g"), permission_classes=[IsAuthenticated]))
    assert [as_user(site, user).status_code for user in ("?", None, "?", "?")] == [401, 401, 401, 429]
    assert names(client) == ["ip=203.0.113.9"]
    assert as_user(site, "41").status_code == 200
    response = as_user(site, "?", address="203.0.113.1")
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (401, "2")
    assert response.headers["WWW-Authenticate"] == "Header"


UNACCEPTABLE = {"Accept": "image/png"}


@on_class
@pytest.mark.parametrize("key", ["user", "user_or_ip", lambda request: request.user.pk], ids=["user", "default", "own"])
def test_what_fails_before_authentication_tells_nothing_about_credentials(site, client, form, key, log_lines):
    """REST framework negotiates the content first; then a limit by user has it authenticate the request."""
    site.serve(form(rate_limit("3/m", key=key, group="g"), permission_classes=[IsAuthenticated]))
    wrong = [site.get(headers={"X-User": "?", **UNACCEPTABLE}).status_code for _ in range(5)]
    assert wrong == [406, 406, 406, 429, 429]
    right = [site.get(headers={"X-User": "41", **UNACCEPTABLE}).status_code for _ in range(4)]
    assert right == [406, 406, 406, 429]
    assert sorted(name.removeprefix("key=") for name in names(client)) == ["41", "ip=203.0.113.9"]
    assert log_lines("raised") == []


@pytest.mark.parametrize("before", [{"versioning_class": OneVersion}, {"initial": fail_early}])
def test_other_failures_before_authentication_are_counted(site, client, before):
    site.serve(FORMS["class"](rate_limit("1/m", key="user", group="g"), **before))
    headers = {"Accept": "application/json; version=9"}
    statuses = [site.get(headers={"X-User": user, **headers}).status_code for user in ("?", "?", "41", "41")]
    assert statuses == [406, 429, 406, 429]
    assert sorted(names(client)) == ["41", "ip=203.0.113.9"]


@on_class
def test_credentials_that_nothing_but_a_limit_reads_are_counted(site, client, form):
    lazy = {"perform_authentication": lambda self, request: None, "permission_classes": [ReadsNoUser]}
    site.serve(form(rate_limit("2/m", key="user", group="g"), **lazy))
    assert [as_user(site, user).status_code for user in ("?", "?", "?", "41")] == [401, 401, 429, 200]
    assert sorted(names(client)) == ["41", "ip=203.0.113.9"]


def test_an_authenticator_that_fails_is_counted(site, client):
    site.serve(FORMS["class"](rate_limit("2/m", key="user", group="g"), authentication_classes=[Failing]))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            site.get()
    assert site.get().status_code == 429
    assert names(client) == ["ip=203.0.113.9"]


@pytest.mark.parametrize(
    ("body", "media_type", "status"),
    [
        ("{", "application/json", 400),
        ("x", "text/csv", 415),
    ],
)
def test_a_body_that_cannot_be_parsed_is_counted(site, client, body, media_type, status):
    limit = rate_limit(Policy("u", "9/m", key="user"), Policy("p", "2/m", key="post:name"))
    site.serve(FORMS["class"](limit))
    options = {"data": body, "content_type": media_type, "headers": {"X-User": "41"}}
    assert [site.request("post", **options).status_code for _ in range(3)] == [status, status, 429]
    assert counters(client) == ["rlaas:rate_limit:p/ip=203.0.113.9", "rlaas:rate_limit:u/41"]


@every_form
def test_what_the_view_raises_is_counted_and_has_the_headers(site, form):
    site.serve(form(rate_limit("2/m", key="user")))
    responses = [as_user(site, "41", where="/?status=400") for _ in range(3)]
    assert [response.status_code for response in responses] == [400, 400, 429]
    assert responses[0].headers["X-RateLimit-Remaining"] == "1"


@every_form
def test_charge_when_sees_the_response_that_the_framework_makes_of_an_exception(site, client, form):
    failed = rate_limit("2/m", key="user", group="g", charge_when=lambda response: response.status_code == 400)
    site.serve(form(failed))
    statuses = [as_user(site, "41", where=f"/?status={status}").status_code for status in (200, 400, 200, 400, 200)]
    assert statuses == [200, 400, 200, 400, 429]


@pytest.mark.parametrize(
    ("form", "key"),
    [
        *[pytest.param(form, "ip", id=f"{name}, ip") for name, form in FORMS.items()],
        *[pytest.param(form, "user", id=f"{name}, user") for name, form in ON_CLASS.items()],
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_the_exception_handler_of_the_site_is_called_once(site, settings, client, form, key, count):
    """Sites report to Sentry there."""
    reported = []

    def report(error, context):
        reported.append(type(error))
        return exception_handler(error, context)

    def limit(view):
        for i in range(count):
            view = rate_limit("9/m", key=key, group=f"g{i}", charge_on_error=False)(view)
        return view

    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": report}
    site.serve(form(limit))
    with pytest.raises(ValueError, match="invalid literal"):
        as_user(site, "41", where="/?status=none")
    assert as_user(site, "41", where="/?status=400").status_code == 400
    assert reported == [ValueError, ValidationError]
    client_of_both = {"ip": "203.0.113.9", "user": "41"}
    assert peek(client_of_both, Policy("g0", "9/m", key=key)).current_count == 1


@every_form
def test_a_method_that_the_view_does_not_have_is_counted(site, form):
    site.serve(form(rate_limit("1/m", key="user")))
    statuses = [site.request("patch", headers={"X-User": "41"}).status_code for _ in range(2)]
    assert statuses == [405, 429]


@every_form
def test_a_limit_by_address_is_checked_before_authentication(site, form):
    """So that it protects the authentication, which may use the database."""
    site.serve(form(rate_limit("1/m", key="ip")))
    assert [as_user(site, "41").status_code for _ in range(3)] == [200, 429, 429]
    assert AUTHENTICATED == ["41"]


@on_class
def test_several_limits_of_one_view(site, client, form):
    def limit(view):
        return rate_limit("1/m", key="user", group="own")(rate_limit("9/m", key="ip", group="address")(view))

    site.serve(form(limit))
    assert [as_user(site, user).status_code for user in ("41", "41", "42")] == [200, 429, 200]
    address = Policy("address", "9/m", key="ip")
    assert peek("203.0.113.9", address).current_count == 2  # what is refused costs nothing


@on_class
def test_with_the_middleware_the_user_of_a_decorator_is_rest_framework_s(site, client, configure, form):
    configure(POLICIES={"site": {"rate": "9/m", "key": "ip"}}, MIDDLEWARE=[{"policies": ["site"]}])
    site.serve(form(rate_limit("1/m", key="user", group="g")), middleware=[OURS])
    response = as_user(site, "41")
    assert sorted(rate_limit_fields(response)[0]) == ["g", "site"]
    assert as_user(site, "41").status_code == 429
    assert counters(client) == ["rlaas:rate_limit:g/41", "rlaas:rate_limit:site/ip=203.0.113.9"]
    assert peek("203.0.113.9", "site").current_count == 1


def test_a_class_at_another_url_is_not_limited(site):
    api = api_class()
    site.serve({"limited": rate_limit("1/m", key="user")(api.as_view()), "free": api.as_view()})
    assert [as_user(site, "41", where="/limited").status_code for _ in range(2)] == [200, 429]
    responses = [as_user(site, "41", where="/free") for _ in range(2)]
    assert [response.json()["remaining"] for response in responses] == [None, None]


def test_another_decorator_between_may_respond_by_itself(site, client):
    """As cache_page does; so the limit is checked before it, when the user is not known yet."""
    site.serve(rate_limit("1/m", key="user", group="g")(never_cache(function_view())))
    assert [as_user(site, user).status_code for user in ("41", "42")] == [200, 429]
    assert names(client) == ["ip=203.0.113.9"]


def test_disabled_nothing_is_checked(site, configure, client):
    configure(ENABLED=False)
    site.serve(rate_limit("1/m", key="user")(function_view()))
    assert [as_user(site, "41").status_code for _ in range(2)] == [200, 200]
    assert counters(client) == []


class AsyncApi(APIView):
    """An async view, as adrf has them."""

    authentication_classes = (ByHeader,)
    permission_classes = ()

    async def dispatch_async(self, request, *args, **kwargs):
        self.args, self.kwargs, self.headers = args, kwargs, {}
        self.request = request = self.initialize_request(request, *args, **kwargs)
        try:
            await sync_to_async(self.initial)(request, *args, **kwargs)
            found = getattr(self, request.method.lower(), self.http_method_not_allowed)
            called = found if iscoroutinefunction(found) else sync_to_async(found)
            response = await called(request, *args, **kwargs)
        except Exception as error:
            response = self.handle_exception(error)
        return self.finalize_response(request, response, *args, **kwargs)

    def dispatch(self, request, *args, **kwargs):
        return self.dispatch_async(request, *args, **kwargs)

    async def get(self, request):
        return handler(self, request)


def test_an_async_class_of_rest_framework(settings, client):
    site = Site("asgi, async def", settings)
    site.own_body = True
    site.serve(rate_limit("1/m", key="user", group="g")(type("Api", (AsyncApi,), {})).as_view())
    assert [as_user(site, user).status_code for user in ("41", "41", "42", "?")] == [200, 429, 200, 401]
    assert names(client) == ["41", "42", "ip=203.0.113.9"]
    statuses = [site.get(headers={"X-User": user, **UNACCEPTABLE}).status_code for user in ("?", "43", "43")]
    assert statuses == [429, 406, 429]


@pytest.mark.parametrize(
    "form",
    [
        lambda limit: limit(type("Api", (AsyncApi,), {}).as_view()),
        lambda limit: method_decorator(limit, name="dispatch")(type("Api", (AsyncApi,), {})).as_view(),
    ],
    ids=["as_view", "dispatch"],
)
def test_outside_of_an_async_class_a_limit_by_user_counts_the_address(settings, client, form):
    site = Site("asgi, async def", settings)
    site.serve(form(rate_limit("2/m", key="user", group="g")))
    assert [as_user(site, user).status_code for user in ("41", "?", "42")] == [200, 401, 429]
    assert names(client) == ["ip=203.0.113.9"]


def test_the_exception_handler_of_an_async_view_is_called_once(settings, client):
    reported = []
    options = {"get_exception_handler": lambda self: lambda error, context: reported.append(type(error))}
    site = Site("asgi, async def", settings)
    site.serve(rate_limit("9/m", key="user", group="g")(type("Api", (AsyncApi,), options)).as_view())
    with pytest.raises(ValueError, match="invalid literal"):
        as_user(site, "41", where="/?status=none")
    assert reported == [ValueError]


# django-ninja


class Bearer(HttpBearer):
    def authenticate(self, request, token):
        return {
            "user": User(pk=41),
            "text": "secret-token",
            "number": 7,
            "uuid": UUID(int=5),
            "record": SimpleNamespace(pk="secret-key"),
            "dict": {"sub": "41"},
            "true": True,
        }[token]


def ninja_site(settings, kind):
    api = NinjaAPI(auth=Bearer(), urls_namespace=f"n{ninja_site.count}")
    ninja_site.count += 1

    if kind == "def":

        @api.get("/")
        @rate_limit("1/m", key="user", group="g")
        def operation(request, number: int = 1):
            return {"number": number}
    else:

        @api.get("/")
        @rate_limit("1/m", key="user", group="g")
        async def operation(request, number: int = 1):
            return {"number": number}

    site = Site(f"{'wsgi' if kind == 'def' else 'asgi'}, {kind}", settings)
    site.serve({"": api.urls})
    return site


ninja_site.count = 0


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("token", "identity"),
    [
        ("user", "41"),
        *((token, "auth-") for token in ("text", "number", "uuid", "record")),
        *((token, "ip=203.0.113.9") for token in ("dict", "true")),
    ],
)
def test_under_ninja_the_user_is_what_the_operation_was_authenticated_as(settings, client, kind, token, identity):
    site = ninja_site(settings, kind)
    headers = {"Authorization": f"Bearer {token}"}
    assert [site.get("/?number=3", headers=headers).status_code for _ in range(2)] == [200, 429]
    (name,) = names(client)
    assert name.startswith(identity)
    assert "secret" not in name
    assert len(name) == (37 if identity == "auth-" else len(identity))


def test_credentials_of_different_kinds_have_different_counters():
    def name(auth):
        request = RequestFactory().get("/")
        request.auth = auth
        rate_limit("9/m", key="user")(lambda request: HttpResponse())(request)
        return request.rate_limit.outcomes[0].identity

    found = [name(auth) for auth in ("5", SimpleNamespace(pk="5"), User(pk=5), "6")]
    assert len(set(found)) == 4
    assert found[2] == "5"
    assert name("5") == found[0]
    assert [name(auth) for auth in (None, "", False, User())] == ["ip=127.0.0.1"] * 4


# The system check


@pytest.fixture
def warnings(settings):
    def found(urls, middleware=(OURS,)):
        Site("wsgi, def", settings).serve(urls, middleware)
        return [message.msg for message in check_settings() if message.id == "rlaas_django.W013"]

    return found


def ninja_urls(auth):
    api = NinjaAPI(auth=auth, urls_namespace=f"n{ninja_site.count}")
    ninja_site.count += 1
    api.get("/")(lambda request: {})
    return api.urls


@pytest.mark.usefixtures("no_views")
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda: function_view(), "ByHeader"),
        (lambda: api_class().as_view(), "ByHeader"),
        (lambda: viewset().as_view({"get": "list"}), "ByHeader"),
        (lambda: ninja_urls(Bearer()), "Bearer"),
        (lambda: ninja_urls([django_auth, Bearer()]), "Bearer"),
        (lambda: api_class(authentication_classes=[SessionAuthentication]).as_view(), None),
        (lambda: api_class(authentication_classes=[]).as_view(), None),
        (lambda: rate_limit_exempt(function_view()), None),
        (lambda: ninja_urls(None), None),
        (lambda: ninja_urls(django_auth), None),
        (lambda: HttpResponse, None),
    ],
)
def test_a_rule_by_user_for_a_view_that_a_framework_authenticates_is_a_warning(warnings, configure, make, how):
    view = make()
    found = warnings({"api/<int:number>/": view})  # without rules, the default policy
    assert [message.split(",")[1].split()[1] for message in found] == [how] * (how is not None)
    assert warnings({"api/<int:number>/": view}, middleware=()) == []
    by_address = {"rate": "5/m", "key": "ip"}
    configure(
        POLICIES={"user": {"rate": "5/m", "key": "user"}, "address": by_address},
        MIDDLEWARE=[{"path": "/api/1/open", "policies": ["user"]}, {"path": "/api/", "policies": ["address"]}],
    )
    assert warnings({"api/<int:number>/": view}) == []
    configure(MIDDLEWARE=[{"path": "/api/", "policies": ["address", "user"]}])
    assert len(warnings({"api/<int:number>/": view})) == (how is not None)


@pytest.mark.usefixtures("no_views")
def test_a_regular_expression_is_known_by_what_it_begins_with(warnings, configure, settings):
    configure(POLICIES={"user": {"rate": "5/m", "key": "user"}}, MIDDLEWARE=[{"path": "/api", "policies": ["user"]}])
    view = function_view()
    urls = [re_path(r"^api/v1/(?P<pk>[0-9]+)$", view)]
    assert len(warnings({"": include(urls)})) == 1
    assert warnings({"other/": include(urls)}) == []


@pytest.mark.usefixtures("no_views")
def test_a_limit_by_user_above_another_decorator_is_a_warning(warnings):
    early = rate_limit("5/m", key="user")(never_cache(function_view()))
    ((found),) = warnings({"a": early, "b": rate_limit("5/m", key="ip")(never_cache(api_class().as_view()))}, ())
    assert "is limited by user under" in found


@pytest.mark.usefixtures("no_views")
@on_class
def test_a_limit_by_user_on_a_class_is_not_a_warning(warnings, form):
    assert warnings({"": form(rate_limit("5/m", key="user"))}, ()) == []
