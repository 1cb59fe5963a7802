"""Sentinels: where the master is, and what happens when another takes its place."""

from __future__ import annotations

import asyncio
import time

import pytest
from django.core.cache import caches
from django_redis.pool import ConnectionFactory
from rlaas_django.policy import SLIDING_WINDOW, YEAR

import rlaas_django
from rlaas_django import Policy, acheck, check
from tests import load, ways
from tests.deployments import HOST, Node, Sentinels, wait_until
from tests.faults import Garbage
from tests.load import SLACK, TIMEOUT, Failover, Load, counted
from tests.test_concurrency import in_processes
from tests.ways import LIMITER, NAMES, TLSProxy, problems, report

ROOMY = load.ROOMY[SLIDING_WINDOW]

ask, node = ways.ask, ways.node
certificate, connects, failures = ways.certificate, ways.connects, ways.failures


@pytest.fixture(scope="module")
def deployed():
    with Sentinels(down_after=700) as sentinels:
        yield sentinels


@pytest.fixture
def whole(deployed):
    """All are up and empty, at the beginning and at the end."""
    yield deployed
    for each in deployed.nodes:
        come_back(deployed, each)
    wait_until(deployed.settled, "the Sentinels have a master")
    deployed.master().client().flushall()


def come_back(sentinels: Sentinels, node: Node) -> None:
    """A node that was gone. An old master becomes a replica at once, which Sentinels would take 10 s for."""
    if node.hanging:
        node.resume()
    elif not node.up:
        node.launch()
    if node in sentinels.data and node is not sentinels.master() and node.replication()["role"] == "master":
        node.client().replicaof(HOST, sentinels.master().port)


@pytest.fixture
def use(settings, configure):
    """Let the cache be where these Sentinels say."""

    def use_sentinels(sentinels, limiter=None, url="redis://mymaster/0", **options):
        # django-redis keeps a pool by its URL, whoever the Sentinels are.
        for known in [each for each in ConnectionFactory._pools if "master" in each]:
            del ConnectionFactory._pools[known]
        entry = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": url,
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": sentinels,
                "SENTINEL_KWARGS": {"socket_timeout": 0.25},
                "SOCKET_TIMEOUT": 0.25,
                "SOCKET_CONNECT_TIMEOUT": 0.25,
                **options,
            },
        }
        settings.CACHES = {**settings.CACHES, "default": entry}
        configure(**(limiter or {}))

    return use_sentinels


@pytest.fixture
def sentinels(whole, use):
    use(whole.sentinels)
    return whole


@pytest.fixture
def strict(sentinels, configure):
    """With the time that a site has."""
    configure(TIMEOUT=TIMEOUT)
    return sentinels


# Where the master is


def test_decisions_are_the_masters(sentinels, ask, algo):
    policies = [Policy(f"{key}", (3, YEAR), key=key, algo=algo) for key in ("user", "ip")]
    who = {"user": "alice", "ip": "192.0.2.1"}
    decisions = [ask.check(who, policies) for _ in range(4)]
    assert [each.allowed for each in decisions] == [True, True, True, False]
    assert not any(each.degraded for each in decisions)
    assert ask.refund(decisions[0])
    assert ask.peek(who, policies).current_count == 2
    assert sentinels.master().client().dbsize() == 2
    assert ask.reset(who, policies) == 2


def test_a_database_may_be_named(whole, use, ask):
    use(whole.sentinels, url="redis://mymaster/3")
    assert not ask.check("alice", ROOMY).degraded
    assert whole.master().client().info("keyspace").keys() == {"db3"}


def test_the_cache_and_forks_of_a_process_that_used_it(sentinels, ask):
    policy = Policy("p", (100, YEAR))

    def work(n):
        if ask is rlaas_django:
            return sum(check("alice", policy).allowed for _ in range(15))
        return sum(asyncio.run(acheck("alice", policy)).allowed for _ in range(15))

    caches["default"].set("a", 1, 60)
    assert all(ask.check("alice", policy).allowed for _ in range(10))
    assert sum(in_processes(work, 8)) == 90
    assert not ask.check("alice", policy).allowed
    wait_until(lambda: caches["default"].get("a") == 1, "the replica, which django-redis reads, has it too")


def test_the_checks_say_nothing_and_ask_nobody(use, no_views, connects):
    with Node(sentinel=True) as gone:
        use([(HOST, gone.port)])
        assert problems() == []
    assert not connects


# Sentinels that are gone, hang or know nothing


def test_without_sentinels_decisions_go_on_while_the_master_lives(strict, ask, use):
    assert ask.check("alice", ROOMY).current_count == 0
    for watcher in strict.watchers:
        watcher.kill()
    assert [ask.check("alice", ROOMY).current_count for _ in range(20)] == list(range(1, 21))
    # Who starts now does not know where the master is.
    use(strict.sentinels)
    began = time.monotonic()
    assert all(ask.check("alice", ROOMY).degraded for _ in range(200))
    assert time.monotonic() - began < 1 + SLACK
    for watcher in strict.watchers:
        watcher.launch()
    wait_until(lambda: not ask.check("alice", ROOMY).degraded, "the master is found", within=6)


def test_a_sentinel_that_hangs_is_waited_for_once(strict, ask, use):
    hung = strict.watchers[0]
    hung.hang()
    use(strict.sentinels)
    began = time.monotonic()
    first = ask.check("alice", ROOMY)
    assert time.monotonic() - began < TIMEOUT + SLACK
    decisions = [ask.check("alice", ROOMY) for _ in range(50)]
    assert not any(each.degraded for each in decisions)
    assert counted("alice", ROOMY) == 50 + (not first.degraded)


def test_a_service_that_no_sentinel_knows_is_named(whole, use, ask, failures, caplog):
    use(whole.sentinels, {"TIMEOUT": TIMEOUT, "LOG_LINES_PER_SECOND": 1_000}, url="redis://othermaster/0")
    for _ in range(3):
        assert ask.check("alice", ROOMY).degraded
    assert all("'othermaster'" in failure for failure in failures)
    assert "'othermaster'" in caplog.text


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n", b""]
)
def test_garbage_is_no_sentinel(use, ask, failures, answer):
    with Garbage(answer) as server:
        use([(HOST, server.port)], {"TIMEOUT": TIMEOUT})
        began = time.monotonic()
        for _ in range(3):
            assert ask.check("alice", ROOMY).degraded
        assert time.monotonic() - began < 3 * TIMEOUT + SLACK
    assert len(failures) == 3


def test_a_server_is_no_sentinel(node, use, ask, failures):
    use([(HOST, node.port)], {"TIMEOUT": TIMEOUT})
    assert ask.check("alice", ROOMY).degraded
    assert "unknown command" in failures[0]


# Ways to a master


@pytest.mark.parametrize("user", ["limiter", None], ids=["a user name", "a password"])
def test_master_and_sentinels_may_want_passwords(whole, use, ask, user, failures):
    """Each its own: the master's is in OPTIONS, the Sentinels' in SENTINEL_KWARGS."""
    master, credentials = whole.master(), {"PASSWORD": "s3cret", **({"USERNAME": user} if user else {})}
    protected = [(master, "s3cret" if user is None else "other"), *((each, "sentry") for each in whole.watchers)]
    master.client().execute_command("ACL", "SETUSER", "limiter", *LIMITER)
    for each, password in protected:
        each.client().execute_command("ACL", "SETUSER", "default", "resetpass", f">{password}")
    try:
        use(whole.sentinels, SENTINEL_KWARGS={"password": "sentry"}, **credentials)
        assert [ask.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert not failures
        use(whole.sentinels, {"TIMEOUT": TIMEOUT}, SENTINEL_KWARGS={"password": "sentry"})
        assert ask.check("alice", ROOMY).degraded
        use(whole.sentinels, SENTINEL_KWARGS={"password": "wrong"}, **credentials)
        assert ask.check("alice", ROOMY).degraded
        assert "auth" in failures[0].lower()
        assert "password" in failures[1].lower()
    finally:
        for each, _ in protected:
            each.client().execute_command("ACL", "SETUSER", "default", "nopass")
        master.client().execute_command("ACL", "DELUSER", "limiter")


def test_a_master_behind_tls(node, certificate, use, ask):
    """The server of the tests has no TLS, and so cannot be watched where it has; but a Sentinel tells where it is."""
    context, trusted = certificate
    with TLSProxy(node.url, context) as front:
        with Node(f"sentinel monitor mymaster {HOST} {front.port} 2", sentinel=True) as sentinel:
            sentinel.launch()
            use(
                [(HOST, sentinel.port)],
                SENTINEL_KWARGS={},
                CONNECTION_POOL_KWARGS={"ssl": True, "ssl_ca_certs": str(trusted)},
            )
            assert [ask.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert front.commands > 2


# Another master


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_failover_under_load(strict, capsys, how):
    victim = strict.master()
    failover = Failover(victim, how, strict.wait_for_failover, NAMES[:6], [])
    failover.assert_right()
    report(capsys, f"Sentinel, {'kill -9' if how == 'kill' else 'SIGSTOP'}: {failover}")

    # The old one comes back, first as the master that it was; neither then nor later it is asked.
    come_back(strict, victim)
    wait_until(strict.settled, "the old master is a replica")
    assert victim is strict.replica()
    victim.client().config_resetstat()
    before = counted("alice", ROOMY)
    with Load([("alice", ROOMY)]) as asked:
        time.sleep(0.5)
    assert not asked.degraded()
    assert counted("alice", ROOMY) == before + asked.charges()[ROOMY.name, "alice"]
    assert not {"cmdstat_evalsha", "cmdstat_eval"} & victim.client().info("commandstats").keys()


def test_a_master_that_has_become_a_replica_is_left(strict, failures):
    """Nobody dies: the Sentinels let the replica take over, and at last tell the old master, which then is READONLY."""
    old, new = strict.master(), strict.replica()
    with asyncio.Runner() as runner:

        def ask():
            return check("alice", ROOMY), runner.run(acheck("alice", ROOMY))

        assert not any(decision.degraded for decision in ask())
        strict.watchers[0].ask("SENTINEL", "FAILOVER", strict.name)
        wait_until(lambda: strict.master() is new and new.replication()["role"] == "master", "the replica took over")
        old.client().replicaof(HOST, new.port)
        began, decisions = time.monotonic(), []
        wait_until(lambda: decisions.extend(ask()) or not any(each.degraded for each in decisions[-2:]), "the new one")
        assert time.monotonic() - began < 3
    assert "read only replica" in failures[0]
    charged = 2 + sum(not each.degraded for each in decisions)
    assert new.client().zcard(f"rlaas:rate_limit:{ROOMY.name}/alice") == charged
