"""Sentinels: which server is the master, and what happens when another takes its place."""

from __future__ import annotations

import asyncio
import time

import pytest
import rlaas_django
from django.core.cache import caches
from django_redis.pool import ConnectionFactory
from rlaas_django import Policy, acheck, check

from tests.support import traffic
from tests.support.deployments import HOST, Node, Sentinels, wait_until
from tests.support.faults import Garbage, TLSProxy
from tests.support.helpers import ACL_RULES, IDENTITIES, LENIENT, check_ids, report, wait_for_servers
from tests.support.internals import SLIDING_WINDOW, YEAR
from tests.support.parallel import in_processes
from tests.support.traffic import SLACK, TIMEOUT, Failover, Load, counted

pytestmark = pytest.mark.slow  # the long tier

ROOMY = traffic.ROOMY[SLIDING_WINDOW]


@pytest.fixture(scope="module")
def shared_sentinels():
    with Sentinels(down_after=700) as sentinels:
        yield sentinels


@pytest.fixture
def nodes(shared_sentinels):
    """Servers and Sentinels, all up and empty, at the beginning and at the end; the cache is elsewhere."""
    yield shared_sentinels
    for each in (*shared_sentinels.watchers, *shared_sentinels.data):  # the Sentinels name the master to the others
        bring_back(shared_sentinels, each)
    wait_until(shared_sentinels.settled, "the Sentinels have a master")
    shared_sentinels.master().client().flushall()


def bring_back(sentinels: Sentinels, node: Node) -> None:
    """Bring back a node that was down. A former master becomes a replica at once, where Sentinels would take 10 s."""
    if node.hanging:
        node.resume()
    elif not node.up:
        node.launch()
    if node in sentinels.data and node is not sentinels.master() and node.replication()["role"] == "master":
        node.client().replicaof(HOST, sentinels.master().port)


@pytest.fixture
def use_sentinels(settings, configure):
    """Put the cache on the master that these Sentinels name."""

    def use(sentinels, rate_limiter=None, url="redis://mymaster/0", **options):
        # django-redis keeps a pool by its URL, whichever the Sentinels are.
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
        configure(**(rate_limiter or {}))

    return use


@pytest.fixture
def sentinels(nodes, use_sentinels):
    """Sentinels that name the cache's master."""
    use_sentinels(nodes.sentinels)
    return nodes


@pytest.fixture
def strict(sentinels, configure):
    """Sentinels that name the cache's master, with the timeout that a site has."""
    configure(TIMEOUT=TIMEOUT)
    wait_for_servers()
    return sentinels


@pytest.fixture
def lenient(sentinels, configure):
    """As `strict`, with a longer timeout."""
    configure(TIMEOUT=LENIENT)
    wait_for_servers()
    return sentinels


# The master


def test_decisions_are_made_on_the_master(sentinels, limiter, algo):
    policies = [Policy(key, (3, YEAR), key=key, algo=algo) for key in ("user", "ip")]
    identity = {"user": "alice", "ip": "192.0.2.1"}
    decisions = [limiter.check(identity, policies) for _ in range(4)]
    assert [each.allowed for each in decisions] == [True, True, True, False]
    assert not any(each.degraded for each in decisions)
    assert limiter.refund(decisions[0])
    assert limiter.peek(identity, policies).current_count == 2
    assert sentinels.master().client().dbsize() == 2
    assert limiter.reset(identity, policies) == 2


def test_the_url_may_name_a_database(nodes, use_sentinels, limiter):
    use_sentinels(nodes.sentinels, url="redis://mymaster/3")
    assert not limiter.check("alice", ROOMY).degraded
    assert nodes.master().client().info("keyspace").keys() == {"db3"}


def test_forks_after_the_first_use_and_the_cache(sentinels, limiter):
    policy = Policy("p", (100, YEAR))

    def work(n):
        if limiter is rlaas_django:
            return sum(check("alice", policy).allowed for _ in range(15))
        return sum(asyncio.run(acheck("alice", policy)).allowed for _ in range(15))

    caches["default"].set("a", 1, 60)
    assert all(limiter.check("alice", policy).allowed for _ in range(10))
    assert sum(in_processes(work, 8)) == 90
    assert not limiter.check("alice", policy).allowed
    wait_until(lambda: caches["default"].get("a") == 1, "the replica, which django-redis reads from, has it too")


def test_the_system_checks_accept_sentinels_and_connect_to_none(use_sentinels, no_views, connects):
    with Node(sentinel=True) as down:
        use_sentinels([(HOST, down.port)])
        assert check_ids() == []
    assert not connects


# Sentinels that are down, hang or know nothing


def test_decisions_go_on_without_sentinels_while_the_master_is_up(lenient, limiter, use_sentinels):
    assert limiter.check("alice", ROOMY).current_count == 0
    for watcher in lenient.watchers:
        watcher.kill()
    assert [limiter.check("alice", ROOMY).current_count for _ in range(20)] == list(range(1, 21))
    # A process that starts now does not know where the master is.
    use_sentinels(lenient.sentinels)
    began = time.monotonic()
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(200))
    assert time.monotonic() - began < 200 * LENIENT / 10  # they do not wait
    for watcher in lenient.watchers:
        watcher.launch()
    wait_until(lambda: not limiter.check("alice", ROOMY).degraded, "the master is found")


def test_a_sentinel_that_hangs_delays_the_first_request_only(lenient, limiter, use_sentinels):
    lenient.watchers[0].hang()
    use_sentinels(lenient.sentinels)
    began = time.monotonic()
    first = limiter.check("alice", ROOMY)
    assert time.monotonic() - began < LENIENT + SLACK
    wait_for_servers()
    began = time.monotonic()
    decisions = [limiter.check("alice", ROOMY) for _ in range(50)]
    assert time.monotonic() - began < 2 * LENIENT + SLACK
    assert not any(each.degraded for each in decisions)
    assert counted("alice", ROOMY) == 50 + (not first.degraded)


def test_the_error_names_a_service_that_no_sentinel_knows(nodes, use_sentinels, limiter, failures, caplog):
    use_sentinels(nodes.sentinels, {"LOG_LINES_PER_SECOND": 1_000}, url="redis://othermaster/0")
    for _ in range(3):
        assert limiter.check("alice", ROOMY).degraded
    assert len(failures) == 3
    assert all("'othermaster'" in failure for failure in failures)
    assert "'othermaster'" in caplog.text


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n", b""]
)
def test_a_server_that_is_not_redis(use_sentinels, limiter, failures, reply):
    with Garbage(reply) as server:
        use_sentinels([(HOST, server.port)], {"TIMEOUT": TIMEOUT})
        began = time.monotonic()
        for _ in range(3):
            assert limiter.check("alice", ROOMY).degraded
        assert time.monotonic() - began < 3 * TIMEOUT + SLACK
    assert len(failures) == 3


def test_a_server_that_is_not_a_sentinel(node, use_sentinels, limiter, failures):
    use_sentinels([(HOST, node.port)])
    assert limiter.check("alice", ROOMY).degraded
    assert "unknown command" in failures[0]


# Credentials and TLS


@pytest.mark.parametrize("user", ["limiter", None], ids=["a user name", "a password"])
def test_master_and_sentinels_with_passwords(nodes, use_sentinels, limiter, user, failures):
    """Each has its own: the master's is in OPTIONS, the Sentinels' in SENTINEL_KWARGS."""
    master, credentials = nodes.master(), {"PASSWORD": "s3cret", **({"USERNAME": user} if user else {})}
    protected = [(master, "s3cret" if user is None else "other"), *((each, "sentry") for each in nodes.watchers)]
    master.client().execute_command("ACL", "SETUSER", "limiter", *ACL_RULES)
    for each, password in protected:
        each.client().execute_command("ACL", "SETUSER", "default", "resetpass", f">{password}")
    try:
        use_sentinels(nodes.sentinels, SENTINEL_KWARGS={"password": "sentry"}, **credentials)
        assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert not failures
        use_sentinels(nodes.sentinels, SENTINEL_KWARGS={"password": "sentry"})
        assert limiter.check("alice", ROOMY).degraded
        assert "auth" in failures[0].lower()
        use_sentinels(nodes.sentinels, SENTINEL_KWARGS={"password": "wrong"}, **credentials)
        assert limiter.check("alice", ROOMY).degraded
        assert "auth" in failures[1].lower()
        assert "wrong" not in failures[1].lower().replace("wrongpass", "")
    finally:
        for each, _ in protected:
            each.client().execute_command("ACL", "SETUSER", "default", "nopass")
        master.client().execute_command("ACL", "DELUSER", "limiter")


def test_a_master_behind_tls(node, certificate, use_sentinels, limiter):
    """The server of the tests has no TLS, so Sentinels cannot monitor it there; but they name its address."""
    context, trusted = certificate
    with TLSProxy(node.url, context) as proxy:
        with Node(f"sentinel monitor mymaster {HOST} {proxy.port} 2", sentinel=True) as sentinel:
            sentinel.launch()
            use_sentinels(
                [(HOST, sentinel.port)],
                SENTINEL_KWARGS={},
                CONNECTION_POOL_KWARGS={"ssl": True, "ssl_ca_certs": str(trusted)},
            )
            assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert proxy.commands > 2


# Another master


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_failover_under_load(strict, configure, capsys, how):
    victim = strict.master()
    failover = Failover(victim, how, strict.wait_for_failover, IDENTITIES[:6], [])
    failover.assert_right()
    report(capsys, f"Sentinel, {'kill -9' if how == 'kill' else 'SIGSTOP'}: {failover}")

    # The former master comes back, at first as a master; neither then nor later it gets a check.
    configure(TIMEOUT=20)  # so that a busy machine makes no check degraded
    bring_back(strict, victim)
    wait_until(strict.settled, "the former master is a replica")
    assert victim is strict.replica()
    victim.client().config_resetstat()
    before = counted("alice", ROOMY)
    with Load([("alice", ROOMY)]) as load:
        time.sleep(0.5)
    assert not load.degraded()
    assert counted("alice", ROOMY) == before + load.charges()[ROOMY.name, "alice"]
    assert not {"cmdstat_evalsha", "cmdstat_eval"} & victim.client().info("commandstats").keys()


def test_a_master_that_became_a_replica_is_left(lenient, failures):
    """No server is down: the Sentinels promote the replica, and the former master replies READONLY from then on."""
    former, new = lenient.master(), lenient.replica()
    with asyncio.Runner() as runner:

        def check_both():
            return check("alice", ROOMY), runner.run(acheck("alice", ROOMY))

        assert not any(decision.degraded for decision in check_both())
        former.client().set("written-last", 1, ex=60)
        assert former.client().wait(1, 30_000) >= 1  # the replica has this write, and so those before it
        lenient.watchers[0].ask("SENTINEL", "FAILOVER", lenient.name)
        wait_until(lambda: lenient.master() is new and new.replication()["role"] == "master", "the replica is promoted")
        former.client().replicaof(HOST, new.port)
        began, decisions = time.monotonic(), []
        wait_until(
            lambda: decisions.extend(check_both()) or not any(each.degraded for each in decisions[-2:]),
            "decisions are made on the new master",
        )
        assert time.monotonic() - began < 3 + SLACK
    assert "read only replica" in failures[0]
    charged = 2 + sum(not each.degraded for each in decisions)
    assert new.client().zcard(f"rlaas:rate_limit:{ROOMY.name}/alice") == charged
