"""The way to Redis: round trips, connections, options of the cache, and calls that are not sent twice."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import rlaas_django
from django.core.cache.backends.base import BaseCache
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from example_project.redis_server import Server
from redis.backoff import NoBackoff
from redis.retry import Retry
from rlaas_django import Policy, acheck, apeek, check, peek
from rlaas_django.testing import embedded_redis

from tests.support.internals import (
    ALGORITHMS,
    SCRIPTS,
    SLIDING_WINDOW,
    YEAR,
    UnavailableError,
    backend,
    check_plan,
    paused_background,
    redis_client,
    script_for,
)
from tests.support.observation import assert_soon, commands_sent, connections, hanging, observer
from tests.support.parallel import in_threads

ROOMY = Policy("p", (1_000, YEAR), algo=SLIDING_WINDOW)
DJANGO_REDIS = "django_redis.cache.RedisCache"
DJANGO = "django.core.cache.backends.redis.RedisCache"


# Round trips


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "refused"])
def test_a_decision_takes_one_round_trip(own, limiter, number, allowed):
    policies = [Policy(f"p{n}", (1, YEAR), algo=algo) for n, algo in enumerate(ALGORITHMS[:number])]
    limiter.check("alice", policies, cost=0 if allowed else 1)  # connects, registers; for a refusal takes all there is
    with commands_sent(own.url) as seen:
        assert limiter.check("alice", policies).allowed is allowed
    assert seen == ["EVALSHA"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_decision_sends_the_sha_of_the_script_that_is_registered_with_the_cache(algo):
    registered = backend.registered_scripts("default")
    script = script_for(algo)
    packed = check_plan("alice", Policy("p", "5/m", algo=algo), 1).pack().packed
    assert registered[script.name].sha == script.sha
    assert f"EVALSHA\r\n$40\r\n{script.sha}".encode() in packed


def test_every_script_is_registered_with_the_cache():
    registered = backend.registered_scripts("default")
    assert {name: script.sha for name, script in registered.items()} == {script.name: script.sha for script in SCRIPTS}


def test_a_script_that_the_server_lost_is_registered_and_called_again(own, limiter):
    limiter.check("alice", ROOMY)
    with observer(own.url) as client:
        client.script_flush()
        with commands_sent(own.url) as seen:
            decision = limiter.check("alice", ROOMY)
        # With SCRIPT LOAD, to stay: servers from 7.4 on evict what EVAL brought.
        assert seen == ["EVALSHA", "SCRIPT LOAD", "EVALSHA"]
        assert client.script_exists(script_for(SLIDING_WINDOW).sha) == [True]
    assert decision.current_count == 1
    assert peek("alice", ROOMY).current_count == 2


# Servers that go, processes and loops that come and go


def test_a_restarted_server_is_found_again_and_counts_from_zero(own):
    assert [check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
    own.kill()
    own.launch()
    assert [check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]


async def test_a_running_loop_finds_a_restarted_server_again(own):
    assert [(await acheck("alice", ROOMY)).current_count for _ in range(3)] == [0, 1, 2]
    await asyncio.to_thread(own.kill)
    await asyncio.to_thread(own.launch)
    assert [(await acheck("alice", ROOMY)).current_count for _ in range(3)] == [0, 1, 2]


def test_parent_and_child_go_on_after_a_fork(limiter):
    """Both at once. The parent's loop, if any, is open then, with connections in its pool."""

    def counts(identity, times, check):
        return [check(identity, ROOMY).current_count for _ in range(times)]

    def child(pipe):
        # A loop cannot be shared between processes, so the child makes its own.
        own = check if limiter is rlaas_django else lambda *args: asyncio.run(acheck(*args))
        pipe.send(counts("child", 100, own))

    assert counts("parent", 10, limiter.check) == list(range(10))
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(writer,))
    process.start()
    writer.close()
    assert counts("parent", 100, limiter.check) == list(range(10, 110))
    assert reader.recv() == list(range(100))
    assert counts("parent", 10, limiter.check) == list(range(110, 120))
    process.join()
    reader.close()


@contextmanager
def nothing_left_open(url: str):
    """As many connections after as before, without the garbage collector's help, or the background thread's part."""
    with paused_background(), observer(url) as client:
        before = connections(client)
        gc.disable()
        try:
            yield
            assert_soon(lambda: connections(client) == before)
        finally:
            gc.enable()


def test_loops_one_after_the_other_count_on_and_leave_no_connection(own):
    with nothing_left_open(own.url):
        counts = [asyncio.run(acheck("alice", ROOMY)).current_count for _ in range(50)]
    assert counts == list(range(50))


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_loops_in_threads_at_once_count_exactly_and_leave_no_connection(own, restless):
    async def some():
        return [
            decision.current_count for decision in await asyncio.gather(*[acheck("alice", ROOMY) for _ in range(3)])
        ]

    with nothing_left_open(own.url):
        counts = in_threads(lambda n: [count for _ in range(12) for count in asyncio.run(some())], 8)
    assert sorted(count for part in counts for count in part) == list(range(8 * 12 * 3))


async def test_more_tasks_than_the_pool_has_connections_are_no_way_around_a_limit(own):
    """redis-py's own pool has 100 and raises for the next, which would be a request without a limit."""
    policy = Policy("p", (10, YEAR))
    decisions = await asyncio.gather(*[acheck("alice", policy) for _ in range(300)])
    assert sum(decision.allowed for decision in decisions) == 10


# Calls that do not end well

RETRIES = {"retry": Retry(NoBackoff(), 3), "retry_on_timeout": True}
retrying = pytest.mark.parametrize(
    ("cache", "options"),
    [
        (DJANGO_REDIS, {"SOCKET_TIMEOUT": 0.5, "CONNECTION_POOL_KWARGS": RETRIES}),
        (DJANGO, {"socket_timeout": 0.5, **RETRIES}),
    ],
    ids=["django-redis", "django"],
)


@retrying
def test_a_call_that_timed_out_is_not_sent_again(limiter, start, use, configure, cache, options):
    """The server reads it once it wakes up; a repetition, which would be answered by then, would count it twice."""
    server = start()
    configure(TIMEOUT=0.5)
    use(server.url, cache, **options)
    limiter.check("alice", ROOMY)
    with commands_sent(server.url) as seen, hanging(server, 0.8):
        assert limiter.check("alice", ROOMY).degraded
    assert seen.count("EVALSHA") == 1
    with observer(server.url) as client:
        assert client.zcard("rlaas:rate_limit:p/alice") == 2


@retrying
def test_a_reply_that_came_too_late_reaches_nobody(limiter, start, use, configure, cache, options):
    server = start()
    configure(TIMEOUT=0.5)
    use(server.url, cache, **options)
    limiter.check("alice", ROOMY, cost=40)
    with hanging(server, 0.8):
        assert limiter.check("alice", ROOMY).degraded
    answers = []
    assert_soon(lambda: answers.append(limiter.check("bob", ROOMY)) or not answers[-1].degraded)
    assert [answers[-1].current_count, limiter.check("bob", ROOMY).current_count] == [0, 1]


@pytest.fixture
def tight(start, use) -> Server:
    """A server that the limiter may have four connections to, so that a lost one is missed."""
    server = start()
    use(server.url, CONNECTION_POOL_KWARGS={"max_connections": 4})
    return server


async def assert_own_answers(times: int) -> None:
    """Each identity has a count of its own, by which a reply tells whose it is."""
    for _ in range(times):
        looks = await asyncio.gather(*[apeek(f"user-{n}", ROOMY) for n in range(4)])
        assert [look.current_count for look in looks] == [1, 2, 3, 4]


async def test_a_check_cancelled_at_any_moment_leaves_no_reply_for_the_next(tight):
    rng = random.Random(1)
    cancelled = 0
    for n in range(4):
        await acheck(f"user-{n}", ROOMY, cost=n + 1)
    await acheck("victim", ROOMY, cost=100)
    for _ in range(200):
        tasks = [asyncio.create_task(acheck("victim", ROOMY)) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:
            for _ in range(rng.randint(0, 10)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(rng.uniform(0, 0.001))
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
        assert all(isinstance(result, asyncio.CancelledError) or result.current_count >= 100 for result in results)
        await assert_own_answers(1)
    assert cancelled


async def test_a_check_cancelled_while_the_server_thinks_leaves_no_reply_for_the_next(tight):
    for n in range(4):
        await acheck(f"user-{n}", ROOMY, cost=n + 1)
    await assert_own_answers(1)  # four connections are open
    with hanging(tight):
        tasks = [asyncio.create_task(acheck("victim", ROOMY, cost=100)) for _ in range(4)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 4
    await assert_own_answers(3)


def test_cancelled_checks_leave_no_connection_behind(own):
    async def storm():
        rng = random.Random(2)
        for _ in range(100):
            task = asyncio.create_task(acheck("alice", ROOMY))
            await asyncio.sleep(rng.uniform(0, 0.001))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with nothing_left_open(own.url):
        asyncio.run(storm())


# Ways to a server


def test_djangos_own_cache_gives_the_same_answers_at_the_same_keys(limiter, algo, configure, client, clock):
    told = []
    for alias in ("default", "django"):
        configure(CACHE=alias)
        client.flushdb()
        decisions = [limiter.check("alice", Policy("p", "3/m", algo=algo)) for _ in range(5)]
        told.append((decisions, client.keys()))
    assert told[0] == told[1]
    assert [decision.allowed for decision in decisions] == [True] * 3 + [False] * 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


UNIX = "unix://{credentials}{socket}?db={db}"
TCP = "redis://{credentials}127.0.0.1:{port}/{db}"


@pytest.mark.parametrize("cache", [DJANGO_REDIS, DJANGO], ids=["django-redis", "django"])
@pytest.mark.parametrize("form", [UNIX, TCP], ids=["unix", "tcp"])
@pytest.mark.parametrize("credentials", ["", ":s3cret@", "limiter:s3cret@"], ids=["open", "password", "acl"])
def test_an_address_may_name_a_socket_or_a_port_a_database_and_credentials(
    limiter, start, use, cache, form, credentials
):
    port = free_port()
    server = start("--port", str(port))
    with observer(server.url) as client:
        if credentials.startswith(":"):
            client.config_set("requirepass", "s3cret")
        elif credentials:
            client.execute_command("ACL", "SETUSER", "limiter", "on", ">s3cret", "~rlaas:*", "+@all")
            client.execute_command("ACL", "SETUSER", "default", "off")
    url = form.format(credentials=credentials, socket=server.socket, port=port, db=3)
    use(url, cache)
    assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
    with observer(url) as client:
        assert client.zcard("rlaas:rate_limit:p/alice") == 3


@pytest.mark.parametrize("form", [UNIX, TCP], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    "options",
    [
        {"PASSWORD": "s3cret"},
        {"CONNECTION_POOL_KWARGS": {"password": "s3cret", "protocol": 2}},
        {"CONNECTION_POOL_KWARGS": {"password": "s3cret", "protocol": 3}},
        {"CONNECTION_POOL_KWARGS": {"password": "s3cret", "decode_responses": True}},
        {"CONNECTION_POOL_KWARGS": {"password": "s3cret", "decode_responses": True, "protocol": 3}},
    ],
    ids=["password", "protocol 2", "protocol 3", "decoded", "decoded 3"],
)
def test_the_options_of_django_redis_are_followed(limiter, start, use, form, options):
    port = free_port()
    server = start("--port", str(port))
    with observer(server.url) as client:
        client.config_set("requirepass", "s3cret")
    use(form.format(credentials="", socket=server.socket, port=port, db=0), **options)
    policies = [Policy(f"p{n}", (2, YEAR), algo=algo) for n, algo in enumerate(ALGORITHMS)]
    decisions = [limiter.check("alice", policies) for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [{each.current_count for each in decision.outcomes} for decision in decisions] == [{0}, {1}, {2}]
    assert limiter.refund(decisions[0])
    assert limiter.reset("alice", policies) == len(ALGORITHMS)


@pytest.mark.parametrize("protocol", [2, 3])
def test_ours_is_the_older_protocol_whatever_the_caches_is(limiter, start, use, protocol):
    server = start()
    use(server.url, CONNECTION_POOL_KWARGS={"protocol": protocol})
    assert not limiter.check("alice", ROOMY).degraded
    with observer(server.url) as client:
        own = str(client.client_id())
        # Servers before 7.0 do not tell.
        spoken = [each.get("resp", "2") for each in client.client_list() if each["id"] != own]
    assert spoken == ["2"]


class OwnCache(BaseCache):
    """A cache of a site's own, which is none of Django's."""

    def __init__(self, location, params):
        super().__init__(params)


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("own", "OwnCache.*gives no Redis client; use django_redis.cache.RedisCache, django.core.cache.*RedisCache"),
        ("missing", "nowhere"),
        ("fakerdis", r"should name an alias in CACHES.*'fakerdis'.*did you mean 'fakeredis'\?"),
        ("nowhere", "should name an alias in CACHES.*'nowhere'"),
    ],
    ids=["of the site's own", "of a missing package", "a misspelt one", "none"],
)
def test_a_cache_that_will_not_do_is_named_with_what_to_do(limiter, settings, configure, alias, message):
    own = {"BACKEND": f"{__name__}.OwnCache"}
    missing = {"BACKEND": "nowhere.RedisCache"}
    settings.CACHES = {**settings.CACHES, "own": own, "missing": missing}
    configure(CACHE=alias)
    with pytest.raises(ImproperlyConfigured, match=message):
        limiter.check("alice", ROOMY)


def test_another_entry_in_caches_is_followed_at_once(limiter, start):
    servers = [start(), start()]
    for turn in range(5):
        for server in servers:
            entry = {"BACKEND": DJANGO_REDIS, "LOCATION": server.url}
            with override_settings(CACHES={"default": entry}):
                assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [
                    3 * turn,
                    3 * turn + 1,
                    3 * turn + 2,
                ]


def test_embedded_servers_are_separate(limiter, settings, configure):
    settings.CACHES = {**settings.CACHES, "one": embedded_redis(), "two": embedded_redis()}
    for count in range(3):
        for alias in ("one", "two"):
            configure(CACHE=alias)
            assert limiter.check("alice", ROOMY).current_count == count


def test_sync_and_async_share_an_embedded_server(configure):
    configure(CACHE="fakeredis")
    for count in range(0, 6, 2):
        assert check("alice", ROOMY).current_count == count
        assert asyncio.run(acheck("alice", ROOMY)).current_count == count + 1
    assert redis_client("fakeredis").zcard("rlaas:rate_limit:p/alice") == 6


INTERRUPTED = """
import signal, time
from rlaas_django.backend.commands import pack

class Interrupt(Exception):
    pass

def interrupt(_, frame):
    if pack.__code__ in (frame.f_code, getattr(frame.f_back, "f_code", None)):  # or a comprehension in it
        raise Interrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
interrupts, end = 0, time.monotonic() + 0.5
while time.monotonic() < end:
    try:
        pack(("EVALSHA", "sha", *range(10**12, 10**12 + 500)))
    except Interrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(interrupts > 0)
"""


def test_a_signal_handler_that_raises_while_a_command_is_packed_crashes_nothing():
    """hiredis crashes when the conversion of a number raises."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_page_waits_for_each_reply_of_a_message(own, configure):
    """Longer than a decision would: the timeout of pages is not that of decisions."""
    configure(TIMEOUT=0.1)
    assert backend.run_commands([("GET", "key"), ("BLPOP", "key", 0.3), ("GET", "key")]) == [None, None, None]


def test_a_page_waits_no_longer_than_its_timeout_for_all_replies(own, configure):
    configure(TIMEOUT=0.1)
    with pytest.raises(UnavailableError, match="timeout after 1 s"):
        backend.run_commands([("BLPOP", "key", 0.6), ("BLPOP", "key", 0.6)])
