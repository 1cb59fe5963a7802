"""Statistics of requests: written beside them, bounded, and never in their way."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time

import pytest
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from rlaas_django import Policy, background, check, rate_limit, stats


@pytest.fixture(autouse=True)
def _nothing_noted(request):
    """And the background thread waits, unless a test is about it: it would write half of what a test has noted."""
    waits = contextlib.nullcontext() if "background" in request.keywords else background._round
    with waits:
        stats._notes.clear()
        yield
        stats._notes.clear()


def ask(policy: Policy, times: int = 1, address: str = "203.0.113.9", path: str = "/search/") -> None:
    @rate_limit(policy)
    def view(request):
        return HttpResponse()

    for _ in range(times):
        view(RequestFactory().get(path, REMOTE_ADDR=address))


def last_minutes(name: str) -> stats.Minute:
    """The last two minutes added up, so that a boundary between asking and looking does not matter."""
    found = stats.minutes([name])[name][-2:]
    return stats.Minute(found[1].start, *(a + b for a, b in zip(found[0][1:], found[1][1:], strict=True)))


def test_requests_are_counted_per_policy_and_minute():
    ask(Policy("p", "3/m", key="ip"), 5)
    stats.flush()
    minute = last_minutes("p")
    assert (minute.allowed, minute.refused, minute.shadowed, minute.degraded) == (3, 2, 0, 0)
    assert len(stats.minutes(["p"])["p"]) == 24 * 60


def test_what_a_shadow_would_refuse_is_counted_apart():
    ask(Policy("p", "1/m", key="ip", shadow=True), 4)
    stats.flush()
    minute = last_minutes("p")
    assert (minute.allowed, minute.refused, minute.shadowed) == (1, 0, 3)


def test_decisions_without_redis_are_counted_once_it_is_back():
    gone = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
    with override_settings(CACHES=gone):
        ask(Policy("p", "3/m", key="ip"), 2)
    stats.flush()
    assert last_minutes("p").degraded == 2


def test_refusals_are_listed_with_what_an_operator_wants_to_know(clock):
    ask(Policy("p", "3/m", key="ip"), 4, path="/login/")
    stats.flush()
    (refusal,) = stats.refusals(["p"])
    assert (refusal.policy, refusal.identity, refusal.method, refusal.path) == ("p", "ip=203.0.113.9", "GET", "/login/")
    assert (refusal.count, refusal.limit, refusal.window, refusal.retry_after) == (3, 3, 60, 60.0)
    assert abs(refusal.at - time.time()) < 5


def test_under_attack_refusals_are_sampled_and_the_rest_is_counted():
    ask(Policy("p", "1/m", key="ip"), 1 + stats.REFUSALS_PER_ROUND + 30)
    stats.flush()
    assert len(stats.refusals(["p"])) == stats.REFUSALS_PER_ROUND
    assert last_minutes("p").unlogged == 30
    assert stats.refused_today(["p"])["p", "ip=203.0.113.9"] == stats.REFUSALS_PER_ROUND + 30


def test_the_refusal_log_keeps_the_newest(monkeypatch, client):
    monkeypatch.setattr(stats, "MOST_REFUSALS", 10)
    for i in range(4):
        ask(Policy("p", "1/m", key="ip"), 5, path=f"/{i}")
        stats.flush()
    assert client.llen(stats.refusals_key("p")) == 10
    assert stats.refusals(["p"])[0].path == "/3"


def test_who_passes_80_percent_is_watched():
    ask(Policy("p", "5/m", key="ip"), 3, address="203.0.113.1")
    ask(Policy("p", "5/m", key="ip"), 4, address="203.0.113.2")
    ask(Policy("p", "5/m", key="ip"), 9, address="203.0.113.3")
    stats.flush()
    assert stats.watched(["p"]) == [("p", "ip=203.0.113.3", 101), ("p", "ip=203.0.113.2", 80)]


def test_the_strongest_are_kept(monkeypatch, client):
    monkeypatch.setattr(stats, "MOST_IDENTITIES", 3)
    for i in range(6):
        ask(Policy("p", "1/m", key="ip"), 2 + i, address=f"203.0.113.{i}")
    stats.flush()
    assert len(stats.watched(["p"])) == 3
    assert sorted(stats.refused_today(["p"]).values()) == [4, 5, 6]


def test_who_is_refused_now_is_watched_though_many_were_before(monkeypatch):
    monkeypatch.setattr(stats, "MOST_IDENTITIES", 3)
    earlier = time.time() - 2 * 3600
    for address in ("203.0.113.97", "203.0.113.98", "203.0.113.99"):
        ask(Policy("p", "1/m", key="ip"), 2, address=address)
    noted = [(earlier, *note[1:]) for note in stats._notes]
    stats._notes.clear()
    stats._notes.extend(noted)
    stats.flush()
    for i in range(4):
        ask(Policy("p", "1/m", key="ip"), 2, address=f"203.0.113.{i}")
        time.sleep(0.002)  # who was seen last goes first, to the millisecond
    stats.flush()
    assert {who for _, who, _ in stats.watched(["p"])} == {f"ip=203.0.113.{i}" for i in (1, 2, 3)}


def test_every_key_has_a_ttl_and_is_in_one_slot_of_a_cluster(client):
    ask(Policy("p", "1/m", key="ip"), 3)
    stats.flush()
    keys = [key for key in client.keys("rlaas:*") if not key.startswith(b"rlaas:rate_limit:")]
    assert len(keys) == 4
    assert all(client.ttl(key) > 0 for key in keys)
    assert all(b"{p}" in key for key in keys)


def test_a_decision_costs_no_command_beside_its_own(client):
    ask(Policy("p", "100/m", key="ip"))
    with client.monitor() as monitor:
        ask(Policy("p", "100/m", key="ip"), 10)
        client.ping()
        seen = []
        for line in monitor.listen():
            if line["command"] == "PING":
                break
            if line["client_type"] != "lua" and "note" not in line["command"]:
                seen.append(line["command"].split()[0])
    assert seen.count("EVALSHA") - sum(word == "SCRIPT" for word in seen) >= 10
    assert {"HINCRBY", "LPUSH", "ZADD"}.isdisjoint(seen)


@pytest.mark.background
def test_they_appear_by_themselves_within_two_seconds():
    ask(Policy("p", "3/m", key="ip"), 5)
    deadline = time.monotonic() + 2
    while last_minutes("p").allowed != 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert last_minutes("p").allowed == 3


def _ask_and_end(times):
    ask(Policy("p", "100/m", key="ip"), times)
    import atexit

    atexit._run_exitfuncs()  # as a process does that ends in order; multiprocessing's children leave it out


@pytest.mark.background
def test_a_process_that_ends_in_order_loses_nothing_and_a_fork_has_its_own_thread():
    ask(Policy("p", "100/m", key="ip"))
    background.run(20)
    workers = [multiprocessing.get_context("fork").Process(target=_ask_and_end, args=(20,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert last_minutes("p").allowed == 61


@pytest.mark.background
def test_statistics_never_fail_a_request(monkeypatch):
    monkeypatch.setattr(stats, "flush", lambda: 1 / 0)
    background.run(20)
    ask(Policy("p", "3/m", key="ip"), 2)


def test_a_thread_that_cannot_start_fails_no_request(monkeypatch):
    monkeypatch.setattr(background, "_owner", None)
    monkeypatch.setattr("threading.Thread.start", lambda thread: (_ for _ in ()).throw(RuntimeError("no more threads")))
    ask(Policy("p", "3/m", key="ip"))


def test_a_request_does_a_round_only_where_the_thread_stands_still(monkeypatch):
    done = []
    monkeypatch.setattr(background, "_jobs", [lambda: done.append("quick")])
    monkeypatch.setattr(background, "_slow_jobs", [lambda: done.append("slow")])
    monkeypatch.setattr(background, "_round", threading.Lock())
    monkeypatch.setattr(background, "_owner", os.getpid())
    monkeypatch.setattr(background, "_last", time.monotonic())
    background.wake()
    assert done == []
    background._last -= background.STALE + 1
    background.wake()
    background.wake()
    assert done == ["quick"]


async def test_a_round_never_runs_on_the_loop(monkeypatch):
    monkeypatch.setattr(background, "_jobs", [lambda: pytest.fail("on the loop")])
    monkeypatch.setattr(background, "_owner", os.getpid())
    monkeypatch.setattr(background, "_last", time.monotonic() - 60)
    background.wake()


def test_notes_are_bounded():
    assert stats._notes.maxlen == stats.MOST_NOTES


def test_decisions_in_code_are_not_statistics_of_requests():
    check("alice", Policy("p", "3/m"))
    assert not stats._notes


async def test_async_views_are_counted():
    from django.test import AsyncRequestFactory

    @rate_limit("3/m", key="ip", group="p")
    async def view(request):
        return HttpResponse()

    for _ in range(5):
        await view(AsyncRequestFactory().get("/"))
    stats.flush()
    assert (last_minutes("p").allowed, last_minutes("p").refused) == (3, 2)
