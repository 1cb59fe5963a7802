"""Have the limiter decide the requests of a log, at the times they were made.

The counters are those of policies with names of their own, and their identities are
numbers: no text of the log reaches Redis, and no override applies to them.
"""

from __future__ import annotations

import itertools
import math
import secrets
import signal
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .. import backend, conf, limiter
from ..core.decision import Decision
from ..core.keys import COUNTER_PREFIX, EncodedIdentity, decode, identify
from ..core.policy import Policy
from ..runtime.clock import Clock, frozen_clock
from .demand import Demand, add_to_window
from .log_lines import Request

TIMEOUT = 30.0  # seconds; nobody waits for a replayed request
MAX_CLIENTS = 100_000  # per policy; of more, those idle the longest are summed up
WORST = 10  # identities that are listed


@dataclass
class Run:
    """One policy under one algorithm, and what it refused."""

    policy: Policy
    refused: int = 0
    refused_identities: int = 0
    longest_wait: float = 0.0  # seconds
    most_admitted: int = 0  # in a window, of one identity
    worst: list[tuple[int, str]] = field(default_factory=list)  # sorted


@dataclass(slots=True, eq=False)
class Client:
    """One identity under one policy."""

    name: str
    identity: EncodedIdentity
    admitted: list[array[int]]  # times, per run
    refused: list[int]  # requests, per run
    demand: Demand = field(default_factory=Demand)
    last: int = 0  # ms


class Candidate:
    """One policy that is replayed, under one algorithm or several."""

    def __init__(
        self, name: str, text: str, policy: Policy, algorithms: Iterable[str]
    ) -> None:
        self.text = text
        self.policy = policy
        # Shadow policies are decided together, but each as if it were alone.
        self.policies = [
            replace(policy, name=f"{name}.{algorithm}", algo=algorithm, shadow=True)
            for algorithm in algorithms
        ]
        self.runs = [Run(policy) for policy in self.policies]

        self.requests = 0
        self.without_identity = 0
        self.identities = 0
        self.approximate = False  # whether clients were forgotten

        # How many requests have which demand, and identities which peak, by measure.
        self.demand = [Counter[int]() for _ in range(3)]
        self.peaks = [Counter[int]() for _ in range(3)]

        self.clients: OrderedDict[str, Client] = OrderedDict()  # idle ones first
        self._numbers = itertools.count()
        self._length = policy.window * 1000

    def client(self, request: Request) -> Client | None:
        """Return the client of a request; None where the log does not tell it."""
        try:
            identity = self._identify(request)
        except ValueError:
            self.without_identity += 1
            return None

        client = self.clients.get(identity)
        if client is None:
            client = Client(
                name=decode(identity)[1] or identity,
                identity=EncodedIdentity(f"replay={next(self._numbers)}"),
                admitted=[array("q") for _ in self.runs],
                refused=[0] * len(self.runs),
            )
            self.clients[identity] = client

        self.clients.move_to_end(identity)
        client.last = request.at
        self.requests += 1
        return client

    def _identify(self, request: Request) -> str:
        """Return the encoded identity; ValueError where the log does not tell it."""
        names: dict[Any, str] = {"ip": request.ip, "user": request.user, **request.more}

        kind, _, parameter = str(self.policy.key).partition(":")
        if kind == "get":
            query = parse_qs(urlsplit(request.path).query)
            names[kind] = query.get(parameter, [""])[0]

        return identify(names, self.policy, conf.config().encoding)

    def count(self, client: Client, now: int, decision: Decision) -> None:
        """Count a request, as it was decided under each algorithm."""
        demand = client.demand.add(now, self._length)
        for counter, number in zip(self.demand, demand, strict=True):
            counter[number] += 1

        for index, run in enumerate(self.runs):
            outcome = decision.outcomes[index]
            if outcome.allowed:
                admitted = add_to_window(client.admitted[index], now, self._length)
                run.most_admitted = max(run.most_admitted, admitted)
            else:
                client.refused[index] += 1
                run.refused += 1
                run.longest_wait = max(run.longest_wait, outcome.retry_after)

    def pop_idle(self) -> Client:
        """Sum up the client that was idle the longest, forget it, and return it."""
        _, client = self.clients.popitem(last=False)
        self.identities += 1
        for counter, peak in zip(self.peaks, client.demand.peaks, strict=True):
            counter[peak] += 1

        for run, refused in zip(self.runs, client.refused, strict=True):
            if refused:
                run.refused_identities += 1
                run.worst = sorted([*run.worst, (refused, client.name)])[-WORST:]
        return client


class Replay:
    """Candidates side by side on one log."""

    def __init__(
        self,
        policies: Sequence[tuple[str, Policy]],
        algorithms: Sequence[str],
        cache: str,
    ) -> None:
        self.first: int | None = None  # ms; the time of the first request
        self.last: int | None = None
        self.too_slow = False  # whether counters may have expired too early

        self._cache = cache
        self._clock = Clock(0)

        self._name = f"replay-{secrets.token_hex(4)}"
        self.candidates: list[Candidate] = []
        for number, (text, policy) in enumerate(policies):
            name = f"{self._name}.{number}"
            chosen = [policy.algo] if policy.algo else algorithms
            self.candidates.append(Candidate(name, text, policy, chosen))

        self._shortest = min(policy.window for _, policy in policies)  # seconds
        self._part_at = 0  # ms; where the present part of the log begins
        self._part_started = math.inf

    def run(
        self, batches: Iterable[list[Request]], progress: Callable[[], None]
    ) -> None:
        """Replay requests, sorted by time, and delete the keys that this takes."""
        settings = conf.replaced(cache=self._cache, timeout=TIMEOUT, enabled=True)
        with settings, frozen_clock(0) as self._clock:
            try:
                for batch in batches:
                    for now, requests in itertools.groupby(batch, attrgetter("at")):
                        self._decide(now, requests)
                    self._forget_idle()
                    progress()
                self._compare_clocks(self._part_at)
            finally:
                self._delete_keys()

        for candidate in self.candidates:
            while candidate.clients:
                candidate.pop_idle()

    def _decide(self, now: int, requests: Iterable[Request]) -> None:
        """Have the limiter decide the requests of one time, in one round trip."""
        self._compare_clocks(now)
        self._clock.ms = now
        self.first = self.first or now
        self.last = now

        charges = []
        checks = []
        for request, candidate in itertools.product(requests, self.candidates):
            client = candidate.client(request)
            if client is not None:
                charges.append((candidate, client))
                checks.append(limiter.plan(client.identity, candidate.policies, 1))

        with uninterrupted():
            decisions = limiter.check_each(checks)

        for (candidate, client), decision in zip(charges, decisions, strict=True):
            if decision.degraded:
                raise backend.UnavailableError("it did not decide a replayed request.")
            candidate.count(client, now, decision)

    def _compare_clocks(self, now: int) -> None:
        """Note where a window of the log takes half a window or more of real time.

        Counters expire by the server's clock, at the earliest a window after the first
        charge. So those of a slower replay might be gone while the log needs them.
        """
        real = time.monotonic()
        if real - self._part_started > self._shortest / 2:
            self.too_slow = True

        if now - self._part_at >= 1000 * self._shortest:
            self._part_at = now
            self._part_started = real

    def _forget_idle(self) -> None:
        """Bound the memory, here and in Redis, by forgetting idle clients."""
        for candidate in self.candidates:
            while len(candidate.clients) > MAX_CLIENTS:
                candidate.approximate = True
                client = candidate.pop_idle()

                self._clock.ms = client.last
                with uninterrupted():
                    limiter.reset(client.identity, candidate.policies)

    def _delete_keys(self) -> None:
        """Delete the counters, unless Redis is unavailable; then they expire."""
        with uninterrupted(), suppress(backend.UnavailableError):
            for keys in backend.scan(f"{COUNTER_PREFIX}{self._name}.*"):
                backend.run_commands([("UNLINK", key) for key in keys])


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have Ctrl-C wait for the end of the block.

    A call that is broken off might still run on the server, and write keys after
    they were deleted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupts: list[tuple[Any, ...]] = []
    handler = signal.signal(
        signal.SIGINT, lambda *arguments: interrupts.append(arguments)
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)

    if interrupts and callable(handler):
        handler(*interrupts[0])
