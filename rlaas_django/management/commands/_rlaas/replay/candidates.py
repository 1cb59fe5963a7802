"""The policies that are replayed, each under one algorithm or several, and what is counted about them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..... import backend, conf
from .....backend.commands import Call
from .....core.clock import frozen_clock
from .....core.keys import decode, identify, key_kind
from .....core.policy import FIXED_WINDOW, Policy
from .....limiter.compiled import ALLOWED, RETRY_AFTER, UNIQUE_LENGTH, Check, CompiledPolicySet
from .log_lines import Request
from .timeline import Timeline
from .usage import MEASURE, Demand, Histogram, Window

LEAST_TTL = 15 * 60_000  # ms; what is left behind by a process that was killed is gone after this time
MAX_CLIENTS = 100_000  # per policy; of more, those that were idle the longest are summed up and forgotten
WORST = 10  # identities that are listed


class Client:
    """One identity under one policy."""

    __slots__ = ("admitted", "demand", "last", "name", "number", "refused")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.last = name, number, 0
        self.demand = Demand()
        self.refused: dict[int, int] = {}  # by the run's number
        self.admitted: dict[int, Window] = {}  # by the run's number; before the first refusal, all were admitted


class Run:
    """One policy under one algorithm."""

    def __init__(self, number: int, policy: Policy, topology: backend.Topology) -> None:
        self.number, self.policy, self.measure = number, policy, MEASURE[policy.algo or conf.config().algo]
        self.refused = self.refused_identities = self.longest_wait = self.most_admitted = 0
        self.worst: list[tuple[int, str]] = []  # a heap
        self.set = CompiledPolicySet((policy,), conf.config(), topology, least_ttl=LEAST_TTL)
        self._templates: dict[int, tuple[list[str], str, str]] = {}

    def call(self, identity: str, now: str, unique: str) -> Call:
        """Return the check of an identity at a time: a filled template takes a tenth of the time of packing."""
        before, middle, after = self._templates.get(len(now)) or self._make_template(len(now))
        packed = f"{identity.join(before)}{now}{middle}{unique}{after}".encode("ascii")
        return Call(self.set.script, self.set.keys((identity,))[0] if self.set.topology.clustered else "", packed)

    def _make_template(self, length: int) -> tuple[list[str], str, str]:
        identity, unique, now = "\0" * len(identity_of(0)), "\1" * UNIQUE_LENGTH, "1" * length
        with frozen_clock(int(now)):
            call = Check(self.set, (identity,), 1, charge=True, unique=unique).pack()
        before, after = call.packed.decode().split(unique)
        before, _, middle = before.rpartition(now)
        self._templates[length] = template = before.split(identity), middle, after
        return template

    def add_admitted(self, client: Client, now: int, length: int) -> None:
        """Count a request that was admitted."""
        window = client.admitted.get(self.number)
        number = len(client.demand.window) if window is None else window.add(now, length)
        if number > self.most_admitted:
            self.most_admitted = number

    def add_refused(self, client: Client, wait: int) -> None:
        """Count a request that was refused; a wait of -1 has no end."""
        if self.number not in client.admitted:
            client.admitted[self.number] = client.demand.window.without_last()
        client.refused[self.number] = client.refused.get(self.number, 0) + 1
        self.refused += 1
        self.longest_wait = max(self.longest_wait, wait)

    def add_client(self, client: Client) -> None:
        """Count a client of which no more is known."""
        if refused := client.refused.get(self.number):
            self.refused_identities += 1
            heapq.heappush(self.worst, (refused, client.name))
            if len(self.worst) > WORST:
                heapq.heappop(self.worst)

    def key(self, client: Client, index: int) -> str:
        """Return the key of a client's state, for the fixed window in the window of this index."""
        key = self.set.keys((identity_of(client.number),))[0]
        return f"{key}:{index}" if self.policy.algo == FIXED_WINDOW else key


def identity_of(number: int) -> str:
    """Return what stands for a client in Redis: no text of the log, and no identity that an override may apply to."""
    return f"replay={number:010}"


class Candidate:
    """One policy that is replayed, under one algorithm or several."""

    def __init__(self, text: str, policy: Policy, runs: Sequence[Run]) -> None:
        self.text, self.policy, self.runs = text, policy, runs
        self.requests = self.without_identity = self.identities = 0
        self.demand = tuple(Histogram() for _ in range(3))  # of requests, by measure
        self.peaks = tuple(Histogram() for _ in range(3))  # of identities, by measure
        self.approximate = False  # whether clients were forgotten that might have come again
        self.old_windows: list[tuple[Run, Client, int]] = []  # of the fixed window, whose keys are to be deleted
        self._value = _value_function(policy)
        self._by_name: dict[str, Client] = {}
        self.clients: dict[str, Client] = {}  # by encoded identity
        self._numbers = itertools.count()
        self._length = policy.window * 1000

    @property
    def certain_limit(self) -> int:
        """The demand up to which no request is refused: of a token bucket, the lower of its limit and its burst."""
        return min(self.policy.fixed_rate.limit, self.policy.capacity)

    def client(self, request: Request) -> Client | None:
        """Return the client of a request; None if the log does not tell it."""
        value = self._value(request)
        name = f"={value}" if value else request.ip  # without a value, the address counts
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
            known["user" if self.policy.key == "user_or_ip" else self.policy.key] = value
        identity = identify(known, self.policy, conf.config().encoding)
        client = self.clients.get(identity)
        if client is None:
            client = self.clients[identity] = Client(decode(identity)[1] or identity, next(self._numbers))
        if len(self._by_name) > 2 * MAX_CLIENTS:
            self._by_name.clear()
        self._by_name[name] = client
        return client

    def read(self, entries: Sequence[tuple[Client, int]], replies: Iterator[Any], timeline: Timeline) -> None:
        """Count what the scripts replied to some requests."""
        fixed = [run for run in self.runs if run.policy.algo == FIXED_WINDOW]
        for client, now in entries:
            before = client.demand.index
            demand = client.demand.add(now, self._length)
            if before != client.demand.index and before:
                self.old_windows += ((run, client, before) for run in fixed)
            for histogram, number in zip(self.demand, demand, strict=True):
                histogram.add(number)
            for run in self.runs:
                reply = next(replies)
                if isinstance(reply, Exception):
                    raise reply
                if reply[ALLOWED] == 1:
                    run.add_admitted(client, now, self._length)
                else:
                    run.add_refused(client, reply[RETRY_AFTER])
                    timeline.add(now, run.number + 1)

    def add_within_limit(self, requests: int) -> None:
        """Count requests that are only known to be within the limit."""
        if requests > 0:
            self.requests += requests
            for histogram in self.demand:
                histogram.add(self.certain_limit, requests)

    def idle_clients(self) -> dict[str, Client]:
        """Return the clients to forget: those without any state, or the tenth that was idle the longest."""
        policy, now = self.policy, max(client.last for client in self.clients.values())
        full = max(2, -(-policy.capacity // policy.fixed_rate.limit))  # windows, until a bucket is full again, too
        idle = {name: each for name, each in self.clients.items() if each.last < now - full * self._length}
        if len(idle) < len(self.clients) // 10:
            longest = heapq.nsmallest(len(self.clients) // 10, self.clients, key=lambda name: self.clients[name].last)
            idle = {name: self.clients[name] for name in longest}
        return idle

    def forget(self, clients: dict[str, Client]) -> None:
        """Sum up clients, and count them as others when they come again."""
        self.sum_up(clients.values())
        for identity in clients:
            del self.clients[identity]
        self._by_name.clear()
        self.approximate = True

    def sum_up(self, clients: Iterable[Client]) -> None:
        """Count clients of which no more is known."""
        for client in clients:
            self.identities += 1
            for histogram, peak in zip(self.peaks, client.demand.peaks, strict=True):
                histogram.add(peak)
            for run in self.runs:
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
        "get": lambda request: parse_qs(urlsplit(request.path).query).get(parameter, [""])[0],
    }
    return functions.get(kind) or (lambda request: request.more.get(key, ""))
