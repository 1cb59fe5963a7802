"""The helpers that start clusters and make faults do what they say, else tests that use them would show nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from example_project.redis_server import Server
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from tests.support.deployments import Cluster, Node, Sentinels, wait_until
from tests.support.faults import Garbage, Proxy, end_of_message

pytestmark = pytest.mark.slow  # the long tier

ROOT = Path(__file__).parents[2]
# A key of each slot.
KEYS = {key_slot(b"%d" % n): str(n) for n in range(200_000)}
STAYING = [KEYS[slot] for slot in range(500, 16384, 1000)]
SLOTS = range(4000, 4100)
MOVING = [KEYS[slot] for slot in SLOTS]


@pytest.fixture(scope="module")
def node():
    with Node() as node:
        node.launch()
        yield node


@pytest.fixture(scope="module")
def shared_cluster():
    with Cluster(node_timeout=1000) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def proxy(node):
    with Proxy(node.url) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with once(proxy.url) as client:
        yield client


def once(url: str, timeout: float = 20) -> redis.Redis:
    """Return a client without retries. A test that expects a timeout gives a short one."""
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=timeout)


def ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Nodes


def test_a_node_can_be_killed_launched_again_on_its_port_and_stopped():
    with Node() as node:
        node.launch()
        assert node.client().ping()
        node.kill()
        with pytest.raises(redis.ConnectionError):
            node.client().ping()
        node.launch()
        node.hang()
        assert not node.up
        with once(node.url, 0.3) as client, pytest.raises(redis.TimeoutError):
            client.ping()
        node.resume()
        assert node.client().ping()
        pid = node.process.pid
        node.hang()
    assert ended(pid)
    assert not node.directory.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_node_ends_with_its_process_though_not_with_the_thread_that_launched_it():
    program = """
import threading, time
from tests.support.deployments import Node
node = Node()
thread = threading.Thread(target=node.launch)
thread.start(); thread.join(); time.sleep(0.1)
node.client().ping(); node.hang()
print(node.process.pid, node.directory, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pid, directory = process.stdout.readline().split()
        process.kill()
    wait_until(lambda: ended(int(pid)), "the node has ended")
    subprocess.run(["rm", "-r", directory], check=True)


# Clusters


def test_a_cluster_is_formed_and_each_key_is_at_the_owner_of_its_slot(cluster):
    assert len(cluster.replicas()) == 3
    with RedisCluster.from_url(cluster.url) as client:
        for key in STAYING:
            client.set(key, key)
    for key in STAYING:
        assert cluster.owner(key) in cluster.masters()
        assert cluster.owner(key).client().get(key) == key.encode()
    assert sorted(cluster.scan()) == sorted(key.encode() for key in STAYING)
    assert {cluster.owner(key) for key in STAYING} == set(cluster.masters())
    cluster.flush()
    assert cluster.scan() == []


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_replica_takes_over_from_a_failed_master(cluster, how):
    key, masters = STAYING[0], len(cluster.masters())
    master = cluster.owner(key)
    master.client().set(key, "kept")
    assert master.client().wait(1, 2000) == 1
    if how == "killed":
        assert cluster.kill_master(key) is master
    else:
        master.hang()
    cluster.wait_for_failover()
    assert cluster.owner(key) is not master
    assert cluster.owner(key).client().get(key) == b"kept"
    if how == "killed":
        master.launch()
    else:
        master.resume()
    cluster.wait_until_settled()
    assert master in cluster.replicas()
    assert len(cluster.masters()) == masters


def test_slots_move_to_a_new_node_under_load_and_no_key_is_lost(cluster):
    """Counters tell more than keys: an increment on a node that has handed its key over would be missing."""
    counts, stop, wrong = dict.fromkeys(MOVING + STAYING, 0), threading.Event(), []

    def load():
        with RedisCluster.from_url(cluster.url) as client:
            while not stop.is_set():
                for key in counts:
                    # redis-py's issue 4015: it cannot send to a node that has no slots yet. The command was not run.
                    with suppress(AttributeError):
                        reply, counts[key] = client.incr(key), counts[key] + 1
                        if reply != counts[key]:
                            wrong.append((key, reply, counts[key]))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        new = cluster.add_node()
        assert new in cluster.masters()
        assert counts[MOVING[0]] > 0
        before = dict(counts)
        cluster.move_slots(SLOTS, new)
        assert counts[MOVING[0]] > before[MOVING[0]]
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert all(cluster.owner(key) is new for key in MOVING)
    assert all(cluster.owner(key) is not new for key in STAYING)
    assert sorted(new.client().scan_iter(count=1000)) == sorted(key.encode() for key in MOVING)
    assert {key: int(cluster.owner(key).client().get(key)) for key in counts} == counts


def test_a_migrating_slot_redirects_with_ask_and_tryagain(cluster):
    source, target = cluster.masters()[:2]
    slot = cluster.view()[source.port].slots[0][0]
    here, there = f"{{{KEYS[slot]}}}here", f"{{{KEYS[slot]}}}there"
    source.client().mset({here: 1, there: 2})
    with cluster.moving(slot, target) as found:
        assert found is source
        cluster.move_keys([there], source, target)
        assert source.client().get(here) == b"1"
        with pytest.raises(redis.exceptions.AskError):
            source.client().get(there)
        with pytest.raises(redis.exceptions.TryAgainError):
            source.client().mget(here, there)
    assert cluster.owner(slot) is target
    assert target.client().mget(here, there) == [b"1", b"2"]


# Sentinels


def test_sentinels_name_a_new_master_when_theirs_is_killed():
    with Sentinels(down_after=500) as sentinels:
        first, second = sentinels.master(), sentinels.replica()
        sentinel = Sentinel(sentinels.sentinels, socket_timeout=1)
        with sentinel.master_for(sentinels.name) as client:
            client.set("key", "kept")
            assert client.wait(1, 2000) == 1
            assert sentinels.kill_master() is first
            sentinels.wait_for_failover()
            assert sentinels.master() is second
            assert client.get("key") == b"kept"
            client.set("key", "taken")
        assert second.client().get("key") == b"taken"
        for each in sentinel.sentinels:
            each.close()


# The proxy


def test_a_proxy_passes_commands_and_replies_of_any_kind(client, proxy):
    client.flushall()
    assert client.set("key", "x" * 200_000)
    assert client.get("key") == b"x" * 200_000
    assert client.get("nothing") is None
    assert client.hgetall("nothing") == {}
    with pytest.raises(redis.ResponseError, match="wrong kind"):
        client.llen("key")
    with client.pipeline() as pipeline:
        assert pipeline.rpush("list", 1, 2).lrange("list", 0, -1).execute() == [2, [b"1", b"2"]]
    assert (proxy.commands, proxy.dropped) == (0, 0)


def test_a_proxy_before_a_unix_socket():
    server = Server()
    try:
        with Proxy(server.url) as proxy, once(proxy.url) as client:
            assert client.ping()
    finally:
        server.stop()


@pytest.fixture
def sha(node) -> str:
    """A script that counts its calls."""
    node.client().delete("count")
    return node.client().script_load("return redis.call('INCR', KEYS[1])")


def test_a_command_whose_reply_is_dropped_has_been_run_once(sha, client, proxy):
    proxy.drop(of="evalsha")
    with once(proxy.url, 0.3) as impatient, pytest.raises(redis.TimeoutError):
        impatient.evalsha(sha, 1, "count")
    assert (proxy.commands, proxy.answered, proxy.dropped) == (1, 0, 1)
    proxy.pass_all()
    assert client.evalsha(sha, 1, "count") == 2
    assert (proxy.commands, proxy.answered, proxy.dropped) == (2, 1, 1)


def test_a_dropped_reply_may_close_the_connection(node, sha, client, proxy):
    client.ping()
    proxy.drop(close=True)
    with pytest.raises(redis.ConnectionError):  # and not TimeoutError, after 20 s
        client.evalsha(sha, 1, "count")
    assert node.client().get("count") == b"1"


def test_the_same_seed_drops_the_same_replies(client, proxy):
    def outcomes(seed) -> list[bool]:
        proxy.drop(0.3, seed, of="ECHO", close=True)
        return [replied(client) for _ in range(30)]

    def replied(client) -> bool:
        try:
            return client.echo("hello") == b"hello"
        except redis.ConnectionError:
            return False

    first = outcomes(1)
    assert first == outcomes(1) != outcomes(2)
    assert 3 <= first.count(False) <= 18


async def test_a_silent_connection_passes_none_of_the_replies_that_follow(node, sha, proxy):
    """Ten commands go out at once; the sixth reply is lost, and with it those that follow, though all were run."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    command = f"*4\r\n$7\r\nEVALSHA\r\n$40\r\n{sha}\r\n$1\r\n1\r\n$5\r\ncount\r\n".encode()
    proxy.drop(0.1, seed=next(seed for seed in range(10_000) if first_drop(seed) == 6))
    writer.write(command * 10)
    assert await reader.readexactly(20) == b":1\r\n:2\r\n:3\r\n:4\r\n:5\r\n"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    proxy.pass_all()
    writer.write(command)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    assert node.client().get("count") == b"10"
    assert (proxy.commands, proxy.answered, proxy.dropped) == (10, 5, 1)
    writer.close()
    await writer.wait_closed()


def first_drop(seed: int) -> int:
    """The number of the reply that is the first to be dropped, of one in ten."""
    generator = random.Random(seed)
    return next(n for n in itertools.count(1) if generator.random() < 0.1)


async def test_delayed_replies_are_held_side_by_side(proxy):
    async with AsyncRedis.from_url(proxy.url) as client:
        await client.ping()
        proxy.delay(0.2)
        began = time.monotonic()
        async with client.pipeline(transaction=False) as pipeline:
            for n in range(20):
                pipeline.echo(n)
            assert await pipeline.execute() == [b"%d" % n for n in range(20)]
        assert 0.2 <= time.monotonic() - began < 20 * 0.2  # as long as one after the other would take


def test_connections_are_cut_refused_and_accepted_again(client, proxy):
    assert client.ping()
    assert proxy.connections == 1
    with client.client() as held:  # a pool would notice, and connect again
        assert held.ping()
        proxy.cut()
        assert proxy.connections == 0
        with pytest.raises(redis.ConnectionError):
            held.ping()
    proxy.refuse()
    with pytest.raises(redis.ConnectionError, match="refused"):
        client.ping()
    proxy.accept()
    assert client.ping()
    proxy.refuse()
    assert client.ping()  # the connection that there is stays


def test_a_proxy_before_a_server_that_is_down_closes_at_once():
    with Node() as gone, Proxy(gone.url) as proxy, once(proxy.url) as client:
        with pytest.raises(redis.ConnectionError):
            client.ping()
        gone.launch()
        assert client.ping()


@pytest.mark.parametrize(
    "message",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$4\r\n\r\n\r\n\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\na\r\n",
        b"%1\r\n+a\r\n*2\r\n_\r\n#t\r\n",
        b"|1\r\n+a\r\n:1\r\n,1.5\r\n",
        b">2\r\n+a\r\n=5\r\ntxt:b\r\n",
    ],
)
def test_where_a_message_ends(message):
    assert end_of_message(bytearray(message + b"+next\r\n")) == len(message)
    assert all(end_of_message(bytearray(message[:length])) is None for length in range(len(message)))


# Replies that are not RESP


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*1\r\n", b"\xff\x00", b""])
def test_garbage_is_an_error_to_a_client(answer):
    with Garbage(answer) as server, once(server.url, 0.3) as client, pytest.raises(redis.RedisError):
        client.ping()


@pytest.mark.parametrize("closes", [False, True])
def test_garbage_replies_with_its_bytes(closes):
    with Garbage(b":1\r\n", close=closes) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        for _ in range(1 if closes else 3):
            client.sendall(b"anything")
            assert client.recv(100) == b":1\r\n"
        if closes:
            assert client.recv(100) == b""
