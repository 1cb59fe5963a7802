"""When Redis fails: what a request gets, how long it takes, what is counted, and that it recovers by itself."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from statistics import median
from urllib.parse import urlsplit

import pytest
import redis
from django.core.cache import caches
from django.http import HttpResponse
from rlaas_django import Policy, acheck, apeek, check, peek, rate_limit, refund

from tests.support.deployments import Node, wait_until
from tests.support.faults import CHUNK, Loopback, messages
from tests.support.http import assert_refusal, ok
from tests.support.internals import (
    YEAR,
    CircuitBreaker,
    UnavailableError,
    breaker_module,
    circuit_breaker,
    flush_statistics,
    paused_background,
    read_minutes,
)
from tests.support.outages import (
    AVAILABLE_AGAIN,
    FAULTS,
    LIMIT,
    LONG_TIMEOUT,
    ROOMY,
    SLACK,
    TIMEOUT,
    UNAVAILABLE,
    ProxiedServer,
    each_on_failure,
    faults_named,
    limited,
    timed,
)
from tests.support.parallel import in_processes, in_threads

pytestmark = pytest.mark.slow  # the long tier

USERS = range(8)
BASE = 10_000  # user n has used n times this already, by which a reply tells whose it is


@pytest.fixture(autouse=True)
def _quiet_process():
    """Pause the background thread, whose commands would be counted, and the garbage collector.

    To collect what a whole run of tests leaves in memory takes longer than what is timed here.
    """
    with paused_background():
        gc.disable()
        yield
        gc.enable()


@pytest.fixture
def no_skipped_calls(monkeypatch):
    """Circuit breakers that skip no call."""
    monkeypatch.setattr(breaker_module, "FIRST_INTERVAL", 0.0)
    monkeypatch.setattr(breaker_module, "MAX_INTERVAL", 0.0)


@pytest.fixture
def short_intervals(monkeypatch):
    """Circuit breakers that probe more often, so that a test sees some probes."""
    monkeypatch.setattr(breaker_module, "FIRST_INTERVAL", 0.1)
    monkeypatch.setattr(breaker_module, "MAX_INTERVAL", 0.2)


def count(identity: str, policy: Policy = ROOMY) -> int:
    return peek(identity, policy).current_count


# Each fault, under each `on_failure`


STRANGE = [fault for fault in FAULTS if fault.name.startswith("replies ") and fault.in_proxy and not fault.counts]
SAMPLES = faults_named("replies nothing, and closes", "replies HTTP", "replies half a reply", "replies OK")


@each_on_failure
@pytest.mark.parametrize("fault", [each for each in FAULTS if each in SAMPLES or each not in STRANGE], ids=str)
def test_on_failure_decides_within_the_timeout_until_the_fault_ends(
    fault, on_failure, site_on_one_loop, target, use_url, breaker_clock, failure_signals, log_lines, record_property
):
    """Six requests meanwhile, of which a process that counts locally allows four."""
    use_url(target.url(fault), fault.timeout)
    decisions = []

    def view(request):
        decisions.append(request.rate_limit)
        return HttpResponse("ok")

    site_on_one_loop.serve(rate_limit(limited(on_failure))(site_on_one_loop.view(view)))
    assert site_on_one_loop.get().headers["X-RateLimit-Remaining"] == "3"
    assert not decisions[0].degraded

    with fault.applied(target):
        times, responses = zip(*[timed(site_on_one_loop.get) for _ in range(6)], strict=True)

    statuses = {"open": [200] * 6, "closed": [503] * 6, "local": [200] * 4 + [429] * 2}
    assert [response.status_code for response in responses] == statuses[on_failure]
    assert all(("RateLimit" in response.headers) == (on_failure == "local") for response in responses)
    if on_failure == "closed":
        assert_refusal(responses[0], status=503, wait=1, policies=["p"], violated=["p"])
    if on_failure == "local":
        assert [int(response.headers["X-RateLimit-Remaining"]) for response in responses] == [3, 2, 1, 0, 0, 0]
        assert_refusal(responses[-1], policies={"p": (LIMIT, YEAR)}, violated=["p"])
    assert all(decision.degraded for decision in decisions[1:])
    sent = [(type(signal["error"]), signal["decision"].degraded) for signal in failure_signals]
    assert sent == [(UnavailableError, True)] * 6
    assert times[0] < fault.waits * TIMEOUT + SLACK
    assert sum(times[1:]) < (0 if fault.opens_breaker else 5 * fault.waits * TIMEOUT) + SLACK
    assert len(log_lines(UNAVAILABLE)) == 1
    record_property("first_ms", round(1000 * times[0], 1))
    record_property("next_ms", round(1000 * median(times[1:]), 1))

    breaker_clock.tick_to_probe()
    counted = fault.counts if fault.loses_keys else 1 + fault.counts
    after = site_on_one_loop.get()
    assert after.status_code == 200
    assert not decisions[-1].degraded
    assert after.headers["X-RateLimit-Remaining"] == str(LIMIT - counted - 1)
    assert len(failure_signals) == 6
    assert len(log_lines(AVAILABLE_AGAIN)) == (1 if fault.opens_breaker else 0)


@each_on_failure
def test_server_restarted_empty_counts_from_zero_without_a_failure(
    on_failure, site_on_one_loop, target, use_url, failure_signals
):
    use_url(target.node.url)
    site_on_one_loop.serve(rate_limit(limited(on_failure))(site_on_one_loop.view(ok)))
    assert site_on_one_loop.statuses(4) == [200] * 4
    target.node.launch()
    assert site_on_one_loop.statuses(5) == [200] * 4 + [429]
    assert failure_signals == []


def test_open_connection_stays_valid_when_a_password_is_set(limiter, target, use_url):
    use_url(target.node.url)
    limiter.check("alice", ROOMY)
    client = target.node.client()
    client.config_set("requirepass", "s3cret")
    try:
        assert not limiter.check("alice", ROOMY).degraded
    finally:
        client.config_set("requirepass", "")


@pytest.mark.parametrize("fault", STRANGE, ids=str)
def test_strange_reply_is_no_decision(fault, limiter, target, use_url, breaker_clock, failure_signals, log_lines):
    use_url(target.url(fault), fault.timeout)
    policy = limited("closed", key="user_or_ip")
    assert limiter.check("alice", policy).allowed
    with fault.applied(target):
        for _ in range(3):
            elapsed, decision = timed(limiter.check, "alice", policy)
            assert (decision.allowed, decision.degraded, decision.unavailable) == (False, True, True)
            assert elapsed < TIMEOUT + SLACK
    assert (circuit_breaker().error is not None) == fault.opens_breaker
    assert len(failure_signals) == 3
    assert len(log_lines(UNAVAILABLE)) == 1
    breaker_clock.tick_to_probe()
    assert limiter.check("alice", policy).current_count == 1


class CountingServer(Loopback):
    """A server that replies NOSCRIPT to everything, and counts what it was sent."""

    commands = 0

    async def serve(self, reader, writer):
        data = bytearray()
        while chunk := await reader.read(CHUNK):
            data += chunk
            for message in messages(data):
                self.commands += b"EVALSHA" in message or b"LOAD" in message
                writer.write(b"-NOSCRIPT No matching script.\r\n")


def test_script_that_cannot_be_loaded_is_loaded_once(limiter, use_url):
    with CountingServer() as server:
        use_url(server.url)
        assert limiter.check("alice", ROOMY).degraded
        assert server.commands <= 3  # the call, SCRIPT LOAD, and perhaps the call again


def test_error_of_the_credential_provider_is_a_failure(limiter, target, use_url, failure_signals, log_lines):
    """As any error that is not redis-py's own."""

    class FailingProvider(redis.CredentialProvider):
        def get_credentials(self):
            raise LookupError("no token")

    use_url(target.node.url, credential_provider=FailingProvider())
    assert limiter.check("alice", ROOMY).degraded
    assert isinstance(failure_signals[0]["error"], UnavailableError)
    assert len(log_lines("no token")) == 1


# A node of a cluster, called as a single server


def test_cluster_node_as_a_single_server_names_the_setting(limiter, use_url, failure_signals, log_lines):
    with Node("cluster-enabled yes") as node:
        node.launch()
        node.ask("CLUSTER", "ADDSLOTS", *range(16_384))
        use_url(node.url)
        assert limiter.check("alice", ROOMY).degraded
    assert "rlaas_django.cluster.ConnectionFactory" in str(failure_signals[0]["error"])
    assert any("rlaas_django.cluster.ConnectionFactory" in line for line in log_lines(UNAVAILABLE))


@pytest.mark.parametrize("reply", [b"-MOVED 1 127.0.0.1:1\r\n", b"-ASK 1 127.0.0.1:1\r\n"], ids=["MOVED", "ASK"])
def test_redirect_by_a_single_server_names_the_setting(limiter, target, use_url, failure_signals, log_lines, reply):
    target.proxy.reply_with(reply)
    try:
        use_url(target.proxy.url)
        assert limiter.check("alice", ROOMY).degraded
    finally:
        target.proxy.reply_with(None)
    assert "rlaas_django.cluster.ConnectionFactory" in str(failure_signals[0]["error"])
    assert any("rlaas_django.cluster.ConnectionFactory" in line for line in log_lines(UNAVAILABLE))


# The timeout


@pytest.fixture
def hang(target):
    """Let the server hang from now on, with its statistics at zero."""

    def begin() -> None:
        if circuit_breaker().error is not None:  # a busy machine took longer than TIMEOUT
            wait_until(lambda: not check("alice", ROOMY).degraded, "the breaker is closed")
        target.node.client().config_resetstat()
        target.node.hang()

    yield begin
    if target.node.hanging:
        target.node.resume()


def attempts(node: Node) -> int:
    """Return the calls, and connections for want of one, that a hung server reads once it goes on."""

    def seen() -> int:
        calls = node.client().info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return calls + node.client().info("stats")["total_connections_received"]

    node.resume()
    wait_until(lambda: seen() > 0, "the server has read what it was sent")
    time.sleep(0.05)  # it reads all of it at once
    return seen()


def test_thousand_checks_during_a_hang_take_two_timeouts_at_most(
    limiter, target, use_url, hang, breaker_clock, record_property
):
    use_url(target.node.url, TIMEOUT)
    limiter.check("alice", ROOMY)
    hang()
    elapsed, decisions = timed(lambda: [limiter.check("alice", ROOMY) for _ in range(1000)])
    assert all(decision.degraded for decision in decisions)
    assert elapsed < 2 * TIMEOUT + 5 * SLACK
    assert 1 <= attempts(target.node) <= 2
    record_property("thousand_ms", round(1000 * elapsed))


def test_sixteen_threads_during_a_hang_wait_once_each(target, use_url, hang, breaker_clock, record_property):
    use_url(target.node.url, TIMEOUT)
    in_threads(lambda n: check("alice", ROOMY))
    hang()

    def work(n):
        return timed(lambda: [check("alice", ROOMY).degraded for _ in range(1008 // 16)])

    elapsed, results = timed(in_threads, work)
    assert all(all(degraded) for _, degraded in results)
    assert max(seconds for seconds, _ in results) < 2 * TIMEOUT + 5 * SLACK
    assert 1 <= attempts(target.node) <= 16 + 1
    record_property("thousand_ms", round(1000 * elapsed))


async def test_thousand_tasks_during_a_hang_wait_together(target, use_url, hang, record_property):
    use_url(target.node.url, TIMEOUT)
    await acheck("alice", ROOMY)
    hang()
    began = time.perf_counter()
    decisions = await asyncio.gather(*[acheck("alice", ROOMY) for _ in range(1000)])
    elapsed = time.perf_counter() - began
    assert elapsed < TIMEOUT + 5 * SLACK
    assert all(decision.degraded for decision in decisions)
    record_property("thousand_ms", round(1000 * elapsed))


def test_failed_call_connects_once(limiter, use_url, no_skipped_calls):
    """None of redis-py's own retries is left."""

    class ClosingServer(Loopback):
        accepted = 0

        async def serve(self, reader, writer):
            self.accepted += 1

    with ClosingServer() as server:
        use_url(server.url)
        for n in range(1, 6):
            assert limiter.check("alice", ROOMY).degraded
            wait_until(lambda n=n: server.accepted >= n, "the connection was accepted")
            assert server.accepted == n


async def test_task_behind_others_waits_one_timeout_at_most(use_url):
    """Also when the batch before takes some of it. The server takes 80 ms for a call, and gets one every 20 ms."""

    class SlowServer(Loopback):
        async def serve(self, reader, writer):
            data = bytearray()
            while chunk := await reader.read(CHUNK):
                data += chunk
                for message in messages(data):
                    if b"EVALSHA" not in message:
                        writer.write(b"+OK\r\n")
                        continue
                    await asyncio.sleep(0.08)
                    writer.write(b"*8\r\n:1\r\n:1\r\n:0\r\n:9\r\n:0\r\n:0\r\n:10\r\n:1\r\n")

    async def measured():
        began = time.perf_counter()
        decision = await acheck("alice", ROOMY)
        return time.perf_counter() - began, decision.degraded

    with SlowServer() as server:
        use_url(server.url, TIMEOUT)
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(measured()))
            await asyncio.sleep(0.02)
        results = await asyncio.gather(*tasks)
        await asyncio.to_thread(server.cut)
    assert max(elapsed for elapsed, _ in results) < TIMEOUT + SLACK
    assert any(degraded for _, degraded in results)


# Recovery, on the real clock


RECOVERABLE = faults_named("stopped", "hung", "connections refused", "replies lost", "read-only")


@pytest.mark.parametrize("fault", RECOVERABLE, ids=str)
def test_service_recovers_within_two_intervals_and_counts_nothing_twice(
    fault, limiter, target, use_url, short_intervals
):
    use_url(target.url(fault), fault.timeout)
    calls = itertools.count(1)
    replied = 0

    def is_available():
        nonlocal replied
        next(calls)
        degraded = limiter.check("alice", ROOMY).degraded
        replied += not degraded
        return not degraded

    assert is_available()
    with fault.applied(target):
        wait_until(
            lambda: is_available() or circuit_breaker().interval == breaker_module.MAX_INTERVAL, "a probe has failed"
        )
    assert replied == 1
    took = wait_until(is_available, "a reply")
    assert took < 2 * breaker_module.MAX_INTERVAL * (1 + breaker_module.JITTER) + SLACK
    for _ in range(10):
        assert is_available()
    attempted = next(calls) - 1 - circuit_breaker().skipped
    counted = count("alice")
    assert replied - fault.loses_keys <= counted <= attempted - fault.loses_keys
    if not fault.counts:
        assert counted == replied - fault.loses_keys


def test_service_recovers_a_second_after_one_failure(target, use_url, record_property):
    use_url(target.node.url)
    check("alice", ROOMY)
    target.node.kill()
    assert check("alice", ROOMY).degraded
    failed = time.monotonic()
    target.node.launch()
    wait_until(lambda: not check("alice", ROOMY).degraded, "a reply")
    took = time.monotonic() - failed
    assert took < breaker_module.FIRST_INTERVAL * (1 + breaker_module.JITTER) + SLACK
    record_property("recovered_ms", round(1000 * took))


def test_new_server_behind_the_same_address_is_found_when_the_old_one_is_read_only(
    limiter, target, use_url, breaker_clock
):
    """As after a failover behind an address that moves; the old server and the connections to it stay open."""
    with Node() as other:
        other.launch()
        use_url(target.proxy.url)
        limiter.check("alice", ROOMY)
        target.node.ask("REPLICAOF", "127.0.0.1", other.port)
        target.proxy.target = urlsplit(other.url)
        try:
            assert limiter.check("alice", ROOMY).degraded
            breaker_clock.tick_to_probe()
            assert not limiter.check("alice", ROOMY).degraded
        finally:
            target.proxy.target = urlsplit(target.node.url)
            target.proxy.cut()
            target.node.ask("REPLICAOF", "NO", "ONE")


# The circuit breaker (see test_unavailable_redis.py for the rest)


@pytest.fixture
def breaker(breaker_clock, configure) -> CircuitBreaker:
    configure(LOG_LINES_PER_SECOND=1000)
    return CircuitBreaker("Redis at nowhere", 0.1)


ERROR = ConnectionError("oops")


def test_an_idle_connection_that_the_server_closed_is_replaced_at_once(client):
    assert not check("alice").degraded
    client.client_kill_filter(_type="normal", skipme=True)
    time.sleep(0.05)
    assert not check("alice").degraded
    assert circuit_breaker().error is None


def test_a_send_that_fails_is_not_repeated(client, monkeypatch):
    assert not check("alice").degraded
    sent = []

    def fail(self, command, check_health=True):
        sent.append(command)
        raise redis.ConnectionError("Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(redis.connection.AbstractConnection, "send_packed_command", fail)
        assert check("alice").degraded
    assert len(sent) == 1


def test_intervals_of_breakers_differ_within_bounds(breaker_clock, configure):
    configure(LOG_LINES_PER_SECOND=0)
    waits = []
    for _ in range(500):
        each = CircuitBreaker("each", 0.1)
        each.record_failure(ERROR)
        waits.append(each.next_probe_in / breaker_module.FIRST_INTERVAL)
    assert 1 <= min(waits) < 1.02
    assert 1 + breaker_module.JITTER - 0.02 < max(waits) <= 1 + breaker_module.JITTER


def test_failures_of_calls_under_way_do_not_lengthen_the_interval(breaker, breaker_clock):
    breaker.record_failure(ERROR)
    wait = breaker.next_probe_in
    for _ in range(50):
        breaker_clock.tick(0.001)
        breaker.record_failure(ERROR)
    assert breaker.next_probe_in == pytest.approx(wait - 0.05)
    breaker_clock.tick(wait)
    assert breaker.allows_call()
    breaker.record_failure(ERROR)
    assert breaker.next_probe_in <= breaker_module.MAX_INTERVAL * (1 + breaker_module.JITTER)


def test_threads_that_fail_together_open_the_breaker_once(breaker, log_lines):
    def work(n):
        breaker.record_failure(ERROR)
        return breaker.allows_call()

    assert not any(in_threads(work))
    assert len(log_lines(UNAVAILABLE)) == 1


def test_one_of_several_threads_is_the_probe(breaker, breaker_clock):
    breaker.record_failure(ERROR)
    breaker_clock.tick_to_probe()
    assert sum(in_threads(lambda n: breaker.allows_call())) == 1


# Errors that do not concern the whole server


@pytest.mark.parametrize("fault", faults_named("out of memory", "snapshots fail", "too few replicas"), ids=str)
def test_server_that_takes_no_writes_still_refuses_identities_over_the_limit(fault, limiter, target, use_url, algo):
    """A full sliding log even counts on: expired entries are deleted before it grows."""
    use_url(target.node.url)
    policy = limited("open", algo=algo)
    for _ in range(LIMIT):
        assert limiter.check("alice", policy).allowed
    with fault.applied(target):
        for _ in range(3):
            refused, fresh = limiter.check("alice", policy), limiter.check("bob", policy)
            assert (refused.allowed, refused.degraded, fresh.allowed) == (False, False, True)
        assert circuit_breaker().error is None


# What receivers and pages get


def causes(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__


def test_cause_of_the_error_is_what_redis_py_raised(limiter, redis_unavailable, failure_signals):
    limiter.check("alice", ROOMY)
    errors = [*itertools.islice(causes(failure_signals[0]["error"]), 10)]
    assert isinstance(errors[0], UnavailableError)
    assert isinstance(errors[1], redis.ConnectionError)
    assert len(errors) < 10


@each_on_failure
def test_statistics_count_what_was_decided_without_redis(on_failure, site_on_one_loop, target, use_url, breaker_clock):
    use_url(target.node.url)
    site_on_one_loop.serve(rate_limit(limited(on_failure))(site_on_one_loop.view(ok)))
    site_on_one_loop.get()
    target.node.kill()
    site_on_one_loop.statuses(6)
    target.node.launch()
    breaker_clock.tick_to_probe()
    flush_statistics()
    found = read_minutes(["p"])["p"][-2:]  # a minute may have ended meanwhile
    allowed, refused, degraded = (
        sum(getattr(each, kind) for each in found) for kind in ("allowed", "refused", "degraded")
    )
    # A process that counts locally knows which identities it refuses.
    expected = {"open": (1, 0, 6), "closed": (1, 0, 6), "local": (1, 2, 4)}
    assert (allowed, refused, degraded) == expected[on_failure]


# The site's own cache


def test_cache_of_the_site_keeps_its_own_pool_and_timeouts(target, use_url):
    use_url(target.node.url, TIMEOUT, socket_timeout=5, max_connections=1)
    pool = caches["default"].client.get_client(True).connection_pool
    before = dict(pool.connection_kwargs), pool.max_connections, pool.connection_class
    caches["default"].set("theirs", 1)
    connection = pool.get_connection()
    try:  # the site's connection is in use, and the limiter has another
        assert not check("alice", ROOMY).degraded
        assert not asyncio.run(acheck("alice", ROOMY)).degraded
    finally:
        pool.release(connection)
    target.node.hang()
    try:
        assert timed(lambda: check("alice", ROOMY).degraded)[0] < TIMEOUT + SLACK
        threading.Timer(2 * TIMEOUT, target.node.resume).start()
        assert caches["default"].get("theirs") == 1  # it waits for as long as the site's own timeout
    finally:
        target.node.resume()
    assert (dict(pool.connection_kwargs), pool.max_connections, pool.connection_class) == before


# Connections that are all in use


def test_many_threads_share_two_connections(target, use_url):
    use_url(target.node.url, LONG_TIMEOUT, max_connections=2)
    others = len(target.node.client().client_list())
    decisions = in_threads(lambda n: [check("alice", ROOMY) for _ in range(50)])
    assert sorted(each.current_count for part in decisions for each in part) == list(range(16 * 50))
    assert len(target.node.client().client_list()) <= others + 2


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not connected"])
def test_thread_that_waits_for_a_connection_to_a_hung_server_makes_no_call(target, use_url, hang, connected):
    use_url(target.node.url, TIMEOUT, max_connections=2)
    if connected:
        in_threads(lambda n: check("alice", ROOMY))
    hang()
    results = in_threads(lambda n: timed(check, "alice", ROOMY))
    assert all(decision.degraded for _, decision in results)
    assert max(seconds for seconds, _ in results) < 3 * TIMEOUT + SLACK
    assert 1 <= attempts(target.node) <= 3  # the third by who gets the first connection that is free again


# Several policies, and shadow policies


def two_per_year(on_failure: str, shadow: bool = False, name: str = "p") -> Policy:
    return Policy(name, (2, YEAR), key="ip", on_failure=on_failure, shadow=shadow)


@pytest.mark.parametrize(
    ("policies", "statuses"),
    [
        ([two_per_year("open", shadow=True)], [200] * 4),
        ([two_per_year("closed", shadow=True)], [200] * 4),
        ([two_per_year("local", shadow=True)], [200] * 4),
        ([two_per_year("open"), two_per_year("closed", name="q")], [503] * 4),
        ([two_per_year("open"), two_per_year("local", name="q")], [200, 200, 429, 429]),
        ([two_per_year("local"), two_per_year("closed", shadow=True, name="q")], [200, 200, 429, 429]),
        ([two_per_year("closed"), two_per_year("local", shadow=True, name="q")], [503] * 4),
        ([two_per_year("open"), two_per_year("closed", shadow=True, name="q")], [200] * 4),
    ],
    ids=[
        *("open shadow", "closed shadow", "local shadow", "open, closed", "open, local"),
        *("local, closed shadow", "closed, local shadow", "open, closed shadow"),
    ],
)
def test_each_of_several_policies_is_followed(site_on_one_loop, redis_unavailable, policies, statuses):
    site_on_one_loop.serve(rate_limit(*policies)(site_on_one_loop.view(ok)))
    assert site_on_one_loop.statuses(4) == statuses


# Refunds


def test_refund_that_fails_fails_no_request(site_on_one_loop, target, use_url):
    use_url(target.node.url)

    def view(request):
        target.node.kill()
        return HttpResponse(status=404)

    decorated = rate_limit(limited("open"), charge_when=lambda response: False)
    site_on_one_loop.serve(decorated(site_on_one_loop.view(view)))
    try:
        assert site_on_one_loop.get().status_code == 404
    finally:
        target.node.launch()


# Replies that are lost or late


@pytest.fixture
def use_proxy_with_users(target, use_url):
    """Give each user a count of its own, and have the limiter use the proxy."""

    def begin(timeout: float = TIMEOUT) -> None:
        use_url(target.node.url, LONG_TIMEOUT)
        for n in USERS[1:]:
            check(f"user-{n}", ROOMY, cost=n * BASE)
        target.proxy.cut()
        use_url(target.proxy.url, timeout)

    yield begin
    target.proxy.pass_all()
    target.proxy.cut()


class Ledger:
    """Checks and replies by user: a reply is of its own user, and each counts more than the one before."""

    def __init__(self) -> None:
        self.checked: Counter[int] = Counter()
        self.replied: Counter[int] = Counter()
        self.latest = {n: n * BASE - 1 for n in USERS}

    def add(self, n: int, decision) -> None:
        self.checked[n] += 1
        if decision.degraded:
            return
        self.replied[n] += 1
        assert decision.current_count // BASE == n
        assert decision.current_count > self.latest[n]
        self.latest[n] = decision.current_count

    def assert_counted_once(self, target: ProxiedServer, use_url) -> None:
        """The server has counted every check with a reply, some without, and none twice."""
        target.proxy.pass_all()
        use_url(target.node.url, LONG_TIMEOUT)
        for n in USERS:
            assert self.replied[n] <= count(f"user-{n}") - n * BASE <= self.checked[n]


CALLS = 10_000


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ten_thousand_calls_with_lost_replies_count_nothing_twice(
    mode, use_proxy_with_users, target, use_url, no_skipped_calls, record_property
):
    """A tenth of the replies is lost, and their connections are closed."""
    use_proxy_with_users(LONG_TIMEOUT)
    check("user-0", ROOMY, cost=0)  # the script is loaded
    ledger, before, dropped = Ledger(), target.proxy.commands, target.proxy.dropped
    target.proxy.drop(0.1, seed=1, of="EVALSHA", close=True)

    async def check_all():
        for start in range(0, CALLS, 4):
            users = [(start + n) % len(USERS) for n in range(4)]
            decisions = await asyncio.gather(*[acheck(f"user-{n}", ROOMY) for n in users])
            for n, decision in zip(users, decisions, strict=True):
                ledger.add(n, decision)

    if mode == "sync":
        for i in range(CALLS):
            ledger.add(i % len(USERS), check(f"user-{i % len(USERS)}", ROOMY))
    else:
        asyncio.run(check_all())
    dropped = target.proxy.dropped - dropped
    assert dropped > 0.08 * CALLS
    assert target.proxy.commands - before <= CALLS  # each was sent once
    ledger.assert_counted_once(target, use_url)
    total = sum(count(f"user-{n}") - n * BASE for n in USERS)
    assert total <= target.proxy.commands - before
    if mode == "sync":  # of tasks that share a connection, those behind a lost reply are lost too
        assert sum(ledger.replied.values()) == CALLS - dropped
    record_property("dropped", dropped)
    record_property("replied", sum(ledger.replied.values()))
    record_property("counted", total)


@pytest.mark.parametrize("trouble", ["lost", "late"])
def test_lost_or_late_reply_reaches_no_other_caller(
    limiter, use_proxy_with_users, target, use_url, no_skipped_calls, trouble
):
    """The proxy keeps the connection open meanwhile, and a late reply does come on it."""
    use_proxy_with_users(0.02)
    limiter.check("user-0", ROOMY, cost=0)
    rng, ledger = random.Random(2), Ledger()
    for i in range(250):
        troubled = rng.random() < 0.1
        if trouble == "late":
            target.proxy.delay(0.04 if troubled else 0)
        else:
            target.proxy.drop(troubled, of="EVALSHA")
        n = i % len(USERS)
        ledger.add(n, limiter.check(f"user-{n}", ROOMY))
    assert sum(ledger.checked.values()) - sum(ledger.replied.values()) > 10
    assert sum(ledger.replied.values()) > 60  # of about 225; a busy machine is late by itself
    ledger.assert_counted_once(target, use_url)


async def test_concurrent_tasks_get_their_own_replies_however_late(
    use_proxy_with_users, target, use_url, no_skipped_calls
):
    use_proxy_with_users(0.03)
    rng, ledger = random.Random(3), Ledger()

    async def check_user(n):
        ledger.add(n, await acheck(f"user-{n}", ROOMY))

    for _ in range(100):
        target.proxy.delay(rng.choice([0, 0.005, 0.01, 0.06]))
        await asyncio.gather(*map(check_user, USERS))
    assert 100 <= sum(ledger.replied.values()) < 800
    await asyncio.to_thread(ledger.assert_counted_once, target, use_url)


# Calls that are cancelled or interrupted


def are_own(decisions) -> bool:
    """Return whether each user's decision is its own, and from Redis."""
    return [(each.degraded, each.current_count) for each in decisions] == [(False, n * BASE) for n in USERS]


def peek_until(done) -> bool:
    """Peek at every user until done; return whether each reply was the user's own."""
    while not done():
        if not are_own([peek(f"user-{n}", ROOMY) for n in USERS]):
            return False
    return True


async def apeek_until(done) -> bool:
    while not done():
        if not are_own(await asyncio.gather(*[apeek(f"user-{n}", ROOMY) for n in USERS])):
            return False
    return True


def after(times: int):
    """Return a function that is true after so many calls."""
    left = iter(range(times))
    return lambda: next(left, None) is None


async def cancel_some(rng: random.Random, target: ProxiedServer, rounds: int) -> int:
    """Cancel checks before they connect, while they are sent or while they wait; return how many."""
    cancelled = 0
    for _ in range(rounds):
        target.proxy.delay(rng.choice([0, 0, 0.001]))
        tasks = [asyncio.create_task(acheck("victim", ROOMY)) for _ in range(rng.randint(1, 60))]
        if rng.random() < 0.7:
            for _ in range(rng.randint(0, 12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(rng.uniform(0, 0.003))
        for task in tasks:
            task.cancel()
        assert await apeek_until(after(1))  # while replies to the cancelled checks are still on their way
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled += sum(isinstance(each, asyncio.CancelledError) for each in results)
        decisions = [each for each in results if not isinstance(each, asyncio.CancelledError)]
        assert all(each.current_count < BASE and not each.degraded for each in decisions)
    return cancelled


def test_ten_thousand_cancelled_checks_leave_no_reply_for_the_next(use_proxy_with_users, target, record_property):
    use_proxy_with_users(LONG_TIMEOUT)
    rng, cancelled, loops = random.Random(4), 0, 0
    while cancelled < 10_000:
        loops += 1
        cancelled += asyncio.run(cancel_some(rng, target, 6))  # a loop begins without a connection
    wait_until(lambda: target.proxy.connections == 0, "every loop has closed its connection")
    record_property("cancelled", cancelled)
    assert loops > 20


class InterruptionError(BaseException):
    """As of a Ctrl-C, or of a time limit that a signal enforces."""


@pytest.fixture
def interrupt():
    """Interrupt a check of this thread in so many seconds, if it still runs."""

    def handler(signum, frame):
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        # What is raised in a finaliser is printed and goes no further.
        if check.__code__ in codes and not any(code.co_name in ("__del__", "_remove") for code in codes):
            raise InterruptionError

    previous = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_interrupted_checks_leave_no_reply_and_lose_no_connection(
    use_proxy_with_users, target, use_url, interrupt, record_property
):
    use_proxy_with_users()
    use_url(target.node.url, LONG_TIMEOUT, max_connections=4)
    others = len(target.node.client().client_list())
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
        decision = peek(f"user-{n}", ROOMY)
        assert (decision.degraded, decision.current_count) == (False, n * BASE), f"after {interrupted} interruptions"
    assert interrupted > 1_000
    record_property("interrupted", interrupted)
    # All four connections can still be had, and no more than these.
    assert not any(in_threads(lambda n: check("victim", ROOMY).degraded, 4))
    wait_until(lambda: len(target.node.client().client_list()) <= others + 4, "lost connections are closed", 5)


def test_event_loops_of_many_threads_come_and_go(target, use_url):
    """As with async views behind WSGI, which have an event loop for each request."""
    use_url(target.node.url, LONG_TIMEOUT)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        results = in_threads(lambda n: [asyncio.run(acheck("alice", ROOMY)).degraded for _ in range(20)])
    finally:
        sys.setswitchinterval(interval)
    assert not any(any(part) for part in results)
    assert count("alice") == 16 * 20


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_refund_in_a_fork_has_a_connection_of_its_own(use_proxy_with_users, target, use_url):
    use_proxy_with_users()
    use_url(target.node.url, LONG_TIMEOUT)
    decisions = [check("victim", ROOMY) for _ in range(80)]

    def child(n):
        return [refund(each) and peek_until(after(1)) for each in decisions[20 * n : 20 * n + 20]]

    assert in_processes(child, 4) == [[True] * 20] * 4
    assert count("victim") == 0
    assert peek_until(after(10))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_forks_amid_calls_of_threads_and_loops_get_their_own_replies(use_proxy_with_users, target, use_url):
    """Eight threads, two of them with an event loop, peek all the time; meanwhile forked processes do the same."""
    use_proxy_with_users()
    use_url(target.node.url, LONG_TIMEOUT)
    done = threading.Event()

    def child(n):
        return peek_until(after(10)) and asyncio.run(apeek_until(after(10))) and peek_until(after(10))

    def thread(n):
        if n == 0:  # forks, amid the calls of the others
            try:
                return all(all(in_processes(child, 4)) for _ in range(5))
            finally:
                done.set()
        return asyncio.run(apeek_until(done.is_set)) if n < 3 else peek_until(done.is_set)

    assert in_threads(thread, 9) == [True] * 9
