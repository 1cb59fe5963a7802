"""Which server has a key, what is done after a redirect, and how often the topology is refreshed."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel
from rlaas_django import Policy, backend, check

from tests.support.deployments import HOST, Cluster, Node, wait_until
from tests.support.helpers import IDENTITIES, wait_for_servers
from tests.support.internals import (
    YEAR,
    ClusterTopology,
    ConnectionOptions,
    NextAttempt,
    Refresher,
    SentinelTopology,
    next_attempt,
)
from tests.support.on_cluster import entry
from tests.support.traffic import SLACK

ROOMY = Policy("p", (1_000, YEAR))
TIMEOUT = 0.5
OPTIONS = ConnectionOptions(redis.Connection, {"protocol": 2}, 10)


# After an error


@pytest.mark.parametrize(
    ("error", "attempt"),
    [
        (NoScriptError("No matching script."), NextAttempt.LOAD),
        (MovedError("866 10.0.0.1:7000"), NextAttempt.REDIRECT),
        (AskError("866 10.0.0.1:7000"), NextAttempt.ASKING),
        (TryAgainError("Multiple keys request during rehashing of slot"), NextAttempt.LATER),
        # The server may have run the call, or would reply the same again.
        (ResponseError("unknown command"), None),
        (ResponseError("WRONGTYPE Operation against a key"), None),
        (ReadOnlyError("You can't write against a read only replica."), None),
        (ClusterDownError("Hash slot not served"), None),
        (ClusterDownError("The cluster is down"), None),
        (NoPermissionError("this user has no permissions"), None),
        (ResponseError("BUSY Redis is busy running a script."), None),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), None),
    ],
    ids=lambda value: f"{type(value).__name__}: {value}" if isinstance(value, Exception) else "",
)
def test_a_call_is_sent_again_only_when_nothing_was_run(error, attempt):
    assert next_attempt(error) == attempt


def test_a_refund_does_not_follow_ask():
    """A refund of the fixed window names a key that never exists, so ASK does not say where its counter is."""
    assert next_attempt(AskError("866 10.0.0.1:7000"), is_refund=True) == NextAttempt.LATER
    assert next_attempt(MovedError("866 10.0.0.1:7000"), is_refund=True) == NextAttempt.REDIRECT


@pytest.mark.parametrize(
    "error", [redis.ConnectionError(), redis.TimeoutError(), BusyLoadingError(), AuthenticationError()]
)
def test_an_error_without_a_reply_is_no_reason_to_send_again(error):
    assert next_attempt(error) is None


# Refreshes


class Refreshes:
    """A function to refresh that notes when it runs, and whether two run at once."""

    def __init__(self, *, lasts: float = 0.0) -> None:
        self.at: list[float] = []
        self.lasts = lasts
        self.running = self.at_once = 0

    def __call__(self) -> None:
        self.at.append(time.monotonic())
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        time.sleep(self.lasts)
        self.running -= 1

    @property
    def intervals(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


@pytest.fixture
def quick(monkeypatch):
    """A tenth of the interval."""
    monkeypatch.setattr(Refresher, "INTERVAL", Refresher.INTERVAL / 10)
    return Refresher


def test_the_first_refresh_is_immediate_and_none_follows_without_a_request(quick):
    refreshes = Refreshes()
    refresher = quick(refreshes)
    refresher.request()
    wait_until(lambda: len(refreshes.at) == 1, "a refresh")
    time.sleep(3 * quick.INTERVAL)
    assert len(refreshes.at) == 1


def request_until(refresher, refreshes: Refreshes, count: int) -> None:
    """Request a refresh from several threads, again and again."""

    def work() -> None:
        deadline = time.monotonic() + 30
        while len(refreshes.at) < count and time.monotonic() < deadline:
            refresher.request()
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(refreshes.at) >= count


def test_refreshes_run_one_at_a_time_and_keep_the_least_interval(quick):
    refreshes = Refreshes(lasts=0.01)
    request_until(quick(refreshes), refreshes, 6)
    assert refreshes.at_once == 1
    assert min(refreshes.intervals) >= quick.INTERVAL
    assert min(refreshes.intervals) < quick.INTERVAL + SLACK


def test_a_refresh_that_is_requested_while_one_runs_follows_it(quick):
    refreshes = Refreshes(lasts=0.05)
    refresher = quick(refreshes)
    refresher.request()
    wait_until(lambda: refreshes.running == 1, "a refresh runs")
    refresher.request()
    wait_until(lambda: len(refreshes.at) == 2, "another follows")


def test_the_pace_is_two_refreshes_per_second_at_most():
    assert Refresher.INTERVAL == 0.5


def test_a_process_that_can_start_no_thread_tries_again(quick, monkeypatch):
    refreshes = Refreshes()
    refresher = quick(refreshes)

    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        refresher.request()
    refresher.request()
    wait_until(lambda: len(refreshes.at) == 1, "a refresh")


# Sentinels


def sentinel_topology(*ports: int, **options) -> SentinelTopology:
    limits = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel([(HOST, port) for port in ports], sentinel_kwargs={**limits, **options})
    return SentinelTopology("mymaster", sentinel, OPTIONS, TIMEOUT)


def test_the_error_names_the_sentinels_that_are_down_and_no_password():
    with Node(sentinel=True) as one, Node(sentinel=True) as other:
        topology = sentinel_topology(one.port, other.port, username="watch", password="s3cret")
        wait_until(lambda: "No master" in topology.error, "the Sentinels are found to be down")
    assert topology.servers() == []
    assert topology.error.startswith("Sentinel service 'mymaster': No master found for 'mymaster'")
    assert f"{HOST}:{one.port} - " in topology.error
    assert f"{HOST}:{other.port} - " in topology.error
    assert "ConnectionError" in topology.error
    for detail in ("s3cret", "watch", "password", "redis.client"):
        assert detail not in topology.error


def test_the_first_request_waits_for_a_sentinel_that_hangs_within_its_timeout():
    with Node("sentinel monitor mymaster 127.0.0.1 1 1", sentinel=True) as sentinel:
        sentinel.launch()
        sentinel.hang()
        topology = sentinel_topology(sentinel.port)
        began = time.monotonic()
        topology.wait_until_known()
        assert time.monotonic() - began < TIMEOUT + SLACK
        assert topology.server_for("key") is None
        wait_until(lambda: "TimeoutError" in topology.error, "the timeout is noticed")
        assert f" : {HOST}:{sentinel.port} - " in topology.error
        sentinel.resume()
        topology.refresh_soon()
        wait_until(lambda: topology.server_for("key") is not None, "the Sentinel names the master")
        wait_until(lambda: "cluster" not in topology.error and "Sentinels" in topology.error, "an error of Sentinels")
    assert topology.master.address == (HOST, 1)
    assert topology.group_by_slot(["a", "b", "c"]) == [range(3)]


# Clusters


@pytest.fixture(scope="module")
def shared_cluster():
    with Cluster(3, 0, "cluster-require-full-coverage no", node_timeout=5000) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    yield shared_cluster
    for node in shared_cluster.nodes:
        if node.hanging:
            node.resume()
    shared_cluster.flush()


def cluster_topology(*addresses: tuple[str, int], timeout: float = TIMEOUT) -> ClusterTopology:
    return ClusterTopology(OPTIONS, addresses, timeout)


def known(*nodes: Node, timeout: float = 20) -> ClusterTopology:
    """Return a topology of these seeds that has been refreshed once."""
    topology = cluster_topology(*[(HOST, node.port) for node in nodes], timeout=timeout)
    topology.wait_until_known()
    return topology


def test_keys_are_grouped_by_slot_in_the_order_of_the_slots_first_keys():
    topology = cluster_topology((HOST, 1))
    keys = ["p/{alice}", "p/{bob}", "q/{alice}", "alice", "r/{carol}", "q/{bob}"]
    assert [list(group) for group in topology.group_by_slot(keys)] == [[0, 2, 3], [1, 5], [4]]
    assert topology.group_by_slot([]) == []


def test_each_key_has_the_server_that_owns_its_slot(cluster):
    topology = known(cluster.nodes[0])
    for name in IDENTITIES[:200]:
        assert topology.server_for(f"rlaas:{{{name}}}").address == (HOST, cluster.owner(name).port)
    assert [server.address[1] for server in topology.servers()] == sorted(node.port for node in cluster.nodes)


def test_a_process_that_starts_while_a_master_hangs_uses_the_others(cluster, settings, configure):
    """The first one by slot, to which redis-py's RedisCluster sends COMMAND when it is made."""
    hanging = cluster.nodes[0]
    slots = cluster.view()[hanging.port].slots
    settings.CACHES = {**settings.CACHES, "default": entry(cluster.urls)}
    configure(TIMEOUT=TIMEOUT)
    hanging.hang()
    wait_for_servers()
    for name in IDENTITIES[:30]:
        decision = check(name, ROOMY)
        assert decision.degraded is any(key_slot(name.encode()) in share for share in slots), name


@pytest.mark.parametrize(
    ("error", "address"),
    [
        (MovedError("866 10.0.0.1:7000"), ("10.0.0.1", 7000)),
        (MovedError("866 :7000"), (HOST, 7000)),  # the same host
        (MovedError("866 ::1:7000"), ("::1", 7000)),
        (AskError("866 10.0.0.1:7000"), ("10.0.0.1", 7000)),
    ],
    ids=repr,
)
def test_a_redirect_names_the_server(cluster, error, address):
    topology = known(*cluster.nodes)
    target = topology.redirect(error, topology.servers()[0])
    assert target.address == address


def test_moved_is_noted_until_the_next_refresh(cluster):
    topology = known(*cluster.nodes)
    slot = key_slot(b"alice")
    owner = topology.server_for("alice")
    other = next(server for server in topology.servers() if server is not owner)
    host, port = other.address
    topology.redirect(MovedError(f"{slot} {host}:{port}"), owner)
    assert topology.server_for("alice") is other
    wait_until(lambda: topology.server_for("alice") is owner, "the refresh, which finds that it has not moved")


@pytest.fixture
def lone_node():
    """A cluster of one node, which has every slot."""
    with Node("cluster-enabled yes", "cluster-require-full-coverage no") as node:
        node.launch()
        node.ask("CLUSTER", "ADDSLOTS", *range(16384))
        yield node


def test_a_node_without_slots_does_not_change_the_map(lone_node):
    topology = known(lone_node)
    server = topology.server_for("alice")
    assert server.address == (HOST, lone_node.port)
    lone_node.ask("CLUSTER", "FLUSHSLOTS")
    topology.refresh_soon()
    wait_until(lambda: "no node has slots" in topology.error, "a refresh from a node without slots")
    assert topology.server_for("alice") is server
    assert topology.servers() == [server]
    # A slot that MOVED names is known all the same.
    other = topology.redirect(MovedError(f"{key_slot(b'alice')} {HOST}:1"), server)
    assert (topology.server_for("alice"), topology.server_for("bob")) == (other, server)
    lone_node.ask("CLUSTER", "ADDSLOTS", *range(16384))
    topology.refresh_soon()
    wait_until(lambda: topology.server_for("alice") is server, "a refresh from a node with slots")


def test_a_slot_without_an_owner_has_no_server(lone_node):
    topology = known(lone_node)
    lone_node.ask("CLUSTER", "DELSLOTS", key_slot(b"alice"))
    topology.refresh_soon()
    wait_until(lambda: topology.server_for("alice") is None, "the refresh")
    assert topology.server_for("bob") is not None
    assert topology.error == "No node of the cluster has the key's slot."


def test_the_seeds_are_asked_again_when_every_known_node_is_gone(lone_node):
    """As when all nodes get new addresses, and the seed is a host name that stays."""
    with Node() as former, Node() as new:  # neither is started
        lone_node.client().config_set("cluster-announce-port", former.port)
        topology = known(lone_node)
        assert [server.address for server in topology.servers()] == [(HOST, former.port)]
        lone_node.client().config_set("cluster-announce-port", new.port)
        topology.refresh_soon()
        wait_until(lambda: topology.server_for("alice").address == (HOST, new.port), "the seed is asked")


def test_threads_may_read_the_map_while_it_is_refreshed(cluster):
    topology = known(*cluster.nodes)
    slot, addresses = key_slot(b"alice"), {(HOST, node.port) for node in cluster.nodes}
    errors: list[BaseException] = []
    ends = time.monotonic() + 0.5

    def repeat(work) -> None:
        try:
            for n in itertools.count():
                work(n)
                if errors or time.monotonic() > ends:
                    return
        except BaseException as error:
            errors.append(error)

    def read(n: int) -> None:
        assert topology.server_for("rlaas:{alice}").address in addresses
        assert {server.address for server in topology.servers()} == addresses

    def move(n: int) -> None:
        server = topology.servers()[n % 3]
        host, port = server.address
        topology.redirect(MovedError(f"{slot} {host}:{port}"), server)

    def meet(n: int) -> None:
        """Meet nodes that are not on the map, as ASK names them."""
        assert topology.server_at((HOST, 1 + n % 500)).address == (HOST, 1 + n % 500)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00001)
    try:
        works = [read, read, lambda n: topology.discover(), move, meet]
        threads = [threading.Thread(target=repeat, args=[work]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_a_database_other_than_0_is_an_error(cluster):
    options = ConnectionOptions(redis.Connection, {"protocol": 2, "db": 3}, 10)
    topology = ClusterTopology(options, [(HOST, cluster.nodes[0].port)], 20)
    topology.wait_until_known()
    assert topology.servers() == []
    assert topology.error == "Redis Cluster: a cluster has database 0 only, not 3"


def test_the_options_of_a_url_with_database_0_are_accepted(cluster, settings):
    settings.CACHES = {**settings.CACHES, "default": entry([f"redis://{HOST}:{cluster.nodes[0].port}/0"])}
    assert not check("alice", ROOMY).degraded
    assert len(backend.servers()) == 3
