"""Run calls on the servers that have their keys. The async twin differs by `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from . import client
from .commands import Call, Pipeline, Word, pack
from .errors import NextAttempt, UnavailableError, next_attempt
from .multiplexer import MAX_BATCH
from .server import Server
from .topology import ClusterTopology, Topology

MAX_PIPELINE = 1_000  # calls per pipeline
TRYAGAIN_PAUSE = 0.003  # seconds; a slot is on its way from node to node
ASKING = Call(None, "", pack(("ASKING",)))
# Seconds that a page waits for a reply, where a decision waits for
# RATE_LIMITER['TIMEOUT'].
ADMIN_TIMEOUT = 1.0


# One call


def execute(topology: Topology, call: Call, admin_timeout: float | None = None) -> Any:
    """Run a call on the server that has its keys, and return the reply.

    UnavailableError when there is none.
    """
    server = topology.master or topology.server_for(call.key)
    if server is None:
        topology.wait_until_known()
    if server is None or server.breaker.error is not None:
        server = _require(topology, topology.server_for(call.key))

    try:
        reply = server.send(call, admin_timeout)
        if isinstance(reply, ResponseError):
            return _repeat(_Attempts(topology, call, server, reply), admin_timeout)
    except RedisError as error:
        raise _unavailable(topology, error) from error
    return reply


async def aexecute(topology: Topology, call: Call) -> Any:
    """As `execute`, without blocking the event loop."""
    server = topology.master or topology.server_for(call.key)
    if server is None:
        await topology.await_until_known()
    if server is None or server.breaker.error is not None:
        server = _require(topology, topology.server_for(call.key))

    try:
        reply = await server.asend(call)
        if isinstance(reply, ResponseError):
            return await _arepeat(_Attempts(topology, call, server, reply))
    except RedisError as error:
        raise _unavailable(topology, error) from error
    return reply


def _repeat(attempts: _Attempts, admin_timeout: float | None) -> Any:
    while attempts.prepare():
        time.sleep(attempts.pause)
        attempts.record(attempts.server.send(attempts.sent, admin_timeout))
    return attempts.reply


async def _arepeat(attempts: _Attempts) -> Any:
    while attempts.prepare():
        await asyncio.sleep(attempts.pause)
        attempts.record(await attempts.server.asend(attempts.sent))
    return attempts.reply


class _Attempts:
    """Further attempts at a call, while servers reply that nothing was run.

    All of them begin within the timeout.
    """

    def __init__(
        self, topology: Topology, call: Call, server: Server, error: ResponseError
    ) -> None:
        self.server = server
        self.sent = call  # with what is sent before it
        self.pause = 0.0
        self.reply: Any = error
        self._topology = topology
        self._call = call
        self._loaded = False
        self._deadline = time.monotonic() + topology.timeout

    def record(self, reply: Any) -> None:
        """Take the reply to what was sent; of a pipeline, its first error or the last."""
        if self.sent is not self._call:
            errors = [part for part in reply if isinstance(part, ResponseError)]
            reply = errors[0] if errors else reply[-1]
        self.reply = reply

    def prepare(self) -> bool:
        """Choose what to send next, and where; return False after a reply.

        UnavailableError after an error when another attempt would not help.
        """
        error = self.reply
        if not isinstance(error, ResponseError):
            return False

        attempt = None
        if time.monotonic() <= self._deadline:
            attempt = next_attempt(
                error, loaded=self._loaded, is_refund=self._call.is_refund
            )
        if attempt is NextAttempt.LOAD:
            self._loaded = True
            self.pause = 0.0
            self.sent = _with_scripts(self.sent.calls or (self._call,))
        elif attempt is None or not isinstance(self._topology, ClusterTopology):
            raise _failed(self._topology, self.server, error) from error
        else:
            self._follow(self._topology, error, attempt)
        return True

    def _follow(
        self, topology: ClusterTopology, error: ResponseError, attempt: NextAttempt
    ) -> None:
        self.sent = self._call
        self.pause = 0.0
        if attempt is NextAttempt.LATER:
            self.pause = TRYAGAIN_PAUSE
            server = topology.server_for(self._call.key) or self.server
        else:
            server = topology.redirect(error, self.server)
        if attempt is NextAttempt.ASKING:
            self.sent = Pipeline((ASKING, self._call))
        self.server = _require(topology, server)


# Several calls


def execute_each(
    topology: Topology, calls: Sequence[Call], admin_timeout: float | None = None
) -> list[Any]:
    """Run independent calls, in one round trip per server.

    Return each reply, or the UnavailableError in its place.
    """
    if not topology.servers():
        topology.wait_until_known()
    batches = _batches(topology, calls, MAX_PIPELINE)
    for batch in batches:
        _run_batch(batch, admin_timeout)
    return _in_order(batches)


async def aexecute_each(topology: Topology, calls: Sequence[Call]) -> list[Any]:
    """As `execute_each`, without blocking the event loop.

    In smaller pipelines, between which other calls are sent.
    """
    if not topology.servers():
        await topology.await_until_known()
    batches = _batches(topology, calls, MAX_BATCH)
    try:
        await asyncio.gather(*[_arun_batch(batch) for batch in batches])
    except asyncio.CancelledError:
        for batch in batches:
            batch.abandon()
        raise
    return _in_order(batches)


def _run_batch(batch: _Batch, admin_timeout: float | None) -> None:
    while pipeline := batch.next_pipeline():
        try:
            batch.record(batch.require_server().send(pipeline, admin_timeout))
        except (UnavailableError, RedisError) as error:
            batch.fail(error)

    for index in batch.settle_errors():
        try:
            reply = execute(batch.topology, batch.calls[index], admin_timeout)
        except UnavailableError as error:
            reply = error
        batch.replies[index] = reply


async def _arun_batch(batch: _Batch) -> None:
    while pipeline := batch.next_pipeline():
        try:
            batch.record(await batch.require_server().asend(pipeline))
        except (UnavailableError, RedisError) as error:
            batch.fail(error)

    for index in batch.settle_errors():
        try:
            reply = await aexecute(batch.topology, batch.calls[index])
        except UnavailableError as error:
            reply = error
        batch.replies[index] = reply


class _Batch:
    """Calls for one server that are sent together, and the replies so far, by index."""

    def __init__(
        self, topology: Topology, server: Server | None, calls: dict[int, Call]
    ) -> None:
        self.topology = topology
        self.calls = calls
        self.replies: dict[int, Any] = {}
        self._server = server
        self._sent: list[int] = []
        self._loaded = False

    def require_server(self) -> Server:
        return _require(self.topology, self._server)

    def next_pipeline(self) -> Pipeline | None:
        """Return all calls; then those whose script was unknown, with it; then None."""
        if not self.replies:
            self._sent = [*self.calls]
            return Pipeline(self.calls.values())

        self._sent = [
            index
            for index, reply in self.replies.items()
            if isinstance(reply, NoScriptError)
        ]
        if self._loaded or not self._sent:
            return None
        self._loaded = True
        return _with_scripts([self.calls[index] for index in self._sent])

    def record(self, replies: list[Any]) -> None:
        """Take the replies to a pipeline; those to SCRIPT LOAD come first."""
        own = replies[-len(self._sent) :]
        self.replies.update(zip(self._sent, own, strict=True))

    def fail(self, error: Exception) -> None:
        """Take an error that all calls of a pipeline have."""
        self.record([_unavailable(self.topology, error)] * len(self._sent))

    def settle_errors(self) -> list[int]:
        """Return which calls to send again, after MOVED for example.

        Each other error becomes an UnavailableError.
        """
        topology = self.topology
        repeated = []
        for index, error in self.replies.items():
            if self._server is None or not isinstance(error, ResponseError):
                continue
            is_refund = self.calls[index].is_refund
            attempt = next_attempt(error, loaded=True, is_refund=is_refund)
            if attempt is None or not isinstance(topology, ClusterTopology):
                self.replies[index] = _failed(topology, self._server, error)
                continue
            repeated.append(index)
            if isinstance(error, MovedError):
                topology.redirect(error, self._server)
        return repeated

    def abandon(self) -> None:
        """Take that the caller was cancelled; a call under way abandons itself."""
        for index, reply in self.replies.items():
            self.calls[index].abandon(reply)


def _batches(topology: Topology, calls: Sequence[Call], size: int) -> list[_Batch]:
    """Return batches of at most this size, for each server."""
    by_server: dict[Server | None, list[int]] = {}
    for index, call in enumerate(calls):
        by_server.setdefault(topology.server_for(call.key), []).append(index)

    return [
        _Batch(topology, server, {i: calls[i] for i in indexes[start : start + size]})
        for server, indexes in by_server.items()
        for start in range(0, len(indexes), size)
    ]


def _in_order(batches: Sequence[_Batch]) -> list[Any]:
    """Return the replies to all batches in the order of their calls."""
    replies: dict[int, Any] = {}
    for batch in batches:
        replies.update(batch.replies)
    return [replies[index] for index in range(len(replies))]


def _with_scripts(calls: Sequence[Call]) -> Pipeline:
    """Return calls as a pipeline that loads their scripts first.

    Not by EVAL, whose scripts servers may evict.
    """
    texts = dict.fromkeys(call.script.text for call in calls if call.script is not None)
    key = calls[0].key
    loads = [Call(None, key, pack(("SCRIPT", "LOAD", text))) for text in texts]
    return Pipeline((*loads, *calls))


# Servers and errors


def _require(topology: Topology, server: Server | None) -> Server:
    """Return a server that may be called.

    UnavailableError when none is known or its circuit breaker is open.
    """
    if server is not None and server.breaker.error is None:
        return server

    topology.refresh_soon()
    if server is None:
        raise UnavailableError(topology.error)
    if not server.breaker.allows_call():
        raise UnavailableError(server.breaker.error)
    return server


def _failed(
    topology: Topology, server: Server, error: ResponseError
) -> UnavailableError:
    """Log an error reply after which a call is not sent again; return it as ours."""
    failure: Exception = error
    # MOVED is also an AskError.
    is_of_cluster = isinstance(error, (AskError, ClusterCrossSlotError))
    if is_of_cluster and not topology.clustered:
        failure = UnavailableError(
            f"{server.name} is a node of a cluster, and the cache's client is for a "
            "single server: set OPTIONS['CONNECTION_FACTORY'] of the cache to "
            "'rlaas_django.cluster.ConnectionFactory'."
        )
    server.breaker.log_error(failure)
    return _unavailable(topology, failure)


def _unavailable(topology: Topology, error: Exception) -> UnavailableError:
    topology.refresh_soon()
    if isinstance(error, UnavailableError):
        return error
    return UnavailableError(str(error))


# Pages and statistics


def run_commands(
    commands: Sequence[Sequence[Word]], server: Server | None = None
) -> list[Any]:
    """Run plain commands of one key each, in one round trip per server.

    Those without a key name a server. For statistics and pages, not for decisions.
    """
    topology = client.topology() if server is None else Topology(server, server.timeout)
    calls = [Call(None, _key(command), pack(command)) for command in commands]
    replies = execute_each(topology, calls, ADMIN_TIMEOUT)
    for reply in replies:
        if isinstance(reply, UnavailableError):
            raise reply
    return replies


def _key(command: Sequence[Word]) -> str:
    position = 2 if command[0] == "MEMORY" else 1
    return str(command[position]) if len(command) > position else ""


def servers() -> list[Server]:
    """Return the servers that have keys; UnavailableError when none is known."""
    topology = client.topology()
    if not topology.servers():
        topology.wait_until_known()

    known = topology.servers()
    if any(server.breaker.error is not None for server in known):
        topology.refresh_soon()
    if not known:
        raise UnavailableError(topology.error)
    return known
