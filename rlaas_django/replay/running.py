"""Have the limiter decide the requests of a log, at the times they were made.

The counters are those of policies with names of their own, and their identities are
numbers: no text of the log reaches Redis, and no override applies to them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import secrets
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .. import backend, conf, limiter
from ..core.decision import Decision
from ..core.keys import COUNTER_PREFIX, EncodedIdentity, decode, identify
from ..core.policy import Policy
from ..runtime.clock import Clock, frozen_clock
from .demand import MEASURE, Demand, Histogram, Window
from .log_lines import Request

TIMEOUT = 30.0  # seconds; nobody waits for a replayed request
MAX_CLIENTS = 100_000  # per policy; of more, those idle the longest are summed up
WORST = 10  # identities that are listed


class Run:
    """One policy under one algorithm, and what it refused."""

    def __init__(self, policy: Policy, algorithm: str) -> None:
        # Shadow policies in one check decide each as if it were alone.
        self.policy = replace(policy, algo=algorithm, shadow=True)
        self.measure = MEASURE[algorithm]
        self.refused = 0
        self.refused_identities = 0
        self.longest_wait = 0.0  # seconds
        self.most_admitted = 0
        self.worst: list[tuple[int, str]] = []  # a heap

    def sum_up(self, name: str, refused: int) -> None:
        """Count an identity that was refused so often."""
        self.refused_identities += 1
        heapq.heappush(self.worst, (refused, name))
        if len(self.worst) > WORST:
            heapq.heappop(self.worst)


class Client:
    """One identity under one policy, with its figures per run."""

    __slots__ = ("admitted", "demand", "identity", "last", "name", "refused")

    def __init__(self, name: str, number: int, runs: int) -> None:
        self.name = name
        self.identity = EncodedIdentity(f"replay={number}")
        self.last = 0
        self.demand = Demand()
        self.admitted = [Window() for _ in range(runs)]
        self.refused = [0] * runs


class Candidate:
    """One policy that is replayed, under one algorithm or several."""

    def __init__(self, text: str, policy: Policy, runs: Sequence[Run]) -> None:
        self.text = text
        self.policy = policy
        self.runs = runs
        self.policies = tuple(run.policy for run in runs)
        self.requests = 0
        self.without_identity = 0
        self.identities = 0
        self.approximate = False  # whether clients were forgotten
        self.demand = tuple(Histogram() for _ in range(3))  # of requests, by measure
        self.peaks = tuple(Histogram() for _ in range(3))  # of identities, by measure
        self.clients: OrderedDict[str, Client] = OrderedDict()  # the idle ones first
        self._length = policy.window * 1000
        self._numbers = itertools.count()

    def client(self, request: Request) -> Client | None:
        """Return the client of a request; None where the log does not tell it."""
        try:
            identity = self._identify(request)
        except ValueError:
            self.without_identity += 1
            return None

        client = self.clients.get(identity)
        if client is None:
            name = decode(identity)[1] or identity
            client = Client(name, next(self._numbers), len(self.runs))
            self.clients[identity] = client
        self.clients.move_to_end(identity)
        client.last = request.at
        self.requests += 1
        return client

    def _identify(self, request: Request) -> str:
        names: dict[Any, str] = {"ip": request.ip, "user": request.user, **request.more}
        key = self.policy.key
        if isinstance(key, str) and key.startswith("get:"):
            query = parse_qs(urlsplit(request.path).query)
            names[key] = query.get(key.removeprefix("get:"), [""])[0]
        return identify(names, self.policy, conf.config().encoding)

    def count(self, client: Client, now: int, decision: Decision) -> None:
        """Count a request, as it was decided under each algorithm."""
        demand = client.demand.add(now, self._length)
        for histogram, number in zip(self.demand, demand, strict=True):
            histogram.add(number)

        for index, run in enumerate(self.runs):
            outcome = decision.outcomes[index]
            if outcome.allowed:
                admitted = client.admitted[index].add(now, self._length)
                run.most_admitted = max(run.most_admitted, admitted)
            else:
                client.refused[index] += 1
                run.refused += 1
                run.longest_wait = max(run.longest_wait, outcome.retry_after)

    def pop_idle(self) -> Client:
        """Sum up the client that was idle the longest, forget it, and return it."""
        _, client = self.clients.popitem(last=False)
        self.identities += 1
        for histogram, peak in zip(self.peaks, client.demand.peaks, strict=True):
            histogram.add(peak)
        for run, refused in zip(self.runs, client.refused, strict=True):
            if refused:
                run.sum_up(client.name, refused)
        return client


class Replay:
    """Candidates side by side on one log. A context manager, which deletes its keys."""

    def __init__(
        self,
        policies: Sequence[tuple[str, Policy]],
        algorithms: Sequence[str],
        cache: str,
    ) -> None:
        self._cache = cache
        self._name = f"replay-{secrets.token_hex(4)}"
        self._clock = Clock(0)
        self._stack = ExitStack()
        self.candidates: list[Candidate] = []
        self.left_behind = False  # whether keys could not be deleted
        self.too_slow = False  # whether counters may have expired too early
        numbers = itertools.count()
        for text, policy in policies:
            chosen = [policy.algo] if policy.algo else algorithms
            runs = [
                Run(replace(policy, name=f"{self._name}.{next(numbers)}"), algorithm)
                for algorithm in chosen
            ]
            self.candidates.append(Candidate(text, policy, runs))

        windows = [candidate.policy.window for candidate in self.candidates]
        self._shortest = min(windows)  # seconds
        self.first: int | None = None  # ms; the earliest request, and the latest
        self.last: int | None = None
        self._part_at = 0  # ms; where the present part of the log begins
        self._part_started = math.inf

    def __enter__(self) -> Replay:
        settings = conf.replaced(cache=self._cache, timeout=TIMEOUT, enabled=True)
        self._stack.enter_context(settings)
        self._stack.callback(self._delete_keys)
        self._clock = self._stack.enter_context(frozen_clock(0))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, batches: Iterable[list[Request]], progress: Callable[[], None]
    ) -> None:
        """Replay requests, sorted by time."""
        for batch in batches:
            if self.first is None:
                self.first = batch[0].at
            self.last = batch[-1].at
            for now, requests in itertools.groupby(batch, key=attrgetter("at")):
                self._decide(now, list(requests))
            for candidate in self.candidates:
                self._forget_idle(candidate)
            progress()

        self._compare_clocks(self._part_at)
        for candidate in self.candidates:
            while candidate.clients:
                candidate.pop_idle()

    def _decide(self, now: int, requests: Sequence[Request]) -> None:
        """Have the limiter decide the requests of one time."""
        self._compare_clocks(now)
        self._clock.ms = now
        charged: list[tuple[Candidate, Client]] = []
        for request, candidate in itertools.product(requests, self.candidates):
            client = candidate.client(request)
            if client is not None:
                charged.append((candidate, client))

        checks = [
            limiter.plan(client.identity, candidate.policies, 1)
            for candidate, client in charged
        ]
        with uninterrupted():
            decisions = limiter.check_each(checks)
        for (candidate, client), decision in zip(charged, decisions, strict=True):
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

    def _forget_idle(self, candidate: Candidate) -> None:
        """Bound the memory, here and in Redis, by forgetting idle clients."""
        while len(candidate.clients) > MAX_CLIENTS:
            candidate.approximate = True
            client = candidate.pop_idle()
            self._clock.ms = client.last
            with uninterrupted():
                limiter.reset(client.identity, candidate.policies)

    def _delete_keys(self) -> None:
        with uninterrupted():
            try:
                for keys in backend.scan(f"{COUNTER_PREFIX}{self._name}.*"):
                    backend.run_commands([("UNLINK", key) for key in keys])
            except backend.UnavailableError:
                self.left_behind = True


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
