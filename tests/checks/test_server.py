"""The system checks that connect to Redis: what it permits, and what it evicts."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
from datetime import timedelta

import pytest
import redis
from django.core.management import call_command
from django.test import RequestFactory
from django.urls import reverse
from django.utils import timezone
from rlaas_django import Policy, acheck, areset, check, rate_limit, refund, reset

from tests.support.helpers import ACL_RULES
from tests.support.http import AUTHENTICATION, ok
from tests.support.internals import ALGORITHMS, check_eviction, check_rights, flush_statistics, set_override

pytestmark = pytest.mark.usefixtures("admin_site")
NAMES = itertools.count()


@pytest.fixture
def admin_site(settings):
    settings.ROOT_URLCONF = "tests.urls"
    settings.MIDDLEWARE = [
        *AUTHENTICATION,
        "django.contrib.messages.middleware.MessageMiddleware",
    ]


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def log_in(server, use):
    """Have the limiter connect as a user with these rules."""

    def log_in(*rules: str) -> None:
        name = f"limiter{next(NAMES)}"  # a new one: a pool of django-redis stays with its URL
        redis.Redis.from_url(server.url).execute_command("ACL", "SETUSER", name, *rules)
        use(server.url.replace("unix://", f"unix://{name}:s3cret@"), SOCKET_TIMEOUT=20, SOCKET_CONNECT_TIMEOUT=20)

    return log_in


@pytest.mark.django_db(transaction=True)
def test_the_documented_rights_are_enough(log_in, admin_client):
    log_in(*ACL_RULES)
    assert check_rights() == check_eviction() == []
    for algo in ALGORITHMS:
        policy = Policy(f"by-{algo}", "2/h", algo=algo)
        decisions = [check("alice", policy), asyncio.run(acheck("alice", policy))]
        assert not any(decision.degraded or not decision.allowed for decision in decisions)
        assert refund(decisions[0])
        assert reset("alice", policy) == 1
        assert asyncio.run(areset("alice", policy)) == 0
    rate_limit("2/h", group="seen")(ok)(RequestFactory().get("/"))
    flush_statistics()
    until = timezone.now() + timedelta(hours=1)
    set_override("alice", "", "block", until, by="operator", reason="spam")
    assert not check("alice", policy).allowed
    for page in ("changelist", "clients", "refusals", "overrides"):
        response = admin_client.get(reverse(f"admin:rlaas_django_ratelimit_{page}"))
        assert response.status_code == 200, page


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (["-time"], "TIME.*: .*'time' command"),
        (["-script"], "SCRIPT LOAD, a decision: .*'script"),
        (["-evalsha"], "a decision: .*'evalsha'"),
        (["-zadd"], "a decision: .*('zadd'|executing the script)"),
        (
            ["resetkeys", "~rlaas:rate_limit:*"],
            "rlaas:override:\\*, rlaas:\\*, a decision: .*o permissions",
        ),
        (
            ["resetkeys", "~rlaas:rate_limit:*", "~rlaas:override:*"],
            "\\(rlaas:\\*: .*o permissions",
        ),
        (["resetpass", ">other"], "username-password|WRONGPASS"),
    ],
)
def test_a_right_that_is_missing_is_a_warning_of_check_deploy(log_in, rules, told):
    log_in(*ACL_RULES, *rules)
    (message,) = check_rights()
    assert message.id == "rlaas_django.W010"
    assert re.search(told, message.msg), message.msg
    assert "+evalsha" in message.hint


def test_a_redis_that_is_unavailable_is_reported_once(redis_unavailable):
    (message,) = check_rights()
    assert message.msg.count("nowhere.sock") == 1
    assert check_eviction() == []


def test_the_rights_are_not_checked_where_the_settings_are_wrong_or_turned_off(configure, redis_unavailable):
    configure(ENABLED=False)
    assert check_rights() == []
    configure(ENABLED=True, CACHE="missing")
    assert check_rights() == check_eviction() == []


def test_the_checks_leave_nothing_in_redis(client):
    assert check_rights() == []
    assert client.keys("*system-check*") == []


def test_only_check_deploy_connects(redis_unavailable, no_views):
    call_command("check")
    output = io.StringIO()
    call_command("check", "--deploy", stderr=output)
    assert "W010" in output.getvalue()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_a_warning_of_check_deploy(server, use, policy):
    use(server.url)
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory-policy", policy)
    assert check_eviction() == []  # its memory is not bounded
    client.config_set("maxmemory", "100mb")
    (message,) = check_eviction()
    assert message.id == "rlaas_django.W011"
    assert policy in message.msg


@pytest.mark.django_db
def test_the_panel_warns_of_a_server_that_evicts(server, use, admin_client):
    use(server.url)
    page = reverse("admin:rlaas_django_ratelimit_changelist")
    assert "maxmemory-policy" not in admin_client.get(page).content.decode()
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    assert "maxmemory-policy allkeys-lru" in admin_client.get(page).content.decode()
