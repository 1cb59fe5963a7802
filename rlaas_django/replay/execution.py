"""Run the requests of a log through the real scripts, on the log's own clock, under keys of its own."""

from __future__ import annotations

import gc
import itertools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .. import backend
from ..backend.commands import Call, pack
from ..core.policy import Policy
from ..limiter.plan import UNIQUE_BYTES
from .candidates import MAX_CLIENTS, Candidate, Client, Run
from .log_lines import Request
from .timeline import Timeline

TIMEOUT = 30.0  # seconds; nobody waits for a replayed request
CALLS_PER_BATCH = 1000
BATCHES_UNDER_WAY = 2
DELETED_TOGETHER = 10_000
KEYS_PER_DELETION = 100

Entries = list[
    list[tuple[Client, int]]
]  # per candidate: the clients and times of requests


@dataclass
class Batch:
    """Requests whose checks are sent together, and keys that are deleted with them."""

    entries: Entries
    old_keys: list[str]
    replies: Future[list[Any]] | None = None


class Replay:
    """Candidates beside each other, on one log. Use it as a context manager: it deletes its keys."""

    def __init__(
        self,
        policies: Sequence[tuple[str, Policy]],
        algorithms: Sequence[str],
        cache: str,
    ) -> None:
        self.topology = backend.make_topology(cache, TIMEOUT)
        prefix, numbers = f"replay-{secrets.token_hex(4)}", itertools.count()
        self.candidates = []
        for text, policy in policies:
            chosen = zip(
                [policy.algo] if policy.algo else algorithms, numbers, strict=False
            )
            runs = [
                Run(i, replace(policy, name=f"{prefix}.{i}", algo=algo))
                for algo, i in chosen
            ]
            self.candidates.append(Candidate(text, policy, runs, self.topology))
        self.timeline = Timeline(
            1 + sum(len(candidate.runs) for candidate in self.candidates)
        )
        self.left_behind = 0  # keys that could not be deleted, and expire
        self._unique = itertools.count(10 ** (2 * UNIQUE_BYTES - 1))
        # While the server runs a batch, the next one is read and packed here.
        self._worker = ThreadPoolExecutor(1)
        self._under_way: deque[Batch] = deque()

    def __enter__(self) -> Replay:
        return self

    def run(
        self, requests: Iterable[list[Request]], progress: Callable[[], None]
    ) -> None:
        """Replay requests, sorted by time."""
        # The thread starts before there is a batch: if Ctrl-C interrupts the start, `shutdown` will not wait for it.
        self._worker.submit(int)
        with _without_garbage_collection():
            self._run(requests, progress)
        for candidate in self.candidates:
            candidate.sum_up(candidate.clients.values())

    def _run(
        self, requests: Iterable[list[Request]], progress: Callable[[], None]
    ) -> None:
        for entries in self._entries(requests):
            self._send(entries)
            while len(self._under_way) >= BATCHES_UNDER_WAY:
                self._receive()
            for candidate in self.candidates:
                if len(candidate.clients) > MAX_CLIENTS:
                    self._receive_all()
                    self._forget_idle(candidate)
            progress()
        self._receive_all()

    def _entries(self, requests: Iterable[list[Request]]) -> Iterator[Entries]:
        """Yield as many requests as make a batch."""
        size = max(1, CALLS_PER_BATCH // len(self.candidates))
        for chunk in requests:
            for start in range(0, len(chunk), size):
                part = chunk[start : start + size]
                for now, times in Counter([request.at for request in part]).items():
                    self.timeline.add(now, 0, times)
                yield [
                    [
                        (client, request.at)
                        for request in part
                        if (client := candidate.client(request)) is not None
                    ]
                    for candidate in self.candidates
                ]

    def _send(self, entries: Entries) -> None:
        calls = []
        for candidate, chosen in zip(self.candidates, entries, strict=True):
            call = candidate.call
            calls += [call(client, now, next(self._unique)) for client, now in chosen]
        batch = Batch(
            entries,
            [key for candidate in self.candidates for key in candidate.old_keys],
        )
        self._under_way.append(
            batch
        )  # before it is sent, so that its keys are deleted whatever happens
        for candidate in self.candidates:
            candidate.old_keys.clear()
        calls += [call for _, call in self._deletions(batch.old_keys)]
        batch.replies = self._worker.submit(backend.execute_each, self.topology, calls)

    def _receive(self) -> None:
        batch = self._under_way[0]
        replies = iter(batch.replies.result() if batch.replies else ())
        for candidate, entries in zip(self.candidates, batch.entries, strict=True):
            candidate.read(
                entries, itertools.islice(replies, len(entries)), self.timeline
            )
        self._under_way.popleft()

    def _receive_all(self) -> None:
        while self._under_way:
            self._receive()

    def _forget_idle(self, candidate: Candidate) -> None:
        """Sum up the clients that were idle the longest, and delete their keys."""
        idle = candidate.idle_clients()
        self._delete(
            key
            for client in idle.values()
            for key in candidate.keys(client, client.demand.index)
        )
        candidate.forget(idle)

    def __exit__(self, *_: object) -> None:
        """Delete the keys."""
        self._worker.shutdown(cancel_futures=True)
        self._delete(self._keys())
        self.topology.close()

    def _keys(self) -> Iterator[str]:
        """Yield every key that may be there."""
        for candidate in self.candidates:
            for client in candidate.clients.values():
                yield from candidate.keys(client, client.demand.index)
            yield from candidate.old_keys
        for batch in self._under_way:
            yield from batch.old_keys
            for candidate, entries in zip(self.candidates, batch.entries, strict=True):
                for client, now in entries:
                    yield from candidate.keys(client, now // candidate.length)

    def _delete(self, keys: Iterable[str]) -> None:
        keys = iter(keys)
        while part := list(itertools.islice(keys, DELETED_TOGETHER)):
            numbers, calls = zip(*self._deletions(part), strict=True)
            replies = backend.execute_each(self.topology, calls)
            failed = zip(numbers, replies, strict=True)
            self.left_behind += sum(
                number for number, reply in failed if isinstance(reply, Exception)
            )

    def _deletions(self, keys: Sequence[str]) -> Iterator[tuple[int, Call]]:
        """Yield calls that delete keys, each with their number; on a Cluster one by one, as they are in many slots."""
        size = 1 if self.topology.clustered else KEYS_PER_DELETION
        for start in range(0, len(keys), size):
            part = keys[start : start + size]
            yield len(part), Call(None, part[0], pack(("UNLINK", *part)))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector of reference cycles, which takes a third of the time: no line makes one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
