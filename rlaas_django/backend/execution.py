"""Run calls on the servers that have their keys. The async twin differs by `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import AskError, ClusterCrossSlotError, MovedError, NoScriptError, RedisError, ResponseError

from .client import topology
from .commands import Call, Message, Word, pack
from .errors import NextAttempt, UnavailableError, next_attempt
from .multiplexer import MAX_BATCH
from .server import Server
from .topology import ClusterTopology, Topology

MAX_PIPELINE = 1_000  # calls per message
TRYAGAIN_PAUSE = 0.003  # seconds; a slot is on its way from node to node
ASKING = Call(None, "", pack(("ASKING",)))
ADMIN_TIMEOUT = 1.0  # seconds that a page waits for a reply, where a decision waits for RATE_LIMITER['TIMEOUT']


def execute(where: Topology, call: Call, timeout: float | None = None) -> Any:
    """Run a call on the server that has its keys, and return the reply; UnavailableError when there is none."""
    server = where.master or where.server_for(call.key)
    if server is None:
        where.wait_until_known()
        server = where.server_for(call.key)
    if server is None or server.breaker.error is not None:  # tested here, too, to save most calls a function
        server = _require(where, server)
    sent, attempts = call, None
    while True:
        try:
            reply = server.send(sent, timeout)
            return reply if sent is call else reply[-1]  # after those of SCRIPT LOAD or ASKING
        except ResponseError as error:
            attempts = attempts or _Attempts(where, call)
            server, sent, pause = attempts.after(error, server, sent)
        except RedisError as error:
            raise _unavailable(where, error) from error
        time.sleep(pause)


async def aexecute(where: Topology, call: Call) -> Any:
    """As `execute`, without blocking the event loop."""
    server = where.master or where.server_for(call.key)
    if server is None:
        await where.await_until_known()
        server = where.server_for(call.key)
    if server is None or server.breaker.error is not None:
        server = _require(where, server)
    sent, attempts = call, None
    while True:
        try:
            reply = await server.asend(sent)
            return reply if sent is call else reply[-1]  # after those of SCRIPT LOAD or ASKING
        except ResponseError as error:
            attempts = attempts or _Attempts(where, call)
            server, sent, pause = attempts.after(error, server, sent)
        except RedisError as error:
            raise _unavailable(where, error) from error
        await asyncio.sleep(pause)


def execute_each(where: Topology, calls: Sequence[Call], *, timeout: float | None = None) -> list[Any]:
    """Run independent calls, in one round trip per server; return each reply, or the UnavailableError in its place."""
    if where.master is not None and 0 < len(calls) <= MAX_PIPELINE:
        return _pipeline(where, where.master, calls, timeout)
    if not where.servers():
        where.wait_until_known()
    parts = _parts(where, calls, MAX_PIPELINE)
    return _in_order(parts, [_pipeline(where, server, [calls[i] for i in part], timeout) for server, part in parts])


async def aexecute_each(where: Topology, calls: Sequence[Call]) -> list[Any]:
    """As `execute_each`, without blocking the event loop; in smaller messages, between which other calls are sent."""
    if not where.servers():
        await where.await_until_known()
    parts = _parts(where, calls, MAX_BATCH)
    tasks = [asyncio.ensure_future(_apipeline(where, server, [calls[i] for i in part])) for server, part in parts]
    try:
        return _in_order(parts, await asyncio.gather(*tasks))
    except asyncio.CancelledError:
        for (_, part), task in zip(parts, tasks, strict=True):
            if task.done() and not task.cancelled():  # the others are cancelled with us
                for i, reply in zip(part, task.result(), strict=True):
                    calls[i].abandon(reply)
        raise


def _parts(where: Topology, calls: Sequence[Call], size: int) -> list[tuple[Server | None, list[int]]]:
    """Return the indexes of the calls for each server, in parts of at most this size."""
    by_server: dict[Server | None, list[int]] = {}
    for i, call in enumerate(calls):
        by_server.setdefault(where.server_for(call.key), []).append(i)
    every = by_server.items()
    return [(server, part[at : at + size]) for server, part in every for at in range(0, len(part), size)]


def _in_order(parts: Sequence[tuple[Server | None, list[int]]], found: Iterable[list[Any]]) -> list[Any]:
    """Return the replies to the parts in the order of their calls."""
    replies: dict[int, Any] = {}
    for (_, part), each in zip(parts, found, strict=True):
        replies.update(zip(part, each, strict=True))
    return [replies[i] for i in range(len(replies))]


def _pipeline(where: Topology, server: Server | None, calls: Sequence[Call], timeout: float | None) -> list[Any]:
    """Send calls to one server as one message; those that it says it did not run are sent again."""
    results = _send(where, server, Message(calls), timeout)
    if unknown := [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]:
        again = _send(where, server, _with_scripts([calls[i] for i in unknown]), timeout)
        for i, result in zip(unknown, again[-len(unknown) :], strict=True):
            results[i] = result
    for i in _settle_errors(where, server, calls, results):
        try:
            results[i] = execute(where, calls[i], timeout=timeout)
        except UnavailableError as error:
            results[i] = error
    return results


async def _apipeline(where: Topology, server: Server | None, calls: Sequence[Call]) -> list[Any]:
    """As `_pipeline`, without blocking the event loop."""
    results = await _asend(where, server, Message(calls))
    try:
        if unknown := [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]:
            again = await _asend(where, server, _with_scripts([calls[i] for i in unknown]))
            for i, result in zip(unknown, again[-len(unknown) :], strict=True):
                results[i] = result
        for i in _settle_errors(where, server, calls, results):
            try:
                results[i] = await aexecute(where, calls[i])
            except UnavailableError as error:
                results[i] = error
    except asyncio.CancelledError:  # a call that is under way abandons itself
        for call, result in zip(calls, results, strict=True):
            call.abandon(result)
        raise
    return results


def _send(where: Topology, server: Server | None, message: Message, timeout: float | None) -> list[Any]:
    """Return the reply to each call of a message, or the UnavailableError of all in their places."""
    try:
        results: list[Any] = _require(where, server).send(message, timeout=timeout, keep_errors=True)
    except (UnavailableError, RedisError) as error:
        return [_unavailable(where, error)] * len(message.parts or ())
    return results


async def _asend(where: Topology, server: Server | None, message: Message) -> list[Any]:
    """As `_send`, without blocking the event loop."""
    try:
        results: list[Any] = await _require(where, server).asend(message, keep_errors=True)
    except (UnavailableError, RedisError) as error:
        return [_unavailable(where, error)] * len(message.parts or ())
    return results


def _with_scripts(calls: Sequence[Call]) -> Message:
    """Return calls as a message that loads their scripts first; not by EVAL, whose scripts servers may evict."""
    texts = dict.fromkeys(call.script.text for call in calls if call.script is not None)
    return Message((*[Call(None, calls[0].key, pack(("SCRIPT", "LOAD", text))) for text in texts], *calls))


def _settle_errors(where: Topology, server: Server | None, calls: Sequence[Call], results: list[Any]) -> list[int]:
    """Return which calls to send again, after MOVED for example; replace each other error by an UnavailableError."""
    to_send_again = []
    for i, error in enumerate(results):
        if server is None or not isinstance(error, ResponseError):
            continue
        if where.clustered and next_attempt(error, loaded=True, is_refund=calls[i].is_refund) is not None:
            to_send_again.append(i)
            if isinstance(where, ClusterTopology) and isinstance(error, MovedError):
                where.redirect(error, server)
        else:
            server.breaker.log_error(error)
            results[i] = _unavailable(where, error)
    return to_send_again


class _Attempts:
    """Further attempts at a call, for as long as servers reply that nothing was run, within the timeout."""

    def __init__(self, where: Topology, call: Call) -> None:
        self.where, self.call = where, call
        self.deadline, self.loaded = time.monotonic() + where.timeout, False

    def after(self, error: ResponseError, server: Server, sent: Call) -> tuple[Server, Call, float]:
        """Return where to send what, and after which pause; UnavailableError when that would not help."""
        where, call = self.where, self.call
        in_time = time.monotonic() <= self.deadline
        attempt = next_attempt(error, loaded=self.loaded, is_refund=call.is_refund) if in_time else None
        if attempt is NextAttempt.LOAD:
            self.loaded = True
            return server, _with_scripts(sent.parts or (call,)), 0.0
        if isinstance(where, ClusterTopology) and attempt is NextAttempt.LATER:
            return _require(where, where.server_for(call.key) or server), call, TRYAGAIN_PAUSE
        if isinstance(where, ClusterTopology) and attempt is not None and isinstance(error, AskError):  # or MOVED
            target = _require(where, where.redirect(error, server))
            return target, Message((ASKING, call)) if attempt is NextAttempt.ASKING else call, 0.0
        failure: Exception = error
        if not where.clustered and isinstance(error, (AskError, ClusterCrossSlotError)):  # or MOVED, an AskError, too
            failure = UnavailableError(
                f"{server.name} is a node of a cluster, and the cache's client is for a single server: set OPTIONS"
                "['CONNECTION_FACTORY'] of the cache to 'rlaas_django.cluster.ConnectionFactory'."
            )
        server.breaker.log_error(failure)
        raise _unavailable(where, failure) from error


def _require(where: Topology, server: Server | None) -> Server:
    """Return a server that may be called; UnavailableError when none is known or its circuit breaker is open."""
    if server is not None and server.breaker.error is None:
        return server
    where.refresh_soon()
    if server is None or not server.breaker.allows_call():
        raise UnavailableError(where.error if server is None else server.breaker.error)
    return server


def _unavailable(where: Topology, error: Exception) -> UnavailableError:
    where.refresh_soon()
    return error if isinstance(error, UnavailableError) else UnavailableError(str(error))


def run_commands(commands: Sequence[Sequence[Word]], server: Server | None = None) -> list[Any]:
    """Run plain commands of one key each, in one round trip per server; those without a key name a server.

    For statistics and pages, not for decisions.
    """
    if not commands:
        return []
    where = topology() if server is None else Topology(server, server.timeout)
    calls = [Call(None, _key(each), pack(each)) for each in commands]
    if not where.clustered:
        return list(execute(where, Message(calls), timeout=ADMIN_TIMEOUT))
    replies = execute_each(where, calls, timeout=ADMIN_TIMEOUT)
    for reply in replies:
        if isinstance(reply, UnavailableError):
            raise reply
    return replies


def _key(command: Sequence[Word]) -> str:
    at = 2 if command[0] == "MEMORY" else 1
    return str(command[at]) if len(command) > at else ""


def servers() -> list[Server]:
    """Return the servers that have keys; UnavailableError when none is known."""
    where = topology()
    if not where.servers():
        where.wait_until_known()
    found = where.servers()
    if any(server.breaker.error is not None for server in found):
        where.refresh_soon()
    if not found:
        raise UnavailableError(where.error)
    return found
