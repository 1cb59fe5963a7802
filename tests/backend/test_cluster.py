"""Redis Cluster: identities in slots, slots on nodes; nodes that fail, join and hand over slots."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import redis
import rlaas_django
from django.contrib.auth.models import User
from django.core.cache import caches
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from redis.crc import key_slot
from rlaas_django import Policy, acheck, areset, backend, check, peek, refund, reset
from rlaas_django.models import Override
from rlaas_django.operators import usage as panel
from rlaas_django.testing import reset_all

import tests.urls  # noqa: F401  (its view is known to the panel as soon as it is imported)
from tests.support import traffic
from tests.support.cancellation import MOMENTS, assert_soon_charged, cancelled
from tests.support.deployments import HOST, Cluster, Node, wait_until
from tests.support.faults import Garbage, TLSProxy
from tests.support.helpers import ACL_RULES, IDENTITIES, LENIENT, check_ids, report, wait_for_servers
from tests.support.internals import (
    ALGORITHMS,
    FIXED_WINDOW,
    PAGE_TIMEOUT,
    SLIDING_WINDOW,
    TOPOLOGY_THREAD,
    YEAR,
    acheck_each,
    check_each,
    check_plan,
    flush_statistics,
    networks,
    observers,
    overrides,
    paused_background,
    receipts,
    redis_client,
    refresh_is_due,
    refund_receipt,
    refund_units,
    reset_statistics,
    set_override,
)
from tests.support.on_cluster import ROOT, command, entry
from tests.support.parallel import WORKERS, in_processes, in_threads
from tests.support.traffic import SLACK, TIMEOUT, Failover, Load, counted

pytestmark = pytest.mark.slow  # the long tier

SLOT = key_slot(b"alice")
UNUSUAL = ["alice", "a{b}c", "{}", "}{", "a:b", "a/b", "100%", "😀", "x" * 300, "{user}.1"]
ROOMY = traffic.ROOMY[SLIDING_WINDOW]
REFRESHES_PER_SECOND = 4


@pytest.fixture(scope="module")
def shared_cluster():
    with Cluster(node_timeout=1000) as cluster:
        yield cluster


@pytest.fixture
def nodes(shared_cluster):
    """A cluster with every node up and empty, at the beginning and at the end; the cache is elsewhere."""
    yield shared_cluster
    for node in shared_cluster.nodes:
        if node.hanging:
            node.resume()
        elif not node.up:
            node.launch()
    shared_cluster.wait_until_settled()
    lasting = [
        key
        for node in shared_cluster.masters()
        for key in node.client().scan_iter("rlaas:*")
        if node.client().ttl(key) == -1
    ]
    shared_cluster.flush()
    assert not lasting, f"keys without a TTL: {lasting}"


@pytest.fixture
def use_cluster(settings, configure):
    """Put the cache on a cluster with these seeds and options; the single server stays as `single`."""
    single = settings.CACHES["default"]

    def use_seeds(urls, rate_limiter=None, **options):
        settings.CACHES = {**settings.CACHES, "single": single, "default": entry(urls, **options)}
        configure(**(rate_limiter or {}))

    return use_seeds


@pytest.fixture
def cluster(nodes, use_cluster):
    """A cluster that the cache is on."""
    use_cluster(nodes.urls)
    return nodes


@pytest.fixture
def strict(cluster, configure):
    """A cluster that the cache is on, with the timeout that a site has."""
    configure(TIMEOUT=TIMEOUT)
    wait_for_servers()
    return cluster


@pytest.fixture
def lenient(cluster, configure):
    """As `strict`, with a longer timeout."""
    configure(TIMEOUT=LENIENT)
    wait_for_servers()
    return cluster


def names_on(cluster: Cluster, node: Node, count: int = 1, kind: str = "") -> list[str]:
    """Return identities, of users or of another kind, whose slot a node owns."""
    slots = cluster.view()[node.port].slots
    found = (name for name in IDENTITIES if any(key_slot(f"{kind}{name}".encode()) in share for share in slots))
    return list(itertools.islice(found, count))


def one_on_each(cluster: Cluster) -> list[str]:
    return [names_on(cluster, node)[0] for node in cluster.masters() if cluster.view()[node.port].slots]


@contextmanager
def commands_received(cluster: Cluster, *, refreshed: bool = True):
    """Count the commands that the nodes receive meanwhile, without those of the test and of replication.

    Wait before for a refresh of the slot map that is due.
    """
    if refreshed:
        wait_until(lambda: not refresh_is_due(), "the slot map is refreshed")
    received = Counter()
    nodes = cluster.up()
    for node in nodes:
        node.client().config_resetstat()
    yield received
    for node in nodes:
        stats = node.client().info("commandstats")
        received.update({name.removeprefix("cmdstat_"): figures["calls"] for name, figures in stats.items()})
    for own in ("config|resetstat", "info", "ping", "replconf", "psync"):
        received.pop(own, None)


@pytest.fixture
def request_connects(monkeypatch):
    """Count the connections to each port, without those that the background thread makes to refresh the slot map."""
    made = Counter()
    connect = socket.socket.connect

    def counting(self, address):
        made[address[1]] += threading.current_thread().name != TOPOLOGY_THREAD
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counting)
    return made


# The core


def test_the_core_does_on_a_cluster_what_it_does_on_a_single_server():
    """Without the tests that take longest; `python -m tests.support.on_cluster` runs them all."""
    core = [f"tests/limiter/test_{module}.py" for module in ("limiter", "source_documents", "algorithms")]
    done = subprocess.run(
        command(*core, "-k", "not two_bytes and not long_traces"), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 190


# Identities and slots


@pytest.mark.parametrize("name", UNUSUAL)
def test_all_keys_of_an_identity_share_a_slot(cluster, name):
    policies = [Policy(each, "5/m", algo=algo) for each in ("default", "p") for algo in ALGORITHMS]
    for policy in policies:
        (outcome,) = check(name, policy).outcomes
    identity = outcome.identity
    overrides.publish(identity, [overrides.Override(identity, "p", overrides.LIMIT, 2**42, 7)])
    keys = cluster.scan("rlaas:*")
    assert len(keys) == len(policies) + 1
    assert {key_slot(key) for key in keys} == {key_slot(identity.encode())}
    assert {f"{{{identity}}}".encode() in key for key in keys} == {True}
    assert peek(name, policies[-1]).limit == 7
    assert reset(name, [Policy("default", "5/m"), Policy("p", "5/m")]) == len(policies)


def test_policies_on_one_identity_are_decided_in_one_call(cluster, limiter):
    policies = [Policy(algo, "3/m", algo=algo) for algo in ALGORITHMS]
    limiter.check("alice", policies)
    with commands_received(cluster) as received:
        assert limiter.check("alice", policies).allowed
    assert (received["evalsha"], received["cluster|slots"]) == (1, 0)


def test_policies_on_several_identities_take_one_call_per_slot(cluster, limiter):
    policies = [Policy("u", "9/m", key="user"), Policy("v", "9/m", key="user"), Policy("i", "9/m", key="ip")]
    identity = {"user": "alice", "ip": "192.0.2.1"}
    limiter.check(identity, policies)
    with commands_received(cluster) as received:
        assert limiter.check(identity, policies).allowed
    assert received["evalsha"] == 2


def test_the_calls_of_a_check_slot_by_slot_are_measured_and_its_refusals_are_not_cached(cluster, limiter):
    observed = []
    observers.add(observed.append, latency=True)
    try:
        for _ in range(3):
            limiter.check("alice", Policy("once", "1/h"))
    finally:
        observers.remove(observed.append)
    assert [(each.result, len(each.latencies), each.is_cached) for each in observed] == [
        ("allowed", 1, False),
        ("refused", 1, False),
        ("refused", 1, False),
    ]


def test_independent_checks_reach_every_node_in_few_messages(cluster, limiter):
    checks = [check_plan(f"user-{i}", Policy("each", "9/m"), 1) for i in range(60)]
    checks.append(
        check_plan({"user": "alice", "ip": "192.0.2.1"}, [Policy("u", "9/m"), Policy("i", "9/m", key="ip")], 1)
    )
    decisions = check_each(checks) if limiter is rlaas_django else asyncio.run(acheck_each(checks))
    assert all(decision.allowed and not decision.degraded for decision in decisions)
    assert [limiter.peek(f"user-{i}", Policy("each", "9/m")).current_count for i in range(60)] == [1] * 60


def test_plain_commands_take_one_round_trip_per_node(lenient, monkeypatch):
    for i in range(60):
        check(f"user-{i}", Policy("each", "9/m", algo=FIXED_WINDOW))
    keys = [key.decode() for key in lenient.scan("rlaas:rate_limit:*")]
    sent, send = [], redis.Connection.send_packed_command

    def counting(connection, *arguments, **options):
        if threading.current_thread().name != TOPOLOGY_THREAD:
            sent.append(connection.port)
        return send(connection, *arguments, **options)

    monkeypatch.setattr(redis.Connection, "send_packed_command", counting)
    ttls = backend.run_commands([("PTTL", key) for key in keys])
    assert len(ttls) == 60
    assert all(0 < ttl <= 60_000 for ttl in ttls)
    assert backend.run_commands([("MEMORY", "USAGE", key) for key in keys]) != [None] * 60
    assert sorted(sent) == sorted(2 * [node.port for node in lenient.masters()])


def test_a_plain_command_that_a_node_refuses_is_an_error_after_the_others_ran(lenient):
    first, second, third = one_on_each(lenient)
    check(second, Policy("each", "9/m", algo=FIXED_WINDOW))
    counter = lenient.scan("rlaas:rate_limit:*")[0].decode()
    with pytest.raises(backend.UnavailableError, match="WRONGTYPE"):
        backend.run_commands([("SET", f"{{{first}}}", 1), ("LLEN", counter), ("SET", f"{{{third}}}", 1)])
    assert backend.run_commands([("GET", f"{{{first}}}"), ("DEL", f"{{{third}}}")]) == [b"1", 1]


def test_plain_commands_wait_for_a_node_as_long_as_a_page_does(strict):
    """Longer than a decision."""
    names = one_on_each(strict)
    backend.run_commands([("GET", f"{{{name}}}") for name in names])  # connects
    node = strict.masters()[1]
    node.hang()
    try:
        with pytest.raises(backend.UnavailableError, match=f"timeout after {PAGE_TIMEOUT:g} s"):
            backend.run_commands([("GET", f"{{{name}}}") for name in names])
    finally:
        node.resume()


def test_a_receipt_is_refunded_once_in_every_slot(cluster, algo, clock):
    policies = [Policy("by-user", "5/m", key="user", algo=algo), Policy("by-ip", "5/m", key="ip", algo=algo)]
    ann = {"user": "ann", "ip": "192.0.2.1"}
    text = receipts.write(check(ann, policies, cost=2))
    assert [refund_receipt(text) for _ in range(2)] == [True, False]
    assert [outcome.current_count for outcome in peek(ann, policies).outcomes] == [0, 0]


THREE = ("user", "ip", "token")
ANN = {"user": "ann", "ip": "192.0.2.1", "token": "t1"}


@pytest.mark.parametrize("refusing", THREE)
def test_a_refusal_is_the_same_as_on_a_single_server(cluster, limiter, algo, refusing, configure, clock):
    """Whichever slot refuses: the figures are those after the refund of what other slots were charged."""
    policies = [Policy(f"by-{key}", (2 if key == refusing else 4, 60), key=key, algo=algo) for key in THREE]
    results = {}
    for alias in ("single", "default"):
        configure(CACHE=alias)
        limiter.reset(ANN, policies)
        decisions = [limiter.check(ANN, policies, cost=cost) for cost in (1, 2, 1, 1)]
        results[alias] = [*decisions, limiter.peek(ANN, policies)]
    assert results["default"] == results["single"]
    assert [decision.allowed for decision in decisions] == [True, False, True, False]
    counts = {outcome.policy.name: (outcome.current_count, outcome.remaining) for outcome in decisions[-1].outcomes}
    assert counts == {policy.name: (2, 0 if policy.key == refusing else 2) for policy in policies}
    assert refund(decisions[-1]) is False
    assert [refund(each) for each in (decisions[0], decisions[0], decisions[2])] == [True, False, True]
    assert [outcome.current_count for outcome in limiter.peek(ANN, policies).outcomes] == [0, 0, 0]


def test_shadow_policies_in_other_slots_are_the_same_as_on_a_single_server(cluster, limiter, configure, clock):
    policies = [
        Policy("trial", "1/m", key="token", shadow=True),
        Policy("by-user", "3/m", key="user"),
        Policy("by-ip", "2/m", key="ip"),
    ]
    results = {}
    for alias in ("single", "default"):
        configure(CACHE=alias)
        limiter.reset(ANN, policies)
        results[alias] = [*(limiter.check(ANN, policies) for _ in range(4)), limiter.peek(ANN, policies)]
    assert results["default"] == results["single"]
    assert [decision.allowed for decision in results["default"]] == [True, True, False, False, False]


@pytest.mark.parametrize("refused", [False, True])
async def test_a_check_across_slots_that_is_cancelled_leaves_nothing_charged(cluster, refused):
    policies = [Policy(f"by-{key}", (5, YEAR), key=key) for key in ("user", "ip", "token")]
    used = 5 if refused else 0
    await acheck(ANN, policies[-1], cost=used)
    for moment in MOMENTS:
        for n in itertools.count():
            if not await cancelled(acheck(ANN, policies), n, moment):
                break
            for policy, units in zip(policies, (0, 0, used), strict=True):
                await assert_soon_charged(ANN, policy, units, f"{moment}, wait {n}")
        assert n > 2
        for policy in policies[:2]:
            await areset(ANN, policy)
        if not refused:
            await areset(ANN, policies[-1])


REQUESTS = 10_000


def test_a_refused_request_leaves_nothing_charged(cluster):
    """What each identity was charged is the number of allowed requests that named it, and never above its limit."""
    limit = 60
    identities = {
        "user": [f"u{n}" for n in range(8)],
        "ip": [f"192.0.2.{n}" for n in range(8)],
        "token": [f"t{n}" for n in range(8)],
    }
    policy_sets = [
        [
            Policy(f"{turn}-{key}", (limit, YEAR), key=key, algo=(ALGORITHMS * 2)[turn + n])
            for n, key in enumerate(identities)
        ]
        for turn in range(len(ALGORITHMS))
    ]

    def work(n):
        rng = random.Random(n)
        # The first of each kind is the busiest, and so full long before the others.
        requests = [
            ({key: rng.choices(names, [4, *[1] * 7])[0] for key, names in identities.items()}, rng.choice(policy_sets))
            for _ in range(REQUESTS // WORKERS)
        ]
        decisions = [check(*request) for request in requests] if n % 2 else asyncio.run(in_tasks(requests))
        return [*map(summary, decisions)]

    async def in_tasks(requests):
        async def some(n):
            return [await acheck(*request) for request in requests[n::3]]

        return [each for part in await asyncio.gather(*map(some, range(3))) for each in part]

    def summary(decision):
        outcomes = [(each.policy.name, each.identity, each.allowed) for each in decision.outcomes]
        return decision.allowed, decision.degraded, outcomes

    summaries = [each for part in in_processes(work) for each in part]
    assert len(summaries) == REQUESTS
    assert not any(degraded for _, degraded, _ in summaries)
    charged = Counter(
        (name, identity) for allowed, _, outcomes in summaries if allowed for name, identity, _ in outcomes
    )
    peeked = [
        peek(identity, policy).outcomes[0]
        for policies in policy_sets
        for policy in policies
        for identity in identities[policy.key]
    ]
    assert {(each.policy.name, each.identity): each.current_count for each in peeked} == charged
    assert max(charged.values()) == limit

    # There was something to get wrong: slots are many, and each policy refused what another had been charged for.
    assert len({key_slot(each.identity.encode()) for each in peeked}) > 20
    mixed = [outcomes for _, _, outcomes in summaries if len({allowed for *_, allowed in outcomes}) == 2]
    refusing = {name for outcomes in mixed for name, _, allowed in outcomes if not allowed}
    assert refusing == {policy.name for policies in policy_sets for policy in policies}


# Other operations, statistics and pages


def test_peek_reset_and_refunds_find_the_slot(cluster, limiter, algo):
    policies = [Policy(f"by-{key}", (9, YEAR), key=key, algo=algo) for key in THREE]
    decisions = [limiter.check(ANN, policies, cost=2) for _ in range(3)]
    assert [each.current_count for each in limiter.peek(ANN, policies).outcomes] == [6, 6, 6]
    assert limiter.refund(decisions[1])
    assert not limiter.refund(decisions[1])
    assert [refund_units(ANN, policy, 1) for policy in policies] == [1, 1, 1]
    assert [each.current_count for each in limiter.peek(ANN, policies).outcomes] == [3, 3, 3]
    assert limiter.reset(ANN, policies) == 3
    assert limiter.reset(ANN, policies) == 0
    assert [key for key in cluster.scan("rlaas:*") if not key.endswith(b":reset")] == []


@pytest.mark.django_db(transaction=True)
def test_overrides_apply_on_every_node(cluster, limiter):
    until = timezone.now() + timedelta(hours=1)
    policy = Policy("p", "2/h")
    for name in one_on_each(cluster):
        override = set_override(name, "p", Override.Kind.BLOCK, until, by="me", reason="spam")
        assert not limiter.check(name, policy).allowed
        set_override(name, "p", Override.Kind.LIMIT, until, by="me", reason="friend", limit=7)
        assert limiter.check(name, policy).remaining == 6
        set_override(name, "", Override.Kind.EXEMPT, until, by="me", reason="us")
        override.refresh_from_db()
        for each in Override.objects.active().filter(identity=name, policy="p"):
            each.end(by="me")
        assert [limiter.check(name, policy).allowed for _ in range(9)] == [True] * 9
    cluster.flush()
    assert not limiter.check(name, Policy("q", "1/h"), cost=2).allowed
    assert Override.restore() == len(one_on_each(cluster))
    assert limiter.check(name, Policy("q", "1/h"), cost=2).allowed


def test_overrides_of_networks_apply_across_slots(cluster, limiter):
    until = int(time.time() * 1000) + 3_600_000
    policies = [Policy("by-user", (9, YEAR), key="user"), Policy("by-ip", (9, YEAR), key="ip")]
    networks.publish([overrides.Override("203.0.113.0/24", "by-ip", "block", until, None, False)])
    refused = limiter.check({"user": "ann", "ip": "203.0.113.9"}, policies)
    assert [(each.policy.name, each.allowed) for each in refused.outcomes] == [("by-user", True), ("by-ip", False)]
    assert limiter.peek({"user": "ann", "ip": "198.51.100.7"}, policies).outcomes[0].current_count == 0
    assert limiter.check({"user": "ann", "ip": "198.51.100.7"}, policies).allowed


def url(name: str, **query: str) -> str:
    return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None)


@pytest.fixture
def admin_pages(settings, admin_client):
    """A browser of the admin's pages, with no statistics of other tests."""
    settings.ROOT_URLCONF = "tests.urls"
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    reset_statistics()
    with paused_background():  # the thread would write half of what a test has recorded
        yield admin_client


def users_with_requests(times: int, count: int = 4) -> list[User]:
    users = []
    for n in range(count):
        users.append(User.objects.create_user(f"person-{n}"))
        browser = Client()
        browser.force_login(users[-1])
        assert [browser.get("/page/").status_code for _ in range(times)] == ([200] * 3 + [429] * times)[:times]
    flush_statistics()
    return users


@pytest.mark.django_db
def test_the_overview_adds_up_all_nodes(lenient, admin_pages):
    users = users_with_requests(5)
    for name in one_on_each(lenient):
        check(name)
    context = admin_pages.get(url("changelist")).context
    row = next(row for row, _ in context["rows"] if row.policy.name == "page")
    assert (row.counts.allowed, row.counts.refused) == (12, 8)
    assert {(label.user, number) for label, number in context["identities"]} == {(user, 2) for user in users}
    state = context["server"]
    assert state.keys == sum(node.client().dbsize() for node in lenient.masters())
    assert state.used_memory > sum(node.client().info("memory")["used_memory"] for node in lenient.masters()) / 2
    assert state.rate_limit_memory is not None
    assert state.rate_limit_memory > 500
    assert state.latency_ms < 1000


@pytest.mark.django_db
def test_watched_active_and_searched_identities_are_found_on_any_node(cluster, admin_pages):
    users = users_with_requests(5, count=8)
    assert len({cluster.owner(str(user.pk)) for user in users}) > 1
    wanted = {(str(user.pk), "page", 3, 2) for user in users}
    for page in (url("clients"), url("clients", tab="active"), url("clients", q="person-")):
        rows = admin_pages.get(page).context["rows"]
        shown = [(r.identity.encoded, r.outcome.policy.name, r.outcome.current_count, r.refused_today) for r in rows]
        assert len(shown) == len(users)
        assert set(shown) == wanted
    for user in users:
        page = admin_pages.get(url("identity", id=str(user.pk)))
        assert [row.outcome.current_count for row in page.context["rows"]] == [3]
        assert sum(group.number for group, _ in page.context["refusals"]) == 2
        action = {"confirmed": "on", "identity": str(user.pk), "action": "reset", "policy": "page"}
        assert admin_pages.post(url("act"), action).status_code == 302
        assert peek(user.pk, Policy("page", "3/m")).current_count == 0
    assert admin_pages.get(url("refusals")).context["found"] == 16


@pytest.mark.django_db
def test_the_list_of_active_identities_scans_node_after_node_and_shows_each_once(cluster, admin_pages, monkeypatch):
    monkeypatch.setattr(panel, "SCAN_COUNT", 20)
    monkeypatch.setattr(panel, "SCANS_PER_PAGE", 2)
    for name in IDENTITIES[:300]:
        check(name)
    shown, cursor, pages = Counter(), "0", 0
    while True:
        page = admin_pages.get(url("clients", tab="active", cursor=cursor)).context
        shown.update(row.identity.encoded for row in page["rows"])
        cursor, pages = str(page["cursor"]), pages + 1
        if cursor == "0":
            break
    assert shown == dict.fromkeys(IDENTITIES[:300], 1)
    assert pages > 3


# A shard that is down


@contextmanager
def without(cluster: Cluster, *masters: Node):
    """Kill masters, whose replicas do not take over; the other nodes stay available."""

    def configure(**options: str) -> None:
        for node in cluster.up():
            for name, value in options.items():
                node.client().config_set(f"cluster-{name.replace('_', '-')}", value)

    configure(replica_no_failover="yes", require_full_coverage="no")
    for node in masters:
        node.kill()
    try:
        yield
    finally:
        for node in masters:
            if not node.up:
                node.launch()
        cluster.wait_until_settled()
        configure(replica_no_failover="no", require_full_coverage="yes")


def test_a_dead_shard_affects_its_own_slots_only(lenient, request_connects, caplog):
    """No decision of the other shards is degraded; one for a dead slot costs no I/O but for a probe per second."""
    dead, *others = lenient.masters()
    down, up = names_on(lenient, dead, 20), [name for node in others for name in names_on(lenient, node, 10)]
    closed = Policy("closed", (1_000, YEAR), on_failure="closed")
    with asyncio.Runner() as runner, without(lenient, dead):

        def check_both(name, policy=ROOMY):
            return check(name, policy), runner.run(acheck(name, policy))

        for name in down[:2]:
            check_both(name)  # opens the circuit breaker
        request_connects.clear()
        began = time.monotonic()
        with commands_received(lenient, refreshed=False) as received:
            for name in down * 10:
                assert all(decision.degraded and decision.allowed for decision in check_both(name))
                assert all(decision.unavailable for decision in check_both(name, closed))
        elapsed = time.monotonic() - began
        assert request_connects[dead.port] <= 3 + elapsed  # probes
        assert received["evalsha"] == 0
        assert received["cluster|slots"] <= 1 + REFRESHES_PER_SECOND * elapsed
        for count, name in enumerate(up * 5):
            assert not any(decision.degraded for decision in check_both(name)), count
        time.sleep(1.2)  # by now the other nodes have noticed as well
        for name in up:
            assert not any(decision.degraded for decision in check_both(name))
        assert all(decision.degraded for decision in check_both(down[0]))
        assert [counted(name, ROOMY) for name in up] == [12] * len(up)
    assert str(dead.port) in caplog.text
    wait_until(lambda: not check(down[0], ROOMY).degraded, "the shard is available again")


def test_a_request_with_a_dead_slot_and_living_ones(lenient):
    """Fail closed: what the living slots were charged is refunded. Fail open: they are charged, and it is allowed."""
    alive, dead = lenient.masters()[:2]
    identity = {
        "user": names_on(lenient, alive)[0],
        "get:a": names_on(lenient, dead, kind="get=")[0],
        "get:b": names_on(lenient, alive, kind="get=")[0],
    }
    with asyncio.Runner() as runner, without(lenient, dead):
        for way, mode in itertools.product(("sync", "async"), ("open", "closed")):
            policies = [
                Policy(f"{way}-{mode}-{key.replace(':', '')}", "9/h", key=key, on_failure=mode) for key in identity
            ]
            decision = check(identity, policies) if way == "sync" else runner.run(acheck(identity, policies))
            assert (decision.allowed, decision.degraded) == (mode == "open", True)
            assert [outcome.degraded for outcome in decision.outcomes] == [False, True, False]
            peeked = peek(identity, policies[::2])
            assert not peeked.degraded
            assert [outcome.current_count for outcome in peeked.outcomes] == [int(mode == "open")] * 2
            assert [decision.outcomes[n].remaining for n in (0, 2)] == [8 if mode == "open" else 9] * 2


def test_two_shards_that_hang_delay_a_request_by_one_timeout(cluster, configure, limiter):
    """Each is noticed by a timeout; a request with an identity on both must not wait for two."""
    timeout = 2 * SLACK
    configure(TIMEOUT=timeout)
    hanging = cluster.masters()[:2]
    identity = {
        "user": names_on(cluster, hanging[0])[0],
        "get:a": names_on(cluster, hanging[1], kind="get=")[0],
    }
    policies = [Policy("by-user", "9/h", key="user"), Policy("by-a", "9/h", key="get:a")]
    assert not limiter.check(identity, policies).degraded
    for node in hanging:
        node.hang()
    began = time.monotonic()
    decision = limiter.check(identity, policies)
    elapsed = time.monotonic() - began
    for node in hanging:
        node.resume()
    assert decision.degraded
    assert elapsed < timeout + SLACK


def test_a_slot_without_an_owner_affects_no_other_slot(lenient, limiter):
    """`CLUSTERDOWN Hash slot not served` is about one slot, not about the node that replies so."""
    owner = lenient.owner(SLOT)
    others = [name for name in names_on(lenient, owner, 4) if key_slot(name.encode()) != SLOT]
    with without(lenient):
        assert not limiter.check("alice", ROOMY).degraded
        for node in lenient.nodes:
            node.ask("CLUSTER", "DELSLOTS", SLOT)
        decisions = [limiter.check(name, ROOMY) for name in ("alice", *others, "alice", *others)]
        owner.ask("CLUSTER", "ADDSLOTS", SLOT)
    assert [each.degraded for each in decisions] == [True, *[False] * len(others)] * 2
    wait_until(lambda: not limiter.check("alice", ROOMY).degraded, "the slot is available again")


@pytest.mark.django_db
def test_a_page_does_not_take_the_reply_of_another_node(strict, admin_pages):
    """A command for a node that is down is not sent to the next one, whose figures would be counted twice."""
    dead = next(node for node in strict.masters() if node is not strict.owner(0))
    for name in one_on_each(strict):
        check(name)
    with without(strict, dead):
        (server,) = [each for each in backend.servers() if each.address[1] == dead.port]
        for wait in (1.5, 0):  # until there is a probe
            with pytest.raises(backend.UnavailableError):
                backend.run_commands([("DBSIZE",)], server)
            time.sleep(wait)
        assert admin_pages.get(url("clients", tab="active")).status_code == 503


# Masters that are replaced


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_failover_under_load(strict, capsys, how):
    """Only slots of the master that fails are affected, once the others have seen that the cluster is complete."""
    victim, *rest = strict.masters()
    others = [name for node in rest for name in names_on(strict, node, 2)]
    failover = Failover(victim, how, strict.wait_for_failover, names_on(strict, victim, 6), others)
    failover.assert_right()
    report(capsys, f"Cluster, {'kill -9' if how == 'kill' else 'SIGSTOP'}: {failover}")


@pytest.mark.django_db
def test_pages_find_a_new_master(lenient, admin_pages):
    """Also where no decision is made meanwhile."""
    for name in one_on_each(lenient):
        check(name)
    assert admin_pages.get(url("clients", tab="active")).status_code == 200
    master = lenient.masters()[0]
    assert master.client().set(f"{{{names_on(lenient, master)[0]}}}", 1, ex=60)
    assert master.client().wait(1, 30_000) >= 1  # the replica has this write, and so those before it
    master.kill()
    lenient.wait_for_failover()
    wait_until(lambda: admin_pages.get(url("clients", tab="active")).status_code == 200, "the page is available")
    rows = admin_pages.get(url("clients", tab="active")).context["rows"]
    assert sorted(row.identity.encoded for row in rows) == sorted(one_on_each(lenient))


# Slots that move


def another_master(cluster: Cluster) -> Node:
    """Return a master that does not own the slot of alice."""
    return next(node for node in cluster.masters() if node is not cluster.owner(SLOT))


def move_keys(cluster: Cluster, source: Node, target: Node) -> None:
    """Move all keys that are in the slot of alice now."""
    keys = source.client().execute_command("CLUSTER", "GETKEYSINSLOT", SLOT, 100)
    cluster.move_keys(keys, source, target)


def set_limit_of_alice(limit: int) -> None:
    overrides.publish("alice", [overrides.Override("alice", "*", overrides.LIMIT, 2**42, limit)])


def test_moved_is_followed_once_and_then_known(lenient, limiter):
    assert limiter.check("alice", ROOMY).current_count == 0
    with lenient.moving(SLOT, another_master(lenient)):
        pass
    assert limiter.check("alice", ROOMY).current_count == 1
    # Both before the slot map is refreshed and after it.
    with commands_received(lenient, refreshed=False) as received:
        assert limiter.check("alice", ROOMY).current_count == 2
    assert (received["evalsha"], received["asking"]) == (1, 0)
    with commands_received(lenient) as received:
        assert limiter.check("alice", ROOMY).current_count == 3
    assert (received["evalsha"], received["asking"], received["cluster|slots"]) == (1, 0, 0)


def test_a_batch_follows_moved_without_asking_the_old_node_again(lenient):
    old, checks = lenient.owner(SLOT), [check_plan("alice", ROOMY, 1) for _ in range(3)]
    check_each(checks[:1])
    with lenient.moving(SLOT, another_master(lenient)):
        pass
    old.client().config_resetstat()
    assert [decision.current_count for decision in check_each(checks[1:])] == [1, 2]
    assert old.client().info("commandstats")["cmdstat_evalsha"]["rejected_calls"] == 2  # the batch, as one message


def test_a_slot_that_moved_to_a_node_that_hangs_costs_one_timeout(lenient, limiter):
    assert limiter.check("alice", ROOMY).current_count == 0
    target = another_master(lenient)
    with lenient.moving(SLOT, target):
        pass
    target.hang()
    began = time.monotonic()
    assert all(limiter.check("alice", ROOMY).degraded for _ in range(8))
    elapsed = time.monotonic() - began
    target.resume()
    assert elapsed < 2 * LENIENT + SLACK


@pytest.mark.parametrize("algo", [algo for algo in ALGORITHMS if algo != FIXED_WINDOW])
def test_ask_is_followed_while_keys_move(lenient, limiter, algo):
    """All keys of a call are at one end: the source replies while it has them, and says ASK afterwards."""
    policy, target = Policy("p", (50, YEAR), algo=algo), another_master(lenient)
    set_limit_of_alice(60)
    decisions = [limiter.check("alice", policy)]
    with lenient.moving(SLOT, target) as source:
        with commands_received(lenient) as received:
            decisions.append(limiter.check("alice", policy))
        assert (received["evalsha"], received["asking"]) == (1, 0)
        move_keys(lenient, source, target)
        with commands_received(lenient) as received:
            decisions.append(limiter.check("alice", policy))
        assert received["asking"] == 1
    decisions.append(limiter.check("alice", policy))
    assert [(each.degraded, each.current_count, each.limit) for each in decisions] == [
        (False, count, 60) for count in range(4)
    ]


def test_tryagain_is_retried_within_the_timeout(lenient, limiter, algo):
    """The counter is at the source; overrides, of which there are none, would be at the target."""
    policy = Policy("p", (50, YEAR), algo=algo)
    assert limiter.check("alice", policy).current_count == 0
    with lenient.moving(SLOT, another_master(lenient)):
        began = time.monotonic()
        assert limiter.check("alice", policy).degraded
        assert 0.5 * LENIENT < time.monotonic() - began < LENIENT + 10 * SLACK  # on a busy machine
    assert limiter.check("alice", policy).current_count == 1


def test_tryagain_ends_once_the_keys_have_moved(cluster, configure, limiter, algo):
    configure(TIMEOUT=5)
    policy = Policy("p", (50, YEAR), algo=algo)
    assert limiter.check("alice", policy).current_count == 0
    with ExitStack() as stack:
        stack.enter_context(cluster.moving(SLOT, another_master(cluster)))
        arriving = threading.Timer(0.03, stack.close)
        arriving.start()
        decisions = [limiter.check("alice", policy), limiter.check("alice", policy)]
        arriving.join()
    assert [(each.degraded, each.current_count) for each in decisions] == [(False, 1), (False, 2)]


@pytest.mark.parametrize("keys", ["at the source", "at the target"])
def test_a_refund_while_a_slot_moves_is_done_or_reported_as_failed(lenient, limiter, algo, keys):
    policy, target = Policy("p", (50, YEAR), algo=algo), another_master(lenient)
    kept, refunded = limiter.check("alice", policy, cost=2), limiter.check("alice", policy, cost=3)
    assert not kept.degraded
    assert not refunded.degraded
    with lenient.moving(SLOT, target) as source:
        if keys == "at the target":
            move_keys(lenient, source, target)
        try:
            done = limiter.refund(refunded)
        except backend.UnavailableError:
            done = None
    assert done in (True, None)
    assert counted("alice", policy) == (2 if done else 5)


@pytest.mark.parametrize("keys", ["at the source", "at the target"])
def test_an_override_while_a_slot_moves_is_replaced_or_reported_as_failed(lenient, keys):
    target = another_master(lenient)
    set_limit_of_alice(60)
    limit = 60
    with lenient.moving(SLOT, target) as source:
        if keys == "at the target":
            move_keys(lenient, source, target)
        with suppress(backend.UnavailableError):
            set_limit_of_alice(70)
            limit = 70
    assert check("alice", ROOMY).limit == limit


def test_a_node_is_added_and_slots_move_under_load(cluster, configure, capsys):
    """No unit is lost and none counted twice: neither charges nor refunds."""
    configure(TIMEOUT=5)
    source = cluster.masters()[0]
    names = list({key_slot(name.encode()): name for name in names_on(cluster, source, 8)}.values())
    staying = [names_on(cluster, node)[0] for node in cluster.masters()[1:]]
    full = Policy("full", (1, YEAR), key="ip")
    assert check("192.0.2.1", full).allowed
    refunded = [Policy(f"refunded-{algo}", (50, YEAR), key="user", algo=algo) for algo in ALGORITHMS]
    requests = [
        *((name, policy) for name in names + staying for policy in traffic.ROOMY.values()),
        *(({"user": name, "ip": "192.0.2.1"}, [policy, full]) for name in names for policy in refunded),
    ]
    with Load(requests, pause=0.001) as load:
        new = cluster.add_node()
        began, moves = time.monotonic(), []
        for target, some in ((new, names), (source, names[:-1]), (new, names[:4])):
            for name in some:
                at = time.monotonic()
                with cluster.moving(key_slot(name.encode()), target):
                    time.sleep(0.02)  # longer than it takes, so that calls come by
                moves.append(time.monotonic() - at)
        moved = time.monotonic()
        cluster.wait_until_settled()
        time.sleep(0.3)
    assert not load.degraded()
    charges = load.charges()
    for name, policy in itertools.product(names + staying, traffic.ROOMY.values()):
        assert counted(name, policy) == charges[policy.name, name] > 0
    left = {(policy.name, name): counted(name, policy) for name in names for policy in refunded}
    assert not {counter: count for counter, count in left.items() if count}
    assert counted("192.0.2.1", full) == 1
    assert load.charges(began, moved).total() > 100
    report(
        capsys,
        f"Cluster, {len(moves)} slots moved, in {max(moves) * 1000:.0f} ms at most: {len(load.made)} checks, "
        f"none degraded, longest {load.longest * 1000:.0f} ms, {load.longer_than(TIMEOUT + 0.05)} over 150 ms",
    )


# Processes, and the cache itself


def test_forks_after_the_first_use_and_their_parent_count_together(cluster, limiter):
    """A fork has its parent's sockets; if it used them, replies would reach the wrong process."""
    names = one_on_each(cluster)
    policy = Policy("p", (100, YEAR))

    def work(n):
        if limiter is rlaas_django:
            return [check(name, policy).allowed for name in names for _ in range(15)]
        return asyncio.run(awork())

    async def awork():
        return [(await acheck(name, policy)).allowed for name in names for _ in range(15)]

    assert all(limiter.check(name, policy).allowed for name in names for _ in range(10))
    allowed = in_processes(work)
    assert sum(map(sum, allowed)) == 90 * len(names)
    assert [limiter.check(name, policy).allowed for name in names] == [False] * len(names)
    assert [counted(name, policy) for name in names] == [100] * len(names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:redis")  # of redis-py 6.0 about its own option
def test_throttles_of_other_packages_count_on_every_node(cluster):
    names = IDENTITIES[:20]
    small, large = Policy("throttle-small", "1/m"), Policy("throttle-large", "9/m")
    for name, _ in itertools.product(names, range(3)):
        decisions = check_each([check_plan(name, small, 1), check_plan(name, large, 1)])
    assert [decision.allowed for decision in decisions] == [False, True]
    assert {peek(name, large).current_count for name in names} == {3}


def test_reset_all_empties_every_node_and_leaves_the_keys_of_the_site(cluster):
    for identity in IDENTITIES[:30]:
        check(identity)
    caches["default"].set("of the site", 1)
    reset_all()
    assert caches["default"].get("of the site") == 1
    assert not any(peek(identity).current_count for identity in IDENTITIES[:30])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:redis")  # of redis-py 6.0 about its own option
def test_the_cache_works_on_the_cluster(cluster):
    cache, names = caches["default"], IDENTITIES[:30]
    for name in names:
        cache.set(name, {"name": name}, 60)
    assert [cache.get(name) for name in names] == [{"name": name} for name in names]
    assert cache.add("n", 1, 60)
    assert cache.incr("n") == 2
    assert cache.delete("n")
    assert len(cluster.scan("*user-*")) == 30
    assert redis_client("default") is redis_client("default")
    values = in_processes(lambda n: [caches["default"].get(name) for name in names[:5]], 3)
    assert values == [[{"name": name} for name in names[:5]]] * 3
    cache.clear()
    assert cluster.scan() == []


def test_a_closed_cache_opens_again(cluster, settings):
    settings.DJANGO_REDIS_CLOSE_CONNECTION = True
    for _ in range(3):
        caches["default"].set("a", 1, 60)
        assert caches["default"].get("a") == 1
        caches["default"].close()
        assert not check("alice", ROOMY).degraded


def test_the_system_checks_accept_a_cluster(cluster, use_cluster, no_views):
    use_cluster(cluster.urls, SOCKET_TIMEOUT=0.25, SOCKET_CONNECT_TIMEOUT=0.25)
    assert check_ids() == []
    call_command("check", "--tag", "caches")


def test_the_system_checks_connect_to_no_server(use_cluster, no_views, connects):
    with Node("cluster-enabled yes") as down:
        use_cluster([down.url], SOCKET_TIMEOUT=0.25)
        assert check_ids() == []
    use_cluster([down.url])
    assert check_ids() == ["rlaas_django.W001"]  # as for any cache whose other users would wait
    assert not connects


# Credentials, URLs and TLS


@pytest.fixture
def credentials(nodes):
    """The default user needs a password that is not ours; the limiter has a user name and password of its own."""
    for node in nodes.nodes:
        node.client().execute_command("ACL", "SETUSER", "limiter", *ACL_RULES)
        node.client().execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
    yield {"USERNAME": "limiter", "PASSWORD": "s3cret"}
    for node in nodes.nodes:
        node.client().execute_command("ACL", "SETUSER", "default", "nopass")
        node.client().execute_command("ACL", "DELUSER", "limiter")


@pytest.mark.parametrize("where", ["in the URL", "in OPTIONS"])
def test_a_cluster_with_user_names(nodes, credentials, use_cluster, limiter, where, failures):
    if where == "in OPTIONS":
        use_cluster(nodes.urls, **credentials)
    else:
        use_cluster([url.replace("://", "://limiter:s3cret@") for url in nodes.urls])
    for name in one_on_each(nodes):
        assert [limiter.check(name, ROOMY).current_count for _ in range(2)] == [0, 1]
    assert not failures
    for node in nodes.masters():
        assert "limiter" in {client["user"] for client in node.client().client_list()}
    use_cluster(nodes.urls)
    assert limiter.check("alice", ROOMY).degraded
    assert re.search("auth", failures[0], re.IGNORECASE)


def test_options_in_the_urls_of_a_cluster_apply(nodes, use_cluster):
    use_cluster([f"{url}?protocol=3&max_connections=3&client_name=limiter" for url in nodes.urls])
    (name,) = names_on(nodes, nodes.masters()[0])
    decisions = in_threads(lambda n: [check(name, ROOMY) for _ in range(10)], 12)
    assert sorted(each.current_count for some in decisions for each in some) == list(range(120))
    wait_until(lambda: not refresh_is_due(), "the slot map is read")
    ours = [each for each in nodes.masters()[0].client().client_list() if each["name"] == "limiter"]
    assert {each["resp"] for each in ours} == {"2"}
    assert 1 <= len(ours) <= 3 + 1  # the background thread has one of its own


@pytest.mark.parametrize("address", ["redis://{host}:{port}", "unix://{socket}"])
def test_options_in_the_url_of_a_single_server_apply(use, limiter, address, tmp_path):
    with Node(f"unixsocket {tmp_path / 's'}") as node:
        node.launch()
        url = address.format(host=HOST, port=node.port, socket=tmp_path / "s")
        use(f"{url}?db=1&protocol=3&max_connections=7&client_name=limiter")
        with redis.Redis(HOST, node.port, db=1) as client:
            assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
            decisions = in_threads(lambda n: [check("bob", ROOMY) for _ in range(10)], 20)
            assert sorted(each.current_count for some in decisions for each in some) == list(range(200))
            assert client.dbsize() == 2
            ours = [each for each in client.client_list() if each["name"] == "limiter"]
        assert {(each["resp"], each["db"]) for each in ours} == {("2", "1")}
        # An event loop has one more, which its tasks share.
        assert 1 <= len(ours) <= 7 + (limiter is not rlaas_django)


@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_tls_with_a_user_name_and_a_database(node, certificate, use, limiter, host, failures):
    context, trusted = certificate
    node.client().execute_command("ACL", "SETUSER", "limiter", *ACL_RULES)
    node.client().execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
    with TLSProxy(node.url, context) as proxy:
        use(f"rediss://limiter:s3cret@{host}:{proxy.port}/2?ssl_ca_certs={trusted}")
        assert [limiter.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert not failures
        use(f"rediss://limiter:s3cret@{host}:{proxy.port}/2")  # trusts the certificates of the system alone
        assert limiter.check("alice", ROOMY).degraded
        assert "certificate verify failed" in failures[0]


def test_tls_on_a_cluster(certificate, use_cluster):
    """The URL names one host; the addresses that the cluster names are connected to with TLS as well."""
    context, trusted = certificate
    with Node("cluster-enabled yes") as node:
        node.launch()
        node.ask("CLUSTER", "ADDSLOTS", *range(16384))
        with TLSProxy(node.url, context) as proxy:
            node.client().config_set("cluster-announce-ip", HOST)
            node.client().config_set("cluster-announce-port", proxy.port)
            wait_until(lambda: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "a cluster of one")
            use_cluster([f"rediss://localhost:{proxy.port}?ssl_ca_certs={trusted}"])
            assert [check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
            assert asyncio.run(acheck("alice", ROOMY)).current_count == 3
            assert [server.address for server in backend.servers()] == [(HOST, proxy.port)]
            caches["default"].set("a", 1, 60)
            assert caches["default"].get("a") == 1


# Wrong settings


def test_a_single_server_where_a_cluster_is_configured(node, use_cluster, limiter, failures, caplog):
    use_cluster([node.url], {"LOG_LINES_PER_SECOND": 1_000})
    assert limiter.check("alice", ROOMY).degraded
    assert "Cluster mode is not enabled on this node" in failures[0]
    assert "Cluster mode is not enabled on this node" in caplog.text


def test_a_cluster_where_a_single_server_is_configured(nodes, use, configure, limiter, failures, caplog):
    """It replies CROSSSLOT to a script, and MOVED to a command with one key."""
    configure(LOG_LINES_PER_SECOND=1_000)
    use(nodes.masters()[0].url)
    assert all(limiter.check(name, ROOMY).degraded for name in one_on_each(nodes))
    with pytest.raises(backend.UnavailableError) as moved:
        backend.run_commands([("GET", names_on(nodes, nodes.masters()[1])[0])])
    for message in (*failures, str(moved.value)):
        assert "OPTIONS['CONNECTION_FACTORY']" in message
        assert "'rlaas_django.cluster.ConnectionFactory'" in message
    assert "rlaas_django.cluster.ConnectionFactory" in caplog.text


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"$-1\r\n", b""])
def test_a_server_that_is_not_redis(use_cluster, limiter, failures, reply):
    with Garbage(reply) as server:
        use_cluster([server.url], {"TIMEOUT": TIMEOUT})
        began = time.monotonic()
        for _ in range(3):
            assert limiter.check("alice", ROOMY).degraded
        assert time.monotonic() - began < 3 * TIMEOUT + SLACK
    assert len(failures) == 3


def test_one_seed_of_several_is_enough(nodes, use_cluster, limiter):
    with Node("cluster-enabled yes") as down:
        use_cluster([down.url, nodes.masters()[1].url])
        assert not any(limiter.check(name, ROOMY).degraded for name in one_on_each(nodes))
