"""Have the limiter decide the requests of a log, at the times they were made.

The counters are those of policies with names of their own, and their identities are
numbers: no text of the log reaches Redis, and no override applies to them.

What clients ask for is counted beside the scripts: the demand. The demand of a request
is the smallest limit that would admit it if all requests before it had been admitted.
Under a limit, fewer of those were admitted; so a request that a limit refuses has a
demand above the limit. The number of requests with a demand above a limit is therefore
the most that the limit refuses: exactly that many under a fixed window, and fewer under
the other algorithms.
"""

from __future__ import annotations

import itertools
import math
import secrets
import signal
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .. import backend, conf, limiter
from ..core.algorithms import ALGORITHMS
from ..core.decision import Decision
from ..core.keys import COUNTER_PREFIX, EncodedIdentity, decode, identify
from ..core.policy import Policy
from ..runtime.clock import Clock, frozen_clock
from .log import Request

TIMEOUT = 30.0  # seconds; nobody waits for a replayed request
MAX_CLIENTS = 100_000  # per policy; of more, those idle the longest are summed up
WORST = 10  # identities that are listed


def count_demand(times: array[int], now: int, length: int) -> dict[str, int]:
    """Return the demand of a request by the kinds of `Algorithm.demand`.

    It is added to the times of the client's earlier requests, of which only those in
    this fixed window and in the one before are kept.
    """
    start = now - now % length  # of the fixed window
    insort(times, now)
    del times[: bisect_left(times, start - length)]

    current = len(times) - bisect_left(times, start)
    previous = len(times) - current
    weighted = math.ceil(previous * (start + length - now) / length)

    return {
        "fixed": current,
        "sliding": len(times) - bisect_right(times, now - length),
        "counter": current + weighted,
    }


class Usage:
    """What one client got under one algorithm."""

    def __init__(self) -> None:
        self.admitted = array("q")  # times of the requests in the window
        self.refused = 0
        self.peak = 0  # the highest demand


class Client:
    """One identity under one policy."""

    def __init__(self, name: str, number: int, runs: int) -> None:
        self.name = name
        self.identity = EncodedIdentity(f"replay={number}")
        self.times = array("q")  # of its requests, for the demand
        self.usages = [Usage() for _ in range(runs)]


class Run:
    """One policy under one algorithm, and what it refused."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.algorithm = ALGORITHMS[str(policy.algo)]

        self.refused = 0
        self.refused_identities = 0
        self.longest_wait = 0.0  # seconds
        self.most_admitted = 0  # in a window, of one identity
        self.worst: list[tuple[int, str]] = []  # sorted

        # How many requests have which demand, and how many identities which peak.
        self.demand: Counter[int] = Counter()
        self.peaks: Counter[int] = Counter()


class Candidate:
    """One policy that is replayed, under one algorithm or several."""

    def __init__(
        self,
        name: str,
        text: str,
        policy: Policy,
        algorithms: Iterable[Any],
    ) -> None:
        self.text = text
        self.policy = policy
        if policy.algo:
            algorithms = [policy.algo]

        # Shadow policies are decided together, but each as if it were alone.
        self.policies = [
            replace(policy, name=f"{name}.{algorithm}", algo=algorithm, shadow=True)
            for algorithm in algorithms
        ]
        self.runs = [Run(policy) for policy in self.policies]

        self.requests = 0
        self.without_identity = 0
        self.identities = 0  # that were summed up
        self.approximate = False  # whether clients were forgotten

        self.clients: OrderedDict[str, Client] = OrderedDict()  # idle ones first

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
            number = self.identities + len(self.clients)
            client = Client(name, number, len(self.runs))
            self.clients[identity] = client

        self.clients.move_to_end(identity)
        self.requests += 1
        return client

    def _identify(self, request: Request) -> str:
        """Return the encoded identity; ValueError where the log does not tell it."""
        names: dict[Any, str] = {
            "ip": request.ip,
            "user": request.user,
            **request.more,
        }

        kind, _, parameter = str(self.policy.key).partition(":")
        if kind == "get":
            query = parse_qs(urlsplit(request.path).query)
            names[kind] = query.get(parameter, [""])[0]

        return identify(names, self.policy, conf.config().encoding)

    def count(self, client: Client, now: int, decision: Decision) -> None:
        """Count a request, as it was decided under each algorithm."""
        length = 1000 * self.policy.window
        demands = count_demand(client.times, now, length)

        for run, usage, outcome in zip(
            self.runs,
            client.usages,
            decision.outcomes,
            strict=True,
        ):
            demand = demands[run.algorithm.demand]
            run.demand[demand] += 1
            usage.peak = max(usage.peak, demand)

            if outcome.allowed:
                insort(usage.admitted, now)
                del usage.admitted[: bisect_right(usage.admitted, now - length)]
                run.most_admitted = max(run.most_admitted, len(usage.admitted))
            else:
                usage.refused += 1
                run.refused += 1
                run.longest_wait = max(run.longest_wait, outcome.retry_after)

    def pop_idle(self) -> Client:
        """Sum up the client that was idle the longest, forget it, and return it."""
        _, client = self.clients.popitem(last=False)
        self.identities += 1

        for run, usage in zip(self.runs, client.usages, strict=True):
            run.peaks[usage.peak] += 1
            if usage.refused:
                run.refused_identities += 1
                insort(run.worst, (usage.refused, client.name))
                del run.worst[:-WORST]

        return client


class Replay:
    """Candidates side by side on one log."""

    _clock: Clock  # of the limiter, while it runs

    def __init__(
        self,
        policies: Mapping[str, Policy],
        algorithms: Iterable[str],
        cache: str,
    ) -> None:
        self.first: int | None = None  # ms; the earliest time of a request
        self.last: int | None = None
        self.too_slow = False  # whether counters may have expired too early
        self.went_back = False  # whether times went back, by more than a window

        self._cache = cache
        self._name = f"replay-{secrets.token_hex(4)}"

        self.candidates = [
            Candidate(f"{self._name}.{number}", text, policy, algorithms)
            for number, (text, policy) in enumerate(policies.items())
        ]
        windows = [1000 * policy.window for policy in policies.values()]
        self._shortest = min(windows)  # ms
        self._longest = max(windows)

        self._part_at = 0  # ms; where the present part of the log begins
        self._part_started = math.inf

    def run(self, batches: Iterable[list[Request]]) -> None:
        """Replay requests, sorted by time, and delete the keys that this takes."""
        settings = conf.replaced(
            cache=self._cache,
            timeout=TIMEOUT,
            enabled=True,
        )
        with settings, frozen_clock(0) as self._clock:
            try:
                for batch in batches:
                    self._decide_batch(batch)
                    self._forget_idle(MAX_CLIENTS)

                self._compare_clocks(self._part_at)
            finally:
                self._delete_keys()

        for candidate in self.candidates:
            while candidate.clients:
                candidate.pop_idle()

    def _decide_batch(self, batch: list[Request]) -> None:
        for now, requests in itertools.groupby(batch, attrgetter("at")):
            if now < self._part_at - self._longest:
                # What was counted later would count for as long as the log goes back.
                self.went_back = True
                self._forget_idle(0)
                self._part_at = 0

            self._compare_clocks(now)
            self._clock.ms = now
            self.first = min(self.first or now, now)
            self.last = max(self.last or now, now)

            self._decide(now, requests)

    def _decide(self, now: int, requests: Iterable[Request]) -> None:
        """Have the limiter decide the requests of one time, in one round trip."""
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
        if real - self._part_started > self._shortest / 2000:
            self.too_slow = True

        if now - self._part_at >= self._shortest:
            self._part_at = now
            self._part_started = real

    def _forget_idle(self, most: int) -> None:
        """Keep so many clients, here and in Redis, and forget the idle ones."""
        for candidate in self.candidates:
            while len(candidate.clients) > most:
                candidate.approximate = True
                client = candidate.pop_idle()

                self._clock.ms = client.times[-1]
                with uninterrupted():
                    limiter.reset(client.identity, candidate.policies, may_refund=False)

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
    interrupts: list[int] = []

    def postpone(number: int, _frame: object) -> None:
        interrupts.append(number)

    handler = signal.signal(signal.SIGINT, postpone)

    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)

    if interrupts:
        signal.raise_signal(signal.SIGINT)
