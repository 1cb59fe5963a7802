"""When Redis fails: what a request gets, how long it takes, what is counted, and that all is well again afterwards."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
import signal
import threading
import time
from collections import Counter
from statistics import median
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from django.core.cache import caches
from django.http import HttpResponse
from rlaas_django.policy import ALGORITHMS, FIXED_WINDOW, SLIDING_WINDOW, YEAR

from rlaas_django import (
    Policy,
    acheck,
    apeek,
    arefund,
    backend,
    breaker,
    check,
    failure,
    peek,
    rate_limit,
    refund,
    reset,
    server,
)
from rlaas_django.backend import UnavailableError
from rlaas_django.signals import backend_failed
from rlaas_django.stats import background, reader, recorder
from rlaas_django.testing import frozen_clock
from tests.conftest import NOW
from tests.deployments import Node, wait_until
from tests.faults import CHUNK, Loopback, messages
from tests.http import BOTH_WAYS, OURS, assert_refusal
from tests.outages import FAULTS, Clock, Place, Visitor, named
from tests.test_concurrency import in_processes, in_threads

DJANGO_REDIS = "django_redis.cache.RedisCache"
TIMEOUT = 0.1
SLACK = 1.0  # seconds that a busy machine may add; what matters is counted, too
LIMIT = 4
# Within a year's window nothing leaves, refills or meets a boundary during a test.
ROOMY = Policy("roomy", (100_000, YEAR), algo=FIXED_WINDOW)
USERS = range(8)
BASE = 10_000  # user n has counted n times so much already, by which a reply tells whose it is
POLICIES = ["open", "closed", "local"]

on_failure_of_each = pytest.mark.parametrize("on_failure", POLICIES)


@pytest.fixture(autouse=True)
def _nothing_left_in_memory():
    """And the background thread waits: what it asks is none of what a test counts. The garbage waits, too: to go
    through what a whole run of tests leaves in memory takes longer than what is timed here."""
    with background.paused():
        recorder.state.reset()
        failure.memory.clear()
        gc.disable()
        yield
        gc.enable()
        recorder.state.reset()
        failure.memory.clear()


@pytest.fixture(scope="module")
def shared_place():
    place = Place()
    yield place
    place.stop()


@pytest.fixture
def place(shared_place) -> Place:
    shared_place.renew()
    return shared_place


@pytest.fixture
def use(settings, configure):
    """Let the limiter use a server, within TIMEOUT; `pool` is what the site said about its pool of connections."""

    def use_url(url: str, timeout: float = TIMEOUT, **pool) -> None:
        if pool:  # django-redis keeps a pool by its URL, whatever the other options are
            url = f"{url}?client_name=pool-{next(numbers)}"
        entry = {"BACKEND": DJANGO_REDIS, "LOCATION": url, "OPTIONS": {"CONNECTION_POOL_KWARGS": pool}}
        settings.CACHES = {**settings.CACHES, "default": entry}
        configure(TIMEOUT=timeout, LOG_LINES_PER_SECOND=1000)

    return use_url


@pytest.fixture
def nobody(use):
    """The limiter's server is not there."""
    use("redis://127.0.0.1:1/0")


@pytest.fixture(params=BOTH_WAYS)
def visitor(request, settings):
    with asyncio.Runner() as runner:
        yield Visitor(request.param, settings, runner)


@pytest.fixture(params=["sync", "async"])
def how(request):
    """The limiter's functions, sync or in a loop that stays open for the whole test."""
    if request.param == "sync":
        yield SimpleNamespace(name="sync", check=check, peek=peek, refund=refund)
    else:
        with asyncio.Runner() as runner:

            def in_loop(function):
                return lambda *args, **options: runner.run(function(*args, **options))

            yield SimpleNamespace(name="async", check=in_loop(acheck), peek=in_loop(apeek), refund=in_loop(arefund))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The breakers' time stands still."""
    clock = Clock()
    monkeypatch.setattr(breaker, "time", clock)
    return clock


@pytest.fixture
def tireless(monkeypatch):
    """Breakers that never keep a call from being made."""
    monkeypatch.setattr(breaker, "FIRST_INTERVAL", 0.0)
    monkeypatch.setattr(breaker, "LONGEST_INTERVAL", 0.0)


@pytest.fixture
def brisk(monkeypatch):
    """Breakers that probe more often, so that a test has seen some."""
    monkeypatch.setattr(breaker, "FIRST_INTERVAL", 0.1)
    monkeypatch.setattr(breaker, "LONGEST_INTERVAL", 0.2)


@pytest.fixture
def heard():
    """What the receivers of backend_failed were told."""
    told = []

    def receiver(sender, **facts):
        told.append(facts)

    backend_failed.connect(receiver)
    yield told
    backend_failed.disconnect(receiver)


@pytest.fixture
def lines(caplog):
    """The lines of our logger that say this."""
    caplog.set_level(logging.DEBUG, logger="rlaas_django")

    def said(what: str) -> list[str]:
        ours = [record.getMessage() for record in caplog.records if record.name == "rlaas_django"]
        return [line for line in ours if what in line]

    return said


numbers = itertools.count()
AWAY, BACK = "could not be asked", "answers again"


def limited(on_failure: str, **options) -> Policy:
    return Policy("p", (LIMIT, YEAR), **{"key": "ip", "algo": FIXED_WINDOW, "on_failure": on_failure, **options})


def its_breaker() -> breaker.Breaker:
    return backend.site().master.breaker


def count(who: str, policy: Policy = ROOMY) -> int:
    return peek(who, policy).current_count


def timed(work, *args):
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


# Each fault, under each policy


NONSENSICAL = [fault for fault in FAULTS if fault.name.startswith("answers ")]
SAMPLES = named("answers nothing and hangs up", "answers HTTP", "answers half a reply", "answers OK")


@on_failure_of_each
@pytest.mark.parametrize("fault", [each for each in FAULTS if each in SAMPLES or each not in NONSENSICAL], ids=str)
def test_a_fault_is_met_by_policy_within_the_budget_and_passes(
    fault, on_failure, visitor, place, use, clock, heard, lines, record_property
):
    """Six requests meanwhile, of which the policy has four for a process that counts by itself."""
    use(place.url(fault))
    decisions = []

    def view(request):
        decisions.append(request.rate_limit)
        return HttpResponse("ok")

    visitor.site.serve(rate_limit(limited(on_failure))(visitor.site.view(view)))
    assert visitor.get().headers["X-RateLimit-Remaining"] == "3"
    assert not decisions[0].degraded

    with fault.befall(place):
        times, responses = zip(*[timed(visitor.get) for _ in range(6)], strict=True)

    statuses = {"open": [200] * 6, "closed": [503] * 6, "local": [200] * 4 + [429] * 2}
    assert [response.status_code for response in responses] == statuses[on_failure]
    assert all(("RateLimit" in response.headers) == (on_failure == "local") for response in responses)
    if on_failure == "closed":
        assert_refusal(responses[0], status=503, wait=1, policies=["p"], violated=["p"])
    if on_failure == "local":
        assert [int(response.headers["X-RateLimit-Remaining"]) for response in responses] == [3, 2, 1, 0, 0, 0]
        assert_refusal(responses[-1], policies={"p": (LIMIT, YEAR)}, violated=["p"])
    assert all(decision.degraded for decision in decisions[1:])
    assert [(type(told["error"]), told["decision"].degraded) for told in heard] == [(UnavailableError, True)] * 6
    assert times[0] < fault.waits * TIMEOUT + SLACK
    assert sum(times[1:]) < (0 if fault.opens else 5 * fault.waits * TIMEOUT) + SLACK
    assert len(lines(AWAY)) == 1
    record_property("first_ms", round(1000 * times[0], 1))
    record_property("next_ms", round(1000 * median(times[1:]), 1))

    clock.pass_interval()
    counted = fault.counts if fault.forgets else 1 + fault.counts
    after = visitor.get()
    assert after.status_code == 200
    assert not decisions[-1].degraded
    assert after.headers["X-RateLimit-Remaining"] == str(LIMIT - counted - 1)
    assert len(heard) == 6
    assert len(lines(BACK)) == (1 if fault.opens else 0)


@on_failure_of_each
def test_a_server_restarted_empty_counts_from_zero_and_nobody_notices(on_failure, visitor, place, use, heard):
    use(place.node.url)
    visitor.site.serve(rate_limit(limited(on_failure))(visitor.site.view(lambda request: HttpResponse("ok"))))
    assert visitor.statuses(4) == [200] * 4
    place.node.launch()
    assert visitor.statuses(5) == [200] * 4 + [429]
    assert heard == []


def test_who_is_connected_goes_on_when_a_password_is_set(how, place, use):
    use(place.node.url)
    how.check("alice", ROOMY)
    client = place.node.client()
    client.config_set("requirepass", "s3cret")
    try:
        assert not how.check("alice", ROOMY).degraded
    finally:
        client.config_set("requirepass", "")


@on_failure_of_each
def test_the_middleware_follows_the_policy_too(on_failure, visitor, nobody, configure):
    configure(POLICIES={"p": {"rate": "2/h", "key": "ip", "on_failure": on_failure}}, MIDDLEWARE=[{"policies": ["p"]}])
    visitor.site.serve(visitor.site.view(lambda request: HttpResponse("ok")), middleware=[OURS])
    expected = {"open": [200] * 3, "closed": [503] * 3, "local": [200, 200, 429]}
    assert visitor.statuses(3) == expected[on_failure]


@pytest.mark.parametrize("fault", NONSENSICAL, ids=str)
def test_nonsense_for_an_answer_is_no_answer(fault, how, place, use, clock, heard, lines):
    use(place.url(fault))
    policy = limited("closed", key="user_or_ip")
    assert how.check("alice", policy).allowed
    with fault.befall(place):
        for _ in range(3):
            elapsed, decision = timed(how.check, "alice", policy)
            assert (decision.allowed, decision.degraded, decision.unavailable) == (False, True, True)
            assert elapsed < TIMEOUT + SLACK
    assert (its_breaker().error is not None) == fault.opens
    assert len(heard) == 3
    assert len(lines(AWAY)) == 1
    clock.pass_interval()
    assert how.check("alice", policy).current_count == 1


# A node of a cluster, asked as a single server


def test_a_node_of_a_cluster_says_which_client_to_use(how, use, heard, lines):
    with Node("cluster-enabled yes") as node:
        node.launch()
        node.ask("CLUSTER", "ADDSLOTS", *range(16_384))
        use(node.url)
        assert how.check("alice", ROOMY).degraded
    assert "rlaas_django.cluster.ConnectionFactory" in str(heard[0]["error"])
    assert any("rlaas_django.cluster.ConnectionFactory" in line for line in lines(AWAY))


@pytest.mark.parametrize("answer", [b"-MOVED 1 127.0.0.1:1\r\n", b"-ASK 1 127.0.0.1:1\r\n"], ids=["MOVED", "ASK"])
def test_a_redirection_says_which_client_to_use(how, place, use, heard, lines, answer):
    place.proxy.babble(answer)
    try:
        use(place.proxy.url)
        assert how.check("alice", ROOMY).degraded
    finally:
        place.proxy.babble(None)
    assert "rlaas_django.cluster.ConnectionFactory" in str(heard[0]["error"])
    assert any("rlaas_django.cluster.ConnectionFactory" in line for line in lines(AWAY))


# The budget


@pytest.fixture
def hang(place):
    """Let the server hang from now on; what was asked of it before is forgotten."""

    def begin() -> None:
        place.node.client().config_resetstat()
        place.node.hang()

    yield begin
    if place.node.hanging:
        place.node.resume()


def attempts(node: Node) -> int:
    """What a server was asked while it hung, it reads once it goes on: calls, or connections for want of one."""

    def seen() -> int:
        calls = node.client().info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return calls + node.client().info("stats")["total_connections_received"]

    node.resume()
    wait_until(lambda: seen() > 0, "the server has read what it was sent")
    time.sleep(0.05)  # it reads all of it at once
    return seen()


def test_a_thousand_decisions_during_a_hang_cost_two_timeouts_at_most(how, place, use, hang, record_property):
    use(place.node.url)
    how.check("alice", ROOMY)
    hang()
    elapsed, decisions = timed(lambda: [how.check("alice", ROOMY) for _ in range(1000)])
    assert all(decision.degraded for decision in decisions)
    assert elapsed < 2 * TIMEOUT + 5 * SLACK
    assert 1 <= attempts(place.node) <= 2
    record_property("thousand_ms", round(1000 * elapsed))


def test_sixteen_threads_during_a_hang_wait_once_each(place, use, hang, record_property):
    use(place.node.url)
    in_threads(lambda n: check("alice", ROOMY))
    hang()

    def work(n):
        return timed(lambda: [check("alice", ROOMY).degraded for _ in range(1008 // 16)])

    elapsed, told = timed(in_threads, work)
    assert all(all(degraded) for _, degraded in told)
    assert max(seconds for seconds, _ in told) < 2 * TIMEOUT + 5 * SLACK
    assert 1 <= attempts(place.node) <= 16 + 1
    record_property("thousand_ms", round(1000 * elapsed))


async def test_a_thousand_tasks_at_once_wait_together(place, use, hang, record_property):
    use(place.node.url)
    await acheck("alice", ROOMY)
    hang()
    began = time.perf_counter()
    decisions = await asyncio.gather(*[acheck("alice", ROOMY) for _ in range(1000)])
    elapsed = time.perf_counter() - began
    assert elapsed < TIMEOUT + 5 * SLACK
    assert all(decision.degraded for decision in decisions)
    record_property("thousand_ms", round(1000 * elapsed))


def test_a_call_that_fails_is_one_attempt_to_connect(how, use, tireless):
    """Of redis-py's own retries none is left."""

    class Counting(Loopback):
        taken = 0

        async def serve(self, reader, writer):
            self.taken += 1

    with Counting() as counting:
        use(counting.url)
        for n in range(1, 6):
            assert how.check("alice", ROOMY).degraded
            wait_until(lambda n=n: counting.taken >= n, "the attempt was seen")
            assert counting.taken == n


async def test_who_waits_behind_others_waits_no_longer_than_the_budget(use):
    """For a server that answers, but slowly: each call takes it 80 ms, and every 20 ms there is another."""

    class Slow(Loopback):
        async def serve(self, reader, writer):
            data = bytearray()
            while chunk := await reader.read(CHUNK):
                data += chunk
                for message in messages(data):
                    if b"EVALSHA" in message:
                        await asyncio.sleep(0.08)
                    writer.write(b"*2\r\n:1\r\n*7\r\n:1\r\n:0\r\n:9\r\n:0\r\n:0\r\n:10\r\n:1\r\n")

    async def ask():
        began = time.perf_counter()
        await acheck("alice", ROOMY)
        return time.perf_counter() - began

    with Slow() as slow:
        use(slow.url)
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(ask()))
            await asyncio.sleep(0.02)
        longest = max(await asyncio.gather(*tasks))
        await asyncio.to_thread(slow.cut)
    assert longest < TIMEOUT + SLACK


# Recovery, on the real clock


@pytest.mark.parametrize("fault", named("stopped", "hung", "refusing", "replies lost", "read-only"), ids=str)
def test_service_is_back_within_two_intervals_without_help_and_nothing_is_counted_twice(fault, how, place, use, brisk):
    use(place.url(fault))
    calls = itertools.count(1)
    answered = 0

    def ask():
        nonlocal answered
        next(calls)
        degraded = how.check("alice", ROOMY).degraded
        answered += not degraded
        return not degraded

    assert ask()
    with fault.befall(place):
        wait_until(lambda: ask() or its_breaker()._interval == breaker.LONGEST_INTERVAL, "a probe has failed too")
    assert answered == 1
    took = wait_until(ask, "an answer")
    assert took < 2 * breaker.LONGEST_INTERVAL * (1 + breaker.JITTER) + SLACK
    for _ in range(10):
        assert ask()
    attempts = next(calls) - 1 - its_breaker().unasked
    counted = count("alice")
    assert answered - fault.forgets <= counted <= attempts - fault.forgets
    if not fault.counts:
        assert counted == answered - fault.forgets


def test_after_one_failure_service_is_back_in_little_more_than_a_second(place, use, record_property):
    use(place.node.url)
    check("alice", ROOMY)
    place.node.kill()
    assert check("alice", ROOMY).degraded
    failed = time.monotonic()
    place.node.launch()
    wait_until(lambda: not check("alice", ROOMY).degraded, "an answer")
    took = time.monotonic() - failed
    assert took < breaker.FIRST_INTERVAL * (1 + breaker.JITTER) + SLACK
    record_property("back_ms", round(1000 * took))


def test_another_server_behind_the_same_name_is_found_when_the_old_one_takes_no_writes(how, place, use, clock):
    """As a failover behind an address that moves; the old server goes on, and so do the connections to it."""
    with Node() as other:
        other.launch()
        use(place.proxy.url)
        how.check("alice", ROOMY)
        place.node.ask("REPLICAOF", "127.0.0.1", other.port)
        place.proxy.target = urlsplit(other.url)
        try:
            assert how.check("alice", ROOMY).degraded
            clock.pass_interval()
            assert not how.check("alice", ROOMY).degraded
        finally:
            place.proxy.target = urlsplit(place.node.url)
            place.proxy.cut()
            place.node.ask("REPLICAOF", "NO", "ONE")


# The breaker


@pytest.fixture
def one(clock, configure) -> breaker.Breaker:
    configure(LOG_LINES_PER_SECOND=1000)
    return breaker.Breaker("Redis at nowhere")


OOPS = ConnectionError("oops")


def test_a_breaker_admits_all_until_a_call_fails_and_then_none(one):
    assert all(one.admits() for _ in range(100))
    one.failed(OOPS)
    assert one.error == "oops"
    assert not any(one.admits() for _ in range(100))
    assert one.unasked == 100


def test_a_breaker_admits_one_probe_per_interval(one, clock):
    one.failed(OOPS)
    clock.pass_interval()
    assert [one.admits() for _ in range(100)] == [True] + [False] * 99
    clock.pass_interval()  # also when nobody says how the probe went
    assert [one.admits() for _ in range(100)] == [True] + [False] * 99


def test_a_breakers_interval_grows_with_failed_probes_to_a_cap(one, clock):
    one.failed(OOPS)
    waits = []
    for _ in range(6):
        waits.append(one.next_probe_in)
        clock.tick(one.next_probe_in)
        assert one.admits()
        one.failed(OOPS)
    wanted = [breaker.FIRST_INTERVAL, *[breaker.LONGEST_INTERVAL] * 5]
    for wait, interval in zip(waits, wanted, strict=True):
        assert interval <= wait <= interval * (1 + breaker.JITTER)


def test_a_breakers_intervals_differ_within_bounds(clock, configure):
    configure(LOG_LINES_PER_SECOND=0)
    waits = []
    for _ in range(500):
        each = breaker.Breaker("each")
        each.failed(OOPS)
        waits.append(each.next_probe_in / breaker.FIRST_INTERVAL)
    assert 1 <= min(waits) < 1.02
    assert 1 + breaker.JITTER - 0.02 < max(waits) <= 1 + breaker.JITTER


def test_failures_of_calls_under_way_do_not_lengthen_a_breakers_interval(one, clock):
    one.failed(OOPS)
    wait = one.next_probe_in
    for _ in range(50):
        clock.tick(0.01)
        one.failed(OOPS)
    assert one.next_probe_in == pytest.approx(wait - 0.5)
    clock.tick(wait)
    assert one.admits()
    one.failed(OOPS)
    assert one.next_probe_in <= breaker.LONGEST_INTERVAL * (1 + breaker.JITTER)


def test_a_breaker_closes_with_the_first_answer_and_begins_anew(one, clock):
    for _ in range(2):
        one.failed(OOPS)
        for _ in range(3):
            clock.tick(one.next_probe_in)
            assert one.admits()
            one.failed(OOPS)
        one.succeeded()
        assert one.error is None
        assert all(one.admits() for _ in range(100))
    one.failed(OOPS)
    assert one.next_probe_in <= breaker.FIRST_INTERVAL * (1 + breaker.JITTER)
    assert one.unasked == 0


def test_a_breaker_says_so_once_per_interval_and_when_it_closes(one, clock, lines):
    for probe in range(1, 6):
        one.failed(OOPS)
        for _ in range(10):
            one.admits()
            one.failed(OOPS)
            one.complain(OOPS)
        assert len(lines(AWAY)) == probe
        assert not lines(BACK)
        clock.tick(one.next_probe_in)
        assert one.admits()
    one.succeeded()
    one.succeeded()
    (line,) = lines(BACK)
    assert f"after {one.away:.1f} s" in line
    assert f"{one.unasked} calls" in line


def test_threads_that_fail_together_open_a_breaker_once(one, lines):
    def work(n):
        one.failed(OOPS)
        return one.admits()

    assert not any(in_threads(work))
    assert len(lines(AWAY)) == 1


def test_of_threads_that_come_together_one_is_the_probe(one, clock):
    one.failed(OOPS)
    clock.pass_interval()
    assert sum(in_threads(lambda n: one.admits())) == 1


def test_an_open_breaker_takes_no_more_than_its_decision(how, place, use, clock):
    """No connection, no call: a server that is fine by now hears nothing until a probe is due."""
    use(place.proxy.url)
    place.proxy.refuse()
    place.proxy.cut()
    how.check("alice", ROOMY)
    place.proxy.accept()
    before = place.proxy.commands
    assert all(how.check("alice", ROOMY).degraded for _ in range(100))
    assert (place.proxy.commands, place.proxy.connections) == (before, 0)
    clock.pass_interval()
    assert not how.check("alice", ROOMY).degraded


# Errors that are not the server's as a whole


def test_an_error_of_one_key_concerns_one_identity(how, place, use, heard, lines):
    use(place.node.url)
    policy = Policy("p", "3/h", algo=SLIDING_WINDOW, on_failure="closed")
    place.node.client().set("rlaas:rate_limit:p/alice", "not a log", ex=3600)
    for n in range(3):
        assert not how.check("alice", policy).allowed
        decision = how.check("bob", policy)
        assert (decision.allowed, decision.degraded, decision.current_count) == (True, False, n)
    assert its_breaker().error is None
    assert len(heard) == 3
    assert len(lines("WRONGTYPE")) == 1


@pytest.mark.parametrize("fault", named("full", "not saving", "too few replicas"), ids=str)
def test_a_server_that_takes_no_writes_still_refuses_those_over_the_limit(fault, how, place, use, algo):
    """A sliding log that is full even counts on: it is emptied of what is dead before it grows."""
    use(place.node.url)
    policy = limited("open", algo=algo)
    for _ in range(LIMIT):
        assert how.check("alice", policy).allowed
    with fault.befall(place):
        for _ in range(3):
            refused, fresh = how.check("alice", policy), how.check("bob", policy)
            assert (refused.allowed, refused.degraded, fresh.allowed) == (False, False, True)
        assert its_breaker().error is None


# What receivers and pages are told


def chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__


def test_the_error_that_is_told_leads_to_what_redis_py_raised_and_no_further(how, nobody, heard):
    how.check("alice", ROOMY)
    errors = [*itertools.islice(chain(heard[0]["error"]), 10)]
    assert isinstance(errors[0], UnavailableError)
    assert isinstance(errors[1], server.redis.ConnectionError)
    assert len(errors) < 10


@on_failure_of_each
def test_statistics_count_what_was_decided_without_redis(on_failure, visitor, place, use, clock):
    use(place.node.url)
    visitor.site.serve(rate_limit(limited(on_failure))(visitor.site.view(lambda request: HttpResponse("ok"))))
    visitor.get()
    place.node.kill()
    visitor.statuses(6)
    place.node.launch()
    clock.pass_interval()
    recorder.flush()
    found = reader.minutes(["p"])["p"][-2:]  # a minute may have ended meanwhile
    allowed, refused, degraded = (
        sum(getattr(each, kind) for each in found) for kind in ("allowed", "refused", "degraded")
    )
    # A process that counts by itself knows whom it refuses.
    wanted = {"open": (1, 0, 6), "closed": (1, 0, 6), "local": (1, 2, 4)}
    assert (allowed, refused, degraded) == wanted[on_failure]


# The site's own cache


def test_the_sites_cache_keeps_its_own_pool_and_timeouts(place, use):
    use(place.node.url, socket_timeout=5, max_connections=1)
    pool = caches["default"].client.get_client(True).connection_pool
    before = dict(pool.connection_kwargs), pool.max_connections, pool.connection_class
    caches["default"].set("theirs", 1)
    connection = pool.get_connection()
    try:  # theirs is in use, and ours is not the same
        assert not check("alice", ROOMY).degraded
        assert not asyncio.run(acheck("alice", ROOMY)).degraded
    finally:
        pool.release(connection)
    place.node.hang()
    try:
        assert timed(lambda: check("alice", ROOMY).degraded)[0] < TIMEOUT + SLACK
        threading.Timer(2 * TIMEOUT, place.node.resume).start()
        assert caches["default"].get("theirs") == 1  # it waits for as long as the site said
    finally:
        place.node.resume()
    assert (dict(pool.connection_kwargs), pool.max_connections, pool.connection_class) == before


# Connections that are all in use


def test_threads_that_find_all_connections_in_use_wait_for_one(place, use):
    use(place.node.url, 20, max_connections=2)
    others = len(place.node.client().client_list())
    told = in_threads(lambda n: [check("alice", ROOMY) for _ in range(50)])
    assert sorted(each.current_count for part in told for each in part) == list(range(16 * 50))
    assert len(place.node.client().client_list()) <= others + 2


@on_failure_of_each
def test_who_gets_no_connection_is_decided_by_policy(on_failure, settings, place, use, monkeypatch, lines):
    use(place.node.url, max_connections=2)
    monkeypatch.setattr("rlaas_django.lines.LONGEST_WAIT", 0.02)
    ours = backend.site().master._quick
    held = [ours.take(), ours.take()]
    with asyncio.Runner() as runner:
        visitor = Visitor("wsgi, def", settings, runner)
        visitor.site.serve(rate_limit(limited(on_failure))(lambda request: HttpResponse("ok")))
        wanted = {"open": [200] * 5, "closed": [503] * 5, "local": [200] * 4 + [429]}
        assert visitor.statuses(5) == wanted[on_failure]
        assert its_breaker().error is None  # the server is not to blame
        assert len(lines("All 2 connections are in use")) == 1
        for line in held:
            line.disconnect()
            ours.idle.append(line)
        assert visitor.get().headers["X-RateLimit-Remaining"] == "3"


def test_who_waits_for_a_connection_to_a_hung_server_waits_no_longer_than_who_has_one(place, use, hang):
    use(place.node.url, max_connections=2)
    in_threads(lambda n: check("alice", ROOMY))
    hang()
    told = in_threads(lambda n: timed(check, "alice", ROOMY))
    assert all(decision.degraded for _, decision in told)
    assert max(seconds for seconds, _ in told) < 2 * TIMEOUT + SLACK
    assert 1 <= attempts(place.node) <= 2


# Counting in this process


@pytest.fixture
def no_server(nobody):
    """Decided without Redis from the first request on."""
    assert check("nobody", ROOMY).degraded


def figures(decision) -> list:
    return [
        (each.allowed, each.limit, each.current_count, each.remaining, each.retry_after, each.reset_after)
        for each in decision.outcomes
    ]


def random_steps(seed: str) -> list:
    rng = random.Random(seed)
    names = ["alice", "bob"]
    return [
        (
            rng.choices([0, 1, 400, 20_000, 61_000], [3, 5, 5, 1, 1])[0],
            rng.choice(names),
            rng.choice([0, 1, 1, 1, 2, 9]),
        )
        for _ in range(200)
    ]


def decide(steps, policies, how) -> list:
    told = []
    with frozen_clock(NOW) as clock:
        for n, (wait, who, cost) in enumerate(steps):
            clock.tick(wait)
            decision = how.check(who, policies, cost=cost)
            told.append((decision.allowed, figures(decision)))
            if n % 5 == 0:
                told.append(bool(how.refund(decision)))
            told.append(figures(how.peek(who, policies)))
    return told


@pytest.mark.parametrize("seed", range(2))
def test_verdicts_of_one_process_are_those_of_redis(algo, how, place, use, seed):
    """Several policies, costs, waits, refunds: the same trace, with Redis and without."""
    burst = {"burst": 6} if algo == "token-bucket-algo" else {}
    policies = [
        Policy("p", "4/m", algo=algo, on_failure="local", **burst),
        Policy("q", "7/h", algo=ALGORITHMS[(ALGORITHMS.index(algo) + 1) % len(ALGORITHMS)], on_failure="local"),
        Policy("s", "2/m", algo=algo, on_failure="local", shadow=True),
    ]
    steps = random_steps(f"{algo}-{seed}")
    use(place.node.url)
    with_redis = decide(steps, policies, how)
    use("redis://127.0.0.1:1/0")
    assert how.check("alice", policies).degraded
    failure.memory.clear()
    without = decide(steps, policies, how)
    assert without == with_redis
    assert {True, False} <= {each[0] for each in with_redis if type(each) is tuple}


def test_a_local_limit_is_divided_by_the_processes(how, no_server, configure, algo):
    configure(LOCAL_SHARE=2)
    policy = Policy("p", (5, YEAR), algo=algo, on_failure="local")
    decisions = [how.check("alice", policy) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, False, False]
    assert decisions[0].limit == 2


def test_a_local_share_is_one_at_least(how, no_server, configure, algo):
    configure(LOCAL_SHARE=100)
    policy = Policy("p", (5, YEAR), algo=algo, on_failure="local")
    assert [how.check("alice", policy).allowed for _ in range(3)] == [True, False, False]


def test_identities_counted_here_are_bounded_and_who_is_seen_is_kept(how, no_server, configure):
    configure(LOCAL_IDENTITIES=100)
    policy = Policy("p", (1, YEAR), on_failure="local")
    assert how.check("alice", policy).allowed
    for n in range(1_000):
        assert how.check(f"user-{n}", policy).allowed
        if n % 50 == 0:
            assert not how.check("alice", policy).allowed
        assert len(failure.memory) <= 100


def test_a_look_without_redis_charges_nothing(how, no_server):
    policy = limited("local", key="user_or_ip")
    assert [how.peek("alice", policy).remaining for _ in range(3)] == [LIMIT] * 3
    assert how.check("alice", policy).remaining == LIMIT - 1
    assert how.peek("alice", policy).remaining == LIMIT - 1


def test_charge_when_gives_back_what_was_charged_here(visitor, no_server):
    free = rate_limit(limited("local"), charge_when=lambda response: response.status_code != 404)
    visitor.site.serve(free(visitor.site.view(lambda request: HttpResponse(status=404))))
    responses = [visitor.get() for _ in range(LIMIT + 3)]
    assert {response.status_code for response in responses} == {404}
    assert {response.headers["X-RateLimit-Remaining"] for response in responses} == {str(LIMIT)}


def test_what_was_counted_here_is_not_counted_by_redis_afterwards(how, place, use, clock):
    use(place.node.url)
    policy = limited("local", key="user_or_ip")
    how.check("alice", policy)
    place.node.hang()
    for _ in range(LIMIT + 1):
        assert how.check("alice", policy).degraded
    place.node.resume()
    clock.pass_interval()
    assert how.check("alice", policy).current_count == 2  # the first, and the one that was sent and not answered


# Several policies, and shadows


def both(on_failure: str, shadow: bool = False, name: str = "p") -> Policy:
    return Policy(name, (2, YEAR), key="ip", on_failure=on_failure, shadow=shadow)


@on_failure_of_each
def test_a_shadow_never_refuses(on_failure, visitor, no_server):
    visitor.site.serve(rate_limit(both(on_failure, shadow=True))(visitor.site.view(lambda request: HttpResponse("ok"))))
    assert visitor.statuses(4) == [200] * 4


@pytest.mark.parametrize(
    ("policies", "statuses"),
    [
        ([both("open"), both("closed", name="q")], [503] * 4),
        ([both("open"), both("local", name="q")], [200, 200, 429, 429]),
        ([both("local"), both("closed", shadow=True, name="q")], [200, 200, 429, 429]),
        ([both("closed"), both("local", shadow=True, name="q")], [503] * 4),
        ([both("open"), both("closed", shadow=True, name="q")], [200] * 4),
    ],
    ids=["open, closed", "open, local", "local, closed shadow", "closed, local shadow", "open, closed shadow"],
)
def test_of_several_policies_each_is_followed(visitor, no_server, policies, statuses):
    visitor.site.serve(rate_limit(*policies)(visitor.site.view(lambda request: HttpResponse("ok"))))
    assert visitor.statuses(4) == statuses


def test_what_a_closed_policy_refuses_is_not_charged_to_a_local_one(how, no_server):
    local, closed = both("local"), both("closed", name="q")
    who = {"ip": "203.0.113.9"}
    for _ in range(4):
        assert not how.check(who, [local, closed]).allowed
    assert how.peek(who, local).current_count == 0


# Never again, and never back


def test_a_call_that_timed_out_is_neither_sent_again_nor_refunded(how, place, use, clock):
    use(place.proxy.url)
    how.check("alice", ROOMY)
    before = place.proxy.commands
    place.proxy.drop()
    decision = how.check("alice", ROOMY)
    place.proxy.pass_all()
    clock.pass_interval()
    assert decision.degraded
    assert not how.refund(decision)
    assert place.proxy.commands == before + 1
    assert how.peek("alice", ROOMY).current_count == 2


def test_a_refund_that_timed_out_is_not_sent_again(how, place, use, clock):
    use(place.proxy.url)
    decisions = [how.check("alice", ROOMY) for _ in range(3)]
    assert how.refund(decisions[0])
    place.proxy.drop()
    with pytest.raises(UnavailableError):
        how.refund(decisions[1])
    place.proxy.pass_all()
    clock.pass_interval()
    assert not how.refund(decisions[1])
    assert how.peek("alice", ROOMY).current_count == 1


def test_a_refund_that_fails_fails_no_request(visitor, place, use, clock):
    use(place.node.url)

    def view(request):
        place.node.kill()
        return HttpResponse(status=404)

    free = rate_limit(limited("open"), charge_when=lambda response: False)
    visitor.site.serve(free(visitor.site.view(view)))
    try:
        assert visitor.get().status_code == 404
    finally:
        place.node.launch()


def test_what_is_no_decision_says_that_redis_is_away(nobody):
    with pytest.raises(UnavailableError):
        reset("alice", ROOMY)


# Replies that are lost or late


@pytest.fixture
def known(place, use):
    """Users who each have a count of their own; asked through the proxy."""

    def make(timeout: float = TIMEOUT) -> None:
        use(place.node.url, 20)
        for n in USERS[1:]:
            check(f"user-{n}", ROOMY, cost=n * BASE)
        place.proxy.cut()
        use(place.proxy.url, timeout)

    yield make
    place.proxy.pass_all()
    place.proxy.cut()


class Ledger:
    """What was asked and answered, by user; an answer is its own user's, and a later one counts more."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.latest = {n: n * BASE - 1 for n in USERS}

    def add(self, n: int, decision) -> None:
        self.asked[n] += 1
        if decision.degraded:
            return
        self.answered[n] += 1
        assert decision.current_count // BASE == n
        assert decision.current_count > self.latest[n]
        self.latest[n] = decision.current_count

    def settle(self, place, use) -> None:
        """The server has counted every call that was answered, some that were not, and none twice."""
        place.proxy.pass_all()
        use(place.node.url, 20)
        for n in USERS:
            assert self.answered[n] <= count(f"user-{n}") - n * BASE <= self.asked[n]


CALLS = 10_000


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_over_ten_thousand_calls_with_lost_replies_nothing_is_counted_twice(
    mode, known, place, use, tireless, record_property
):
    """A tenth of the replies; the connection goes with them."""
    known(20)
    check("user-0", ROOMY, cost=0)  # the script is registered
    ledger, before, dropped = Ledger(), place.proxy.commands, place.proxy.dropped
    place.proxy.drop(0.1, seed=1, of="EVALSHA", close=True)

    async def ask_all():
        for start in range(0, CALLS, 4):
            users = [(start + n) % len(USERS) for n in range(4)]
            decisions = await asyncio.gather(*[acheck(f"user-{n}", ROOMY) for n in users])
            for n, decision in zip(users, decisions, strict=True):
                ledger.add(n, decision)

    if mode == "sync":
        for i in range(CALLS):
            ledger.add(i % len(USERS), check(f"user-{i % len(USERS)}", ROOMY))
    else:
        asyncio.run(ask_all())
    dropped = place.proxy.dropped - dropped
    assert dropped > 0.08 * CALLS
    assert place.proxy.commands - before <= CALLS  # each was sent once
    ledger.settle(place, use)
    total = sum(count(f"user-{n}") - n * BASE for n in USERS)
    assert total <= place.proxy.commands - before
    if mode == "sync":  # of tasks that share a connection, those behind a lost reply are lost too
        assert sum(ledger.answered.values()) == CALLS - dropped
    record_property("dropped", dropped)
    record_property("answered", sum(ledger.answered.values()))
    record_property("counted", total)


@pytest.mark.parametrize("trouble", ["lost", "late"])
def test_a_reply_that_comes_late_or_never_reaches_nobody_else(how, known, place, use, tireless, trouble):
    """The connection stays open meanwhile, and a late reply does come on it."""
    known(0.02)
    how.check("user-0", ROOMY, cost=0)
    rng, ledger = random.Random(2), Ledger()
    for i in range(250):
        troubled = rng.random() < 0.1
        if trouble == "late":
            place.proxy.delay(0.04 if troubled else 0)
        else:
            place.proxy.drop(troubled, of="EVALSHA")
        n = i % len(USERS)
        ledger.add(n, how.check(f"user-{n}", ROOMY))
    assert sum(ledger.answered.values()) > 180
    assert sum(ledger.asked.values()) - sum(ledger.answered.values()) > 10
    ledger.settle(place, use)


async def test_tasks_at_once_get_their_own_replies_however_late(known, place, use, tireless):
    known(0.03)
    rng, ledger = random.Random(3), Ledger()

    async def ask(n):
        ledger.add(n, await acheck(f"user-{n}", ROOMY))

    for _ in range(100):
        place.proxy.delay(rng.choice([0, 0.005, 0.01, 0.06]))
        await asyncio.gather(*map(ask, USERS))
    assert 100 <= sum(ledger.answered.values()) < 800
    await asyncio.to_thread(ledger.settle, place, use)


# Calls that are cut short


def are_own(looks) -> bool:
    return [(look.degraded, look.current_count) for look in looks] == [(False, n * BASE) for n in USERS]


def look_until(enough) -> bool:
    """Whether each answer was the user's own."""
    while not enough():
        if not are_own([peek(f"user-{n}", ROOMY) for n in USERS]):
            return False
    return True


async def alook_until(enough) -> bool:
    while not enough():
        if not are_own(await asyncio.gather(*[apeek(f"user-{n}", ROOMY) for n in USERS])):
            return False
    return True


def after(times: int):
    """Not enough, so many times."""
    left = iter(range(times))
    return lambda: next(left, None) is None


async def cancel_some(rng: random.Random, place: Place, rounds: int) -> int:
    """Checks that are cancelled before they connect, while they are sent or while they wait; how many."""
    cancelled = 0
    for _ in range(rounds):
        place.proxy.delay(rng.choice([0, 0, 0.001]))
        tasks = [asyncio.create_task(acheck("victim", ROOMY)) for _ in range(rng.randint(1, 60))]
        if rng.random() < 0.7:
            for _ in range(rng.randint(0, 12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(rng.uniform(0, 0.003))
        for task in tasks:
            task.cancel()
        assert await alook_until(after(1))  # while replies to those who left are still on their way
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled += sum(isinstance(each, asyncio.CancelledError) for each in results)
        answers = [each for each in results if not isinstance(each, asyncio.CancelledError)]
        assert all(each.current_count < BASE and not each.degraded for each in answers)
    return cancelled


def test_ten_thousand_cancelled_checks_leave_no_reply_for_the_next(known, place, record_property):
    known(20)
    rng, cancelled, loops = random.Random(4), 0, 0
    while cancelled < 10_000:
        loops += 1
        cancelled += asyncio.run(cancel_some(rng, place, 6))  # a loop begins without a connection
    wait_until(lambda: place.proxy.connections == 0, "every loop has closed its connection")
    record_property("cancelled", cancelled)
    assert loops > 20


class InterruptionError(BaseException):
    """As of a Ctrl-C, or of a time limit that a signal enforces."""


@pytest.fixture
def interrupt():
    """Let a check of this thread be interrupted in so many seconds, if it still runs."""

    def handler(signum, frame):
        names = []
        while frame is not None:
            names.append(frame.f_code)
            frame = frame.f_back
        # What is raised in a finaliser reaches nobody.
        if check.__code__ in names and not any(code.co_name in ("__del__", "remove") for code in names):
            raise InterruptionError

    previous = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_checks_interrupted_at_any_moment_leave_no_reply_and_lose_no_connection(
    known, place, use, interrupt, monkeypatch, record_property
):
    known()
    use(place.node.url, 20, max_connections=4)
    monkeypatch.setattr("rlaas_django.lines.LONGEST_WAIT", 0.1)
    others = len(place.node.client().client_list())
    usual = median(timed(check, "victim", ROOMY)[0] for _ in range(50))
    rng, interrupted = random.Random(5), 0
    for i in range(6_000):
        interrupt(rng.uniform(0.000001, 1.2 * usual))
        try:
            check("victim", ROOMY)
        except InterruptionError:
            interrupted += 1
        finally:
            interrupt(0)
        n = i % len(USERS)
        look = peek(f"user-{n}", ROOMY)
        assert (look.degraded, look.current_count) == (False, n * BASE), f"after {interrupted} interruptions"
    assert interrupted > 1_000
    record_property("interrupted", interrupted)
    # All four connections can still be had, and no more than these.
    assert not any(in_threads(lambda n: check("victim", ROOMY).degraded, 4))
    wait_until(lambda: len(place.node.client().client_list()) <= others + 4, "what was left is closed", 5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_forks_amid_the_calls_of_threads_and_loops_get_their_own_answers(known, place, use):
    """Eight threads, two of them with a loop, ask all the time; meanwhile processes are forked, and ask too."""
    known()
    use(place.node.url, 20)
    done = threading.Event()

    def child(n):
        return look_until(after(10)) and asyncio.run(alook_until(after(10))) and look_until(after(10))

    def thread(n):
        if n == 0:  # forks, amid what the others do
            try:
                return all(all(in_processes(child, 4)) for _ in range(5))
            finally:
                done.set()
        return asyncio.run(alook_until(done.is_set)) if n < 3 else look_until(done.is_set)

    assert in_threads(thread, 9) == [True] * 9
