"""Run calls on the servers that have their keys. The async twin differs by `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
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
ADMIN_TIMEOUT = 1.0  # seconds that a page waits for a reply, where a decision waits for RATE_LIMITER['TIMEOUT']


def execute(topology: Topology, call: Call, admin_timeout: float | None = None) -> Any:
    """Run a call on the server that has its keys, and return the reply; UnavailableError when there is none."""
    server = topology.master or topology.server_for(call.key)
    if server is None:
        topology.wait_until_known()
        server = topology.server_for(call.key)
    if (
        server is None or server.breaker.error is not None
    ):  # tested here, too, to save most calls a function
        server = _require(topology, server)
    sent, attempts = call, None
    while True:
        try:
            result = server.send(sent, admin_timeout)
            return (
                result if sent is call else _last(result)
            )  # after those of SCRIPT LOAD or ASKING
        except ResponseError as error:
            attempts = attempts or _Attempts(topology, call)
            server, sent, pause = attempts.after(error, server, sent)
        except RedisError as error:
            raise _unavailable(topology, error) from error
        time.sleep(pause)


async def aexecute(topology: Topology, call: Call) -> Any:
    """As `execute`, without blocking the event loop."""
    server = topology.master or topology.server_for(call.key)
    if server is None:
        await topology.await_until_known()
        server = topology.server_for(call.key)
    if server is None or server.breaker.error is not None:
        server = _require(topology, server)
    sent, attempts = call, None
    while True:
        try:
            result = await server.asend(sent)
            return result if sent is call else _last(result)
        except ResponseError as error:
            attempts = attempts or _Attempts(topology, call)
            server, sent, pause = attempts.after(error, server, sent)
        except RedisError as error:
            raise _unavailable(topology, error) from error
        await asyncio.sleep(pause)


def execute_each(
    topology: Topology, calls: Sequence[Call], admin_timeout: float | None = None
) -> list[Any]:
    """Run independent calls, in one round trip per server; return each reply, or the UnavailableError in its place."""
    if topology.master is not None and 0 < len(calls) <= MAX_PIPELINE:
        return _pipeline(topology, topology.master, calls, admin_timeout)
    if not topology.servers():
        topology.wait_until_known()
    parts = _parts(topology, calls, MAX_PIPELINE)
    return _in_order(
        parts,
        [
            _pipeline(topology, server, [calls[i] for i in part], admin_timeout)
            for server, part in parts
        ],
    )


async def aexecute_each(topology: Topology, calls: Sequence[Call]) -> list[Any]:
    """As `execute_each`, without blocking the event loop; in smaller pipelines, between which other calls are sent."""
    if not topology.servers():
        await topology.await_until_known()
    parts = _parts(topology, calls, MAX_BATCH)
    tasks = [
        asyncio.ensure_future(_apipeline(topology, server, [calls[i] for i in part]))
        for server, part in parts
    ]
    try:
        return _in_order(parts, await asyncio.gather(*tasks))
    except asyncio.CancelledError:
        for (_, part), task in zip(parts, tasks, strict=True):
            if task.done() and not task.cancelled():  # the others are cancelled with us
                for i, reply in zip(part, task.result(), strict=True):
                    calls[i].abandon(reply)
        raise


def _parts(
    topology: Topology, calls: Sequence[Call], size: int
) -> list[tuple[Server | None, list[int]]]:
    """Return the indexes of the calls for each server, in parts of at most this size."""
    by_server: dict[Server | None, list[int]] = {}
    for i, call in enumerate(calls):
        by_server.setdefault(topology.server_for(call.key), []).append(i)
    every = by_server.items()
    return [
        (server, part[at : at + size])
        for server, part in every
        for at in range(0, len(part), size)
    ]


def _in_order(
    parts: Sequence[tuple[Server | None, list[int]]], found: Iterable[list[Any]]
) -> list[Any]:
    """Return the replies to the parts in the order of their calls."""
    replies: dict[int, Any] = {}
    for (_, part), each in zip(parts, found, strict=True):
        replies.update(zip(part, each, strict=True))
    return [replies[i] for i in range(len(replies))]


def _pipeline(
    topology: Topology,
    server: Server | None,
    calls: Sequence[Call],
    admin_timeout: float | None,
) -> list[Any]:
    """Send calls to one server as one pipeline; those that it says it did not run are sent again."""
    results = _send(topology, server, Pipeline(calls), admin_timeout)
    if unknown := [
        i for i, result in enumerate(results) if isinstance(result, NoScriptError)
    ]:
        again = _send(
            topology, server, _with_scripts([calls[i] for i in unknown]), admin_timeout
        )
        for i, result in zip(unknown, again[-len(unknown) :], strict=True):
            results[i] = result
    for i in _settle_errors(topology, server, calls, results):
        try:
            results[i] = execute(topology, calls[i], admin_timeout)
        except UnavailableError as error:
            results[i] = error
    return results


async def _apipeline(
    topology: Topology, server: Server | None, calls: Sequence[Call]
) -> list[Any]:
    """As `_pipeline`, without blocking the event loop."""
    results = await _asend(topology, server, Pipeline(calls))
    try:
        if unknown := [
            i for i, result in enumerate(results) if isinstance(result, NoScriptError)
        ]:
            again = await _asend(
                topology, server, _with_scripts([calls[i] for i in unknown])
            )
            for i, result in zip(unknown, again[-len(unknown) :], strict=True):
                results[i] = result
        for i in _settle_errors(topology, server, calls, results):
            try:
                results[i] = await aexecute(topology, calls[i])
            except UnavailableError as error:
                results[i] = error
    except asyncio.CancelledError:  # a call that is under way abandons itself
        for call, result in zip(calls, results, strict=True):
            call.abandon(result)
        raise
    return results


def _last(results: list[Any]) -> Any:
    """Return the last result of a pipeline; raise the first error reply in it."""
    for result in results:
        if isinstance(result, ResponseError):
            raise result
    return results[-1]


def _send(
    topology: Topology,
    server: Server | None,
    pipeline: Pipeline,
    admin_timeout: float | None,
) -> list[Any]:
    """Return the result of each call of a pipeline, or the UnavailableError of all in their places."""
    try:
        results: list[Any] = _require(topology, server).send(pipeline, admin_timeout)
    except (UnavailableError, RedisError) as error:
        return [_unavailable(topology, error)] * len(pipeline.calls)
    return results


async def _asend(
    topology: Topology, server: Server | None, pipeline: Pipeline
) -> list[Any]:
    """As `_send`, without blocking the event loop."""
    try:
        results: list[Any] = await _require(topology, server).asend(pipeline)
    except (UnavailableError, RedisError) as error:
        return [_unavailable(topology, error)] * len(pipeline.calls)
    return results


def _with_scripts(calls: Sequence[Call]) -> Pipeline:
    """Return calls as a pipeline that loads their scripts first; not by EVAL, whose scripts servers may evict."""
    texts = dict.fromkeys(call.script.text for call in calls if call.script is not None)
    return Pipeline(
        (
            *[
                Call(None, calls[0].key, pack(("SCRIPT", "LOAD", text)))
                for text in texts
            ],
            *calls,
        )
    )


def _settle_errors(
    topology: Topology, server: Server | None, calls: Sequence[Call], results: list[Any]
) -> list[int]:
    """Return which calls to send again, after MOVED for example; replace each other error by an UnavailableError."""
    to_send_again = []
    for i, error in enumerate(results):
        if server is None or not isinstance(error, ResponseError):
            continue
        if (
            topology.clustered
            and next_attempt(error, loaded=True, is_refund=calls[i].is_refund)
            is not None
        ):
            to_send_again.append(i)
            if isinstance(topology, ClusterTopology) and isinstance(error, MovedError):
                topology.redirect(error, server)
        else:
            results[i] = _failed(topology, server, error)
    return to_send_again


class _Attempts:
    """Further attempts at a call, for as long as servers reply that nothing was run, within the timeout."""

    def __init__(self, topology: Topology, call: Call) -> None:
        self.topology, self.call = topology, call
        self.deadline, self.loaded = time.monotonic() + topology.timeout, False

    def after(
        self, error: ResponseError, server: Server, sent: Call
    ) -> tuple[Server, Call, float]:
        """Return where to send what, and after which pause; UnavailableError when that would not help."""
        topology, call = self.topology, self.call
        in_time = time.monotonic() <= self.deadline
        attempt = (
            next_attempt(error, loaded=self.loaded, is_refund=call.is_refund)
            if in_time
            else None
        )
        if attempt is NextAttempt.LOAD:
            self.loaded = True
            return server, _with_scripts(sent.calls or (call,)), 0.0
        if isinstance(topology, ClusterTopology) and attempt is NextAttempt.LATER:
            return (
                _require(topology, topology.server_for(call.key) or server),
                call,
                TRYAGAIN_PAUSE,
            )
        if (
            isinstance(topology, ClusterTopology)
            and attempt is not None
            and isinstance(error, AskError)
        ):  # or MOVED
            target = _require(topology, topology.redirect(error, server))
            return (
                target,
                Pipeline((ASKING, call)) if attempt is NextAttempt.ASKING else call,
                0.0,
            )
        raise _failed(topology, server, error) from error


def _require(topology: Topology, server: Server | None) -> Server:
    """Return a server that may be called; UnavailableError when none is known or its circuit breaker is open."""
    if server is not None and server.breaker.error is None:
        return server
    topology.refresh_soon()
    if server is None or not server.breaker.allows_call():
        raise UnavailableError(
            topology.error if server is None else server.breaker.error
        )
    return server


def _failed(
    topology: Topology, server: Server, error: ResponseError
) -> UnavailableError:
    """Log an error reply after which a call is not sent again, and return it as an UnavailableError."""
    failure: Exception = error
    if not topology.clustered and isinstance(
        error, (AskError, ClusterCrossSlotError)
    ):  # or MOVED, an AskError, too
        failure = UnavailableError(
            f"{server.name} is a node of a cluster, and the cache's client is for a single server: set OPTIONS"
            "['CONNECTION_FACTORY'] of the cache to 'rlaas_django.cluster.ConnectionFactory'."
        )
    server.breaker.log_error(failure)
    return _unavailable(topology, failure)


def _unavailable(topology: Topology, error: Exception) -> UnavailableError:
    topology.refresh_soon()
    return (
        error if isinstance(error, UnavailableError) else UnavailableError(str(error))
    )


def run_commands(
    commands: Sequence[Sequence[Word]], server: Server | None = None
) -> list[Any]:
    """Run plain commands of one key each, in one round trip per server; those without a key name a server.

    For statistics and pages, not for decisions.
    """
    topology = client.topology() if server is None else Topology(server, server.timeout)
    replies = execute_each(
        topology,
        [Call(None, _key(each), pack(each)) for each in commands],
        ADMIN_TIMEOUT,
    )
    for reply in replies:
        if isinstance(reply, UnavailableError):
            raise reply
    return replies


def _key(command: Sequence[Word]) -> str:
    at = 2 if command[0] == "MEMORY" else 1
    return str(command[at]) if len(command) > at else ""


def servers() -> list[Server]:
    """Return the servers that have keys; UnavailableError when none is known."""
    topology = client.topology()
    if not topology.servers():
        topology.wait_until_known()
    found = topology.servers()
    if any(server.breaker.error is not None for server in found):
        topology.refresh_soon()
    if not found:
        raise UnavailableError(topology.error)
    return found
