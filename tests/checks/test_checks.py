"""System checks beyond the mistakes of tests/checks/test_conf.py: rules, proxies, and the limits of views."""

from __future__ import annotations

import ipaddress
from functools import partial
from types import ModuleType

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.urls import path as urls_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rlaas_django import Policy, rate_limit
from rlaas_django.middleware import RateLimitMiddleware

from tests.support.http import ok
from tests.support.internals import check_proxies, check_settings, check_shared_cache, conf

pytestmark = pytest.mark.usefixtures("no_views")

AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"
OURS = "rlaas_django.middleware.RateLimitMiddleware"


def found() -> list[tuple[str, str]]:
    """Return the ids and messages of the checks."""
    return [(message.id.removeprefix("rlaas_django."), message.msg) for message in check_settings()]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("/api/", "'/api/' is not a rule"),
        ({"pth": "/api/"}, "no option 'pth'; did you mean 'path'?"),
        ({"path": "api/"}, "path 'api/' does not begin with a slash"),
        ({"path": 5}, "path 5 does not begin with a slash"),
        ({"path": "/a", "regex": "^/b"}, "a path or a regex, not both"),
        ({"regex": "("}, "MIDDLEWARE'][0]: missing ), unterminated subpattern"),
        ({"regex": 5}, "is not text"),
        ({"path": "/a", "methods": 5}, "The method 5 is neither text nor a list"),
        ({"path": "/a", "policies": "search"}, "policies 'search' is not a list of names"),
        ({"path": "/a", "policies": []}, "policies [] is not a list of names"),
        ({"path": "/a", "policies": ["serach"]}, "no policy 'serach'; did you mean 'search'?"),
        ({"path": "/a", "policies": [["search"]]}, "no policy ['search']"),
        ({"path": "/a", "policies": ["search"], "exempt": True}, "has policies, or exempt: True"),
        ({"path": "/a", "exempt": "yes"}, "has policies, or exempt: True"),
        ({"path": "/a", "policies": ["search"], "cost": 6}, "policy 'search': the cost 6 exceeds 5"),
        ({"path": "/a", "policies": ["search"], "cost": 1.5}, "The cost 1.5 is not a whole number"),
        ({"path": "/a", "charge_when": "401"}, "charge_when '401' is neither a function nor"),
        ({"path": "/a", "method": "PSOT"}, "'PSOT' is not known; did you mean 'POST'?"),
        ({"path": "/a", "method": "POST", "methods": ["PUT"]}, "a method or methods, not both"),
    ],
)
def test_an_invalid_rule_is_an_error(configure, rule, message):
    configure(POLICIES={"search": {"rate": "5/m"}}, MIDDLEWARE=[rule])
    ((code, text),) = found()
    assert code == "E008"
    assert message in text


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"MIDDLEWARE": {"path": "/"}}, "E008", "should be a list of rules"),
        ({"MIDDLEWARE": [{"methods": [1]}]}, "E008", "The HTTP method 1 is not known"),
        ({"MIDDLEWARE": [{"methods": []}]}, "E008", "The method [] is neither text nor a list"),
        ({"MIDDLEWARE": [{"methods": ["GET", "PSOT"]}]}, "E008", "method 'PSOT' is not known; did you mean 'POST'?"),
        ({"CACHE": ["default"]}, "E006", "should be text"),
        ({"PROXY_HEADER": "X-Real-IP"}, "E006", "'X-Forwarded-For', 'Forwarded' or None"),
        ({"ENABLED": "no"}, "E006", "should be True or False, not 'no'"),
        ({"HEADERS": "RateLimit"}, "E006", "should list some of"),
        ({"HEADERS": ["X-Rate"]}, "E006", "should list some of"),
        ({"HEADERS": None}, "E006", "should list some of"),
        ({"LOG_LINES_PER_SECOND": -1}, "E006", "not -1"),
        ({"TRUSTED_PROXIES": "10.0.0.0/8"}, "E009", "should be a list"),
        ({"TRUSTED_PROXIES": 5}, "E009", "should be a list"),
        ({"TRUSTED_PROXIES": ["10.0.0.0/33"]}, "E009", "'10.0.0.0/33' is not an address or network"),
        ({"TRUSTED_PROXIES": ["proxy.example"]}, "E009", "'proxy.example' is not an address or network"),
        ({"TRUSTED_PROXIES": [10]}, "E009", "10 is not an address or network"),
        ({"TRUSTED_PROXIES": [True]}, "E009", "True is not an address or network"),
        ({"TRUSTED_PROXIES": ["0.0.0.0/0"]}, "W003", "covers every address"),
        ({"TRUSTED_PROXIES": ["10.0.0.1", "::/0"]}, "W003", "covers every address"),
        ({"RESPONSE": "no.such.thing"}, "E010", "No module named 'no'"),
        ({"RESPONSE": "math.pi"}, "E010", "should be a callable"),
        ({"RESPONSE": 5}, "E010", "should be a callable"),
        ({"POLICIES": {"a": {"rate": "5/m", "key": "no.such.key"}}}, "E011", "'no.such.key' cannot be imported"),
        ({"POLICIES": {"a": {"rate": "5/m", "key": "math.pi"}}}, "E011", "'math.pi' is not a callable"),
    ],
)
def test_an_invalid_or_dangerous_value_is_reported(configure, options, code, message):
    configure(**options)
    ((seen, text),) = found()
    assert seen == code
    assert message in text


def test_a_dotted_path_of_a_rule_that_is_no_function_is_an_error(settings, configure):
    settings.MIDDLEWARE = [OURS]
    configure(MIDDLEWARE=[{"path": "/a", "charge_when": "math.pi"}])
    ((code, message),) = found()
    assert (code, message) == ("E011", "RATE_LIMITER['MIDDLEWARE'][0]: its charge_when 'math.pi' is not a callable.")


def test_listed_proxies_are_accepted(configure):
    configure(TRUSTED_PROXIES=["10.0.0.1", "10.0.0.0/8", "2001:db8::/32", "unix"])
    assert found() == []


def test_a_network_object_is_a_proxy(configure):
    network = ipaddress.ip_network("10.0.0.0/8")
    configure(TRUSTED_PROXIES=[network])
    assert found() == []
    assert conf.config().proxies == (network,)


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ((5, 2, 0), True),
        ((5, 2, 12), True),
        ((5, 2, 13), False),
        ((5, 2, 19), False),
        ((6, 0, 0), True),
        ((6, 0, 3), True),
        ((6, 0, 4), False),
        ((6, 1, 0), False),
    ],
)
def test_a_django_that_mistakes_underscores_in_headers_is_a_warning_behind_proxies(
    configure, monkeypatch, version, warned
):
    monkeypatch.setattr("django.VERSION", (*version, "final", 0))
    assert found() == []  # no forwarding header is read
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert [code for code, _ in found()] == ["W006"] * warned


def test_proxies_that_are_not_set_are_a_warning_of_check_deploy(configure):
    assert [message.id for message in check_proxies()] == ["rlaas_django.W004"]
    configure(TRUSTED_PROXIES=[])
    assert check_proxies() == []


@pytest.mark.parametrize(
    ("middleware", "warned"),
    [([OURS], False), ([OURS, AUTHENTICATION], True), ([AUTHENTICATION, OURS], False), ([AUTHENTICATION], False)],
)
def test_the_middleware_must_come_after_authentication_to_count_by_user(settings, configure, middleware, warned):
    configure(MAX_REQUESTS=5)
    settings.MIDDLEWARE = middleware
    assert ([code for code, _ in found()] == ["W005"]) == warned


@pytest.mark.parametrize("middleware", [[], [AUTHENTICATION], ["no.such.Middleware"]])
def test_rules_without_the_middleware_are_a_warning(settings, configure, middleware):
    settings.MIDDLEWARE = middleware
    assert found() == []  # without rules
    configure(MIDDLEWARE=[{"path": "/api/", "exempt": True}])
    ((code, message),) = found()
    assert code == "W007"
    assert "MIDDLEWARE has no rlaas_django.middleware.RateLimitMiddleware" in message


def test_a_site_limited_by_the_defaults_alone_is_a_warning(settings, configure):
    """Five requests per minute, where nobody has chosen a number: a page with six images has its user locked out."""
    settings.MIDDLEWARE = [AUTHENTICATION, OURS]
    ((code, message),) = found()
    assert code == "W024"
    assert "the whole site, the admin included, is limited to 5/m per client" in message


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"WINDOW_SIZE": 30}, True),
        ({"POLICIES": {"search": {"rate": "5/m"}}}, True),
        ({"MAX_REQUESTS": 5}, False),
        ({"MIDDLEWARE": [{"path": "/", "policies": ["default"]}]}, False),
        ({"MIDDLEWARE": [{"path": "/", "exempt": True}]}, False),
        ({"ENABLED": False}, False),
    ],
)
@pytest.mark.parametrize("has_middleware", [True, False])
def test_the_defaults_are_no_warning_where_they_were_chosen(settings, configure, options, warned, has_middleware):
    settings.MIDDLEWARE = [OURS] if has_middleware else []
    configure(**options)
    assert ("W024" in [code for code, _ in found()]) == (warned and has_middleware)


class OwnMiddleware(RateLimitMiddleware):
    pass


@pytest.mark.parametrize("ours", [OURS, "tests.checks.test_checks.OwnMiddleware"])
def test_the_middleware_may_be_a_subclass(settings, configure, ours):
    settings.MIDDLEWARE = [AUTHENTICATION, ours]
    configure(MIDDLEWARE=[{"path": "/api/", "exempt": True}])
    assert found() == []


REACHED = [
    ([{"path": "/api/open"}, {"path": "/api"}, {"path": "/"}], []),
    ([{"path": "/api", "methods": ["POST"]}, {"path": "/api"}], []),
    ([{"path": "/api", "methods": ["GET"]}, {"path": "/api", "methods": ["GET", "POST"]}], []),
    ([{"path": "/api"}, {"path": "/apiary"}], []),
    ([{"path": "/api"}, {"regex": "^/api/"}, {}], []),
    ([{"regex": "^/a"}, {"regex": "^/b"}, {"path": "/a"}], []),
    ([{"path": "/"}, {"path": "/api"}], [(1, 0)]),
    ([{}, {"regex": "^/api"}, {"methods": ["POST"]}], [(1, 0), (2, 0)]),
    ([{"path": "/api/"}, {"path": "/api/v1", "methods": ["POST"]}], [(1, 0)]),
    ([{"path": "/api", "methods": ["GET", "POST"]}, {"path": "/api/v1", "methods": ["HEAD"]}], [(1, 0)]),
    ([{"path": "/x"}, {"regex": "^/a"}, {"regex": "^/a", "methods": ["POST"]}], [(2, 1)]),
]


@pytest.mark.parametrize(("rules", "unreachable"), REACHED)
def test_a_rule_that_an_earlier_one_covers_is_a_warning(settings, configure, rules, unreachable):
    settings.MIDDLEWARE = [OURS]
    configure(MIDDLEWARE=[{**rule, "exempt": True} for rule in rules])
    messages = [f"RATE_LIMITER['MIDDLEWARE'][{i}] is never reached: [{j}] matches" for i, j in unreachable]
    assert [code for code, _ in found()] == ["W008"] * len(unreachable)
    assert [message[: len(start)] for start, (_, message) in zip(messages, found(), strict=True)] == messages


def cache(location, backend="django_redis.cache.RedisCache"):
    options = {"SOCKET_TIMEOUT": 1} if "django_redis" in backend else {"socket_timeout": 1}
    return {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}


SERVER = "redis://127.0.0.1:6379"
DJANGO = "django.core.cache.backends.redis.RedisCache"


@pytest.mark.parametrize(
    ("caches", "alias", "shared"),
    [
        ({"default": cache(f"{SERVER}/0")}, "default", True),
        ({"default": cache(f"{SERVER}/0"), "limits": cache(f"{SERVER}/1")}, "limits", False),
        ({"default": cache(f"{SERVER}/0"), "limits": cache(f"{SERVER}/1")}, "default", True),
        ({"default": cache(f"{SERVER}/0"), "limits": cache(f"{SERVER}/0")}, "limits", True),
        ({"default": cache(SERVER), "limits": cache(f"{SERVER}/0", DJANGO)}, "limits", True),
        ({"default": cache("redis://127.0.0.1:6380/0"), "limits": cache(f"{SERVER}/0")}, "limits", False),
        ({"default": cache("", "django.core.cache.backends.locmem.LocMemCache"), "limits": cache(SERVER)}, "limits", 0),
        ({"default": cache("", "django.core.cache.backends.locmem.LocMemCache")}, "default", False),  # W016
        ({"default": cache(SERVER)}, "defualt", False),  # E005
    ],
)
def test_a_cache_that_the_site_uses_too_is_a_warning_of_check_deploy(settings, configure, caches, alias, shared):
    settings.CACHES = caches
    configure(CACHE=alias)
    assert [message.id for message in check_shared_cache()] == ["rlaas_django.W009"] * shared
    assert "W009" not in [code for code, _ in found()]


def test_the_default_policy_does_not_matter_where_there_are_rules_without_it(settings, configure):
    settings.MIDDLEWARE = [OURS, AUTHENTICATION]
    configure(POLICIES={"api": {"rate": "5/m", "key": "ip"}}, MIDDLEWARE=[{"path": "/api/", "policies": ["api"]}])
    assert found() == []
    configure(MIDDLEWARE=[{"path": "/api/"}])
    assert [code for code, _ in found()] == ["W005"]


def test_a_policy_name_with_two_definitions_is_an_error():
    @rate_limit("5/m", group="shared")
    def one(request):
        return HttpResponse()

    @rate_limit("6/m", group="shared")
    def other(request):
        return HttpResponse()

    @rate_limit("5/m", group="shared")
    def same(request):
        return HttpResponse()

    codes = [code for code, message in found()]
    assert codes == ["E012"]


def made_by_a_function():
    @rate_limit("5/m")
    def view(request):
        return HttpResponse()

    return view


def lambdas():
    limit = rate_limit("5/m")
    return limit(lambda request: HttpResponse("a")), limit(lambda request: HttpResponse("b"))


@pytest.mark.parametrize(
    ("views", "shared"),
    [
        (lambda: [made_by_a_function(), made_by_a_function()], True),
        (lambdas, True),
        (lambda: [rate_limit("5/m")(partial(ok)), rate_limit("5/m")(partial(ok))], True),
        (lambda: [made_by_a_function()], False),
        (lambda: [rate_limit("5/m")(ok), rate_limit("5/m")(ok)], False),  # one view at two URLs
        (lambda: [rate_limit("100/h")(rate_limit("5/m")(ok))], False),  # two decorators on one view
        (lambda: [rate_limit("100/h")(cache_control(private=True)(rate_limit("5/m")(ok)))], False),
        (lambda: [rate_limit("100/h")(view) for view in (made_by_a_function(), made_by_a_function())], True),
        (lambda: [rate_limit("5/m", group="g")(lambda request: ok(request)) for _ in range(2)], False),
        (lambda: [rate_limit("login")(lambda request: ok(request)) for _ in range(2)], False),
        (lambda: [rate_limit("5/m")(View.as_view()) for _ in range(2)], False),
    ],
)
def test_views_that_share_a_name_and_so_a_counter_are_a_warning(configure, views, shared):
    configure(POLICIES={"login": {"rate": "5/m"}})
    in_use = views()
    assert [code for code, _ in found()] == ["W012"] * shared
    assert in_use


def test_a_method_that_many_requests_reach_is_one_view():
    class Page(View):
        @method_decorator([rate_limit("100/h"), rate_limit("5/m")])
        def get(self, request):
            return HttpResponse()

    for _ in range(3):
        assert Page.as_view()(RequestFactory().get("/")).status_code == 200
    assert found() == []


def test_a_decorator_that_redefines_a_policy_of_the_settings_is_an_error(configure):
    configure(POLICIES={"redefined": {"rate": "5/m"}})

    @rate_limit(Policy("redefined", "9/m"))
    def view(request):
        return HttpResponse()

    assert [code for code, message in found()] == ["E012"]


def test_a_large_log_of_a_decorator_is_a_warning_once():
    @rate_limit("5000/m", group="large")
    def one(request):
        return HttpResponse()

    @rate_limit("5000/m", group="large")
    def other(request):
        return HttpResponse()

    @rate_limit(Policy("compact", "5000/m", algo="sliding-window-compact-algo"))
    def compact(request):
        return HttpResponse()

    ((code, message),) = found()
    assert code == "W002"
    assert "5000 entries" in message


def test_a_large_log_that_all_clients_share_is_no_warning(configure):
    """There is one counter, and not one for each of a million users."""
    configure(POLICIES={"site": {"rate": "10_000/h", "key": "global"}})
    view = rate_limit("5000/m", key="global")(ok)
    assert found() == []
    assert view


def test_a_view_with_an_unknown_policy_is_an_error(configure):
    configure(POLICIES={"search": {"rate": "5/m"}})

    @rate_limit("serach")
    def view(request):
        return HttpResponse()

    ((code, message),) = found()
    assert code == "E013"
    assert "test_a_view_with_an_unknown_policy_is_an_error" in message
    assert "did you mean 'search'?" in message


@pytest.mark.parametrize("as_method", [False, True])
def test_a_burst_without_token_bucket_is_an_error(configure, as_method):
    limit = rate_limit("5/m", burst=9)
    view = method_decorator(limit) if as_method else limit(lambda request: HttpResponse())
    ((code, message),) = found()
    assert code == "E014"
    assert "burst goes with 'token-bucket-algo', and RATE_LIMITER['USE_ALGO'] is 'sliding-window-algo'" in message
    configure(USE_ALGO="token-bucket-algo")
    assert found() == []
    assert view


@pytest.mark.parametrize(("policy", "cost", "wrong"), [("small", 5, False), ("small", 6, True), ("large", 60, False)])
def test_a_cost_over_the_limit_of_a_named_policy_is_an_error(configure, policy, cost, wrong):
    bucket = {"rate": "5/m", "algo": "token-bucket-algo", "burst": 60}
    configure(POLICIES={"small": {"rate": "5/m"}, "large": bucket})
    view = rate_limit(policy, cost=cost)(lambda request: HttpResponse())
    assert [code for code, _ in found()] == ["E015"] * wrong
    assert view


def test_a_cost_that_is_too_large_for_the_algorithm_is_an_error(configure):
    view = rate_limit("20000/m", cost=10_001, group="g")(lambda request: HttpResponse())
    assert [code for code, message in found() if "the cost 10001 is over 10000" in message] == ["E015"]
    configure(USE_ALGO="sliding-window-compact-algo")
    assert found() == []
    assert view


def is_401(response):
    return response.status_code == 401


def use_view(settings, view, path="search/"):
    """Have a view, which a rule may match, at a URL of the site."""
    urls = ModuleType("urls")
    urls.urlpatterns = [urls_path(path, view)]
    settings.ROOT_URLCONF = urls


@pytest.mark.parametrize(
    ("rule", "decorator", "warned"),
    [
        ({}, {}, False),
        ({"cost": 1}, {}, False),
        ({"cost": 2}, {"cost": 2}, False),
        ({"charge_when": is_401}, {"charge_when": f"{__name__}.is_401"}, False),
        ({"method": "POST", "cost": 2}, {"method": "GET"}, False),
        ({"path": "/other/", "cost": 2}, {}, False),
        ({"charge_when": "no.such.function"}, {"charge_when": "no.such.function"}, False),
        ({"cost": 2}, {}, True),
        ({"method": "POST", "cost": 2}, {}, True),
        ({}, {"cost": ok}, True),
        ({"charge_when": is_401}, {}, True),
        ({}, {"cost": 2, "charge_when": is_401}, True),
    ],
)
@pytest.mark.parametrize("has_middleware", [True, False])
def test_a_policy_that_a_rule_and_a_decorator_charge_differently_is_a_warning(
    configure, settings, rule, decorator, warned, has_middleware
):
    settings.MIDDLEWARE = [OURS] if has_middleware else []
    policies = {"search": {"rate": "5/m", "key": "ip"}, "every": {"rate": "9/m", "key": "ip"}}
    configure(POLICIES=policies, MIDDLEWARE=[{"path": "/search/", **rule, "policies": ["every", "search"]}])
    use_view(settings, rate_limit("search", **decorator)(ok))
    messages = [message for code, message in found() if code == "W014"]
    assert len(messages) == (warned and has_middleware)
    for message in messages:
        assert message.startswith("The middleware and tests.support.http.ok both apply policy 'search'")


def test_the_default_policy_that_the_middleware_applies_without_rules_is_compared_as_well(configure, settings):
    configure(MAX_REQUESTS=5)
    settings.MIDDLEWARE = [OURS]
    use_view(settings, rate_limit(cost=3)(ok))
    ((code, message),) = found()
    assert code == "W014"
    assert message.startswith("The middleware and tests.support.http.ok both apply policy 'default', with another cost")


@pytest.mark.parametrize(
    ("classes", "warned"),
    [
        ([TokenAuthentication], True),
        ([SessionAuthentication], False),
        ([SessionAuthentication, TokenAuthentication], True),
    ],
)
def test_a_decorator_by_user_above_the_authentication_of_a_framework_is_a_warning(settings, classes, warned):
    view = cache_control(private=True)(api_view(["GET"])(authentication_classes(classes)(lambda request: None)))
    use_view(settings, rate_limit("5/m", key="user")(view))
    assert [code for code, _ in found()] == ["W013"] * warned


UPDATE, FETCH = (f"django.middleware.cache.{name}CacheMiddleware" for name in ("Update", "FetchFrom"))


@pytest.mark.parametrize(
    ("middleware", "decorated", "warned"),
    [
        ([UPDATE, OURS, FETCH], False, True),
        ([UPDATE, FETCH, OURS], False, True),
        ([UPDATE, FETCH], True, True),
        ([UPDATE, FETCH], False, False),
        ([OURS, UPDATE, FETCH], True, False),
        ([OURS], True, False),
    ],
)
def test_a_cache_of_whole_pages_inside_which_limits_are_decided_is_a_warning(
    settings, configure, middleware, decorated, warned
):
    configure(MAX_REQUESTS=5)
    settings.MIDDLEWARE = middleware
    view = rate_limit("5/m", key="ip")(ok) if decorated else ok
    assert [code for code, _ in found()] == ["W015"] * warned
    assert view


@pytest.mark.parametrize("option", ["cost", "charge_when", "response", "key"])
@pytest.mark.parametrize(
    ("path", "reason"), [("no.such.function", "cannot be imported"), ("math.pi", "not a callable")]
)
def test_a_dotted_path_of_a_decorator_that_is_no_function_is_an_error(option, path, reason):
    view = rate_limit("5/m", **{option: path})(lambda request: HttpResponse())
    ((code, message),) = found()
    assert code == "E011"
    assert f"its {option} '{path}'" in message
    assert reason in message
    assert view


@override_settings(INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"])
@pytest.mark.parametrize("use", [lambda: rate_limit("5/m"), lambda: rate_limit(ok), lambda: RateLimitMiddleware(ok)])
def test_without_the_app_a_decorator_and_the_middleware_are_an_error(use):
    """Its checks are not registered, so that `manage.py check` cannot tell; but it imports the views."""
    with pytest.raises(ImproperlyConfigured, match="Add 'rlaas_django' to INSTALLED_APPS"):
        use()


def test_manage_py_check_runs_them(configure, capsys):
    configure(TRUSTED_PROXIES=["0.0.0.0/0"])
    call_command("check", tag=["caches"])
    assert "rlaas_django.W003" in capsys.readouterr().err
