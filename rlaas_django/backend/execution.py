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


# One call


def execute(topology: Topology, call: Call) -> Any:
    """Run a call on the server that has its keys, and return the reply.

    UnavailableError when there is none.
    """
    server = topology.master or topology.server_for(call.key)
    if server is None:
        call.started_at = time.monotonic()
        topology.wait_until_known()
    if server is None or server.breaker.error is not None:
        server = _require_available(topology, topology.server_for(call.key))

    try:
        reply = server.send(call)
        if type(reply) is not list and isinstance(reply, ResponseError):
            return _repeat(_Attempts(topology, call, server, reply))
    except RedisError as error:
        raise _unavailable(topology, error) from error
    return reply


async def aexecute(topology: Topology, call: Call) -> Any:
    """As `execute`, without blocking the event loop."""
    server = topology.master or topology.server_for(call.key)
    if server is None:
        call.started_at = time.monotonic()
        await topology.await_until_known()
    if server is None or server.breaker.error is not None:
        server = _require_available(topology, topology.server_for(call.key))

    try:
        reply = await server.asend(call)
        if type(reply) is not list and isinstance(reply, ResponseError):
            return await _arepeat(_Attempts(topology, call, server, reply))
    except RedisError as error:
        raise _unavailable(topology, error) from error
    return reply


def _repeat(attempts: _Attempts) -> Any:
    while attempts.choose_next():
        time.sleep(attempts.pause)
        attempts.record(attempts.server.send(attempts.sent))
    return attempts.reply


async def _arepeat(attempts: _Attempts) -> Any:
    while attempts.choose_next():
        await asyncio.sleep(attempts.pause)
        attempts.record(await attempts.server.asend(attempts.sent))
    return attempts.reply


class _Attempts:
    """Further attempts at a call, while servers reply that nothing was run.

    Pipelines, which all of them together have the time of the call.
    """

    def __init__(
        self, topology: Topology, call: Call, server: Server, error: ResponseError
    ) -> None:
        self.server = server
        self.sent = call  # the call, with SCRIPT LOAD or ASKING before it
        self.pause = 0.0
        self.reply: Any = error
        self._topology = topology
        self._call = call
        self._loaded = False
        call.started_at = call.started_at or call.sent_at
        self._deadline = call.deadline(topology.timeout)

    def record(self, reply: Any) -> None:
        """Take the first error of a pipeline, or the last reply."""
        errors = [part for part in reply if isinstance(part, ResponseError)]
        self.reply = errors[0] if errors else reply[-1]

    def choose_next(self) -> bool:
        """Choose what to send next, and where.

        Return False after a reply. UnavailableError after an error when another
        attempt would not help.
        """
        error = self.reply
        if not isinstance(error, ResponseError):
            return False

        call = self._call
        topology = self._topology
        attempt = next_attempt(error, loaded=self._loaded, is_refund=call.is_refund)
        in_time = time.monotonic() <= self._deadline
        self.pause = 0.0
        if in_time and attempt is NextAttempt.LOAD:
            self._loaded = True
            self.sent = _with_scripts(self.sent.calls or (call,))
            return True

        if not in_time or attempt is None or not isinstance(topology, ClusterTopology):
            raise _failed(topology, self.server, error) from error
        self.sent = Pipeline((call,))
        if attempt is NextAttempt.LATER:
            self.pause = TRYAGAIN_PAUSE
            self.server = topology.server_for(call.key) or self.server
        elif isinstance(error, AskError):  # or MOVED
            self.server = topology.redirect(error, self.server)
        if attempt is NextAttempt.ASKING:
            self.sent = Pipeline((ASKING, call))
        _require_available(topology, self.server)
        return True


def _with_scripts(calls: Sequence[Call]) -> Pipeline:
    """Return calls as a pipeline that loads their scripts first.

    Not by EVAL, whose scripts servers may evict.
    """
    texts = dict.fromkeys(call.script.text for call in calls if call.script is not None)
    key = calls[0].key
    loads = [Call(None, key, pack(("SCRIPT", "LOAD", text))) for text in texts]
    return Pipeline((*loads, *calls))


# Several calls


def execute_each(topology: Topology, calls: Sequence[Call]) -> list[Any]:
    """Run independent calls, in one round trip per server.

    Return each reply, or the UnavailableError in its place.
    """
    topology.wait_until_known()
    replies: dict[int, Any] = {}
    for batch in _batches(topology, calls, MAX_PIPELINE, replies):
        _run_batch(batch)
    return [replies[index] for index in range(len(calls))]


async def aexecute_each(topology: Topology, calls: Sequence[Call]) -> list[Any]:
    """As `execute_each`, without blocking the event loop.

    In smaller pipelines, between which other calls are sent.
    """
    await topology.await_until_known()
    replies: dict[int, Any] = {}
    batches = _batches(topology, calls, MAX_BATCH, replies)
    try:
        await asyncio.gather(*[_arun_batch(batch) for batch in batches])
    except asyncio.CancelledError:  # a call that is under way abandons itself
        for index, reply in replies.items():
            calls[index].abandon(reply)
        raise
    return [replies[index] for index in range(len(calls))]


def _run_batch(batch: _Batch) -> None:
    try:
        server = _require_available(batch.topology, batch.server)
        batch.record(server, server.send(Pipeline(batch.calls.values())))
    except (UnavailableError, RedisError) as error:
        batch.fail(error)

    for index in batch.to_resend:
        try:
            reply = execute(batch.topology, batch.calls[index])
        except UnavailableError as error:
            reply = error
        batch.replies[index] = reply


async def _arun_batch(batch: _Batch) -> None:
    try:
        server = _require_available(batch.topology, batch.server)
        batch.record(server, await server.asend(Pipeline(batch.calls.values())))
    except (UnavailableError, RedisError) as error:
        batch.fail(error)

    for index in batch.to_resend:
        try:
            reply = await aexecute(batch.topology, batch.calls[index])
        except UnavailableError as error:
            reply = error
        batch.replies[index] = reply


class _Batch:
    """Calls for one server, which are sent together, by index."""

    def __init__(
        self,
        topology: Topology,
        server: Server | None,
        calls: dict[int, Call],
        replies: dict[int, Any],
    ) -> None:
        self.topology = topology
        self.server = server
        self.calls = calls
        self.replies = replies  # also to other batches
        self.to_resend: list[int] = []  # one by one

    def record(self, server: Server, replies: list[Any]) -> None:
        """Take the replies to the pipeline.

        An error may mean to send a call again.
        """
        topology = self.topology
        for index, reply in zip(self.calls, replies, strict=True):
            if not isinstance(reply, ResponseError):
                self.replies[index] = reply
            elif next_attempt(reply) is None:
                self.replies[index] = _failed(topology, server, reply)
            else:
                self.to_resend.append(index)
            if isinstance(reply, MovedError) and isinstance(topology, ClusterTopology):
                topology.redirect(reply, server)

    def fail(self, error: Exception) -> None:
        """Take an error that concerns all calls."""
        failure = _unavailable(self.topology, error)
        self.replies.update(dict.fromkeys(self.calls, failure))


def _batches(
    topology: Topology, calls: Sequence[Call], size: int, replies: dict[int, Any]
) -> list[_Batch]:
    """Return the calls for each server, in batches of at most this size."""
    by_server: dict[Server | None, list[int]] = {}
    for index, call in enumerate(calls):
        by_server.setdefault(topology.server_for(call.key), []).append(index)

    batches = []
    for server, indexes in by_server.items():
        for start in range(0, len(indexes), size):
            part = {index: calls[index] for index in indexes[start : start + size]}
            batches.append(_Batch(topology, server, part, replies))
    return batches


# Servers and errors


def _require_available(topology: Topology, server: Server | None) -> Server:
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
    """Log an error reply after which a call is not sent again.

    Return it as ours.
    """
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
    calls = [
        Call(None, _key(command), pack(command), for_page=True) for command in commands
    ]
    replies = execute_each(topology, calls)
    for reply in replies:
        if isinstance(reply, UnavailableError):
            raise reply
    return replies


def _key(command: Sequence[Word]) -> str:
    position = 2 if command[0] == "MEMORY" else 1
    return str(command[position]) if len(command) > position else ""


def servers() -> list[Server]:
    """Return the servers that have keys.

    UnavailableError when none is known.
    """
    topology = client.topology()
    topology.wait_until_known()
    known = topology.servers()
    if any(server.breaker.error is not None for server in known):
        topology.refresh_soon()
    if not known:
        raise UnavailableError(topology.error)
    return known
