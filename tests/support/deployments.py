"""Deployments of Redis: single servers, a Cluster and Sentinels, all real processes on loopback ports."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, Self

import redis
from example_project.redis_server import binary
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

HOST = "127.0.0.1"
BUS = 10_000  # the distance of a node's cluster bus from its port; other distances only from Redis 7 on


def reserve(also: int | None = None) -> tuple[int, list[socket.socket]]:
    """Return a free port, with the one at the distance `also`, which no other process gets until the sockets close.

    A server of ours can still bind it, again and again: on Linux, sockets that are bound with SO_REUSEADDR bar only
    those without it, and the kernel's own choice of a port, while none of them listens.
    """
    while True:
        sockets = [socket.socket(), *([socket.socket()] if also else [])]
        try:
            sockets[0].bind((HOST, 0))
            port = sockets[0].getsockname()[1]
            if also:
                sockets[1].bind((HOST, port + also))
        except (OSError, OverflowError):  # taken, or no port at all
            for each in sockets:
                each.close()
            continue
        for each in sockets:  # not before they are bound, or two of us could hold the same port
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return port, sockets


def wait_until(fact: Callable[[], bool], what: str, within: float = 30) -> float:
    """Wait until a fact holds; return the seconds that it took."""
    began = time.monotonic()
    while not fact():
        if time.monotonic() - began > within:
            raise TimeoutError(f"not within {within} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - began


class Keeper:
    """A process that kills our servers once this process is gone, however it went.

    The kernel's death signal, which redis_server uses, comes with the end of the thread that started a server, and
    these may be started by any. A server that is stopped (SIGSTOP) would not end on its SIGTERM either.
    """

    PROGRAM = """
import os, select, signal, sys
pids, rest = set(), b""
while os.getppid() == int(sys.argv[1]):  # a fork of our parent may hold the pipe open
    if select.select([0], [], [], 0.25)[0]:
        data = os.read(0, 4096)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            pids ^= {int(line)}  # sent when it starts, and when it has ended
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def tell(self, pid: int) -> None:
        with self.lock:
            if self.process is None:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", self.PROGRAM, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is for us alone
                )
                self.owner = os.getpid()
            os.write(self.process.stdin.fileno(), b"%d\n" % pid)

    def stop(self) -> None:
        if self.process is not None and os.getpid() == self.owner:
            self.process.stdin.close()
            self.process.wait()


_keeper = Keeper()
atexit.register(_keeper.stop)  # before any node's, and so run after them


class Node:
    """One server process on a TCP port of its own, with these lines of configuration, which stay over a restart."""

    def __init__(self, *settings: str, sentinel: bool = False) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rlaas-", dir="/tmp"))
        self.port, self._reserved = reserve(also=BUS if "cluster-enabled yes" in settings else None)
        self.sentinel = sentinel
        self.process: subprocess.Popen | None = None
        self.hanging = False
        self.owner = os.getpid()
        # A file, because Sentinels keep in it what they know, and which server is whose replica.
        self.configuration = self.directory / "server.conf"
        common = [f"port {self.port}", f"bind {HOST}", f"dir {self.directory}"]
        data = ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        self.configuration.write_text("\n".join([*common, *([] if sentinel else data), *settings, ""]))
        self._client = redis.Redis(
            *(HOST, self.port), retry=Retry(NoBackoff(), 0), socket_timeout=3, socket_connect_timeout=1
        )
        atexit.register(self.stop)

    def __repr__(self) -> str:
        return f"<Node {self.port}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def up(self) -> bool:
        """Whether it runs and is not stopped."""
        process = self.process  # which another thread may end meanwhile
        return process is not None and process.poll() is None and not self.hanging

    def client(self) -> redis.Redis:
        """Return a client of this node alone, without retries; it is closed with the node."""
        return self._client

    def ask(self, *command: str | int | bytes) -> str:
        """Return the reply to a command as text."""
        return self._client.execute_command(*command).decode()

    def replication(self) -> dict[str, str | int]:
        return self._client.info("replication")

    def start(self) -> None:
        """Start the process, anew if need be, and do not wait."""
        self.kill()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [binary(), str(self.configuration), *(["--sentinel"] if self.sentinel else [])],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _keeper.tell(self.process.pid)

    def launch(self) -> None:
        """Start the process, anew if need be, and wait until it answers."""
        self.start()
        self.wait_until_up()

    def wait_until_up(self) -> None:
        wait_until(self.answers, f"a reply of {self}")

    def answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self} did not start:\n{(self.directory / 'log').read_text()}")
        try:
            return self._client.execute_command("PING") is not None
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """Kill it, even if it is stopped; it may be launched again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            _keeper.tell(self.process.pid)
            self.process = None
        self.hanging = False

    def hang(self) -> None:
        """Stop the process (SIGSTOP) until `resume()`: it accepts connections and does not reply."""
        self.process.send_signal(signal.SIGSTOP)
        self.hanging = True

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.hanging = False

    def stop(self) -> None:
        """End it for good."""
        if os.getpid() != self.owner:
            return  # a fork is not the owner
        self.kill()  # a master that is asked to end waits for its replicas first, and none has data to save
        self._client.close()
        for each in self._reserved:
            each.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.stop)


def launch_together(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_until_up()


class Deployment:
    """Nodes that make up one service."""

    nodes: list[Node]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @contextmanager
    def _or_none(self) -> Iterator[None]:
        """All of the nodes come up, or none stays."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def up(self) -> list[Node]:
        return [node for node in self.nodes if node.up]

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class Seen(NamedTuple):
    """A node of a cluster as another sees it."""

    id: str
    flags: set[str]
    slots: list[range]


class Cluster(Deployment):
    """A Redis Cluster, the slots shared out evenly among the masters; `settings` are further lines for every node.

    At least 2 s go by until it is formed: so long a new master takes no writes, whatever it knows.
    """

    def __init__(self, masters: int = 3, replicas: int = 3, *settings: str, node_timeout: int = 2000) -> None:
        """`node_timeout`, in ms, is when a node is seen as failed; a failover takes about 1 s more."""
        self.settings = ("cluster-enabled yes", f"cluster-node-timeout {node_timeout}", *settings)
        self.nodes = []
        with self._or_none():
            self.nodes += [Node(*self.settings) for _ in range(masters + replicas)]
            self._form(self.nodes[:masters], self.nodes[masters:])

    def _form(self, masters: list[Node], replicas: list[Node]) -> None:
        launch_together(self.nodes)
        bounds = [REDIS_CLUSTER_HASH_SLOTS * n // len(masters) for n in range(len(masters) + 1)]
        for n, node in enumerate(masters):
            node.ask("CLUSTER", "ADDSLOTS", *range(bounds[n], bounds[n + 1]))
        for n, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        # Each meets each, as gossip would take seconds.
        for one, other in combinations(self.nodes, 2):
            one.ask("CLUSTER", "MEET", HOST, other.port)
        wait_until(self._all_know_all, "every node of the cluster knows every other")
        for n, node in enumerate(replicas):
            node.ask("CLUSTER", "REPLICATE", self.id(masters[n % len(masters)]))
        self.wait_until_settled()

    # State

    @property
    def urls(self) -> list[str]:
        """The addresses of the nodes that are up: seeds for a client."""
        return [node.url for node in self.up()]

    @property
    def url(self) -> str:
        return self.urls[0]

    def id(self, node: Node) -> str:
        return node.ask("CLUSTER", "MYID")

    def view(self, node: Node | None = None) -> dict[int, Seen]:
        """Return what a node, or any that is up, knows of the others: by port, without those it has only just met."""
        view = {}
        for line in (node or self.up()[0]).ask("CLUSTER", "NODES").splitlines():
            name, address, flags, _, _, _, _, _, *slots = line.split()
            port = int(address.split("@")[0].rsplit(":", 1)[1])
            bounds = [[int(slot) for slot in part.split("-")] for part in slots if not part.startswith("[")]
            if "handshake" not in flags:
                view[port] = Seen(name, set(flags.split(",")), [range(ends[0], ends[-1] + 1) for ends in bounds])
        return view

    def _by_role(self, role: str) -> list[Node]:
        view = self.view()
        return [node for node in self.nodes if node.port in view and role in view[node.port].flags]

    def masters(self) -> list[Node]:
        """Return the masters in the others' view, up or not; until a failover is over, the failed one is among them."""
        return self._by_role("master")

    def replicas(self) -> list[Node]:
        return self._by_role("slave")

    def owner(self, key: str | bytes | int) -> Node:
        """Return the node that owns a key or a slot in the others' view, up or not."""
        slot = key if isinstance(key, int) else key_slot(key.encode() if isinstance(key, str) else key)
        view = self.view()
        for node in self.nodes:
            if node.port in view and any(slot in slots for slots in view[node.port].slots):
                return node
        raise LookupError(f"slot {slot} has no owner")

    def scan(self, pattern: str = "*") -> list[bytes]:
        """Return the keys on all masters that are up."""
        return [key for node in self.masters() if node.up for key in node.client().scan_iter(pattern, count=1000)]

    def flush(self) -> None:
        for node in self.masters():
            if node.up:
                node.client().flushall()

    # Waiting

    def _all_know_all(self) -> bool:
        ports = {node.port for node in self.up()}
        return all(ports <= self.view(node).keys() for node in self.up())

    def settled(self) -> bool:
        """Return whether the nodes that are up agree on the owner of every slot, and replicas are connected."""
        up = self.up()
        ports = {node.port for node in up}
        try:
            views = [self.view(node) for node in up]
            maps = [{port: ("master" in view[port].flags, view[port].slots) for port in ports} for view in views]
            served = sum(len(slots) for _, shares in maps[0].values() for slots in shares)
            return (
                all(each == maps[0] for each in maps)
                and served == REDIS_CLUSTER_HASH_SLOTS
                and all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in up)
                and all(node.replication().get("master_link_status", "up") == "up" for node in up)
            )
        except (redis.RedisError, LookupError):  # one has gone meanwhile, or is not known to all
            return False

    def wait_until_settled(self, within: float = 30) -> float:
        return wait_until(self.settled, "the cluster has settled", within)

    def wait_for_failover(self, within: float = 30) -> float:
        """Wait until replicas have taken over from each failed master; return the seconds that it took."""
        return self.wait_until_settled(within)

    # Changes

    def kill_master(self, key: str | bytes | int) -> Node:
        """Kill the master of a key or a slot."""
        node = self.owner(key)
        node.kill()
        return node

    def add_node(self) -> Node:
        """Add a master without slots, known to all."""
        node = Node(*self.settings)
        self.nodes.append(node)
        node.launch()
        for other in self.up():
            if other is not node:
                node.ask("CLUSTER", "MEET", HOST, other.port)
        self.wait_until_settled()
        return node

    @contextmanager
    def moving(self, slot: int, to: Node) -> Iterator[Node]:
        """Migrate a slot: inside the block it is migrating, with all keys at the source; afterwards all have moved.

        Meanwhile a key that is not at the source is redirected to the target (ASK), and a command on several keys is
        refused while only some are there (TRYAGAIN). `move_keys` moves some.
        """
        source = self.owner(slot)
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id(source))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id(to))
        try:
            yield source
        finally:
            self._finish_move(slot, source, to)

    def _finish_move(self, slot: int, source: Node, to: Node) -> None:
        while keys := source.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.move_keys(keys, source, to)
        # The target first: were the source first, the two would send clients to each other.
        others = [node for node in self.masters() if node.up and node not in (source, to)]
        for node in (to, source, *others):
            self._give_slot(node, slot, self.id(to))

    def _give_slot(self, node: Node, slot: int, owner: str) -> None:
        """Tell a node the owner of a slot."""
        try:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", owner)
        except redis.ResponseError as error:
            # A master without its last slot is a replica from then on, and learns of the rest by gossip.
            if "only with masters" not in str(error):
                raise

    def move_keys(self, keys: Iterable[bytes], source: Node, to: Node) -> None:
        """Move keys of a migrating slot; one that has expired is no error."""
        source.client().execute_command("MIGRATE", HOST, to.port, "", 0, 2000, "KEYS", *keys)

    def move_slots(self, slots: Iterable[int], to: Node) -> None:
        """Move slots with their keys, one by one, while clients go on."""
        for slot in slots:
            if self.owner(slot) is not to:
                with self.moving(slot, to):
                    pass
        self.wait_until_settled()


class Sentinels(Deployment):
    """A master and a replica, watched by three Sentinels, two of which have to agree on a failover."""

    name = "mymaster"

    def __init__(self, *settings: str, down_after: int = 1000) -> None:
        """`down_after`, in ms, is when the master is seen as failed; `settings` are lines for both servers."""
        self.nodes, self.data, self.watchers = [], [], []
        with self._or_none():
            self._start_data(settings)
            self._start_watchers(down_after)
            wait_until(self.settled, "the Sentinels know the servers and each other")

    def _start_data(self, settings: tuple[str, ...]) -> None:
        master = self._add(self.data, *settings)
        self._add(self.data, *settings, f"replicaof {HOST} {master.port}")
        launch_together(self.data)

    def _start_watchers(self, down_after: int) -> None:
        master, replica = self.data
        watch = [
            f"sentinel monitor {self.name} {HOST} {master.port} 2",
            f"sentinel down-after-milliseconds {self.name} {down_after}",
            f"sentinel failover-timeout {self.name} 3000",
            f"sentinel known-replica {self.name} {HOST} {replica.port}",
        ]
        ids = {self._add(self.watchers, *watch, sentinel=True): f"{n:040x}" for n in range(1, 4)}
        for node in ids:
            # As after a restart: it would otherwise take them seconds to discover one another.
            with node.configuration.open("a") as file:
                file.write(f"sentinel myid {ids[node]}\n")
                for other in ids.keys() - {node}:
                    file.write(f"sentinel known-sentinel {self.name} {HOST} {other.port} {ids[other]}\n")
        launch_together(self.watchers)

    def _add(self, kind: list[Node], *settings: str, sentinel: bool = False) -> Node:
        node = Node(*settings, sentinel=sentinel)
        self.nodes.append(node)
        kind.append(node)
        return node

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        """Their addresses, as redis-py and django-redis want them."""
        return [(HOST, node.port) for node in self.watchers]

    @property
    def url(self) -> str:
        """The LOCATION for django-redis."""
        return f"redis://{self.name}/0"

    def _master_by(self, watcher: Node) -> Node:
        _, port = watcher.client().execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return next(node for node in self.data if node.port == int(port))

    def master(self) -> Node:
        """Return the master by the Sentinels' word, up or not."""
        return self._master_by(next(node for node in self.watchers if node.up))

    def replica(self) -> Node:
        return next(node for node in self.data if node is not self.master())

    def settled(self) -> bool:
        """Return whether the Sentinels name one master, which is up and replicated, and have a quorum."""
        try:
            named = {self._master_by(node) for node in self.watchers if node.up}
            if len(named) != 1 or not (master := named.pop()).up:
                return False
            roles = [node.replication() for node in self.data if node.up and node is not master]
            return (
                master.replication()["role"] == "master"
                and all(role.get("master_link_status") == "up" for role in roles)
                and all(self._is_ready(node) for node in self.watchers if node.up)
            )
        except (redis.RedisError, OSError):
            return False

    def _is_ready(self, watcher: Node) -> bool:
        with suppress(redis.ResponseError):  # NOQUORUM
            return watcher.ask("SENTINEL", "CKQUORUM", self.name).startswith("OK")
        return False

    def kill_master(self) -> Node:
        node = self.master()
        node.kill()
        return node

    def wait_for_failover(self, within: float = 30) -> float:
        """Wait until the replica has taken over from a failed master; return the seconds that it took."""
        return wait_until(self.settled, "the Sentinels have a master", within)
