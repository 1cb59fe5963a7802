"""RATE_LIMITER: its defaults, and each mistake that it can have."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from rlaas_django import Rate, check, peek

from tests.support.internals import ALGORITHMS, SLIDING_WINDOW, check_settings, conf

pytestmark = pytest.mark.usefixtures("no_views")


def test_without_a_setting_the_defaults_apply(settings):
    del settings.RATE_LIMITER
    default = conf.config().policy("default")
    assert (default.rate, default.key) == (Rate(5, 60), "user_or_ip")
    assert conf.config().algo == SLIDING_WINDOW


def test_the_top_level_is_the_default_policy(configure):
    configure(USE_ALGO="fixed-window-algo", WINDOW_SIZE=10, MAX_REQUESTS=3)
    decision = check("alice")
    assert (decision.policy.name, decision.limit, decision.remaining) == ("default", 3, 2)
    assert decision.ttl <= 10


def test_a_named_policy_is_found_by_its_name(configure):
    configure(POLICIES={"search": {"rate": "30/10s", "key": "ip", "algo": "token-bucket-algo", "burst": 60}})
    decision = check("203.0.113.9", "search")
    assert (decision.policy.name, decision.limit) == ("search", 60)
    assert decision.outcomes[0].identity == "ip=203.0.113.9"


def test_named_policies_take_the_algorithm_of_the_setting(configure, client):
    configure(USE_ALGO="sliding-window-compact-algo", POLICIES={"a": {"rate": "5/m"}})
    check("alice", "a")
    assert client.keys() == [b"rlaas:rate_limit:a/alice:log"]


def test_an_overridden_setting_applies_at_once_and_only_meanwhile(settings):
    for limit in (2, 3):
        settings.RATE_LIMITER = {"TIMEOUT": 20, "MAX_REQUESTS": limit}
        assert peek("alice").limit == limit
    settings.RATE_LIMITER = {"TIMEOUT": 20}
    assert peek("alice").limit == 5


def test_the_algorithm_can_change_under_traffic(configure, client):
    for _ in range(3):
        for algo in ALGORITHMS:
            configure(USE_ALGO=algo, MAX_REQUESTS=3)
            assert check("alice").allowed
    for algo in ALGORITHMS:
        configure(USE_ALGO=algo)
        assert peek("alice").current_count == 3
    assert len(client.keys()) == len(ALGORITHMS)


def test_the_window_can_change_under_traffic(configure):
    for algo in ALGORITHMS:
        for window in (60, 1800, 60, 7):
            configure(USE_ALGO=algo, MAX_REQUESTS=100, WINDOW_SIZE=window)
            assert check("alice").allowed


def test_the_error_for_an_unknown_policy_suggests_the_nearest(configure):
    configure(POLICIES={"search": {"rate": "5/m"}})
    with pytest.raises(ImproperlyConfigured, match=r"no policy 'serach'; did you mean 'search'\?"):
        check("alice", "serach")


MISTAKES = [
    ("5/m", "E001", "RATE_LIMITER should be a dict, not '5/m'."),
    ({"MAX_REQUEST": 5}, "E001", "RATE_LIMITER has no key 'MAX_REQUEST'; did you mean 'MAX_REQUESTS'?"),
    ({"max_requests": 5}, "E001", "RATE_LIMITER has no key 'max_requests'; did you mean 'MAX_REQUESTS'?"),
    ({"policies": {}}, "E001", "did you mean 'POLICIES'?"),
    ({"POLICIES": {"a": {"Rate": "5/m"}}}, "E004", "is not a policy"),
    ({"POLICIES": {"a": {"rate": "5/m", "KEY": "ip"}}}, "E004", "no option 'KEY'; did you mean 'key'?"),
    ({5: 5}, "E001", "RATE_LIMITER has no key 5"),
    ({"USE_ALGO": "fixed-windw-algo"}, "E002", "did you mean 'fixed-window-algo'?"),
    ({"USE_ALGO": None}, "E002", "algorithm None is not known"),
    ({"USE_ALGO": ["x"]}, "E002", "algorithm ['x'] is not known"),
    ({"MAX_REQUESTS": 0}, "E003", "The limit 0 is below 1"),
    ({"MAX_REQUESTS": "5"}, "E003", "The limit '5' is not a whole number"),
    ({"WINDOW_SIZE": -60}, "E003", "The window -60 is below 1"),
    ({"WINDOW_SIZE": 31_536_001}, "E003", "over a year"),
    ({"POLICIES": ["search"]}, "E004", "should be a dict of names and policies"),
    ({"POLICIES": {"a": "5/m"}}, "E004", '\'5/m\' is not a policy; write {"rate": "5/m"'),
    ({"POLICIES": {"a": {"key": "ip"}}}, "E004", "is not a policy"),
    ({"POLICIES": {"a": {"rate": "5/month"}}}, "E004", "['a']: '5/month' is not a rate"),
    ({"POLICIES": {"a": {"rate": "5/m", "keey": "ip"}}}, "E004", "no option 'keey'; did you mean 'key'?"),
    ({"POLICIES": {"a b": {"rate": "5/m"}}}, "E004", "'a b' is not a policy name"),
    ({"POLICIES": {"default": {"rate": "5/m"}}}, "E004", "choose another name"),
    ({"POLICIES": {"a": {"rate": "5/m", "burst": 9}}}, "E004", "burst goes with 'token-bucket-algo'"),
    ({"POLICIES": {"a": {"rate": "5/m", "algo": "token-bucket-algo", "burst": 0}}}, "E004", "burst 0"),
    ({"POLICIES": {"a": {"rate": "5/m", "cost": -1}}}, "E004", "['a']: "),
    ({"POLICIES": {"a": {"rate": "5/m", "method": "PSOT"}}}, "E004", "['a']: "),
    ({"POLICIES": {"a": {"rate": "5/m", "charge_when": 401}}}, "E004", "['a']: "),
    ({"CACHE": "defualt"}, "E005", "should name an alias in CACHES, not 'defualt'; did you mean 'default'?"),
    ({"IPV6_PREFIX": 129}, "E006", "should be 1 to 128, not 129"),
]


@pytest.mark.parametrize(("value", "code", "message"), MISTAKES)
def test_a_mistake_is_an_error_of_the_system_check_and_of_the_first_use(settings, value, code, message):
    settings.RATE_LIMITER = value
    (found,) = check_settings()
    assert found.id == f"rlaas_django.{code}"
    assert message in found.msg
    with pytest.raises(ImproperlyConfigured):
        check("alice")


def test_every_mistake_is_reported_at_once(settings):
    settings.RATE_LIMITER = {"USE_ALGO": "x", "MAX_REQUESTS": 0, "POLICIES": {"a": {"rate": "x"}, "b": {}}}
    assert [found.id[-4:] for found in check_settings()] == ["E002", "E003", "E004", "E004"]


def test_good_settings_pass_the_check(configure):
    configure(POLICIES={"a": {"rate": "999/m"}, "b": {"rate": "9999/m", "algo": "sliding-window-compact-algo"}})
    assert check_settings() == []
    configure(CACHE="fakeredis")
    assert check_settings() == []


def test_a_long_sliding_window_is_a_warning_with_an_estimate_of_memory(configure):
    configure(POLICIES={"a": {"rate": "1000/m"}})
    (found,) = check_settings()
    assert found.id == "rlaas_django.W002"
    assert "120,000 MB per million users" in found.msg
    assert "sliding-window-compact-algo" in found.hint


@pytest.mark.parametrize(
    ("backend", "option"),
    [
        ("django_redis.cache.RedisCache", "SOCKET_TIMEOUT"),
        ("django.core.cache.backends.redis.RedisCache", "socket_timeout"),
    ],
)
def test_a_cache_without_socket_timeout_is_a_warning(settings, backend, option):
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": "redis://127.0.0.1:1/15"}}
    (found,) = check_settings()
    assert found.id == "rlaas_django.W001"
    assert option in found.hint
