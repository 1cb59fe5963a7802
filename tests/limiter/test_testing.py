"""rlaas_django.testing: what it gives to the tests of a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.test import AsyncClient, Client, SimpleTestCase, override_settings
from django.urls import path
from rlaas_django import Policy, acheck, check, rate_limit
from rlaas_django.testing import (
    RateLimitTestMixin,
    aexhaust,
    assert_limited,
    embedded_redis,
    exhaust,
    frozen_clock,
    reset,
    reset_all,
)


def test_the_clock_stands_until_it_ticks():
    with frozen_clock(1_000_000) as clock:
        for _ in range(5):
            check("alice")
        assert check("alice").retry_after == 60.0
        clock.tick(59_999)
        assert clock.ms == 1_059_999
        assert check("alice").retry_after == 0.001
        clock.tick(1)
        assert check("alice").allowed


def test_clocks_nest_and_end_with_their_block_also_after_an_error():
    policy = Policy("p", "1/m")
    with frozen_clock(1000):
        check("alice", policy)
        try:
            with frozen_clock(31_000):
                assert check("alice", policy).retry_after == 30.0
                raise RuntimeError
        except RuntimeError:
            pass
        assert check("alice", policy).retry_after == 60.0
    assert check("alice", policy).allowed  # by the server's clock


def test_without_a_time_the_clock_stands_at_the_present():
    before = time.time_ns() // 1_000_000
    with frozen_clock() as clock:
        assert before <= clock.ms <= time.time_ns() // 1_000_000


async def test_async_decisions_and_other_threads_use_the_frozen_clock():
    with frozen_clock(1_000_000) as clock:
        await acheck("alice")
        thread = threading.Thread(target=check, args=("alice",))
        thread.start()
        thread.join()
        clock.tick(10_000)
        decision = await acheck("alice")
        assert decision.current_count == 2
        assert decision.reset_after == 60.0


def test_an_embedded_server_is_empty_and_its_own():
    for _ in range(2):
        with override_settings(CACHES={"default": embedded_redis()}):
            assert check("alice").current_count == 0
            assert check("alice").current_count == 1


def test_the_fixture_freezes_the_clock(rate_limit_clock):
    check("alice", Policy("p", "1/m"))
    rate_limit_clock.tick(30_000)
    assert check("alice", Policy("p", "1/m")).retry_after == 30.0


def test_a_reset_forgets_cached_refusals(client):
    policy = Policy("p", "1/h")
    assert [check("alice", policy).allowed for _ in range(2)] == [True, False]
    client.flushdb()
    reset()
    assert check("alice", policy).allowed


def test_a_reset_forgets_the_counters_of_the_local_fallback(redis_unavailable):
    policy = Policy("p", "1/h", on_failure="local")
    assert [check("alice", policy).allowed for _ in range(2)] == [True, False]
    reset()
    assert check("alice", policy).allowed


ROOT = Path(__file__).parents[2]

# Counters


@rate_limit("3/m", key="ip")
def limited(request):
    return HttpResponse("hello")


@rate_limit("5/m", key="ip")
def login(request):
    return HttpResponse("hello")


urlpatterns = [path("limited/", limited), path("login/", login), path("free/", lambda request: HttpResponse("hello"))]
here = pytest.mark.urls(__name__)


def use_up() -> None:
    """Leave a counter and, without a frozen clock, a cached refusal."""
    assert [check("alice", Policy("p", "1/h")).allowed for _ in range(2)] == [True, False]


def test_reset_all_deletes_counters_overrides_and_statistics_and_nothing_of_the_site(server):
    use_up()
    server.set("session:1", "of the site")
    server.set("my:rlaas:key", "of the site")
    server.set("rlaas:override:alice", "of a test", ex=60)
    reset_all()
    assert sorted(server.keys()) == [b"my:rlaas:key", b"session:1"]
    use_up()


def test_reset_all_deletes_thousands_of_keys(client):
    client.mset({f"rlaas:rate_limit:{n}": 1 for n in range(5_000)})
    client.mset({f"other:{n}": 1 for n in range(1_000)})
    reset_all()
    assert client.dbsize() == 1_000


def test_the_fixture_begins_with_empty_counters(server, request):
    use_up()
    clock = request.getfixturevalue("rate_limits")
    use_up()
    clock.tick(3_600_000)
    use_up()


def test_the_fixture_turns_rate_limiting_off(configure, request):
    configure(POLICIES={"p": {"rate": "1/h"}})
    request.getfixturevalue("rate_limits_disabled")
    assert all(check("alice", "p").allowed for _ in range(3))  # and other settings stay


@here
def test_exhaust_sends_requests_until_one_is_refused(rate_limits):
    response = exhaust(Client(), "/limited/")
    assert_limited(response)
    assert response.headers["Retry-After"] == "60"
    rate_limits.tick(60_000)
    for _ in range(3):
        assert Client().get("/limited/").status_code == 200
    assert_limited(exhaust(Client(), "/limited/", method="post", data={"a": 1}))


@here
async def test_exhaust_has_an_async_version(rate_limits):
    assert_limited(await aexhaust(AsyncClient(), "/limited/"))


@here
def test_exhaust_fails_a_test_of_a_view_without_a_limit(monkeypatch):
    monkeypatch.setattr("rlaas_django.testing.MAX_REQUESTS", 10)
    with pytest.raises(AssertionError, match="/free/ refused none of 10 requests"):
        exhaust(Client(), "/free/")
    with pytest.raises(AssertionError, match="/free/ refused none of 10 requests"):
        async_to_sync(aexhaust)(AsyncClient(), "/free/")


@here
def test_assert_limited_says_what_came_instead(rate_limits):
    with pytest.raises(AssertionError, match=r"not 200; RateLimit: .*;r=2;t=60"):
        assert_limited(Client().get("/limited/"))
    with pytest.raises(AssertionError, match="not 200; RateLimit: none"):
        assert_limited(Client().get("/free/"))


@override_settings(ROOT_URLCONF=__name__)
class Mixed(RateLimitTestMixin, SimpleTestCase):
    """Two tests that would fail each other if a counter leaked."""

    def test_one(self):
        self.assert_limited(self.exhaust("/limited/"))
        self.rate_limits.tick(60_000)
        assert self.client.get("/limited/").status_code == 200

    def test_another(self):
        self.test_one()


# The plugin, in a project of its own

CONFTEST = """
from django.conf import settings
from rlaas_django.testing import embedded_redis
settings.configure(CACHES={"default": embedded_redis()}, USE_TZ=True)
"""
LEAK = """
import pytest
from rlaas_django import check

@pytest.mark.parametrize("_", range(2))
def test_five_are_allowed(_):
    assert [check("alice").allowed for _ in range(6)] == [True] * 5 + [False]
"""


SITE = """
from django.conf import settings
from rlaas_django.testing import embedded_redis
settings.configure(CACHES={"default": embedded_redis()}, ROOT_URLCONF="tests.limiter.test_testing", ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["rlaas_django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}, USE_TZ=True)
"""


def run_pytest(folder: Path, *options: str, **environment: str) -> str:
    """Run pytest in a project of its own; return the last line."""
    names = ("PYTEST_ADDOPTS", "DJANGO_SETTINGS_MODULE", "PYTEST_XDIST_WORKER")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error"]
    command += [*options, "-c", os.devnull, "--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, cwd=folder)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_tests_of_a_site_use_the_fixtures_without_pytest_django(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_site.py").write_text(LEAK)
    assert run_pytest(tmp_path, "-p", "no:django").startswith("1 failed, 1 passed")
    assert run_pytest(tmp_path, "-p", "no:django", "-o", "usefixtures=rate_limits").startswith("2 passed")


def test_a_project_without_settings_is_not_disturbed(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_nothing(): pass")
    assert run_pytest(tmp_path).startswith("1 passed")
    assert run_pytest(tmp_path, "-p", "no:django", DJANGO_SETTINGS_MODULE="is.not.there").startswith("1 passed")


def test_the_examples_of_the_documentation_pass(tmp_path):
    text = (ROOT / "docs" / "testing.md").read_text()
    with_pytest, with_unittest = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "conftest.py").write_text(SITE)
    (tmp_path / "test_examples.py").write_text(with_pytest + with_unittest)
    assert run_pytest(tmp_path, PYTHONPATH=str(ROOT)).startswith("2 passed")
