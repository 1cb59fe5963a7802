"""While Redis is unavailable: each `on_failure`, the circuit breaker, recovery, and that nothing is sent twice.

One test of each behaviour, for the quick tier; test_failure.py has every fault, races and long runs.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
import weakref
from itertools import product

import pytest
import redis.asyncio
from django.http import HttpResponse
from rlaas_django import Policy, acheck, check, rate_limit, reset

from tests.support.faults import CHUNK, Loopback, messages
from tests.support.http import OURS, ok
from tests.support.internals import (
    SLIDING_WINDOW,
    YEAR,
    CircuitBreaker,
    ConnectionOptions,
    UnavailableError,
    breaker_module,
    call_now,
    circuit_breaker,
    connection_pool,
    local_store,
    paused_background,
    pool_module,
)
from tests.support.outages import (
    AVAILABLE_AGAIN,
    LIMIT,
    ROOMY,
    TIMEOUT,
    UNAVAILABLE,
    each_on_failure,
    faults_named,
    limited,
)
from tests.support.parallel import in_threads

ERROR = ConnectionError("oops")


@pytest.fixture(autouse=True)
def _no_background_jobs():
    with paused_background():
        yield


# What a request gets


@each_on_failure
def test_middleware_follows_on_failure(on_failure, site_on_one_loop, redis_unavailable, configure):
    configure(POLICIES={"p": {"rate": "2/h", "key": "ip", "on_failure": on_failure}}, MIDDLEWARE=[{"policies": ["p"]}])
    site_on_one_loop.serve(site_on_one_loop.view(ok), middleware=[OURS])
    expected = {"open": [200] * 3, "closed": [503] * 3, "local": [200, 200, 429]}
    assert site_on_one_loop.statuses(3) == expected[on_failure]


def test_shadow_policy_never_refuses(site_on_one_loop, redis_unavailable):
    policies = [limited(on_failure, name=on_failure, shadow=True) for on_failure in ("closed", "local")]
    site_on_one_loop.serve(rate_limit(*policies)(site_on_one_loop.view(ok)))
    assert site_on_one_loop.statuses(LIMIT + 1) == [200] * (LIMIT + 1)


def test_policy_that_fails_closed_charges_no_other(limiter, redis_unavailable):
    local, closed = limited("local", name="q"), limited("closed")
    identity = {"ip": "203.0.113.9"}
    for _ in range(LIMIT + 1):
        assert not limiter.check(identity, [local, closed]).allowed
    assert limiter.peek(identity, local).current_count == 0


def test_reset_raises_the_error(redis_unavailable):
    with pytest.raises(UnavailableError):
        reset("alice", ROOMY)


@pytest.mark.parametrize("fault", faults_named("replies OK", "replies a list of strings"), ids=str)
def test_strange_reply_is_an_error_of_one_call(fault, limiter, target, use_url, failure_signals, log_lines):
    use_url(target.url(fault))
    policy = limited("closed", key="user_or_ip")
    with fault.applied(target):
        decision = limiter.check("alice", policy)
        assert (decision.allowed, decision.degraded, decision.unavailable) == (False, True, True)
        assert circuit_breaker().error is None
    assert [type(signal["error"]) for signal in failure_signals] == [UnavailableError]
    assert len(log_lines(UNAVAILABLE)) == 1
    assert limiter.check("alice", policy).current_count == 0


@pytest.mark.parametrize("reply", [b"+OK\r\n", b"$-1\r\n", b"*1\r\n$1\r\n1\r\n", b"$8\r\n12345678\r\n"], ids=str)
def test_strange_reply_to_a_refund_or_reset_raises_the_error(limiter, target, use_url, reply):
    use_url(target.proxy.url)
    decision = limiter.check("alice", ROOMY)
    target.proxy.reply_with(reply)
    try:
        with pytest.raises(UnavailableError, match="unexpected reply"):
            limiter.refund(decision)
        with pytest.raises(UnavailableError, match="unexpected reply"):
            limiter.reset("alice", ROOMY)
        assert limiter.check("alice", ROOMY).degraded
    finally:
        target.proxy.reply_with(None)


class OwnNumbers(Loopback):
    """A server that replies to a check of user-<n> with a count of n, and some replies too many."""

    surplus = b""  # sent once, with the next reply

    async def serve(self, reader, writer):
        data = bytearray()
        while chunk := await reader.read(CHUNK):
            data += chunk
            for message in messages(data):
                user = re.search(rb"user-(\d+)", message)
                if user is None:  # of the handshake
                    writer.write(b"+OK\r\n")
                    continue
                surplus, self.surplus = self.surplus, b""
                numbers = (1, 1, int(user[1]), 9, 0, 0, 10, 1)
                writer.write(surplus + b"*8\r\n" + b"".join(b":%d\r\n" % number for number in numbers))
            await writer.drain()


STRANGE = [
    b"+OK\r\n",
    b":1\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    b"$1\r\n1\r\n",
    b"$-1\r\n",
    b"*8\r\n" + 8 * b"$1\r\n1\r\n",
]


@pytest.mark.parametrize("surplus", STRANGE, ids=str)
def test_surplus_reply_shifts_no_other(limiter, use_url, surplus):
    with OwnNumbers() as server:
        use_url(server.url)
        for n in range(0, 30, 3):
            assert limiter.check(f"user-{n}", ROOMY).current_count == n
            server.surplus = surplus
            assert limiter.check(f"user-{n + 1}", ROOMY).degraded
            assert limiter.check(f"user-{n + 2}", ROOMY).current_count == n + 2
        assert server.connections == 1
    assert circuit_breaker().error is None


@pytest.mark.parametrize("surplus", STRANGE, ids=str)
async def test_surplus_reply_strands_and_shifts_no_task(use_url, surplus):
    with OwnNumbers() as server:
        use_url(server.url)
        for _ in range(3):
            server.surplus = surplus
            decisions = await asyncio.gather(*[acheck(f"user-{n}", ROOMY) for n in range(300)])
            assert all(each.degraded or each.current_count == n for n, each in enumerate(decisions))
            assert any(each.degraded for each in decisions)
            assert not decisions[-1].degraded  # not sent with the first


@pytest.mark.skipif(not hasattr(redis.asyncio.Connection, "can_read"), reason="redis-py < 8")
async def test_surplus_reply_of_the_same_shape_shifts_no_task(use_url):
    with OwnNumbers() as server:
        use_url(server.url)
        for n in range(0, 30, 3):
            assert (await acheck(f"user-{n}", ROOMY)).current_count == n
            server.surplus = b"*8\r\n:1\r\n:1\r\n:999\r\n:9\r\n:0\r\n:0\r\n:10\r\n:1\r\n"
            assert (await acheck(f"user-{n + 1}", ROOMY)).degraded
            assert (await acheck(f"user-{n + 2}", ROOMY)).current_count == n + 2


@pytest.mark.parametrize("names", [["send_packed_command"], ["can_read", "can_read_destructive"]], ids=str)
def test_name_that_redis_py_has_no_more_is_an_error_of_the_request(limiter, own, monkeypatch, names):
    """And not a reason to decide without Redis from then on."""
    modules = redis.connection, redis.asyncio.connection
    classes = [module.AbstractConnection for module in modules] + [redis.connection.ConnectionInterface]
    limiter.check("alice", ROOMY)
    with monkeypatch.context() as patch:
        for each, name in product(classes, names):
            patch.delattr(each, name, raising=False)
        time.sleep(2 * pool_module.FRESH)  # a connection used since then is not examined
        with pytest.raises(AttributeError, match=names[0]):
            limiter.check("alice", ROOMY)
    assert circuit_breaker().error is None
    assert not limiter.check("alice", ROOMY).degraded


def test_error_of_one_key_concerns_one_identity(limiter, target, use_url, failure_signals, log_lines):
    use_url(target.node.url)
    policy = Policy("p", "3/h", algo=SLIDING_WINDOW, on_failure="closed")
    target.node.client().set("rlaas:rate_limit:p/alice", "not a log", ex=3600)
    for n in range(3):
        assert not limiter.check("alice", policy).allowed
        decision = limiter.check("bob", policy)
        assert (decision.allowed, decision.degraded, decision.current_count) == (True, False, n)
    assert circuit_breaker().error is None
    assert len(failure_signals) == 3
    assert len(log_lines("WRONGTYPE")) == 1


def test_an_error_reply_keeps_no_caller_alive(target, use_url):
    """Until the garbage collector runs: such a server may send one for each request."""
    use_url(target.node.url)
    target.node.client().set("rlaas:rate_limit:p/alice", "not a log", ex=3600)

    policy = Policy("p", "3/h", algo=SLIDING_WINDOW)
    assert not check("bob", policy).degraded  # the server has the script then

    def call() -> weakref.ref:
        held_by_the_caller = type("Held", (), {})()
        assert check("alice", policy).degraded
        return weakref.ref(held_by_the_caller)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


# Recovery


def test_service_recovers_after_a_restart(site_on_one_loop, target, use_url, breaker_clock, log_lines):
    use_url(target.node.url)
    site_on_one_loop.serve(rate_limit(limited("closed"))(site_on_one_loop.view(ok)))
    assert site_on_one_loop.statuses(2) == [200, 200]
    target.node.kill()
    assert site_on_one_loop.statuses(3) == [503] * 3
    target.node.launch()
    assert site_on_one_loop.statuses(2) == [503, 503]  # no probe is due
    breaker_clock.tick_to_probe()
    assert site_on_one_loop.get().headers["X-RateLimit-Remaining"] == str(LIMIT - 1)
    assert (len(log_lines(UNAVAILABLE)), len(log_lines(AVAILABLE_AGAIN))) == (1, 1)


def test_open_breaker_makes_no_call_and_no_connection(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url)
    target.proxy.refuse()
    target.proxy.cut()
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(2))
    target.proxy.accept()
    before = target.proxy.commands
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(100))
    assert (target.proxy.commands, target.proxy.connections) == (before, 0)
    breaker_clock.tick_to_probe()
    assert not limiter.check("alice", ROOMY).degraded


def test_single_timeout_skips_no_call(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url, TIMEOUT)
    limiter.check("alice", ROOMY)
    for _ in range(2):  # a reply in between starts over
        target.proxy.drop()
        assert limiter.check("alice", ROOMY).degraded
        target.proxy.pass_all()
        assert not limiter.check("alice", ROOMY).degraded


def test_two_timeouts_in_a_row_open_the_breaker(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url, TIMEOUT)
    limiter.check("alice", ROOMY)
    target.proxy.drop()
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(2))
    target.proxy.pass_all()
    assert limiter.check("alice", ROOMY).degraded
    breaker_clock.tick_to_probe()
    assert not limiter.check("alice", ROOMY).degraded


def test_connection_closed_amid_a_call_costs_that_call_alone(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url)
    for n in range(3):
        assert limiter.check("alice", ROOMY).current_count == 2 * n
        target.proxy.drop(of="EVALSHA", close=True)
        assert limiter.check("alice", ROOMY).degraded
        target.proxy.pass_all()


def test_two_new_connections_closed_amid_a_call_open_the_breaker(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url)
    target.proxy.drop(of="EVALSHA", close=True)
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(2))
    target.proxy.pass_all()
    assert limiter.check("alice", ROOMY).degraded
    breaker_clock.tick_to_probe()
    assert not limiter.check("alice", ROOMY).degraded


def test_missing_password_opens_the_breaker(limiter, target, use_url, breaker_clock):
    """Redis 7.0 rejects a call of more than ten arguments with a protocol error then, and closes the connection."""
    use_url(target.node.url)
    policies = [Policy(f"p{n}", (100, YEAR)) for n in range(3)]
    client = target.node.client()
    client.config_set("requirepass", "s3cret")
    try:
        before = client.info("stats")["total_connections_received"]
        assert all(limiter.check("alice", policies).degraded for _ in range(20))
        assert client.info("stats")["total_connections_received"] - before <= 2
        assert circuit_breaker().error is not None
    finally:
        client.config_set("requirepass", "")
    breaker_clock.tick_to_probe()
    assert not limiter.check("alice", policies).degraded


def test_usage_counted_locally_is_not_added_to_redis_afterwards(limiter, target, use_url, breaker_clock):
    use_url(target.node.url, TIMEOUT)
    policy = limited("local", key="user_or_ip")
    limiter.check("alice", policy)
    target.node.hang()
    try:
        for _ in range(LIMIT + 1):
            assert limiter.check("alice", policy).degraded
    finally:
        target.node.resume()
    breaker_clock.tick_to_probe()
    assert limiter.check("alice", policy).current_count == 2  # the first, and the one that was sent and had no reply


# Nothing is sent twice


def test_call_that_timed_out_is_neither_sent_again_nor_refunded(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url, TIMEOUT)
    limiter.check("alice", ROOMY)
    before = target.proxy.commands
    target.proxy.drop()
    decision = limiter.check("alice", ROOMY)
    target.proxy.pass_all()
    breaker_clock.tick_to_probe()
    assert decision.degraded
    assert not limiter.refund(decision)
    assert target.proxy.commands == before + 1
    assert limiter.peek("alice", ROOMY).current_count == 2


def test_refund_that_timed_out_is_not_sent_again(limiter, target, use_url, breaker_clock):
    use_url(target.proxy.url, TIMEOUT)
    decisions = [limiter.check("alice", ROOMY) for _ in range(3)]
    assert limiter.refund(decisions[0])
    target.proxy.drop()
    with pytest.raises(UnavailableError):
        limiter.refund(decisions[1])
    target.proxy.pass_all()
    breaker_clock.tick_to_probe()
    assert not limiter.refund(decisions[1])
    assert limiter.peek("alice", ROOMY).current_count == 1


# Connections that are all in use


@each_on_failure
def test_exhausted_pool_is_decided_by_on_failure(on_failure, site, target, use_url, log_lines):
    use_url(target.node.url, TIMEOUT, max_connections=2)
    site.serve(rate_limit(limited(on_failure))(ok))
    pool = connection_pool()
    held = [pool.acquire(call_now()) for _ in range(2)]
    expected = {"open": [200] * 5, "closed": [503] * 5, "local": [200] * 4 + [429]}
    assert site.statuses(5) == expected[on_failure]
    assert circuit_breaker().error is None  # the server is not to blame
    assert 1 <= len(log_lines("All 2 connections are in use")) < 5  # one per second, on a busy machine a few
    pool.discard(held[0])
    pool.release(held[1], 0.0)
    assert site.get().headers["X-RateLimit-Remaining"] == "3"


def test_threads_wait_for_a_free_connection(target, use_url):
    use_url(target.node.url, max_connections=2)
    others = len(target.node.client().client_list())
    decisions = in_threads(lambda n: [check("alice", ROOMY) for _ in range(10)])
    assert sorted(each.current_count for part in decisions for each in part) == list(range(16 * 10))
    assert len(target.node.client().client_list()) <= others + 2


class OwnConnection(redis.Connection):
    """Of the site: it reads its replies itself."""


@pytest.mark.parametrize("connection_class", [redis.Connection, OwnConnection])
def test_a_connection_that_is_dropped_is_gone_without_the_garbage_collector(connection_class):
    options = ConnectionOptions.of(connection_class, {}, 1)
    gc.disable()
    try:
        dropped = weakref.ref(options.connection(0.1))
        assert dropped() is None
    finally:
        gc.enable()


# The circuit breaker


@pytest.fixture
def breaker(breaker_clock, configure) -> CircuitBreaker:
    configure(LOG_LINES_PER_SECOND=1000)
    return CircuitBreaker("Redis at nowhere", 0.1)


def test_breaker_opens_with_the_first_failure(breaker):
    assert all(breaker.allows_call() for _ in range(100))
    breaker.record_failure(ERROR)
    assert breaker.error == "oops"
    assert not any(breaker.allows_call() for _ in range(100))
    assert breaker.skipped == 100


def test_failure_that_does_not_open_the_breaker_does_so_the_second_time_in_a_row(breaker):
    breaker.record_failure(ERROR, opens=False)
    assert breaker.error is None
    breaker.record_success()
    breaker.record_failure(ERROR, opens=False)
    assert breaker.error is None
    assert breaker.allows_call()
    breaker.record_failure(ERROR, opens=False)
    assert breaker.error == "oops"
    assert not breaker.allows_call()


def test_open_breaker_allows_one_probe_per_interval(breaker, breaker_clock):
    breaker.record_failure(ERROR)
    breaker_clock.tick_to_probe()
    assert [breaker.allows_call() for _ in range(100)] == [True] + [False] * 99
    breaker_clock.tick_to_probe()  # also when the result of the probe is never recorded
    assert [breaker.allows_call() for _ in range(100)] == [True] + [False] * 99


def test_a_probe_that_waits_for_longer_than_the_interval_is_the_only_one(breaker_clock):
    breaker = CircuitBreaker("Redis at nowhere", timeout=1.0)
    breaker.record_failure(ERROR)
    breaker_clock.tick_to_probe()
    assert breaker.allows_call()
    assert breaker.next_probe_in >= 1.0


def test_interval_doubles_with_failed_probes_up_to_the_maximum(breaker, breaker_clock):
    breaker.record_failure(ERROR)
    waits = []
    for _ in range(6):
        waits.append(breaker.next_probe_in)
        breaker_clock.tick(breaker.next_probe_in)
        assert breaker.allows_call()
        breaker.record_failure(ERROR)
    expected = [0.15, 0.3, 0.6, 1.2, 2.0, 2.0]
    for wait, interval in zip(waits, expected, strict=True):
        assert interval <= wait <= interval * (1 + breaker_module.JITTER)


def test_breaker_closes_with_the_first_reply_and_starts_over(breaker, breaker_clock):
    for _ in range(2):
        breaker.record_failure(ERROR)
        for _ in range(3):
            breaker_clock.tick(breaker.next_probe_in)
            assert breaker.allows_call()
            breaker.record_failure(ERROR)
        breaker.record_success()
        assert breaker.error is None
        assert all(breaker.allows_call() for _ in range(100))
    breaker.record_failure(ERROR)
    assert breaker.next_probe_in <= breaker_module.FIRST_INTERVAL * (1 + breaker_module.JITTER)
    assert breaker.skipped == 0


def test_breaker_logs_once_a_second_and_when_it_closes(breaker, breaker_clock, log_lines):
    for probe in range(1, 6):
        breaker.record_failure(ERROR)
        for _ in range(10):
            breaker.allows_call()
            breaker.record_failure(ERROR)
            breaker.log_error(ERROR)
        assert len(log_lines(UNAVAILABLE)) == probe
        assert not log_lines(AVAILABLE_AGAIN)
        breaker_clock.tick(max(breaker.next_probe_in, breaker_module.LOG_INTERVAL))
        assert breaker.allows_call()
    breaker.record_success()
    breaker.record_success()
    (line,) = log_lines(AVAILABLE_AGAIN)
    assert f"after {breaker.open_for:.1f} s" in line
    assert f"{breaker.skipped} calls" in line


# Counting in this process


def test_local_limit_is_divided_by_the_processes(limiter, redis_unavailable, configure, algo):
    policy = Policy("p", (5, YEAR), algo=algo, on_failure="local")
    configure(LOCAL_SHARE=2)
    decisions = [limiter.check("alice", policy) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, True, False, False]
    assert decisions[0].limit == 2
    configure(LOCAL_SHARE=100)  # one unit at least
    assert [limiter.check("bob", policy).allowed for _ in range(3)] == [True, False, False]


def test_local_identities_are_bounded_and_those_that_last_longest_are_kept(limiter, redis_unavailable, configure):
    configure(LOCAL_IDENTITIES=100)
    lasting = Policy("p", (1, YEAR), on_failure="local")
    policy = Policy("q", "1/m", on_failure="local")
    assert limiter.check("alice", lasting).allowed
    for n in range(500):
        assert limiter.check(f"user-{n}", policy).allowed
        if n % 50 == 0:
            assert not limiter.check("alice", lasting).allowed
        assert len(local_store) <= 100


def test_local_peek_charges_nothing(limiter, redis_unavailable):
    policy = limited("local", key="user_or_ip")
    assert [limiter.peek("alice", policy).remaining for _ in range(3)] == [LIMIT] * 3
    assert limiter.check("alice", policy).remaining == LIMIT - 1
    assert limiter.peek("alice", policy).remaining == LIMIT - 1


def test_charge_when_refunds_what_was_charged_locally(site_on_one_loop, redis_unavailable):
    decorated = rate_limit(limited("local"), charge_when=lambda response: response.status_code != 404)
    site_on_one_loop.serve(decorated(site_on_one_loop.view(lambda request: HttpResponse(status=404))))
    responses = [site_on_one_loop.get() for _ in range(LIMIT + 3)]
    assert {response.status_code for response in responses} == {404}
    assert {response.headers["X-RateLimit-Remaining"] for response in responses} == {str(LIMIT)}


def test_a_breaker_logs_also_while_the_settings_are_invalid(breaker, settings, log_lines):
    """As a background thread may, whose servers are those of other settings."""
    settings.RATE_LIMITER = {"USE_ALGO": "no-such-algo"}
    breaker.log_error(ConnectionError("refused"))
    assert len(log_lines("refused")) == 1
