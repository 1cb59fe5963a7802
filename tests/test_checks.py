"""System checks beyond the mistakes of tests/test_conf.py: rules, proxies, and the limits of views."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.http import HttpResponse

from rlaas_django import Policy, rate_limit
from tests.internals import check_proxies, check_settings

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
        ({"path": "/a", "methods": "POST"}, "methods 'POST' is not a list"),
        ({"path": "/a", "methods": 5}, "methods 5 is not a list"),
        ({"path": "/a", "policies": "search"}, "policies 'search' is not a list of names"),
        ({"path": "/a", "policies": []}, "policies [] is not a list of names"),
        ({"path": "/a", "policies": ["serach"]}, "no policy 'serach'; did you mean 'search'?"),
        ({"path": "/a", "policies": [["search"]]}, "no policy ['search']"),
        ({"path": "/a", "policies": ["search"], "exempt": True}, "has policies, or exempt: True"),
        ({"path": "/a", "exempt": "yes"}, "has policies, or exempt: True"),
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
        ({"MIDDLEWARE": [{"methods": [1]}]}, "E008", "methods [1] is not a list"),
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


def test_listed_proxies_are_accepted(configure):
    configure(TRUSTED_PROXIES=["10.0.0.1", "10.0.0.0/8", "2001:db8::/32", "unix"])
    assert found() == []


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
def test_the_middleware_must_come_after_authentication_to_count_by_user(settings, middleware, warned):
    settings.MIDDLEWARE = middleware
    assert ([code for code, _ in found()] == ["W005"]) == warned


def test_the_default_policy_does_not_matter_where_a_rule_matches_everything(settings, configure):
    settings.MIDDLEWARE = [OURS, AUTHENTICATION]
    configure(MIDDLEWARE=[{"path": "/", "exempt": True}])
    assert found() == []


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


def test_a_view_with_an_unknown_policy_is_an_error(configure):
    configure(POLICIES={"search": {"rate": "5/m"}})

    @rate_limit("serach")
    def view(request):
        return HttpResponse()

    ((code, message),) = found()
    assert code == "E013"
    assert "test_a_view_with_an_unknown_policy_is_an_error" in message
    assert "did you mean 'search'?" in message


def test_manage_py_check_runs_them(configure, capsys):
    configure(TRUSTED_PROXIES=["0.0.0.0/0"])
    call_command("check", tag=["caches"])
    assert "rlaas_django.W003" in capsys.readouterr().err
