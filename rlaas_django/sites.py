"""Where Redis is: in one place, where the Sentinels say, or on the nodes of a cluster.

Finding out is a dialogue without I/O of its own: it yields a server and what to send it, and is sent the reply.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from redis import RedisError
from redis import TimeoutError as RedisTimeoutError
from redis.crc import key_slot

from .server import Server, UnavailableError
from .wire import Batch, pack

Address = tuple[str, int]
Dialogue = Generator[tuple[Server | None, Any], Any, Any]
MakeServer = Callable[[Address], Server]

CLUSTER_SLOTS = pack(("CLUSTER", "SLOTS"))
BETWEEN_LOOKS = 1.0  # seconds: a cluster that is being rearranged is not asked with every redirection


class Site:
    """One server."""

    clustered = False

    def __init__(self, server: Server | None = None) -> None:
        self.master = server

    def server(self, key: str) -> Server | None:  # noqa: ARG002
        """Who has a key; None while nobody knows."""
        return self.master

    def servers(self) -> list[Server]:
        """All that have keys."""
        return [] if self.master is None else [self.master]

    def parts(self, keys: Sequence[str]) -> list[Sequence[int]]:
        """Which of these keys, by number, one call can be about."""
        return [range(len(keys))]

    def find(self) -> Dialogue:
        """Find out where the servers are now."""
        yield from ()


class Sentinel(Site):
    """The master of a service that Sentinels watch."""

    def __init__(self, service: str, sentinels: Iterable[Server], make: MakeServer) -> None:
        super().__init__()
        self.question = pack(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service))
        self.service, self.sentinels, self.make = service, list(sentinels), make

    def find(self) -> Dialogue:
        address, told_by = yield from _ask_each(self.sentinels, self.question)
        if not address:
            unknown = UnavailableError(f"No Sentinel knows a master {self.service!r}.")
            told_by.breaker.complain(unknown)
            raise unknown
        try:
            host, port = _text(address[0]), int(address[1])
        except (TypeError, ValueError, IndexError) as error:
            raise told_by.nonsense(address) from error
        if self.master is None or self.master.address != (host, port):
            self.master = self.make((host, port))


class Cluster(Site):
    """Nodes that have a share of the slots each."""

    clustered = True

    def __init__(self, seeds: Iterable[Server], make: MakeServer) -> None:
        super().__init__()
        self.seeds, self.make = list(seeds), make
        self.known: dict[Address, Server] = {server.address: server for server in self.seeds}
        # Where ranges of slots start, in order; and their last slots, with who has them. Replaced in one go.
        self.map: tuple[list[int], list[tuple[int, Server]]] = [], []
        self.moves: dict[int, Server] = {}  # slots that were met elsewhere since
        self.next_look = 0.0

    def server(self, key: str) -> Server | None:
        slot = key_slot(key.encode())
        if (moved := self.moves.get(slot)) is not None:
            return moved
        starts, ranges = self.map
        at = bisect_right(starts, slot) - 1
        return ranges[at][1] if at >= 0 and slot <= ranges[at][0] else None

    def servers(self) -> list[Server]:
        found = {server.address: server for _, server in self.map[1]}
        return [found[address] for address in sorted(found)]

    def parts(self, keys: Sequence[str]) -> list[Sequence[int]]:
        slots: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            slots.setdefault(key_slot(key.encode()), []).append(i)
        return [*slots.values()]

    def at(self, host: str, port: int, told_by: Server) -> Server:
        """The node at an address; a node that does not know its own is where it was asked."""
        address = host or told_by.address[0], port
        known = self.known
        found = known.get(address)
        return known.setdefault(address, self.make(address)) if found is None else found

    def moved(self, slot: int, server: Server) -> Dialogue:
        """A node said that another has the slot. Rarely one slot alone moves, so the others are asked for as well."""
        self.moves[slot] = server
        if time.monotonic() >= self.next_look:
            try:
                yield from self.find(server)
            except UnavailableError:
                return

    def find(self, *first: Server) -> Dialogue:
        self.next_look = time.monotonic() + BETWEEN_LOOKS
        up = [server for server in list(self.known.values()) if server.breaker.error is None and server not in first]
        random.shuffle(up)
        down = [server for server in list(self.known.values()) if server.breaker.error is not None]
        reply, told_by = yield from _ask_each([*first, *up, *down], CLUSTER_SLOTS)
        ranges = {}
        try:
            for start, end, (host, port, *_), *_replicas in reply:
                ranges[int(start)] = int(end), self.at(_text(host), int(port), told_by)
        except (TypeError, ValueError) as error:
            raise told_by.nonsense(reply) from error
        if not ranges:
            raise told_by.nonsense(reply)  # a node that was taken out of the cluster
        starts = sorted(ranges)
        self.map = starts, [ranges[start] for start in starts]
        self.moves = {}
        wanted = {server.address: server for server in (*self.seeds, *self.servers())}
        self.known = wanted


def _ask_each(servers: list[Server], batch: Batch) -> Dialogue:
    """The first answer, and whose it is. Who does not answer in time uses up the time of all."""
    error: Exception | None = None
    for server in servers:
        if not server.breaker.admits():
            error = error or UnavailableError(server.breaker.error)
            continue
        try:
            return (yield server, batch), server
        except RedisTimeoutError as timeout:
            error = timeout
            break
        except RedisError as failure:
            server.breaker.complain(failure)
            error = failure
    raise UnavailableError(str(error)) from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
