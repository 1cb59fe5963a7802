"""Which server has a key.

A single server, the master that the Sentinels name, or a node of a cluster. redis-py's
own clients ask the Sentinels and the nodes, in a background thread: a request reads
what is known and never waits for a refresh, but for the very first one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisClusterException
from redis.sentinel import MasterNotFoundError, Sentinel

from ..runtime import log
from .connection import Address, ConnectionOptions
from .server import Server


class Topology:
    """Where the servers are.

    A single one, or, in a derived class, as others say.
    """

    clustered = False
    error = ""  # why no server is known

    def __init__(self, server: Server | None, timeout: float) -> None:
        self.master = server
        self.timeout = timeout

    def server_for(self, key: str) -> Server | None:  # noqa: ARG002
        """Return the server that has a key, or None while it is not known."""
        return self.master

    def servers(self) -> list[Server]:
        """Return every server that has keys."""
        return [] if self.master is None else [self.master]

    def close(self) -> None:
        """Close the connections that are not in use."""
        for server in self.servers():
            server.close()

    def group_by_slot(self, keys: Sequence[str]) -> list[Sequence[int]]:
        """Group the indexes of keys by hash slot. One call names keys of one slot."""
        return [range(len(keys))]

    def refresh_soon(self) -> None:
        """Have the topology refreshed in the background."""

    def wait_until_known(self) -> None:
        """Wait for the first refresh, within the timeout."""

    async def await_until_known(self) -> None:
        """As `wait_until_known`, without blocking the event loop."""


class DiscoveredTopology(Topology):
    """A topology that Sentinels or cluster nodes report."""

    no_server: str  # the error when the servers are known, and none is the key's

    def __init__(self, name: str, timeout: float) -> None:
        super().__init__(None, timeout)
        self.name = name
        self.error = f"{name}: no reply within {timeout:g} s"
        self._refreshed = threading.Event()  # once, with or without success
        self._refresher = Refresher(self._refresh)
        self._refresher.request()

    def discover(self) -> None:
        """Ask where the servers are."""
        raise NotImplementedError

    def close(self) -> None:
        self._refresher.stop()
        super().close()

    def refresh_soon(self) -> None:
        self._refresher.request()

    def wait_until_known(self) -> None:
        self._refreshed.wait(self.timeout)

    async def await_until_known(self) -> None:
        if not self._refreshed.is_set():
            await asyncio.to_thread(self.wait_until_known)

    def _refresh(self) -> None:
        try:
            self.discover()
            self.error = self.no_server
        except Exception as error:  # noqa: BLE001  (whatever redis-py makes of a reply)
            self.error = f"{self.name}: {error}"
            if not self._refresher.is_stopped:
                log.error("%s unavailable: %s", self.name, log.escaped(str(error)))
        self._refreshed.set()


class SentinelTopology(DiscoveredTopology):
    """The master of a service that Sentinels monitor."""

    no_server = "The Sentinels name no master."

    def __init__(
        self,
        service: str,
        sentinel: Sentinel,
        master: ConnectionOptions,
        timeout: float,
    ) -> None:
        self._service = service
        self._sentinel = sentinel
        self._master_options = master
        super().__init__(f"Sentinel service {service!r}", timeout)

    def discover(self) -> None:
        try:
            discover: Any = self._sentinel.discover_master
            host, port = discover(self._service)
        except MasterNotFoundError as error:
            raise MasterNotFoundError(self._shortened(str(error))) from error

        address = str(host), int(port)
        if self.master is None or self.master.address != address:
            self.master = Server(self._master_options.at(address), self.timeout)

    def _shortened(self, text: str) -> str:
        """Return an error with addresses where redis-py shows clients in full."""
        for client in self._sentinel.sentinels:
            options = client.connection_pool.connection_kwargs
            text = text.replace(str(client), f"{options['host']}:{options['port']}")
        return text


class ClusterTopology(DiscoveredTopology):
    """The nodes of a Redis Cluster, each with a share of the hash slots."""

    clustered = True
    no_server = "No node of the cluster has the key's slot."

    def __init__(
        self, nodes: ConnectionOptions, seeds: Sequence[Address], timeout: float
    ) -> None:
        self._node_options = nodes
        self._seeds = seeds
        self._known: list[Address] = []  # every node, also replicas
        self._servers: dict[Address, Server] = {}
        self._primaries: list[Server] = []
        self._slots: dict[int, Server] = {}
        super().__init__("Redis Cluster", timeout)

    def discover(self) -> None:
        manager = self._read_slots()
        slots = {
            slot: self.server_at((nodes[0].host, nodes[0].port))
            for slot, nodes in manager.slots_cache.items()
        }
        primaries = sorted(set(slots.values()), key=lambda server: server.address)

        self._known = [(node.host, node.port) for node in manager.nodes_cache.values()]
        self._servers = {server.address: server for server in primaries}
        self._slots = slots
        self._primaries = primaries

    def _read_slots(self) -> NodesManager:
        """Ask the known nodes, and the seeds in case all nodes are gone.

        Not by RedisCluster(), which sends COMMAND to the first primary and fails when
        that one is down. By a new manager each time: when there is an error, the known
        slots stay.
        """
        options = {**self._node_options.options}
        if options.get("db"):
            message = f"a cluster has database 0 only, not {options['db']}"
            raise RedisClusterException(message)

        options.pop("host", None)
        options.pop("port", None)
        addresses = dict.fromkeys((*self._known, *self._seeds))
        node: Any = ClusterNode
        try:
            manager = NodesManager(
                [node(*address) for address in addresses],
                from_url=True,  # takes every option of a connection
                connection_class=self._node_options.connection_class,
                socket_timeout=self.timeout,
                socket_connect_timeout=self.timeout,
                **options,
            )
        except IndexError as error:  # redis-py wants the first of them
            raise RedisClusterException("no node has slots") from error
        manager.close()
        return manager

    def server_for(self, key: str) -> Server | None:
        return self._slots.get(key_slot(key.encode()))

    def servers(self) -> list[Server]:
        return self._primaries

    def group_by_slot(self, keys: Sequence[str]) -> list[Sequence[int]]:
        slots: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            slots.setdefault(key_slot(key.encode()), []).append(index)
        return [*slots.values()]

    def server_at(self, address: Address) -> Server:
        """Return the node at an address."""
        server = self._servers.get(address)
        if server is None:
            server = Server(self._node_options.at(address), self.timeout)
        return self._servers.setdefault(address, server)

    def redirect(self, error: AskError, server: Server) -> Server:
        """Return the node that MOVED or ASK names.

        An empty host is the host of the server that said so.
        """
        target = self.server_at((error.host or server.address[0], error.port))
        if isinstance(error, MovedError):
            self._slots[error.slot_id] = target
            self.refresh_soon()  # rarely one slot alone moves
        return target


class Refresher:
    """Runs a function in a background thread, one at a time, when it is requested."""

    INTERVAL = 0.5  # seconds between two runs, so that a node that is away costs little

    def __init__(self, refresh: Callable[[], object]) -> None:
        self._refresh = refresh
        self._lock = threading.Lock()
        self._requested = False
        self._running = False
        self._next_run = 0.0
        self.is_stopped = False  # as other settings have replaced the topology

    def stop(self) -> None:
        """Run no more, apart from a run in progress."""
        self.is_stopped = True
        self._requested = False

    def request(self) -> None:
        with self._lock:
            if self.is_stopped:
                return
            self._requested = True
            if self._running:
                return
            self._running = True

        thread = threading.Thread(
            target=self._run, name="rlaas_django topology", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads now; the next request tries again
            self._running = False

    def _run(self) -> None:
        while self._is_due():
            self._refresh()
            self._next_run = time.monotonic() + self.INTERVAL

    def _is_due(self) -> bool:
        """Wait until the next run may begin.

        Return whether one was requested.
        """
        time.sleep(max(0.0, self._next_run - time.monotonic()))
        with self._lock:
            self._running = self._requested
            self._requested = False
            return self._running
