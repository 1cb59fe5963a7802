"""The policies that are replayed, each under one algorithm or several, and what is counted about them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .. import backend, conf
from ..backend.commands import Call
from ..core.algorithms import FIXED_WINDOW
from ..core.keys import decode, identify, key_kind
from ..core.policy import Policy
from ..limiter import PolicySet
from ..limiter.plan import UNIQUE_BYTES, pack_command, plan_encoded
from ..limiter.replies import ALLOWED, RETRY_AFTER, ROW
from ..runtime.clock import frozen_clock
from .log_lines import Request
from .timeline import Timeline
from .usage import MEASURE, SLIDING, Demand, Histogram, Window

LEAST_TTL = (
    15 * 60_000
)  # ms; what is left behind by a process that was killed is gone after this time
MAX_CLIENTS = 100_000  # per policy; of more, those that were idle the longest are summed up and forgotten
WORST = 10  # identities that are listed


class Client:
    """One identity under one policy."""

    __slots__ = ("demand", "identity", "last", "name")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.last = name, 0
        self.identity = identity_of(number)
        self.demand = Demand()


class Run:
    """One policy under one algorithm."""

    def __init__(self, number: int, policy: Policy) -> None:
        self.number, self.policy, self.measure = (
            number,
            policy,
            MEASURE[policy.algo or conf.config().algo],
        )
        self.refused = self.refused_identities = self.longest_wait = (
            self.most_admitted
        ) = 0
        self.worst: list[tuple[int, str]] = []  # a heap
        # Of clients that were refused: how often, and the requests that were admitted. Of others, all were.
        self._refused: dict[Client, int] = {}
        self._admitted: dict[Client, Window] = {}

    def add_admitted(self, client: Client, now: int, length: int, demand: int) -> None:
        """Count a request that was admitted, the last one of so many in its window."""
        window = self._admitted.get(client)
        number = demand if window is None else window.add(now, length)
        if number > self.most_admitted:
            self.most_admitted = number

    def add_refused(self, client: Client, wait: int) -> None:
        """Count a request that was refused; a wait of -1 has no end."""
        if client not in self._admitted:
            self._admitted[client] = client.demand.window.without_last()
        self._refused[client] = self._refused.get(client, 0) + 1
        self.refused += 1
        self.longest_wait = max(self.longest_wait, wait)

    def add_client(self, client: Client) -> None:
        """Count a client of which no more is known."""
        self._admitted.pop(client, None)
        if refused := self._refused.pop(client, 0):
            self.refused_identities += 1
            heapq.heappush(self.worst, (refused, client.name))
            if len(self.worst) > WORST:
                heapq.heappop(self.worst)


def identity_of(number: int) -> str:
    """Return what stands for a client in Redis: no text of the log, and no identity that an override may apply to."""
    return f"replay={number:010}"


class Candidate:
    """One policy that is replayed, under one algorithm or several."""

    def __init__(
        self, text: str, policy: Policy, runs: Sequence[Run], topology: backend.Topology
    ) -> None:
        self.text, self.policy, self.runs = text, policy, runs
        # One call of the script decides all runs, each as if it were alone: shadow policies do not refuse for others.
        policies = tuple(replace(run.policy, shadow=True) for run in runs)
        self._set = PolicySet(policies, conf.config(), topology)
        self._templates: dict[
            int, tuple[list[str], str, str]
        ] = {}  # by the length of the time
        self._fixed = [
            i for i, run in enumerate(runs) if run.policy.algo == FIXED_WINDOW
        ]
        self.requests = self.without_identity = self.identities = 0
        self.demand = tuple(Histogram() for _ in range(3))  # of requests, by measure
        self.peaks = tuple(Histogram() for _ in range(3))  # of identities, by measure
        self.approximate = (
            False  # whether clients were forgotten that might have come again
        )
        self.old_keys: list[
            str
        ] = []  # of the fixed window's past windows, to be deleted
        self._value = _value_function(policy)
        self._by_name: dict[str, Client] = {}
        self.clients: dict[str, Client] = {}  # by encoded identity
        self._numbers = itertools.count()
        self.length = policy.window * 1000

    @property
    def certain_limit(self) -> int:
        """The demand up to which no request is refused: of a token bucket, the lower of its limit and its burst."""
        return min(self.policy.fixed_rate.limit, self.policy.capacity)

    def client(self, request: Request) -> Client | None:
        """Return the client of a request; None if the log does not tell it."""
        value = self._value(request)
        name = (
            f"={value}" if value else request.ip
        )  # without a value, the address counts
        client = self._by_name.get(name) or self._new_name(name, value, request.ip)
        if client is None:
            self.without_identity += 1
        else:
            client.last = request.at
            self.requests += 1
        return client

    def _new_name(self, name: str, value: str, ip: str) -> Client | None:
        """Return the client of a name: a new one, or a known one under another name, as IPv6 addresses have many."""
        if not name:
            return None
        known: dict[Any, Any] = {"ip": ip}
        if value:
            known["user" if self.policy.key == "user_or_ip" else self.policy.key] = (
                value
            )
        identity = identify(known, self.policy, conf.config().encoding)
        client = self.clients.get(identity)
        if client is None:
            client = self.clients[identity] = Client(
                decode(identity)[1] or identity, next(self._numbers)
            )
        if len(self._by_name) > 2 * MAX_CLIENTS:
            self._by_name.clear()
        self._by_name[name] = client
        return client

    def call(self, client: Client, now: int, unique: int) -> Call:
        """Return the check of a client at a time: a filled template takes a tenth of the time of packing."""
        at, identity = str(now), client.identity
        before, middle, after = self._templates.get(len(at)) or self._make_template(
            len(at)
        )
        packed = f"{identity.join(before)}{at}{middle}{unique}{after}".encode("ascii")
        key = (
            self._set.keys((identity,) * len(self.runs))[0]
            if self._set.topology.clustered
            else ""
        )
        return Call(self._set.script, key, packed)

    def _make_template(self, length: int) -> tuple[list[str], str, str]:
        identity, unique, now = (
            "\0" * len(identity_of(0)),
            "\1" * 2 * UNIQUE_BYTES,
            "1" * length,
        )
        with frozen_clock(int(now)):
            check = plan_encoded(self._set, (identity,) * len(self.runs), 1)
            check.unique = unique
            packed = pack_command(check)
        before, after = packed.decode().split(unique)
        before, _, middle = before.rpartition(now)
        self._templates[length] = template = before.split(identity), middle, after
        return template

    def keys(self, client: Client, index: int) -> list[str]:
        """Return the keys of a client's state, for the fixed window in the window of this index."""
        keys = self._set.keys((client.identity,) * len(self.runs))
        for i in self._fixed:
            keys[i] += f":{index}"
        return keys

    def read(
        self,
        entries: Sequence[tuple[Client, int]],
        replies: Iterable[Any],
        timeline: Timeline,
    ) -> None:
        """Count what the scripts replied to some requests."""
        length, demands = self.length, []
        rows = [
            (run, ROW * i + ALLOWED, ROW * i + RETRY_AFTER)
            for i, run in enumerate(self.runs)
        ]
        for (client, now), reply in zip(entries, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            demand = client.demand
            if self._fixed and now // length > demand.index > 0:
                # Before the client forgets this window: an interrupt may come between any two lines.
                keys = self.keys(client, demand.index)
                self.old_keys += [keys[i] for i in self._fixed]
            demands.append(demand.add(now, length))
            for run, allowed, retry_after in rows:
                if reply[allowed] == 1:
                    run.add_admitted(client, now, length, demands[-1][SLIDING])
                else:
                    run.add_refused(client, reply[retry_after])
                    timeline.add(now, run.number + 1)
        for histogram, numbers in zip(
            self.demand, zip(*demands, strict=True), strict=False
        ):  # there may be none
            histogram.add_all(numbers)

    def add_within_limit(self, requests: int) -> None:
        """Count requests that are only known to be within the limit."""
        if requests > 0:
            self.requests += requests
            for histogram in self.demand:
                histogram.add(self.certain_limit, requests)

    def idle_clients(self) -> dict[str, Client]:
        """Return the clients to forget: those without any state, or the tenth that was idle the longest."""
        policy, now = self.policy, max(client.last for client in self.clients.values())
        full = max(
            2, -(-policy.capacity // policy.fixed_rate.limit)
        )  # windows, until a bucket is full again, too
        idle = {
            name: each
            for name, each in self.clients.items()
            if each.last < now - full * self.length
        }
        if len(idle) < len(self.clients) // 10:
            longest = heapq.nsmallest(
                len(self.clients) // 10,
                self.clients,
                key=lambda name: self.clients[name].last,
            )
            idle = {name: self.clients[name] for name in longest}
        return idle

    def forget(self, clients: dict[str, Client]) -> None:
        """Sum up clients, and count them as others when they come again."""
        self.sum_up(clients.values())
        for identity in clients:
            del self.clients[identity]
        left = set(self.clients.values())
        self._by_name = {
            name: client for name, client in self._by_name.items() if client in left
        }
        self.approximate = True

    def sum_up(self, clients: Collection[Client]) -> None:
        """Count clients of which no more is known."""
        self.identities += len(clients)
        peaks = zip(*[client.demand.peaks for client in clients], strict=True)
        for histogram, numbers in zip(
            self.peaks, peaks, strict=False
        ):  # there may be no client
            histogram.add_all(numbers)
        for run in self.runs:
            for client in clients:
                run.add_client(client)


def _value_function(policy: Policy) -> Callable[[Request], str]:
    """Return the function that takes from a request what a policy counts by; '' where the address counts."""
    key, kind = str(policy.key), key_kind(policy.key)
    parameter = key.partition(":")[2]
    functions: dict[str, Callable[[Request], str]] = {
        "ip": lambda _: "",
        "user": lambda request: request.user,
        "user_or_ip": lambda request: request.user,
        "global": lambda _: "global",
        "get": lambda request: parse_qs(urlsplit(request.path).query).get(
            parameter, [""]
        )[0],
    }
    return functions.get(kind) or (lambda request: request.more.get(key, ""))
