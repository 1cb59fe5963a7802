"""Redis Cluster: identities in slots, slots on nodes; and nodes that come, go and hand their slots over."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import caches
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from redis.crc import key_slot
from rlaas_django.policy import ALGORITHMS, FIXED_WINDOW, SLIDING_WINDOW, YEAR

import rlaas_django
import tests.urls  # noqa: F401  (its view is known to the panel as soon as it is imported)
from rlaas_django import Policy, acheck, backend, check, overrides, peek, refund, reset
from rlaas_django.admin import panel
from rlaas_django.limiter import give_back
from rlaas_django.models import Override
from rlaas_django.stats import background, recorder
from tests import load, ways
from tests.deployments import HOST, Cluster, Node, wait_until
from tests.faults import Garbage
from tests.load import SLACK, TIMEOUT, Failover, Load, counted
from tests.on_cluster import ROOT, command, entry
from tests.test_concurrency import WORKERS, in_processes, in_threads
from tests.ways import LIMITER, NAMES, TLSProxy, problems, report

SLOT = key_slot(b"alice")
ODD = ["alice", "a{b}c", "{}", "}{", "a:b", "a/b", "100%", "😀", "x" * 300, "{user}.1"]
ROOMY = load.ROOMY[SLIDING_WINDOW]

ask, node = ways.ask, ways.node
certificate, connects, failures = ways.certificate, ways.connects, ways.failures


@pytest.fixture(scope="module")
def deployed():
    with Cluster(node_timeout=1000) as cluster:
        yield cluster


@pytest.fixture
def whole(deployed):
    """Every node is up and empty, at the beginning and at the end."""
    yield deployed
    for node in deployed.nodes:
        if node.hanging:
            node.resume()
        elif not node.up:
            node.launch()
    deployed.wait_until_settled()
    lasting = [
        key for node in deployed.masters() for key in node.client().scan_iter("rlaas:*") if node.client().ttl(key) == -1
    ]
    deployed.flush()
    assert not lasting


@pytest.fixture
def use(settings, configure):
    """Let the cache be on a cluster with these seeds and options; the single server stays as `single`."""
    single = settings.CACHES["default"]

    def use_seeds(urls, limiter=None, **options):
        settings.CACHES = {**settings.CACHES, "single": single, "default": entry(urls, **options)}
        configure(**(limiter or {}))

    return use_seeds


@pytest.fixture
def cluster(whole, use):
    use(whole.urls)
    return whole


@pytest.fixture
def strict(cluster, configure):
    """With the time that a site has."""
    configure(TIMEOUT=TIMEOUT)
    return cluster


def names_on(cluster: Cluster, node: Node, count: int = 1) -> list[str]:
    """Identities whose slot is a node's."""
    slots = cluster.view()[node.port].slots
    found = (name for name in NAMES if any(key_slot(name.encode()) in some for some in slots))
    return list(itertools.islice(found, count))


def one_on_each(cluster: Cluster) -> list[str]:
    return [names_on(cluster, node)[0] for node in cluster.masters() if cluster.view()[node.port].slots]


@contextmanager
def commands(cluster: Cluster):
    """What the nodes that are up are asked meanwhile: command -> how often."""
    seen = Counter()
    nodes = cluster.up()
    for node in nodes:
        node.client().config_resetstat()
    yield seen
    for node in nodes:
        told = node.client().info("commandstats")
        seen.update({name.removeprefix("cmdstat_"): figures["calls"] for name, figures in told.items()})
    for own in ("config|resetstat", "info", "ping", "replconf", "psync"):
        seen.pop(own, None)


# The core


def test_the_core_does_on_a_cluster_what_it_does_on_a_server():
    """Without what takes longest; `python -m tests.on_cluster` runs it all."""
    core = [f"tests/test_{module}.py" for module in ("limiter", "source_documents", "algorithms")]
    done = subprocess.run(
        command(*core, "-k", "not two_bytes and not long_traces"), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 190


# Identities and slots


@pytest.mark.parametrize("name", ODD)
def test_all_keys_of_an_identity_share_a_slot(cluster, name):
    policies = [Policy(each, "5/m", algo=algo) for each in ("default", "p") for algo in ALGORITHMS]
    for policy in policies:
        (outcome,) = check(name, policy).outcomes
    who = outcome.identity
    overrides.publish(who, [overrides.Override(who, "p", overrides.LIMIT, 2**42, 7)])
    keys = cluster.scan("rlaas:*")
    assert len(keys) == len(policies) + 1
    assert {key_slot(key) for key in keys} == {key_slot(who.encode())}
    assert {f"{{{who}}}".encode() in key for key in keys} == {True}
    assert peek(name, policies[-1]).limit == 7
    assert reset(name, [Policy("default", "5/m"), Policy("p", "5/m")]) == len(policies)


def test_policies_on_one_identity_are_decided_in_one_call(cluster, ask):
    policies = [Policy(algo, "3/m", algo=algo) for algo in ALGORITHMS]
    ask.check("alice", policies)
    with commands(cluster) as seen:
        assert ask.check("alice", policies).allowed
    assert (seen["evalsha"], seen["cluster|slots"]) == (1, 0)


def test_policies_on_three_identities_take_a_call_per_slot(cluster, ask):
    policies = [Policy("u", "9/m", key="user"), Policy("v", "9/m", key="user"), Policy("i", "9/m", key="ip")]
    who = {"user": "alice", "ip": "192.0.2.1"}
    ask.check(who, policies)
    with commands(cluster) as seen:
        assert ask.check(who, policies).allowed
    assert seen["evalsha"] == 2


THREE = ("user", "ip", "token")


@pytest.mark.parametrize("refusing", THREE)
def test_a_refusal_is_told_and_left_as_by_a_single_server(cluster, ask, algo, refusing, configure, clock):
    """Whichever of the slots refuses: the figures are those after what was charged is given back."""
    policies = [Policy(f"by-{key}", (2 if key == refusing else 4, 60), key=key, algo=algo) for key in THREE]
    who = {"user": "ann", "ip": "192.0.2.1", "token": "t1"}
    told = {}
    for alias in ("single", "default"):
        configure(CACHE=alias)
        ask.reset(who, policies)
        decisions = [ask.check(who, policies, cost=cost) for cost in (1, 2, 1, 1)]
        told[alias] = [*decisions, ask.peek(who, policies)]
    assert told["default"] == told["single"]
    assert [decision.allowed for decision in decisions] == [True, False, True, False]
    counts = {outcome.policy.name: (outcome.current_count, outcome.remaining) for outcome in decisions[-1].outcomes}
    assert counts == {policy.name: (2, 0 if policy.key == refusing else 2) for policy in policies}
    assert refund(decisions[-1]) is False
    assert [refund(each) for each in (decisions[0], decisions[0], decisions[2])] == [True, False, True]
    assert [outcome.current_count for outcome in ask.peek(who, policies).outcomes] == [0, 0, 0]


def test_shadows_in_other_slots_are_as_on_a_single_server(cluster, ask, configure, clock):
    policies = [
        Policy("trial", "1/m", key="token", shadow=True),
        Policy("by-user", "3/m", key="user"),
        Policy("by-ip", "2/m", key="ip"),
    ]
    who = {"user": "ann", "ip": "192.0.2.1", "token": "t1"}
    told = {}
    for alias in ("single", "default"):
        configure(CACHE=alias)
        ask.reset(who, policies)
        told[alias] = [*(ask.check(who, policies) for _ in range(4)), ask.peek(who, policies)]
    assert told["default"] == told["single"]
    assert [decision.allowed for decision in told["default"]] == [True, True, False, False, False]


REQUESTS = 10_000


def test_nothing_is_left_charged_by_a_refused_request(cluster):
    """What each identity was charged is the number of allowed requests that named it, and never above its limit."""
    limit, kinds = (
        60,
        {
            "user": [f"u{n}" for n in range(8)],
            "ip": [f"192.0.2.{n}" for n in range(8)],
            "token": [f"t{n}" for n in range(8)],
        },
    )
    sets = [
        [
            Policy(f"{turn}-{key}", (limit, YEAR), key=key, algo=(ALGORITHMS * 2)[turn + n])
            for n, key in enumerate(kinds)
        ]
        for turn in range(len(ALGORITHMS))
    ]

    def work(n):
        rng = random.Random(n)
        # The first of each kind is the busiest, and so full long before the others.
        requests = [
            ({key: rng.choices(names, [4, *[1] * 7])[0] for key, names in kinds.items()}, rng.choice(sets))
            for _ in range(REQUESTS // WORKERS)
        ]
        return [*map(outcomes, asked(requests) if n % 2 else asyncio.run(aasked(requests)))]

    def asked(requests):
        return [check(*request) for request in requests]

    async def aasked(requests):
        async def some(n):
            return [await acheck(*request) for request in requests[n::3]]

        return [each for part in await asyncio.gather(*map(some, range(3))) for each in part]

    def outcomes(decision):
        told = [(each.policy.name, each.identity, each.allowed) for each in decision.outcomes]
        return decision.allowed, decision.degraded, told

    told = [each for part in in_processes(work) for each in part]
    assert len(told) == REQUESTS
    assert not any(degraded for _, degraded, _ in told)
    charged = Counter((name, who) for allowed, _, each in told if allowed for name, who, _ in each)
    looks = [peek(who, policy).outcomes[0] for some in sets for policy in some for who in kinds[policy.key]]
    assert {(look.policy.name, look.identity): look.current_count for look in looks} == charged
    assert max(charged.values()) == limit

    # There was something to get wrong: slots are many, and each policy refused what another had been charged for.
    assert len({key_slot(look.identity.encode()) for look in looks}) > 20
    mixed = [each for _, _, each in told if len({passed for _, _, passed in each}) == 2]
    assert {name for each in mixed for name, _, passed in each if not passed} == {p.name for some in sets for p in some}


# What else is asked of Redis


def test_peek_reset_refund_and_giving_back_find_the_slot(cluster, ask, algo):
    policies = [Policy(f"by-{key}", (9, YEAR), key=key, algo=algo) for key in THREE]
    who = {"user": "ann", "ip": "192.0.2.1", "token": "t1"}
    decisions = [ask.check(who, policies, cost=2) for _ in range(3)]
    assert [each.current_count for each in ask.peek(who, policies).outcomes] == [6, 6, 6]
    assert ask.refund(decisions[1])
    assert not ask.refund(decisions[1])
    assert give_back(who, policies, 1) == 1
    assert [each.current_count for each in ask.peek(who, policies).outcomes] == [3, 3, 3]
    assert ask.reset(who, policies) == 3
    assert ask.reset(who, policies) == 0
    assert cluster.scan("rlaas:*") == []


@pytest.mark.django_db
def test_overrides_hold_on_every_node(cluster, ask):
    until = timezone.now() + timedelta(hours=1)
    policy = Policy("p", "2/h")
    for name in one_on_each(cluster):
        override = Override.set(name, "p", Override.Kind.BLOCK, until, by="me", reason="spam")
        assert not ask.check(name, policy).allowed
        Override.set(name, "p", Override.Kind.LIMIT, until, by="me", reason="friend", limit=7)
        assert ask.check(name, policy).remaining == 6
        Override.set(name, "", Override.Kind.EXEMPT, until, by="me", reason="us")
        override.refresh_from_db()
        for each in Override.objects.active().filter(identity=name, policy="p"):
            each.end(by="me")
        assert [ask.check(name, policy).allowed for _ in range(9)] == [True] * 9
    cluster.flush()
    assert not ask.check(name, Policy("q", "1/h"), cost=2).allowed
    assert Override.restore() == len(one_on_each(cluster))
    assert ask.check(name, Policy("q", "1/h"), cost=2).allowed


def url(name: str, **query: str) -> str:
    return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None)


@pytest.fixture
def pages(settings):
    """The admin's pages, with nothing left over from other tests' requests."""
    settings.ROOT_URLCONF = "tests.urls"
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    recorder.pending.clear()
    with background.paused():  # the thread would write half of what a test has recorded
        yield url


def users_who_asked(times: int, count: int = 4) -> list[User]:
    users = []
    for n in range(count):
        users.append(User.objects.create_user(f"person-{n}"))
        browser = Client()
        browser.force_login(users[-1])
        assert [browser.get("/page/").status_code for _ in range(times)] == ([200] * 3 + [429] * times)[:times]
    recorder.flush()
    return users


@pytest.mark.django_db
def test_the_overview_is_about_all_nodes(strict, pages, admin_client):
    users = users_who_asked(5)
    for name in one_on_each(strict):
        check(name)
    context = admin_client.get(url("changelist")).context
    summary = next(each for each in context["summaries"] if each["policy"] == "page")
    assert (summary["hour_allowed"], summary["hour_refused"]) == (12, 8)
    assert {(who.user, number) for who, _, number in context["top"]} == {(user, 2) for user in users}
    state = context["server"]
    assert state.keys == sum(node.client().dbsize() for node in strict.masters())
    assert state.used_memory > sum(node.client().info("memory")["used_memory"] for node in strict.masters()) / 2
    assert state.rate_limit_memory is not None
    assert state.rate_limit_memory > 500
    assert state.latency_ms < 1000


@pytest.mark.django_db
def test_who_is_watched_active_or_looked_for_is_found_on_any_node(cluster, pages, admin_client):
    users = users_who_asked(5, count=8)
    assert len({cluster.owner(str(user.pk)) for user in users}) > 1
    wanted = {(str(user.pk), "page", 3, 2) for user in users}
    for page in (url("users"), url("users", tab="active"), url("users", q="person-")):
        rows = admin_client.get(page).context["rows"]
        seen = [(r.identity.encoded, r.outcome.policy.name, r.outcome.current_count, r.refused_today) for r in rows]
        assert len(seen) == len(users)
        assert set(seen) == wanted
    for user in users:
        page = admin_client.get(url("identity", id=str(user.pk)))
        assert {row.outcome.current_count for row in page.context["rows"]} == {0, 3}
        assert len(page.context["refusals"]) == 2
        act = {"confirmed": "on", "identity": str(user.pk), "action": "reset", "policy": "page"}
        assert admin_client.post(url("act"), act).status_code == 302
        assert peek(user.pk, Policy("page", "3/m")).current_count == 0
    assert admin_client.get(url("refusals")).context["found"] == 16


@pytest.mark.django_db
def test_all_active_goes_from_node_to_node_and_shows_each_once(cluster, pages, admin_client, monkeypatch):
    monkeypatch.setattr(panel, "SCAN_COUNT", 20)
    monkeypatch.setattr(panel, "SCANS_PER_PAGE", 2)
    for name in NAMES[:300]:
        check(name)
    seen, cursor, pages_seen = Counter(), "0", 0
    while True:
        page = admin_client.get(url("users", tab="active", cursor=cursor)).context
        seen.update(row.identity.encoded for row in page["rows"])
        cursor, pages_seen = str(page["cursor"]), pages_seen + 1
        if cursor == "0":
            break
    assert seen == dict.fromkeys(NAMES[:300], 1)
    assert pages_seen > 3


# A shard that is gone


@contextmanager
def without(cluster: Cluster, *masters: Node):
    """Masters that are gone, and whose replicas do not take over; the others do not mind."""

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


def test_a_dead_shard_is_dead_for_its_own_slots_only(strict, connects, caplog):
    """No decision of the other shards is degraded; one for a dead slot costs no I/O but for a probe now and then."""
    dead, *others = strict.masters()
    gone, there = names_on(strict, dead, 20), [name for node in others for name in names_on(strict, node, 10)]
    closed = Policy("closed", (1_000, YEAR), on_failure="closed")
    with asyncio.Runner() as runner, without(strict, dead):

        def ask(name, policy=ROOMY):
            return check(name, policy), runner.run(acheck(name, policy))

        for name in gone[:2]:
            ask(name)  # the breaker opens
        connects.clear()
        with commands(strict) as seen:
            began = time.monotonic()
            for name in gone * 10:
                assert all(decision.degraded and decision.allowed for decision in ask(name))
                assert all(decision.unavailable for decision in ask(name, closed))
            took = time.monotonic() - began
        probes = 1 + took  # one per second at most
        assert connects[dead.port] <= probes
        assert seen["evalsha"] == 0
        assert seen["cluster|slots"] <= probes
        for count, name in enumerate(there * 5):
            assert not any(decision.degraded for decision in ask(name)), count
        time.sleep(1.2)  # by now the other nodes have found out as well
        for name in there:
            assert not any(decision.degraded for decision in ask(name))
        assert all(decision.degraded for decision in ask(gone[0]))
        assert [counted(name, ROOMY) for name in there] == [12] * len(there)
    assert str(dead.port) in caplog.text
    wait_until(lambda: not check(gone[0], ROOMY).degraded, "the shard is asked again", within=6)


def test_a_dead_slot_and_living_ones_in_one_request(strict):
    """Closed: what the living slots were charged is given back. Open: they are charged, and it passes."""
    here, dead = strict.masters()[:2]
    names = {"user": names_on(strict, here)[0]}
    for key, node in (("get:a", dead), ("get:b", here)):
        slots = strict.view()[node.port].slots
        names[key] = next(n for n in NAMES if any(key_slot(f"get={n}".encode()) in some for some in slots))
    with asyncio.Runner() as runner, without(strict, dead):
        for way, mode in itertools.product(("sync", "async"), ("open", "closed")):
            policies = [
                Policy(f"{way}-{mode}-{key.replace(':', '')}", "9/h", key=key, on_failure=mode) for key in names
            ]
            asked = check(names, policies) if way == "sync" else runner.run(acheck(names, policies))
            assert (asked.allowed, asked.degraded) == (mode == "open", True)
            assert [outcome.degraded for outcome in asked.outcomes] == [False, True, False]
            looks = peek(names, policies[::2])
            assert not looks.degraded
            assert [outcome.current_count for outcome in looks.outcomes] == [int(mode == "open")] * 2
            assert [asked.outcomes[n].remaining for n in (0, 2)] == [8 if mode == "open" else 9] * 2


def test_two_hung_shards_cost_one_request_no_more_than_the_budget(cluster, configure, ask):
    """Each is found out by a time-out; so many identities must not make it so many."""
    configure(TIMEOUT=0.4)
    hung = cluster.masters()[:2]
    slots = cluster.view()[hung[1].port].slots
    names = {
        "user": names_on(cluster, hung[0])[0],
        "get:a": next(n for n in NAMES if any(key_slot(f"get={n}".encode()) in some for some in slots)),
    }
    policies = [Policy("by-user", "9/h", key="user"), Policy("by-a", "9/h", key="get:a")]
    assert not ask.check(names, policies).degraded
    for node in hung:
        node.hang()
    began = time.monotonic()
    decision = ask.check(names, policies)
    took = time.monotonic() - began
    for node in hung:
        node.resume()
    assert decision.degraded
    assert took < 0.7


def test_a_slot_that_is_nobodys_is_no_others_trouble(strict, ask):
    """CLUSTERDOWN Hash slot not served: about one slot, not about the node that says so."""
    owner = strict.owner(SLOT)
    others = [name for name in names_on(strict, owner, 4) if key_slot(name.encode()) != SLOT]
    with without(strict):
        assert not ask.check("alice", ROOMY).degraded
        for node in strict.nodes:
            node.ask("CLUSTER", "DELSLOTS", SLOT)
        decisions = [ask.check(name, ROOMY) for name in ("alice", *others, "alice", *others)]
        owner.ask("CLUSTER", "ADDSLOTS", SLOT)
    assert [each.degraded for each in decisions] == [True, *[False] * len(others)] * 2
    wait_until(lambda: not ask.check("alice", ROOMY).degraded, "the slot is found again")


@pytest.mark.django_db
def test_a_page_is_not_told_by_another_node(strict, pages, admin_client):
    """What is asked of a node that is gone is not asked of the next one, which would be counted twice."""
    dead = next(node for node in strict.masters() if node is not strict.owner(0))
    for name in one_on_each(strict):
        check(name)
    with without(strict, dead):
        (node,) = [each for each in backend.nodes() if each.address[1] == dead.port]
        for wait in (1.5, 0):  # until there is a probe
            with pytest.raises(backend.UnavailableError):
                backend.execute([("DBSIZE",)], node)
            time.sleep(wait)
        assert admin_client.get(url("users", tab="active")).status_code == 503


# Masters that are replaced


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_failover_under_load(strict, capsys, how):
    """Only slots of the master that goes are affected, once the others have seen that the cluster is whole."""
    victim, *rest = strict.masters()
    others = [name for node in rest for name in names_on(strict, node, 2)]
    failover = Failover(victim, how, strict.wait_for_failover, names_on(strict, victim, 6), others)
    failover.assert_right()
    report(capsys, f"Cluster, {'kill -9' if how == 'kill' else 'SIGSTOP'}: {failover}")


@pytest.mark.django_db
def test_pages_find_a_new_master(strict, pages, admin_client):
    """Also where nobody but a page asks."""
    for name in one_on_each(strict):
        check(name)
    assert admin_client.get(url("users", tab="active")).status_code == 200
    master = strict.masters()[0]
    master.kill()
    strict.wait_for_failover()
    wait_until(lambda: admin_client.get(url("users", tab="active")).status_code == 200, "the page is back", within=6)
    rows = admin_client.get(url("users", tab="active")).context["rows"]
    assert sorted(row.identity.encoded for row in rows) == sorted(one_on_each(strict))


# Slots that move


def another_master(cluster: Cluster) -> Node:
    """Whom the slot of alice may go to."""
    return next(node for node in cluster.masters() if node is not cluster.owner(SLOT))


def move_keys(cluster: Cluster, source: Node, target: Node) -> None:
    """All that are in the slot of alice now."""
    keys = source.client().execute_command("CLUSTER", "GETKEYSINSLOT", SLOT, 100)
    cluster.move_keys(keys, source, target)


def let_alice_have(limit: int) -> None:
    overrides.publish("alice", [overrides.Override("alice", "*", overrides.LIMIT, 2**42, limit)])


def test_a_slot_that_moved_is_asked_for_where_it_is_from_then_on(strict, ask):
    assert ask.check("alice", ROOMY).current_count == 0
    with strict.moving(SLOT, another_master(strict)):
        pass
    assert ask.check("alice", ROOMY).current_count == 1
    with commands(strict) as seen:
        assert ask.check("alice", ROOMY).current_count == 2
    assert (seen["evalsha"], seen["asking"], seen["cluster|slots"]) == (1, 0, 0)


def test_a_slot_that_moved_to_a_node_that_hangs_is_waited_for_once(strict, ask):
    assert ask.check("alice", ROOMY).current_count == 0
    target = another_master(strict)
    with strict.moving(SLOT, target):
        pass
    target.hang()
    began = time.monotonic()
    assert all(ask.check("alice", ROOMY).degraded for _ in range(8))
    took = time.monotonic() - began
    target.resume()
    assert took < 2 * TIMEOUT + SLACK


@pytest.mark.parametrize("algo", [algo for algo in ALGORITHMS if algo != FIXED_WINDOW])
def test_keys_on_their_way_are_asked_for_where_they_are(strict, ask, algo):
    """All of a call's keys are at one end: with those that are there the source answers, for others it says ASK."""
    policy, target = Policy("p", (50, YEAR), algo=algo), another_master(strict)
    let_alice_have(60)
    decisions = [ask.check("alice", policy)]
    with strict.moving(SLOT, target) as source:
        with commands(strict) as seen:
            decisions.append(ask.check("alice", policy))
        assert (seen["evalsha"], seen["asking"]) == (1, 0)
        move_keys(strict, source, target)
        with commands(strict) as seen:
            decisions.append(ask.check("alice", policy))
        assert seen["asking"] == 1
    decisions.append(ask.check("alice", policy))
    assert [(each.degraded, each.current_count, each.limit) for each in decisions] == [
        (False, count, 60) for count in range(4)
    ]


def test_a_call_whose_keys_are_apart_waits_within_the_budget(strict, ask, algo):
    """TRYAGAIN: the counter is at the source, and overrides, which there are none of, would be at the target."""
    policy = Policy("p", (50, YEAR), algo=algo)
    assert ask.check("alice", policy).current_count == 0
    with strict.moving(SLOT, another_master(strict)):
        began = time.monotonic()
        assert ask.check("alice", policy).degraded
        assert 0.5 * TIMEOUT < time.monotonic() - began < TIMEOUT + SLACK
    assert ask.check("alice", policy).current_count == 1


def test_a_call_whose_keys_are_apart_goes_on_once_they_have_moved(cluster, configure, ask, algo):
    configure(TIMEOUT=5)
    policy = Policy("p", (50, YEAR), algo=algo)
    assert ask.check("alice", policy).current_count == 0
    with ExitStack() as stack:
        stack.enter_context(cluster.moving(SLOT, another_master(cluster)))
        arriving = threading.Timer(0.03, stack.close)
        arriving.start()
        decisions = [ask.check("alice", policy), ask.check("alice", policy)]
        arriving.join()
    assert [(each.degraded, each.current_count) for each in decisions] == [(False, 1), (False, 2)]


@pytest.mark.parametrize("when", ["still there", "gone"])
def test_what_is_given_back_meanwhile_is_not_lost(strict, ask, algo, when):
    policy, target = Policy("p", (50, YEAR), algo=algo), another_master(strict)
    kept, given = ask.check("alice", policy, cost=2), ask.check("alice", policy, cost=3)
    told = []
    with strict.moving(SLOT, target) as source:
        if when == "gone":
            move_keys(strict, source, target)
        try:
            told.append(ask.refund(given))
        except backend.UnavailableError:
            told.append(None)  # it was not said to be done
    if told == [None]:
        assert counted("alice", policy) == 5
    else:
        assert told == [True]
        assert counted("alice", policy) == 2
    assert not kept.degraded


@pytest.mark.parametrize("when", ["still there", "gone"])
def test_an_override_that_is_replaced_meanwhile_is_not_lost(strict, when):
    target = another_master(strict)
    let_alice_have(60)
    held = 60
    with strict.moving(SLOT, target) as source:
        if when == "gone":
            move_keys(strict, source, target)
        with suppress(backend.UnavailableError):
            let_alice_have(70)
            held = 70
    assert check("alice", ROOMY).limit == held


def test_adding_a_node_and_moving_slots_under_load(cluster, configure, capsys):
    """Nothing is lost and nothing counted twice: neither what is charged nor what is given back."""
    configure(TIMEOUT=1)
    source = cluster.masters()[0]
    names = list({key_slot(name.encode()): name for name in names_on(cluster, source, 8)}.values())
    staying = [names_on(cluster, node)[0] for node in cluster.masters()[1:]]
    full = Policy("full", (1, YEAR), key="ip")
    assert check("192.0.2.1", full).allowed
    given = [Policy(f"given-{algo}", (50, YEAR), key="user", algo=algo) for algo in ALGORITHMS]
    requests = [
        *((name, policy) for name in names + staying for policy in load.ROOMY.values()),
        *(({"user": name, "ip": "192.0.2.1"}, [policy, full]) for name in names for policy in given),
    ]
    with Load(requests, pause=0.001) as asked:
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
    assert not asked.degraded()
    charges = asked.charges()
    for name, policy in itertools.product(names + staying, load.ROOMY.values()):
        assert counted(name, policy) == charges[policy.name, name] > 0
    left = {(policy.name, name): counted(name, policy) for name in names for policy in given}
    assert not {counter: count for counter, count in left.items() if count}
    assert counted("192.0.2.1", full) == 1
    assert asked.charges(began, moved).total() > 100
    report(
        capsys,
        f"Cluster, {len(moves)} times a slot moved, in {max(moves) * 1000:.0f} ms at most: {len(asked.made)} requests, "
        f"none degraded, longest {asked.longest * 1000:.0f} ms, {asked.longer_than(TIMEOUT + 0.05)} over 150 ms",
    )


# Processes, and the cache itself


def test_forks_after_first_use_and_their_parent_count_on(cluster, ask):
    """A fork has its parent's sockets; if it used them, replies would reach the wrong process."""
    names = one_on_each(cluster)
    policy = Policy("p", (100, YEAR))

    def work(n):
        if ask is rlaas_django:
            return [check(name, policy).allowed for name in names for _ in range(15)]
        return asyncio.run(awork())

    async def awork():
        return [(await acheck(name, policy)).allowed for name in names for _ in range(15)]

    assert all(ask.check(name, policy).allowed for name in names for _ in range(10))
    told = in_processes(work)
    assert sum(map(sum, told)) == 90 * len(names)
    assert [ask.check(name, policy).allowed for name in names] == [False] * len(names)
    assert [counted(name, policy) for name in names] == [100] * len(names)


def test_the_cache_works_on_the_cluster(cluster):
    for name in NAMES[:30]:
        caches["default"].set(name, {"name": name}, 60)
    assert [caches["default"].get(name) for name in NAMES[:30]] == [{"name": name} for name in NAMES[:30]]
    assert caches["default"].add("n", 1, 60)
    assert caches["default"].incr("n") == 2
    assert caches["default"].delete("n")
    assert len(cluster.scan("*user-*")) == 30
    assert backend.client("default") is backend.client("default")
    told = in_processes(lambda n: [caches["default"].get(name) for name in NAMES[:5]], 3)
    assert told == [[{"name": name} for name in NAMES[:5]]] * 3
    caches["default"].clear()
    assert cluster.scan() == []


def test_a_closed_cache_is_opened_again(cluster, settings):
    settings.DJANGO_REDIS_CLOSE_CONNECTION = True
    for _ in range(3):
        caches["default"].set("a", 1, 60)
        assert caches["default"].get("a") == 1
        caches["default"].close()
        assert not check("alice", ROOMY).degraded


def test_the_checks_say_nothing_about_such_a_cache(cluster, use, no_views):
    use(cluster.urls, SOCKET_TIMEOUT=0.25, SOCKET_CONNECT_TIMEOUT=0.25)
    assert problems() == []
    call_command("check", "--tag", "caches")


def test_the_checks_ask_no_server(use, no_views, connects):
    with Node("cluster-enabled yes") as gone:
        use([gone.url], SOCKET_TIMEOUT=0.25)
        assert problems() == []
    use([gone.url])
    assert problems() == ["rlaas_django.W001"]  # as for any cache whose other users would wait
    assert not connects


# Ways to a server


@pytest.fixture
def credentials(whole):
    """Who has no password may not do anything; the limiter may, with its own."""
    for node in whole.nodes:
        node.client().execute_command("ACL", "SETUSER", "limiter", *LIMITER)
        node.client().execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
    yield {"USERNAME": "limiter", "PASSWORD": "s3cret"}
    for node in whole.nodes:
        node.client().execute_command("ACL", "SETUSER", "default", "nopass")
        node.client().execute_command("ACL", "DELUSER", "limiter")


@pytest.mark.parametrize("where", ["in the URL", "in OPTIONS"])
def test_a_cluster_may_want_user_names(whole, credentials, use, ask, where, failures):
    if where == "in OPTIONS":
        use(whole.urls, **credentials)
    else:
        use([url.replace("://", "://limiter:s3cret@") for url in whole.urls])
    for name in one_on_each(whole):
        assert [ask.check(name, ROOMY).current_count for _ in range(2)] == [0, 1]
    assert not failures
    for node in whole.masters():
        assert "limiter" in {client["user"] for client in node.client().client_list()}
    use(whole.urls, {"TIMEOUT": TIMEOUT})
    assert ask.check("alice", ROOMY).degraded
    assert re.search("auth", failures[0], re.IGNORECASE)


def test_options_of_a_cluster_s_urls_are_followed(whole, use):
    use([f"{url}?protocol=3&max_connections=3&client_name=limiter" for url in whole.urls])
    (name,) = names_on(whole, whole.masters()[0])
    decisions = in_threads(lambda n: [check(name, ROOMY) for _ in range(10)], 12)
    assert sorted(each.current_count for some in decisions for each in some) == list(range(120))
    ours = [each for each in whole.masters()[0].client().client_list() if each["name"] == "limiter"]
    assert {each["resp"] for each in ours} == {"2"}
    assert 1 <= len(ours) <= 3


@pytest.fixture
def use_url(settings):
    def use_one(url: str, **options) -> None:
        entry = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": options}
        settings.CACHES = {**settings.CACHES, "default": entry}

    return use_one


@pytest.mark.parametrize("way", ["redis://{host}:{port}", "unix://{socket}"])
def test_options_of_a_server_s_url_are_followed(use_url, ask, way, tmp_path):
    with Node(f"unixsocket {tmp_path / 's'}") as node:
        node.launch()
        address = way.format(host=HOST, port=node.port, socket=tmp_path / "s")
        use_url(f"{address}?db=1&protocol=3&max_connections=7&client_name=limiter")
        assert_options_are_followed(node, ask)


def assert_options_are_followed(node: Node, ask) -> None:
    with redis.Redis(HOST, node.port, db=1) as client:
        assert [ask.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        decisions = in_threads(lambda n: [check("bob", ROOMY) for _ in range(10)], 20)
        assert sorted(each.current_count for some in decisions for each in some) == list(range(200))
        assert client.dbsize() == 2
        ours = [each for each in client.client_list() if each["name"] == "limiter"]
    assert {(each["resp"], each["db"]) for each in ours} == {("2", "1")}
    # Of a loop there is one more: its tasks share it.
    assert 1 <= len(ours) <= 7 + (ask is not rlaas_django)


@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_tls_with_a_user_name_and_a_database(node, certificate, use_url, ask, host, configure, failures):
    context, trusted = certificate
    node.client().execute_command("ACL", "SETUSER", "limiter", *LIMITER)
    node.client().execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
    with TLSProxy(node.url, context) as front:
        use_url(f"rediss://limiter:s3cret@{host}:{front.port}/2?ssl_ca_certs={trusted}")
        assert [ask.check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
        assert not failures
        configure(TIMEOUT=1)
        use_url(f"rediss://limiter:s3cret@{host}:{front.port}/2")  # whose certificates the system knows
        assert ask.check("alice", ROOMY).degraded
        assert "certificate verify failed" in failures[0]


def test_tls_on_a_cluster(certificate, use):
    """The URL names one host; the addresses that the cluster tells are connected to with TLS as well."""
    context, trusted = certificate
    with Node("cluster-enabled yes") as node:
        node.launch()
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        with TLSProxy(node.url, context) as front:
            node.client().config_set("cluster-announce-ip", HOST)
            node.client().config_set("cluster-announce-port", front.port)
            wait_until(lambda: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "a cluster of one")
            use([f"rediss://localhost:{front.port}?ssl_ca_certs={trusted}"])
            assert [check("alice", ROOMY).current_count for _ in range(3)] == [0, 1, 2]
            assert asyncio.run(acheck("alice", ROOMY)).current_count == 3
            assert [server.address for server in backend.nodes()] == [(HOST, front.port)]
            caches["default"].set("a", 1, 60)
            assert caches["default"].get("a") == 1


# What is no cluster


def test_a_single_server_is_no_cluster(node, use, ask, failures):
    use([node.url], {"TIMEOUT": TIMEOUT})
    assert ask.check("alice", ROOMY).degraded
    assert "cluster support disabled" in failures[0]


def test_a_cluster_is_no_single_server(whole, use_url, configure, ask, failures):
    """It says CROSSSLOT to a call, and MOVED to a command of one key."""
    configure(TIMEOUT=TIMEOUT)
    use_url(whole.masters()[0].url)
    assert all(ask.check(name, ROOMY).degraded for name in one_on_each(whole))
    with pytest.raises(backend.UnavailableError) as moved:
        backend.execute([("GET", names_on(whole, whole.masters()[1])[0])])
    for message in (*failures, str(moved.value)):
        assert "OPTIONS['CONNECTION_FACTORY']" in message
        assert "'rlaas_django.cluster.ConnectionFactory'" in message


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"$-1\r\n", b""])
def test_garbage_is_no_cluster(use, ask, failures, answer):
    with Garbage(answer) as server:
        use([server.url], {"TIMEOUT": TIMEOUT})
        began = time.monotonic()
        for _ in range(3):
            assert ask.check("alice", ROOMY).degraded
        assert time.monotonic() - began < 3 * TIMEOUT + SLACK
    assert len(failures) == 3


def test_one_seed_of_several_will_do(whole, use, ask):
    with Node("cluster-enabled yes") as gone:
        use([gone.url, whole.masters()[1].url])
        assert not any(ask.check(name, ROOMY).degraded for name in one_on_each(whole))


def test_what_cannot_be_asked_is_in_the_log(node, use_url, use, ask, whole, caplog):
    """Each kind of trouble, once per interval: who watches the log finds out."""
    use([node.url], {"TIMEOUT": TIMEOUT, "LOG_LINES_PER_SECOND": 1_000})
    ask.check("alice", ROOMY)
    assert "cluster support disabled" in caplog.text
    use_url(whole.masters()[0].url)
    for name in one_on_each(whole):
        ask.check(name, ROOMY)
    assert "rlaas_django.cluster.ConnectionFactory" in caplog.text
