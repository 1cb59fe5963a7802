"""Statistics of requests: recorded in memory, written by a background thread, bounded in Redis."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import threading
import time
from collections import deque
from dataclasses import replace

import pytest
from django.db import OperationalError, connections
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory, override_settings
from rlaas_django import Policy, backend, check, rate_limit
from rlaas_django.operators import actions
from rlaas_django.runtime import background, observers, process
from rlaas_django.stats import reader, recorder, schema
from rlaas_django.stats.schema import user_agent_class

GONE = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}


@pytest.fixture
def fresh_thread():
    """A process whose background thread has not started, and another one afterwards."""
    background.state.reset()
    yield
    background.state.reset()


def send(policy: Policy, times: int = 1, address: str = "203.0.113.9", path: str = "/search/") -> None:
    """Send requests to a limited view."""

    @rate_limit(policy)
    def view(request):
        return HttpResponse()

    for _ in range(times):
        view(RequestFactory().get(path, REMOTE_ADDR=address))


def last_minutes(name: str = schema.SITE) -> reader.Counts:
    """Return the last two minutes added up: a minute may end between the requests and here."""
    before, now = reader.minutes([name])[name][-2:]
    return reader.Counts(now.start, *(a + b for a, b in zip(before[1:], now[1:], strict=True)))


class TestFlush:
    def test_requests_are_counted_per_policy_and_minute(self):
        send(Policy("p", "3/m", key="ip"), 5)
        recorder.flush()
        minute = last_minutes("p")
        assert (minute.allowed, minute.refused, minute.over, minute.degraded) == (3, 2, 0, 0)
        assert len(reader.minutes(["p"])["p"]) == 24 * 60

    async def test_requests_to_async_views_are_counted(self):
        @rate_limit("3/m", key="ip", group="p")
        async def view(request):
            return HttpResponse()

        for _ in range(5):
            await view(AsyncRequestFactory().get("/"))
        recorder.flush()
        assert (last_minutes("p").allowed, last_minutes("p").refused) == (3, 2)

    def test_refusals_of_a_shadow_policy_are_counted_apart(self):
        send(Policy("p", "1/m", key="ip", shadow=True), 4)
        recorder.flush()
        minute = last_minutes("p")
        assert (minute.allowed, minute.refused, minute.over) == (1, 0, 3)

    def test_decisions_without_redis_are_counted_when_it_is_available_again(self):
        with override_settings(CACHES=GONE):
            send(Policy("p", "3/m", key="ip"), 2)
            with contextlib.suppress(Exception):
                recorder.flush()
        recorder.flush()
        assert last_minutes("p").degraded == 2

    def test_the_oldest_decisions_are_dropped_beyond_a_bound(self, monkeypatch):
        for queue in ("pending", "uneventful"):
            monkeypatch.setattr(recorder, queue, deque(maxlen=3))
        send(Policy("p", "100/m", key="ip"), 5)
        send(Policy("q", "1/m", key="ip"), 5)
        recorder.flush()
        assert last_minutes("p").allowed == 3
        assert last_minutes("q").refused == 3

    @pytest.mark.parametrize(("failing", "dropped"), [(b"{q}", 3), (b"{", 5)])
    def test_what_cannot_be_written_counts_as_dropped(self, monkeypatch, failing, dropped):
        """A shard of a Cluster may be unavailable, or a server may have no room."""
        send(Policy("p", "100/m", key="ip"), 2)
        send(Policy("q", "2/m", key="ip"), 3)
        execute = backend.execute

        def fail(where, call, *args, **kwargs):
            if failing in call.packed:
                raise backend.UnavailableError("OOM")
            return execute(where, call, *args, **kwargs)

        monkeypatch.setattr(backend, "execute", fail)
        recorder.flush()
        assert recorder.dropped == dropped

    def test_what_waits_for_redis_is_bounded(self):
        """A client chooses the path and the method; uvicorn lets 64 kB of them pass."""
        assert recorder.pending.maxlen <= 20_000
        assert recorder.uneventful.maxlen <= 20_000
        view = rate_limit(Policy("p", "1/m", key="ip"))(lambda request: HttpResponse())
        for _ in range(2):
            view(RequestFactory().generic("M" * 5_000, "/" + "a" * 60_000))
        assert [(len(each.method), len(each.path)) for _, each in recorder.pending] == [(16, 300)] * 2
        recorder.flush()
        (refusal,) = reader.refusals(["p"])
        assert (refusal.method, refusal.path) == ("M" * 16, "/" + "a" * 299)

    def test_every_key_has_a_ttl_and_a_hash_tag(self, client):
        send(Policy("in-code", "1/m", key="ip"), 3)
        recorder.flush()
        keys = [key for key in client.keys("rlaas:*") if not key.startswith(b"rlaas:rate_limit:")]
        assert all(client.ttl(key) > 0 for key in keys)
        tagged = [key for key in keys if b"{in-code}" in key or b"{*}" in key]
        assert len(tagged) == 12
        assert sorted({*keys} - {*tagged}) == [b"rlaas:limit:in-code/ip=203.0.113.9", b"rlaas:policies"]

    def test_recording_sends_no_command(self, client):
        send(Policy("p", "100/m", key="ip"))
        with client.monitor() as monitor:
            send(Policy("p", "100/m", key="ip"), 10)
            client.ping()
            commands = []
            for line in monitor.listen():
                if line["command"] == "PING":
                    break
                if line["client_type"] != "lua":
                    commands.append(line["command"].split()[0])
        assert commands.count("EVALSHA") == 10


@pytest.fixture(params=["sync", "async"])
def request_to(request):
    """`request_to(view, ...)`: send a request to a function that is limited by these policies, sync and async."""

    def send_sync(*decorators, method="GET"):
        return _decorated(lambda request: HttpResponse(), decorators)(RequestFactory().generic(method, "/search/"))

    def send_async(*decorators, method="GET"):
        async def view(request):
            return HttpResponse()

        return runner.run(_decorated(view, decorators)(AsyncRequestFactory().generic(method, "/search/")))

    with asyncio.Runner() as runner:
        yield send_sync if request.param == "sync" else send_async


def _decorated(view, decorators):
    for decorator in decorators:  # the last is the outermost
        view = decorator(view)
    return view


def results(name: str = schema.SITE) -> dict[str, int]:
    """Flush, and return how many decisions there were of each result."""
    recorder.flush()
    return {result: number for result, number in last_minutes(name)._asdict().items() if number and result != "start"}


class TestOnce:
    """A request is counted once for the site, and once for each of its policies."""

    def test_a_request_under_three_policies_is_one_request(self, request_to):
        policies = [Policy("a", "9/m", key="ip"), Policy("b", "9/m", key="ip"), Policy("c", "1/m", key="ip")]
        for _ in range(3):
            request_to(rate_limit(*policies))
        assert results() == {"allowed": 1, "refused": 2}
        assert results("c") == {"allowed": 1, "refused": 2}
        assert results("a") == results("b") == {"allowed": 1, "other": 2}

    def test_a_request_under_two_decorators_is_one_request(self, request_to):
        outer, inner = rate_limit("9/m", key="ip", group="outer"), rate_limit("1/m", key="ip", group="inner")
        for _ in range(3):
            request_to(inner, outer)
        assert results() == {"allowed": 1, "refused": 2}
        assert results("outer") == {"allowed": 1, "other": 2}
        assert results("inner") == {"allowed": 1, "refused": 2}

    def test_over_the_limit_without_a_refusal(self, request_to):
        shadow = rate_limit(Policy("shadow", "1/m", key="ip", shadow=True))
        annotating = rate_limit("1/m", key="ip", group="annotating", block=False)
        for _ in range(3):
            request_to(shadow, annotating)
        assert results() == {"allowed": 1, "over": 2}
        assert results("shadow") == results("annotating") == {"allowed": 1, "over": 2}

    def test_a_policy_that_one_decorator_tolerates_and_another_enforces_refuses(self, request_to):
        policy = Policy("p", "1/m", key="ip")
        for _ in range(2):
            request_to(rate_limit(policy), rate_limit(policy, block=False))
        assert results("p") == results() == {"allowed": 1, "refused": 1}

    def test_functions_limited_one_after_the_other_are_counted_one_by_one(self):
        """Without limits around them, which would have them counted as one request."""
        request = RequestFactory().get("/graphql/")
        for name in ("books", "authors"):
            rate_limit("9/m", key="ip", group=name)(lambda request: HttpResponse())(request)
        assert results() == {"allowed": 2}  # one request below the middleware
        assert results("books") == results("authors") == {"allowed": 1}

    def test_a_view_that_raises_is_counted(self):
        @rate_limit("9/m", key="ip", group="p")
        def view(request):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            view(RequestFactory().get("/"))
        assert results() == results("p") == {"allowed": 1}

    def test_what_is_not_limited_is_not_counted(self, settings, request_to):
        request_to(rate_limit("9/m", key="ip", method="POST"))
        settings.RATE_LIMITER = {"ENABLED": False}
        request_to(rate_limit("9/m", key="ip"))
        check("alice")
        assert not recorder.pending
        assert not recorder.uneventful


class TestCheckInCode:
    def test_a_check_is_counted_with_the_label_of_its_caller(self, limiter):
        policy = Policy("p", "1/m")
        for _ in range(3):
            limiter.check("alice", policy, source="import")
        assert results() == results("p") == {"allowed": 1, "refused": 2}
        assert {refusal.source for refusal in reader.refusals()} == {"import"}
        assert reader.most_refused() == ({"alice": 2}, {"import": 2})

    def test_decisions_far_from_a_limit_and_near_it_are_counted_alike(self, limiter):
        pair = [Policy("wide", "10/m"), Policy("narrow", "4/m")]
        for _ in range(6):
            limiter.check("alice", pair)
        assert results() == {"allowed": 4, "refused": 2}
        assert results("wide") == {"allowed": 4, "other": 2}
        assert results("narrow") == {"allowed": 4, "refused": 2}
        assert [*reader.watched()] == [("narrow", "alice")]

    def test_a_check_without_a_label_comes_from_code(self, limiter):
        limiter.check("alice", Policy("p", "1/m"), cost=2)
        recorder.flush()
        (refusal,) = reader.refusals()
        assert (refusal.source, refusal.method, refusal.path, refusal.agent) == ("code", "", "", "")

    def test_a_peek_is_not_counted(self, limiter):
        limiter.peek("alice")
        assert not recorder.pending
        assert not recorder.uneventful


class TestObservers:
    @pytest.fixture
    def observed(self):
        found = []
        observers.add(found.append)
        yield found
        observers.remove(found.append)
        assert not observers.timed

    def test_an_observer_sees_each_decision_with_its_results(self, observed, request_to):
        policies = [Policy("a", "9/m", key="ip"), Policy("b", "1/m", key="ip")]
        for _ in range(2):
            request_to(rate_limit(*policies))
        assert [each.result for each in observed] == ["allowed", "refused"]
        assert [(outcome.policy.name, result) for outcome, result in observed[1].results()] == [
            ("a", "other"),
            ("b", "refused"),
        ]
        assert (observed[1].source, observed[1].method, observed[1].path) == ("request", "GET", "/search/")

    def test_without_redis_the_result_is_degraded(self, observed, redis_unavailable, limiter):
        limiter.check("alice", Policy("p", "1/m"))
        limiter.check("alice", Policy("q", "1/m", on_failure="closed"))
        assert [each.result for each in observed] == ["degraded", "degraded"]

    def test_the_latency_is_measured_only_for_an_observer_that_wants_it(self, observed, limiter, request_to):
        limiter.check("alice")
        observers.add(observed.append, latency=True)
        limiter.check("alice")
        request_to(rate_limit("9/m", key="ip"))
        assert [len(each.latencies) for each in observed] == [0, 1, 1]
        assert all(0 < seconds < 60 for each in observed for seconds in each.latencies)

    def test_a_cached_refusal_has_no_latency(self, observed, limiter):
        observers.add(observed.append, latency=True)
        for _ in range(3):
            limiter.check("alice", Policy("p", "1/h"))
        assert [len(each.latencies) for each in observed] == [1, 1, 0]


class TestSeries:
    @pytest.fixture
    def at(self, monkeypatch):
        """`at(seconds)`: move the clock of the statistics to so long ago."""
        now = time.time()
        return lambda seconds: monkeypatch.setattr(time, "time", lambda: now - seconds)

    def test_a_week_of_hours_and_a_day_of_minutes(self, at):
        policy = Policy("p", "1000/m", key="ip")
        for days in (6, 3, 0):
            at(days * schema.DAY)
            send(policy, 2)
            recorder.flush()
        week, day = reader.hours(["p", schema.SITE]), reader.hours(["p"], days=1)["p"]
        assert [len(week["p"]), len(day)] == [168, 24]
        assert [each.allowed for each in week["p"] if each.total] == [2, 2, 2]
        assert week["p"] == week[schema.SITE]
        assert sum(each.allowed for each in day) == 2
        assert sum(each.allowed for each in reader.minutes(["p"])["p"]) == 2

    def test_the_key_of_each_series_expires_after_its_time(self, client):
        send(Policy("p", "9/m", key="ip"))
        recorder.flush()
        now = int(time.time())
        assert schema.DAY < client.ttl(schema.MINUTES.key("p", now)) <= 2 * schema.DAY
        assert 8 * schema.DAY <= client.ttl(schema.HOURS.key("p", now)) <= 9 * schema.DAY


class TestRefusals:
    def test_an_entry_has_the_request_and_the_usage(self, clock):
        send(Policy("p", "3/m", key="ip"), 4, path="/login/")
        recorder.flush()
        (refusal,) = reader.refusals(["p"])
        assert (refusal.policy, refusal.identity) == ("p", "ip=203.0.113.9")
        assert (refusal.source, refusal.method, refusal.path) == ("request", "GET", "/login/")
        assert (refusal.address, refusal.agent, refusal.over) == ("203.0.113.9", "none", False)
        assert (refusal.count, refusal.limit, refusal.window, refusal.retry_after) == (3, 3, 60, 60.0)
        assert abs(refusal.at - time.time()) < 5

    def test_a_flush_lists_a_sample_and_counts_the_rest(self):
        send(Policy("p", "1/m", key="ip"), 1 + recorder.REFUSALS_PER_FLUSH + 30)
        recorder.flush()
        assert len(reader.refusals(["p"])) == recorder.REFUSALS_PER_FLUSH
        assert last_minutes("p").unlogged == 30
        assert reader.refused_identities(["p"])["p"]["ip=203.0.113.9"] == recorder.REFUSALS_PER_FLUSH + 30

    def test_refusals_that_are_counted_together_are_counted_exactly(self, monkeypatch):
        monkeypatch.setattr(recorder, "REFUSALS_PER_FLUSH", 3)
        pair = [Policy("p", "2/m"), Policy("q", "50/m")]
        for number, name in enumerate(("alice", "bob", "carol"), 1):
            for _ in range(2 + 10 * number):
                check(name, pair, source=f"job of {name}")
        assert results() == {"allowed": 6, "refused": 60, "unlogged": 57}
        assert results("p") == {"allowed": 6, "refused": 60, "unlogged": 57}
        assert results("q") == {"allowed": 6, "other": 60}
        refused = {"alice": 10, "bob": 20, "carol": 30}
        assert reader.refused_identities(["p"])["p"] == refused
        assert reader.most_refused() == (refused, {f"job of {name}": number for name, number in refused.items()})

    @pytest.mark.parametrize("options", [{"shadow": True}, {"block": False}], ids=str)
    def test_who_is_over_the_limit_and_not_refused_is_counted_apart(self, options):
        view = rate_limit("1/m", key="ip", group="p", **options)(lambda request: HttpResponse())
        for _ in range(4):
            view(RequestFactory().get("/"))
        recorder.flush()
        assert reader.refused_identities(["p"])["p"] == {}
        over = reader.refused_identities(["p"], statistic=schema.OVER_LIMIT)["p"]
        assert over == {"ip=127.0.0.1": 3}
        assert reader.refused_today([("p", "ip=127.0.0.1")]) == {("p", "ip=127.0.0.1"): 0}

    def test_the_newest_are_kept(self, monkeypatch, client):
        monkeypatch.setattr(schema, "REFUSALS", replace(schema.REFUSALS, size=10))
        for i in range(4):
            send(Policy("p", "1/m", key="ip"), 5, path=f"/{i}")
            recorder.flush()
        assert client.llen(schema.REFUSALS.key("p")) == 10
        assert reader.refusals(["p"])[0].path == "/3"


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "browser"),
        ("Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)", "bot"),
        ("curl/8.5.0", "program"),
        ("python-requests/2.32.3", "program"),
        (" ", "none"),
    ],
)
def test_the_class_of_a_user_agent(user_agent, expected):
    assert user_agent_class(user_agent) == expected


class TestWatched:
    def test_identities_from_80_percent_on_are_watched(self):
        send(Policy("p", "5/m", key="ip"), 3, address="203.0.113.1")
        send(Policy("p", "5/m", key="ip"), 4, address="203.0.113.2")
        send(Policy("p", "5/m", key="ip"), 9, address="203.0.113.3")
        recorder.flush()
        assert [*reader.watched("p").items()] == [(("p", "ip=203.0.113.3"), 101), (("p", "ip=203.0.113.2"), 80)]

    def test_the_identities_with_the_most_refusals_are_kept(self, monkeypatch):
        for name in ("IDENTITIES", "WATCHED"):
            monkeypatch.setattr(schema, name, replace(getattr(schema, name), size=3))
        for i in range(6):
            send(Policy("p", "1/m", key="ip"), 2 + i, address=f"203.0.113.{i}")
        recorder.flush()
        assert len(reader.watched("p")) == 3
        assert [*reader.refused_identities(["p"])["p"].values()] == [6, 5, 4]

    def test_an_earlier_hour_takes_no_room_from_this_one(self, monkeypatch):
        monkeypatch.setattr(schema, "WATCHED", replace(schema.WATCHED, size=3))
        now = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now - 2 * schema.HOUR)
            for address in ("203.0.113.97", "203.0.113.98", "203.0.113.99"):
                send(Policy("p", "1/m", key="ip"), 2, address=address)
        recorder.flush()
        for i in range(4):
            send(Policy("p", "1/m", key="ip"), 2, address=f"203.0.113.{i}")
            time.sleep(0.002)  # of equal usage, the identity seen last ranks first, to the millisecond
        recorder.flush()
        assert {identity for _, identity in reader.watched("p")} == {f"ip=203.0.113.{i}" for i in (1, 2, 3)}


@pytest.mark.background
class TestBackground:
    def test_the_thread_writes_within_two_seconds(self):
        send(Policy("p", "3/m", key="ip"), 5)
        deadline = time.monotonic() + 2
        while last_minutes("p").allowed != 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert last_minutes("p").allowed == 3

    def test_a_forked_process_writes_its_own_decisions_at_its_end(self):
        send(Policy("p", "100/m", key="ip"))
        background.run(20)
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_send_and_exit, args=(20,)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(20)
        assert last_minutes("p").allowed == 61

    def test_a_fork_does_not_write_what_its_parent_recorded(self):
        with background.state.round_lock:
            send(Policy("p", "100/m", key="ip"), 5)
            worker = multiprocessing.get_context("fork").Process(target=_send_and_exit, args=(1,))
            worker.start()
            worker.join(20)
        background.run(20)
        assert last_minutes("p").allowed == 6

    def test_a_failing_flush_fails_no_request_and_is_logged(self, monkeypatch, caplog):
        def flush():
            raise ValueError("odd")

        monkeypatch.setattr(background, "jobs", dict(background.jobs))
        background.register(flush)
        background.run(20)
        send(Policy("p", "3/m", key="ip"), 2)
        (line,) = [record.getMessage() for record in caplog.records if "flush" in record.getMessage()]
        assert line == "Background job test_stats.flush failed: ValueError('odd')"

    def test_a_flush_that_fails_without_redis_is_not_logged_again(self, monkeypatch, caplog):
        def flush():
            raise backend.UnavailableError("closed")

        monkeypatch.setattr(background, "jobs", dict(background.jobs))
        background.register(flush)
        background.run(20)
        assert "flush failed" not in caplog.text

    @pytest.mark.parametrize(("engine", "logged"), [("dummy", False), ("sqlite3", True)])
    def test_overrides_are_not_restored_where_there_is_no_database(self, monkeypatch, caplog, engine, logged):
        def fail(*args):
            raise RuntimeError("no table")

        monkeypatch.setattr("rlaas_django.models.Override.publish_missing", fail)
        monkeypatch.setitem(connections.settings["default"], "ENGINE", f"django.db.backends.{engine}")
        monkeypatch.setattr(actions.state, "next_comparison", 0.0)
        background.run(20)
        assert ("restore_lost_overrides failed" in caplog.text) == logged

    @pytest.mark.django_db
    @pytest.mark.parametrize(("table", "logged"), [("not_migrated", False), ("auth_user", True)])
    def test_overrides_are_not_restored_where_no_migration_has_run(self, monkeypatch, caplog, table, logged):
        def fail(*args):
            raise OperationalError("no such table")

        monkeypatch.setattr("rlaas_django.models.Override.publish_missing", fail)
        monkeypatch.setattr("rlaas_django.models.Override._meta.db_table", table)
        monkeypatch.setattr(actions.state, "next_comparison", 0.0)
        background.run(20)
        assert ("restore_lost_overrides failed" in caplog.text) == logged

    @pytest.mark.usefixtures("fresh_thread")
    def test_a_thread_that_cannot_start_fails_no_request(self, monkeypatch):
        def fail(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("threading.Thread.start", fail)
        send(Policy("p", "3/m", key="ip"))

    @pytest.mark.usefixtures("fresh_thread")
    def test_a_reset_leaves_one_thread(self):
        send(Policy("p", "3/m", key="ip"))
        process.reset()
        send(Policy("p", "3/m", key="ip"))
        deadline = time.monotonic() + 10
        while _threads() != [background.state.thread] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _threads() == [background.state.thread]


def _send_and_exit(times):
    send(Policy("p", "100/m", key="ip"), times)
    atexit._run_exitfuncs()  # which a child of multiprocessing does not call


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "rlaas_django"]


@pytest.mark.background
class TestStalledThread:
    """As with uWSGI without --enable-threads: the thread starts, and never runs."""

    @pytest.fixture(autouse=True)
    def _no_thread(self, fresh_thread, monkeypatch):
        monkeypatch.setattr("threading.Thread.start", lambda thread: None)
        send(Policy("p", "100/m", key="ip"))

    def test_a_request_flushes_after_five_seconds(self, monkeypatch):
        now = time.monotonic()
        send(Policy("p", "100/m", key="ip"))
        assert last_minutes("p").allowed == 0
        monkeypatch.setattr(background.time, "monotonic", lambda: now + background.STALLED_AFTER + 1)
        send(Policy("p", "100/m", key="ip"))
        send(Policy("p", "100/m", key="ip"))
        assert last_minutes("p").allowed == 3  # the fourth waits for another five seconds

    def test_a_request_does_not_query_the_database(self, monkeypatch):
        monkeypatch.setattr("rlaas_django.models.Override.restore", lambda: pytest.fail("restored"))
        monkeypatch.setattr(background.state, "wake_at", time.monotonic() - 60)
        send(Policy("p", "100/m", key="ip"))
        assert last_minutes("p").allowed == 2

    async def test_nothing_is_flushed_in_an_event_loop(self, monkeypatch):
        rounds = []
        monkeypatch.setattr(background, "jobs", {})
        background.register(lambda: rounds.append("in the event loop"), background.WHEN_STALLED)
        monkeypatch.setattr(background.state, "wake_at", time.monotonic() - 60)
        background.wake()
        assert not rounds
