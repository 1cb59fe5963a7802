"""What a review found in the way to Redis and in what is remembered of it: none of it comes back."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import multiprocessing
import pickle
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import pytest
import redis
from django.http import HttpResponse
from django.test import override_settings
from django.urls import reverse
from redis.crc import key_slot

from rlaas_django import (
    Policy,
    acheck,
    arefund,
    areset,
    backend,
    breaker,
    check,
    log,
    peek,
    questions,
    rate_limit,
    refund,
    refusals,
    reset,
    responses,
    sites,
)
from rlaas_django.cluster import ConnectionFactory
from rlaas_django.identity import Id
from rlaas_django.policy import FIXED_WINDOW, SLIDING_WINDOW, YEAR, Decision, Left, Outcome, Repeated
from rlaas_django.server import Server, UnavailableError, _for_tls
from rlaas_django.stats import background
from rlaas_django.testing import embedded_redis
from rlaas_django.wire import pack
from tests.faults import Loopback
from tests.http import BOTH_WAYS, OURS, Site
from tests.test_backend import ROOMY, ask, assert_soon, onlooker, own, restless, start, use  # noqa: F401
from tests.test_refusals import now, use_up  # noqa: F401

# Within a year's window nothing leaves, refills or meets a boundary during a test.
ONE = Policy("one", (1, YEAR))
WITHIN = 30  # seconds, for what is there at once or never


def page(name: str, **query: str) -> str:
    return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None)


@pytest.fixture
def browser(settings, admin_client):
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    return admin_client


def assert_in_order(who: str = "somebody") -> None:
    """Redis is asked, and says who is over the limit."""
    assert backend.site().master.breaker.error is None
    assert not use_up(check, ONE, who).degraded


# What is sent

# Where a length in characters is short of that in bytes, the rest of a key is read as the next command.
COMMANDS = "\r\n" + "$0\r\n\r\n" * 11 + "*3\r\n$3\r\nSET\r\n$5\r\npwned\r\n$4\r\nyes!\r\nPING"


TEXTS = ["ip=" + "é" * len(COMMANDS) + COMMANDS, "ip=é", "%é", "é", "ip=\udce9"]
FOREIGN = ["josé", b"jos\xff", "page/josé", b"page/\xff\xfe", "é/alice", b"\xff/alice", "{é}", "ip=é"]


@pytest.mark.parametrize(("name", "option"), [("users", "q"), ("identity", "id")])
def test_a_text_from_the_admin_is_never_read_as_a_command(own, browser, name, option):  # noqa: F811
    with onlooker(own.url) as client:
        for n, text in enumerate(TEXTS):
            query = f"{option}={quote(text, errors='surrogateescape')}"
            assert browser.get(f"{page(name)}?{query}", follow=True).status_code == 200
            assert client.get("pwned") is None
            assert_in_order(f"user-{n}")


def test_foreign_keys_among_ours_are_left_out_of_the_active_ones(own, browser):  # noqa: F811
    check("alice")
    with onlooker(own.url) as client:
        for key in FOREIGN:
            client.set(b"rlaas:rate_limit:" + (key.encode() if isinstance(key, str) else key), 1, ex=60)
    response = browser.get(page("users", tab="active"))
    assert response.status_code == 200
    assert [row.identity.encoded for row in response.context["rows"]] == ["alice"]
    assert_in_order()


@pytest.mark.parametrize("number", [1, 3])
def test_an_identity_that_is_not_ascii_is_not_packed(number):
    policies = [Policy(f"p{n}", "5/m") for n in range(number)]
    with pytest.raises(UnicodeEncodeError):
        questions.policy_set(policies).pack(["alice"] * (number - 1) + ["josé"], "", "unique", 1, True)


# Who keeps the time


STANDARD = socket.socket


class OwnSocket(STANDARD):
    """As gevent's and eventlet's: a subclass that waits in its own way, for as long as its own timeout says."""


@pytest.mark.parametrize("kind", [STANDARD, OwnSocket], ids=["the standard library's", "another"])
def test_the_kernel_keeps_the_time_of_the_standard_librarys_sockets_alone(monkeypatch, kind):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        connection = Server(redis.Connection, {"host": host, "port": port}, 0.25, 1).line(1.5).connection
        monkeypatch.setattr(socket, "socket", kind)
        with connection._connect() as connected:
            assert type(connected) is kind
            size = struct.calcsize("ll")
            kept = [
                struct.unpack("ll", connected.getsockopt(socket.SOL_SOCKET, option, size))
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
            ]
            ours = connected.gettimeout()
    if kind is STANDARD:
        assert ours is None
        assert [(seconds, round(rest, -4)) for seconds, rest in kept] == [(1, 500_000)] * 2  # in ticks of the kernel's
    else:
        assert ours == 1.5
        assert kept == [(0, 0)] * 2


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_stood_still_takes_no_answered_request_for_lost(own, configure):  # noqa: F811
    configure(TIMEOUT=0.4)
    decisions: list[Decision] = []
    ends = False

    async def work(n):
        while not ends:
            decisions.append(await acheck(f"user-{n}", ROOMY, cost=0))

    async def until(fact):
        async with asyncio.timeout(WITHIN):
            while not fact():  # noqa: ASYNC110  (the loop has to be busy)
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(n)) for n in range(40)]
    await until(lambda: decisions)
    channel = backend.site().master._channels[asyncio.get_running_loop()]
    for _ in range(3):
        await until(lambda: channel.sent)
        stand_still(0.5)
        came, later = len(decisions), asyncio.get_running_loop().time() + 0.05
        await until(lambda: len(decisions) > came + 200 and asyncio.get_running_loop().time() > later)  # noqa: B023
    ends = True
    await asyncio.gather(*tasks)
    assert not [decision for decision in decisions if decision.degraded]
    assert backend.site().master.breaker.error is None


# Whether a server is worth asking


def test_a_page_that_asks_for_what_is_forbidden_stops_no_decision(start, use, ask, browser):  # noqa: F811
    server = start()
    with onlooker(server.url) as client:
        client.execute_command("ACL", "SETUSER", "site", "on", ">pw", "~*", "&*", "+@all", "-@dangerous")
    use(f"unix://site:pw@{server.socket}?db=0")
    use_up(ask, ONE)
    assert browser.get(page("changelist")).status_code == 200
    assert backend.site().master.breaker.error is None
    refusals.known.clear()
    decision = ask("alice", ONE)
    assert (decision.allowed, decision.degraded) == (False, False)
    assert not ask("bob", ONE).degraded


def test_a_server_that_took_no_writes_is_asked_again_through_the_only_connection(
    start,  # noqa: F811
    use,  # noqa: F811
    ask,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(breaker, "FIRST_INTERVAL", 0.05)
    monkeypatch.setattr(breaker, "LONGEST_INTERVAL", 0.05)
    server = start()
    use(server.url, CONNECTION_POOL_KWARGS={"max_connections": 1})
    assert not ask("alice", ROOMY).degraded
    its = backend.site().master.breaker
    with onlooker(server.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert ask("alice", ROOMY).degraded
        assert "read only" in str(its.error)
        client.execute_command("REPLICAOF", "NO", "ONE")
    for _ in range(2):
        assert_soon(lambda: its.next_probe_in == 0)
        ask("alice", ROOMY)
    assert its.error is None
    assert not ask("alice", ROOMY).degraded


def test_a_database_that_does_not_exist_is_no_server_to_ask(start, use, ask, monkeypatch):  # noqa: F811
    monkeypatch.setattr(breaker, "FIRST_INTERVAL", 600.0)
    server = start()
    use(f"unix://{server.socket}?db=99")
    with onlooker(server.url) as client:
        before = client.info("stats")["total_connections_received"]
        decisions = [ask("alice", ROOMY) for _ in range(20)]
        accepted = client.info("stats")["total_connections_received"] - before
    assert all(decision.degraded for decision in decisions)
    assert backend.site().master.breaker.error is not None
    assert accepted <= 2


# Where the nodes are


class Node:
    """A server of which nothing is asked."""

    def __init__(self, address):
        self.address = address
        self.breaker = SimpleNamespace(error=None, admits=lambda: True)
        self.doubted = 0

    def nonsense(self, reply):
        self.doubted += 1
        return UnavailableError(f"{reply!r} is no answer")


ALONE = [[0, 16383, [b"h", 0]]]
THREE = [[0, 5000, [b"h", 0]], [5001, 10000, [b"h", 1]], [10001, 16383, [b"h", 2]]]


def told(dialogue, reply):
    """The end of a dialogue in which whoever is asked answers so."""
    try:
        next(dialogue)
        dialogue.send(reply)
    except StopIteration as done:
        return done.value
    raise AssertionError("It asks again.")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(sites, "BETWEEN_LOOKS", 0.0)
    cluster = sites.Cluster([Node(("h", n)) for n in range(3)], Node)
    told(cluster.find(), THREE)
    return cluster


def all_at_once(works, seconds: float) -> list[BaseException]:
    """Each of these by a thread of its own, with 1, 2, 3 ..., for so long or until one raises; what was raised."""
    errors: list[BaseException] = []
    ends = time.monotonic() + seconds

    def repeat(work):
        try:
            for n in itertools.count(1):
                work(n)
                if errors or time.monotonic() > ends:
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_at_once_may_look_for_nodes_and_rearrange_them(cluster, restless):  # noqa: F811
    slot = key_slot(b"abc")

    def look(n):
        assert cluster.server("{abc}key") is not None
        assert cluster.servers()

    def find(n):
        told(cluster.find(), ALONE if n % 2 else THREE)

    def move(n):
        there = cluster.at("h", n % 3, cluster.seeds[0])
        told(cluster.moved(slot, there), THREE if n % 2 else ALONE)

    def meet(n):
        """As ASK does: nodes that are on no map."""
        assert cluster.at("", 100 + n, cluster.seeds[0]).address == ("h", 100 + n)
        assert cluster.at("h", 100 + n % 5, cluster.seeds[0]).address == ("h", 100 + n % 5)

    assert all_at_once([look, look, find, find, move, meet], 1) == []


@pytest.mark.parametrize("reply", [[], (), None, [[0, 16383]]], ids=repr)
def test_a_node_that_knows_of_no_slot_does_not_change_the_map(cluster, reply):
    for node in cluster.seeds:
        with pytest.raises(UnavailableError, match="no answer"):
            told(cluster.find(node), reply)
        assert node.doubted == 1
    assert cluster.servers() == cluster.seeds
    assert cluster.server("{abc}key") is cluster.seeds[1]
    # A slot that was met elsewhere is known all the same.
    told(cluster.moved(key_slot(b"abc"), cluster.seeds[2]), reply)
    assert cluster.servers() == cluster.seeds
    assert cluster.server("{abc}key") is cluster.seeds[2]


# Units that come back


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_refund_gives_back_what_it_can_before_it_says_what_it_could_not(monkeypatch, how):
    """In a cluster: a decision has a receipt for each slot."""
    parts = [check(who, ROOMY) for who in ("alice", "bob", "carol")]
    whole = Decision(True, parts[0].outcomes, [receipt for part in parts for receipt in part.receipts])
    run, tried = backend.run, []

    def run_some(call, **options):
        tried.append(call.key.rpartition("/")[2])
        if tried[-1] == "bob":
            raise UnavailableError("Its node is away.")
        return run(call, **options)

    async def arun_some(call):
        return run_some(call)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "run", run_some)
        patch.setattr(backend, "arun", arun_some)
        with pytest.raises(UnavailableError, match="away"):
            refund(whole) if how == "sync" else asyncio.run(arefund(whole))
    assert tried == ["carol", "bob", "alice"]
    assert [peek(who, ROOMY).current_count for who in ("alice", "bob", "carol")] == [0, 1, 0]
    assert refund(whole) is False


# Refusals in memory


@pytest.fixture
def lasting(monkeypatch):
    """They hold until the wait is over, however busy the machine."""
    monkeypatch.setattr(refusals, "LONGEST", 1_000.0)


def test_a_refusal_is_not_told_again_of_another_server(ask, lasting):  # noqa: F811
    """Each test of a site may have an empty one, by the same name."""
    for _ in range(3):
        with override_settings(CACHES={"default": embedded_redis()}):
            decisions = [ask("alice", ONE) for _ in range(3)]
        assert [decision.allowed for decision in decisions] == [True, False, False]
        assert [type(decision) for decision in decisions] == [Decision, Decision, Repeated]


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_a_refusal_stays_in_memory_though_an_outer_gate_is_given_back(settings, configure, monkeypatch, lasting, way):
    configure(
        POLICIES={"site": {"rate": "1000/h", "key": "global"}, "login": {"rate": "1/h", "key": "ip"}},
        MIDDLEWARE=[{"path": "/", "policies": ["site"]}],
    )
    site = Site(way, settings)
    site.serve(rate_limit("login")(site.view(lambda request: HttpResponse("ok"))), [OURS])
    assert site.statuses(2) == [200, 429]
    asked: list[tuple[str, bytes]] = []
    run, arun = backend.run, backend.arun

    def note(call):
        asked.extend((call.script.name, name) for name in (b"site", b"login") if b"limit:%b/" % name in call.packed)

    def run_noted(call, **options):
        note(call)
        return run(call, **options)

    async def arun_noted(call):
        note(call)
        return await arun(call)

    monkeypatch.setattr(backend, "run", run_noted)
    monkeypatch.setattr(backend, "arun", arun_noted)
    assert site.statuses(5) == [429] * 5
    assert asked == [("check", b"site"), ("refund", b"site")] * 5
    assert peek({}, "site").current_count == 1


def test_a_refusal_from_before_a_reset_is_not_told_after_it(monkeypatch, lasting):
    """Another thread is refused while the reset is on its way."""
    use_up(check, ONE)
    refusals.known.clear()
    run, told_meanwhile = backend.run, []

    def run_later(call, **options):
        if call.script.name == "reset":
            thread = threading.Thread(target=lambda: told_meanwhile.append(check("alice", ONE)))
            thread.start()
            thread.join()
        return run(call, **options)

    monkeypatch.setattr(backend, "run", run_later)
    assert reset("alice", ONE) == 1
    assert [decision.allowed for decision in told_meanwhile] == [False]
    assert check("alice", ONE).allowed


async def test_a_tasks_refusal_from_before_a_reset_is_not_told_after_it(monkeypatch, lasting):
    await acheck("alice", ONE)
    run = backend.arun

    async def run_later(call):
        if call.script.name == "reset":
            assert not (await acheck("alice", ONE)).allowed
        return await run(call)

    monkeypatch.setattr(backend, "arun", run_later)
    assert await areset("alice", ONE) == 1
    assert (await acheck("alice", ONE)).allowed


def test_a_refusal_that_a_reset_overtakes_is_not_remembered(monkeypatch, lasting):
    """The other way round: the reset begins and ends while the refusal is on its way back."""
    check("alice", ONE)
    run = backend.run

    def run_slowly(call, **options):
        reply = run(call, **options)
        if call.script.name == "check":
            with monkeypatch.context() as patch:
                patch.setattr(backend, "run", run)
                assert reset("alice", ONE) == 1
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(backend, "run", run_slowly)
        assert not check("alice", ONE).allowed
    assert not refusals.known
    assert check("alice", ONE).allowed


def test_what_is_left_of_a_fixed_window_gets_less_in_memory_too(lasting, now):  # noqa: F811
    policy = Policy("fixed", (1, YEAR), algo=FIXED_WINDOW)
    first = use_up(check, policy)
    now(10)
    again = check("alice", policy)
    assert type(again) is Repeated
    for decision in (first, again):
        assert decision.ttl == math.ceil(decision.reset_after) == math.ceil(decision.retry_after)
    assert 10 <= first.ttl - again.ttl < 10 + WITHIN


def test_another_windows_size_stays_what_it_is_in_memory(lasting, now):  # noqa: F811
    policy = Policy("sliding", (1, YEAR), algo=SLIDING_WINDOW)
    assert use_up(check, policy).ttl == YEAR
    now(10)
    again = check("alice", policy)
    assert type(again) is Repeated
    assert again.ttl == YEAR


def test_a_cost_that_is_no_number_is_an_error_though_a_refusal_is_in_memory(ask, lasting):  # noqa: F811
    use_up(ask, ONE)
    assert type(ask("alice", ONE, cost=1)) is Repeated
    for cost in (True, 1.0):
        with pytest.raises(ValueError, match="whole number"):
            ask("alice", ONE, cost=cost)


# Forks


@contextmanager
def held_elsewhere(*locks):
    """Another thread has these locks meanwhile."""
    ready, done = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            ready.set()
            done.wait(2 * WITHIN)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert ready.wait(WITHIN)
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads and forks do not mix is the point
def test_a_fork_can_use_what_another_thread_of_the_parent_had_locked(own):  # noqa: F811
    check("parent", ROOMY)
    server = backend.site().master

    def locks():
        return [
            *(
                ConnectionFactory._lock,
                backend._lock,
                background.state.start_lock,
                background.state.round_lock,
                log._lock,
            ),
            *(server.breaker._lock, server._quick.lock, server._patient.lock),
        ]

    def child(pipe):
        free = [lock.acquire(timeout=1) for lock in locks()]
        for lock, taken in zip(locks(), free, strict=True):
            if taken:
                lock.release()
        pipe.send(free)
        backend._sites.clear()
        server.breaker.failed(redis.ConnectionError("away"))
        server.breaker.succeeded()
        pipe.send([check("child", ROOMY).current_count for _ in range(3)])

    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=[writer])
    with held_elsewhere(*locks()):
        process.start()
        writer.close()
        try:
            assert reader.poll(WITHIN)
            assert reader.recv() == [True] * len(locks())
            assert reader.poll(WITHIN)
            assert reader.recv() == [0, 1, 2]
        finally:
            process.kill()
            process.join()
            reader.close()
    assert check("parent", ROOMY).current_count == 1


# Another review


def test_a_tuple_made_for_each_call_fills_no_memory(own):  # noqa: F811
    policies = Policy("a", (100_000, YEAR)), Policy("b", (100_000, YEAR))
    for _ in range(questions.MOST_SETS + 10):
        check("alice", (*policies, *()))
    assert len(questions._sets.known) <= questions.MOST_SETS + 1


class Talkative(Loopback):
    """A server that greets as others do, and answers a PING with this, a piece at a time."""

    def __init__(self, pieces: list[bytes], pause: float = 0.0) -> None:
        self.pieces, self.pause = pieces, pause
        super().__init__()

    async def serve(self, reader, writer) -> None:
        while data := await reader.read(65_536):
            for piece in self.pieces if b"PING" in data else [b"+OK\r\n" * data.count(b"SETINFO")]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self.pause)


def ping(talkative: Talkative, timeout: float) -> object:
    parts = urlsplit(talkative.url)
    options = {"host": parts.hostname, "port": parts.port, "protocol": 2}
    return Server(redis.Connection, options, timeout, 1).send(pack(("PING",)))


def test_a_reply_too_many_is_nobodys():
    with Talkative([b"+PONG\r\n" * 2]) as talkative, pytest.raises(redis.InvalidResponse, match="more than it was"):
        ping(talkative, 20)
    with Talkative([b"+PONG\r\n"]) as talkative:
        assert ping(talkative, 20) == b"PONG"


def test_a_reply_in_small_pieces_must_be_in_time_too():
    began = time.monotonic()
    with Talkative([b"*1000\r\n", *[b":1\r\n"] * 1000], 0.05) as talkative, pytest.raises(redis.TimeoutError):
        ping(talkative, 0.5)
    assert time.monotonic() - began < 25  # of 50


@pytest.mark.filterwarnings("ignore")
def test_a_timer_that_sends_signals_does_not_prolong_a_call(start, use, configure):  # noqa: F811
    server = start()
    use(server.url)
    configure(TIMEOUT=1)
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        assert not check("alice", ROOMY).degraded
        with onlooker(server.url) as client:
            client.execute_command("CLIENT", "PAUSE", 20_000, "WRITE")
            began = time.monotonic()
            assert check("alice", ROOMY).degraded
            assert time.monotonic() - began < 10
            client.execute_command("CLIENT", "UNPAUSE")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_decisions_of_each_kind_can_be_copied_and_stored(lasting):
    policies = (ONE, Policy("roomy", (100, YEAR)))
    decisions = [check("alice", policies), check("bob", ONE), use_up(check, ONE, "carol"), check("carol", ONE)]
    assert type(decisions[-1]) is Repeated
    for decision in decisions:
        for again in (copy.copy(decision), copy.deepcopy(decision), pickle.loads(pickle.dumps(decision))):
            assert again == decision
            assert again.retry_after == decision.retry_after
            assert refund(again) is False


def test_what_is_left_of_a_fixed_window_gets_less_from_its_first_second_on():
    policy = Policy("fixed", "5/10s", algo=FIXED_WINDOW)
    told = Decision(False, (Outcome(policy, "alice", False, 5, 5, 0, 9.5, 9.5, Left(10)),))
    assert [Repeated(told, age).ttl for age in (0.0, 0.4, 0.9, 9.4)] == [10, 10, 9, 1]
    assert [Repeated(told, age).outcomes[0].ttl for age in (0.0, 0.9)] == [10, 9]
    told = Decision(False, (Outcome(policy, "alice", False, 5, 5, 0, 9.5, 9.5, 10),))
    assert Repeated(told, 5).ttl == 10


def test_an_identity_of_no_letters_is_one_like_others():
    assert check(Id(""), ROOMY).current_count == 0
    assert check(Id(""), ROOMY).current_count == 1


def test_a_setting_that_was_not_there_before_is_seen_by_what_is_remembered(settings, lasting):
    del settings.RATE_LIMITER
    use_up(check, ONE)
    assert type(check("alice", ONE)) is Repeated
    with override_settings(RATE_LIMITER={"MAX_REQUESTS": 100}):
        settings.CACHES  # noqa: B018  (somebody else reads it)
        assert type(check("alice", ONE)) is Decision


def test_two_that_refuse_tell_of_the_one_with_the_longer_wait(rf):
    def told(*waits):
        policies = Policy("a", "5/h"), Policy("b", "10/h")
        outcomes = [
            Outcome(policy, "alice", False, policy.capacity, 5, 0, wait, 60.0, 3600)
            for policy, wait in zip(policies, waits, strict=True)
        ]
        return responses.plain_refusal(rf.get("/"), Decision(False, tuple(outcomes)))["X-RateLimit-Limit"]

    assert [told(10.0, 5.0), told(5.0, 10.0)] == ["5", "10"]


async def test_connections_of_loops_are_kept_alive_as_those_of_threads(start, use):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start("--port", str(port))
    use(f"redis://127.0.0.1:{port}/0")
    assert not check("alice", ROOMY).degraded
    assert not (await acheck("alice", ROOMY)).degraded
    server = backend.site().master
    channel = server._channels[asyncio.get_running_loop()]
    both = [server._quick.idle[0].connection.plug, channel._wire.transport.get_extra_info("socket")]
    for level, option in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    ):
        assert len({each.getsockopt(level, option) for each in both}) == 1


def test_tls_options_for_threads_alone_do_not_reach_a_loop():
    options = {"host": "h", "ssl_check_hostname": False, "ssl_validate_ocsp": False}
    assert _for_tls(options) == {"host": "h", "ssl_check_hostname": False}
