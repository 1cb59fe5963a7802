"""What checks, commands and the panel say where decisions are counted in the process."""

from __future__ import annotations

import unittest

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import SimpleTestCase
from django.urls import reverse
from rlaas_django import check
from rlaas_django.admin import RateLimitsOfUser
from rlaas_django.testing import RateLimitTestMixin

from tests.support.commands import rlaas
from tests.support.http import AUTHENTICATION
from tests.support.internals import SUBCOMMANDS, check_deployed_store, check_settings

pytestmark = pytest.mark.usefixtures("no_views")

NOTICE = "CACHES['default'] is not on Redis: each process counts by itself; configure Redis for more than one process."
ARGUMENTS = {
    "show": ["alice"],
    "reset": ["alice"],
    "block": ["alice", "--for", "1h", "--reason", "abuse"],
    "exempt": ["alice", "--for", "1h", "--reason", "abuse"],
    "limit": ["alice", "--factor", "2", "--for", "1h", "--reason", "abuse"],
    "end": ["alice"],
    "replay": ["access.log", "--policy", "5/m by ip"],
}
NEED_REDIS = sorted({*SUBCOMMANDS} - {"doctor", "token"})


@pytest.fixture
def default_caches(settings):
    """Django's default CACHES."""
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    settings.RATE_LIMITER = {"TRUSTED_PROXIES": []}


def test_check_warns_and_shows_the_lines_to_write(default_caches):
    (warning,) = check_settings()
    assert (warning.id, warning.msg) == ("rlaas_django.W016", NOTICE)
    assert warning.hint.startswith('CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache"')
    compile(warning.hint, "settings.py", "exec")


def test_check_deploy_is_an_error(default_caches):
    (error,) = check_deployed_store()
    assert error.id == "rlaas_django.E017"
    with pytest.raises(SystemCheckError, match=r"(?s)E017.*W016"):
        call_command("check", "--deploy", "--tag", "caches")


def test_check_deploy_has_nothing_to_say_with_redis():
    assert check_deployed_store() == []


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nowhere.RedisCache", "No module named 'nowhere'"),
        ("django_redis.cache.RedisCach", "RedisCach"),
        ("tests.backend.test_backend.OwnCache", "gives no Redis client"),
    ],
)
def test_a_cache_with_another_trouble_is_an_error(settings, backend, message):
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": "redis://127.0.0.1:1/0"}}
    settings.RATE_LIMITER = {}
    (error,) = check_settings()
    assert error.id == "rlaas_django.E007"
    assert message in error.msg
    assert "RATE_LIMITER" not in error.msg
    assert "CACHES = " in error.hint
    with pytest.raises(Exception, match=message):
        check("alice")


@pytest.mark.parametrize("name", NEED_REDIS)
def test_a_command_that_needs_redis_exits_with_1(default_caches, name):
    result = rlaas(name, *ARGUMENTS.get(name, []))
    assert result.code == 1
    assert f"This needs Redis. {NOTICE}" in result.out + result.err


def test_doctor_says_so(default_caches):
    result = rlaas("doctor")
    assert result.code == 1
    assert NOTICE in result.out
    assert "cannot be examined" not in result.out


@pytest.fixture
def panel(default_caches, settings):
    settings.ROOT_URLCONF = "tests.urls"
    settings.MIDDLEWARE = [*AUTHENTICATION, "django.contrib.messages.middleware.MessageMiddleware"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "name",
    ["changelist", "clients", "refusals", "shadow", "overrides", "add_override", "history", "identity", "policy"],
)
def test_a_page_of_the_panel_says_so(panel, admin_client, name):
    response = admin_client.get(reverse(f"admin:rlaas_django_ratelimit_{name}"))
    assert response.status_code == 200
    assert "Overrides and statistics need Redis." in response.content.decode()


@pytest.mark.django_db
def test_the_page_of_a_user_says_so(panel):
    users = RateLimitsOfUser()
    users.admin_site = admin.site
    assert "Overrides and statistics need Redis." in users.rate_limits(User.objects.create_user("alice"))


def test_the_mixin_for_tests_empties_the_counters(default_caches):
    class Tests(RateLimitTestMixin, SimpleTestCase):
        def test_one(self):
            assert check("alice").remaining == 4

        test_two = test_one

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Tests)
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun == 2
    assert result.wasSuccessful(), result.errors + result.failures


def test_the_fixture_for_tests_empties_the_counters(default_caches, rate_limits):
    assert check("alice").remaining == 4
