"""manage.py rlaas doctor: each thing that is wrong is found, with what to write instead."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpResponse
from django.test import RequestFactory
from rlaas_django import check, rate_limit

from tests.support.commands import rlaas
from tests.support.internals import backend, doctor, flush_statistics

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_views")]


@pytest.fixture
def healthy(own, settings, configure):
    """Settings and a server without anything to complain about."""
    entry = settings.CACHES["default"]
    settings.CACHES = {"default": settings.CACHES["locmem"], "limits": entry}
    configure(CACHE="limits", TRUSTED_PROXIES=[])
    return own


def findings(*options: str, code: int = 0) -> dict[str, dict]:
    result = rlaas("doctor", "--json", *options)
    assert result.code == code, result.out
    return {finding["subject"]: finding for finding in result.json}


def levels(found: dict[str, dict]) -> set[str]:
    return {finding["level"] for finding in found.values()}


def test_a_healthy_server_has_no_complaint(healthy):
    check("alice")
    found = findings("--strict")
    assert levels(found) == {"ok"}
    subjects = "settings connection latency clock version memory persistence keys proxies"
    assert set(found) == set(subjects.split())
    assert "over 200 calls" in found["latency"]["text"]
    assert "over a unix socket" in found["connection"]["text"]
    shown = rlaas("doctor").out
    assert shown.startswith("ok      settings: The system checks find nothing.\n")


@pytest.mark.usefixtures("redis_unavailable")
def test_an_unavailable_redis_is_an_error():
    found = findings(code=1)
    assert found["connection"]["level"] == "error"
    assert "LOCATION" in found["connection"]["fix"]


def test_wrong_settings_are_an_error(settings):
    settings.RATE_LIMITER = {"MAX_REQUEST": 5}
    found = findings(code=1)
    assert "did you mean 'MAX_REQUESTS'" in found["settings (rlaas_django.E001)"]["text"]


def test_a_shared_cache_is_a_warning_and_strict_exits_with_2(healthy, settings, configure):
    settings.CACHES = {"default": settings.CACHES["limits"]}
    configure(CACHE="default")
    assert findings()["settings (rlaas_django.W009)"]["level"] == "warning"
    findings("--strict", code=2)


def test_a_server_that_drops_counters_is_a_warning(healthy):
    backend.run_commands(
        [("CONFIG", "SET", "maxmemory", "100mb"), ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")]
    )
    found = findings()
    assert "maxmemory-policy allkeys-lru" in found["settings (rlaas_django.W011)"]["text"]
    assert found["memory"]["level"] == "ok"


def test_middleware_before_authentication_is_a_warning(healthy, settings):
    users = "django.contrib.auth.middleware.AuthenticationMiddleware"
    settings.MIDDLEWARE = ["rlaas_django.middleware.RateLimitMiddleware", users]
    assert "settings (rlaas_django.W005)" in findings()


def test_a_key_without_a_ttl_is_an_error(healthy):
    backend.run_commands([("SET", "rlaas:rate_limit:alice:log", 1)])
    found = findings(code=1)["keys"]
    assert "1 of 1 keys have no TTL, such as rlaas:rate_limit:alice:log" in found["text"]
    assert "UNLINK" in found["fix"]


def test_a_slow_server_is_a_warning(healthy, configure, monkeypatch):
    configure(TIMEOUT=0.001)
    monkeypatch.setattr(doctor.time, "perf_counter", iter(range(10_000)).__next__)
    found = list(doctor.look_at_connection(backend.servers()[0]))
    assert [each.level for each in found if each.subject == "latency"] == ["warning"]


@pytest.mark.parametrize(
    ("info", "subject", "level", "text"),
    [
        ({"redis_version": "5.0.14"}, "version", "error", "too old"),
        ({"redis_version": "7.0.15", "role": "slave"}, "role", "error", "takes no writes"),
        ({"redis_version": "7.0.15"}, "version", "ok", "7.0.15"),
        ({"maxmemory": "100", "used_memory": "95"}, "memory", "error", "soon the server takes no writes"),
        ({"maxmemory": "100", "used_memory": "50"}, "memory", "ok", "50.0 %"),
        ({"rdb_last_bgsave_status": "err"}, "persistence", "error", "rdb_last_bgsave_status"),
        ({}, "server", "warning", "does not permit INFO"),
    ],
)
def test_what_info_tells(healthy, monkeypatch, info, subject, level, text):
    whole = {"redis_version": "7.0.15", "role": "master", **info} if info else {}
    monkeypatch.setattr(backend, "server_info", lambda _: whole)
    found = {each.subject: each for each in doctor.look_at_state(backend.servers()[0])}
    assert found[subject].level == level
    assert text in found[subject].text
    assert level == "ok" or found[subject].fix


def test_a_clock_that_differs_is_a_warning(healthy, monkeypatch):
    now = doctor.time.time()
    monkeypatch.setattr(doctor.time, "time", lambda: now + 60)
    (clock,) = [each for each in doctor.look_at_connection(backend.servers()[0]) if each.subject == "clock"]
    assert (clock.level, clock.fix) == ("warning", "Run NTP on both hosts.")


class TestProxies:
    def refuse(self, *addresses: str, users: int = 0) -> None:
        @rate_limit("1/h", key="user_or_ip", group="proxies")
        def view(request):
            return HttpResponse()

        clients = [User(pk=number) for number in range(1, users + 1)] or [AnonymousUser()]
        for address in addresses:
            for user in 2 * clients:
                request = RequestFactory().get("/", REMOTE_ADDR=address)
                request.user = user
                view(request)
        flush_statistics()

    def test_a_private_address_with_several_users_looks_like_a_proxy(self, healthy, configure):
        configure(TRUSTED_PROXIES=None)
        self.refuse("10.0.0.5", users=2)
        found = findings()["proxies"]
        assert found["level"] == "warning"
        assert '["10.0.0.5"]' in found["fix"]

    @pytest.mark.parametrize("users", [0, 1])
    def test_a_single_client_does_not_look_like_a_proxy(self, healthy, configure, users):
        configure(TRUSTED_PROXIES=None)
        self.refuse("10.0.0.5", users=users)
        assert findings()["proxies"]["level"] == "ok"

    def test_they_are_clients_where_the_settings_say_so(self, healthy):
        self.refuse("10.0.0.5", users=2)
        assert findings()["proxies"]["level"] == "ok"

    def test_a_trusted_proxy_that_passes_no_address_on_is_a_warning(self, healthy, configure):
        configure(TRUSTED_PROXIES=["10.0.0.0/8"])
        self.refuse("10.0.0.5")
        found = findings()["proxies"]
        assert found["level"] == "warning"
        assert "X-Forwarded-For" in found["fix"]

    def test_public_addresses_are_clients(self, healthy, configure):
        configure(TRUSTED_PROXIES=None)
        self.refuse("8.8.4.4", "9.9.9.9", "10.0.0.5")
        assert findings()["proxies"]["level"] == "ok"


@pytest.mark.parametrize(
    ("url", "subjects"),
    [
        ("redis://198.51.100.7:6379/0", ["connection"]),  # a network for documentation is not public
        ("redis://redis:6379/0", ["connection"]),
        ("redis://8.8.4.4:6379/0", ["connection", "TLS"]),
        ("redis://redis.example.com:6379/0", ["connection", "TLS"]),
        ("rediss://redis.example.com:6379/0", ["connection"]),
    ],
)
def test_a_public_network_without_encryption_is_a_warning(use, monkeypatch, url, subjects):
    use(url)
    monkeypatch.setattr(backend, "run_commands", lambda *_: [(0, 0)])
    found = [each.subject for each in doctor.look_at_connection(backend.topology().master)]
    assert found == [*subjects, "latency", "clock"]


def test_a_cache_that_is_not_encrypted_on_a_public_network_is_a_warning(use):
    use("redis://198.51.100.7:6379/0")
    assert not backend.encryption(backend.topology().master).is_safe
    use("rediss://198.51.100.7:6379/0")
    assert backend.encryption(backend.topology().master).is_safe
    use("rediss://198.51.100.7:6379/0?ssl_cert_reqs=none")
    assert "not checked" in backend.encryption(backend.topology().master).text
