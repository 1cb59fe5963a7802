"""What `manage.py check` says of RATE_LIMITER['LOGIN'] and of AUTHENTICATION_BACKENDS."""

from __future__ import annotations

import pytest
from django.contrib.auth.backends import ModelBackend
from rlaas_django.auth import LoginRateLimitMixin

from tests.support.http import OURS
from tests.support.internals import check_logins, check_settings, conf

DJANGO_S = "django.contrib.auth.backends.ModelBackend"
LIMITED = "rlaas_django.auth.ModelBackend"


class Own(LoginRateLimitMixin, ModelBackend):
    pass


class Unlimited(ModelBackend):
    pass


class Reversed(ModelBackend, LoginRateLimitMixin):
    pass


class ByEmail(ModelBackend):
    def authenticate(self, request, email, password):
        return None


@pytest.fixture
def ids(settings):
    """Return the ids of the checks, and what they say, for these backends."""

    def found(*backends, middleware=(OURS,)):
        settings.AUTHENTICATION_BACKENDS = [*backends]
        settings.MIDDLEWARE = [*middleware]
        return {message.id.removeprefix("rlaas_django."): message.msg for message in check_logins()}

    return found


@pytest.mark.parametrize(
    ("login", "problem"),
    [
        ({"nam": ["5/m"]}, "there is no option 'nam'; did you mean 'name'?"),
        ({"name": "5/m"}, "name '5/m' is not a list"),
        ({"name": ["5/fortnight"]}, "'5/fortnight' is not a rate"),
        ({"name": ["5/m", "6/60"]}, "name has two rates over the same window"),
        ({"shadow": 1}, "shadow 1 is not True or False"),
        ("5/m", 'write {"name_and_address": ["5/5m"]}'),
        (True, 'write {"name_and_address": ["5/5m"]}'),
    ],
)
def test_an_invalid_setting_is_an_error_that_says_what_to_write(configure, login, problem):
    configure(LOGIN=login)
    (message,) = check_settings()
    assert message.id == "rlaas_django.E021"
    assert problem in message.msg


def test_a_policy_of_the_same_name_is_an_error(configure):
    configure(POLICIES={"login-name": {"rate": "5/m"}})
    (message,) = check_settings()
    assert message.id == "rlaas_django.E021"
    assert "policy 'login-name' is also in RATE_LIMITER['POLICIES']" in message.msg


@pytest.mark.parametrize("value", [["5/m"], {"name_and_address": ["5/m"]}])
def test_a_list_is_of_name_and_address_and_the_rest_are_the_defaults(configure, value):
    configure(LOGIN=value)
    login = conf.config().login
    rates = {counted: [str(policy.rate) for policy in policies] for counted, policies in login.items()}
    assert rates == {"name_and_address": ["5/m"], "name": ["100/h"], "address": ["100/h"]}


def test_an_empty_list_is_no_limit(configure):
    configure(LOGIN={"address": [], "name": []})
    assert [name for name, policies in conf.config().login.items() if policies] == ["name_and_address"]


@pytest.mark.parametrize("backend", [LIMITED, f"{__name__}.Own"])
def test_a_limited_backend_alone_is_right(ids, configure, backend):
    configure(LOGIN=["5/m"])
    assert ids(backend) == {}
    assert ids(backend, "django.contrib.auth.backends.RemoteUserBackend") == {}


def test_login_without_a_limited_backend_warns_only_if_it_is_set(ids, configure):
    assert ids(DJANGO_S) == {}
    configure(LOGIN=["5/m"])
    assert [*ids(DJANGO_S)] == ["W021"]


def test_a_second_backend_that_compares_passwords_warns(ids):
    found = ids(LIMITED, f"{__name__}.Unlimited")
    assert [*found] == ["W022"]
    assert "Unlimited in AUTHENTICATION_BACKENDS compares passwords" in found["W022"]


def test_a_mixin_behind_its_base_limits_nothing(ids):
    assert [*ids(LIMITED, f"{__name__}.Reversed")] == ["W022"]


def test_a_backend_that_takes_an_e_mail_address_compares_passwords(ids):
    assert [*ids(LIMITED, f"{__name__}.ByEmail")] == ["W022"]


def test_without_the_middleware_it_warns(ids):
    assert [*ids(LIMITED, middleware=())] == ["W023"]


def test_turned_off_it_says_nothing(ids, configure):
    configure(LOGIN=False)
    assert ids(LIMITED, DJANGO_S, middleware=()) == {}
