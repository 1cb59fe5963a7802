"""Run calls on the servers that have their keys. The async twin differs by `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import AskError, ClusterCrossSlotError, MovedError, NoScriptError, RedisError, ResponseError

from .client import topology
from .commands import Call, Message, Word, pack
from .errors import UnavailableError, next_attempt
from .multiplexer import MAX_BATCH
from .server import Address, Server
from .topology import ClusterTopology, Topology

MAX_PIPELINE = 1_000  # calls per message
ADMIN_TIMEOUT = 1.0  # seconds that a page waits for a reply, where a decision waits for RATE_LIMITER['TIMEOUT']


def execute(where: Topology, call: Call, *, timeout: float | None = None) -> Any:
    """Run a call on the server that has its keys, and return the reply; UnavailableError when there is none."""
    server = where.master or where.server_for(call.key)
    if server is None:
        where.wait_until_known()
        server = where.server_for(call.key)
    if server is None or server.breaker.error is not None:
        server = _require(where, server)
    sent, attempts = call, None
    while True:
        try:
            reply = server.send(sent, timeout=timeout)
            return reply if sent is call else reply[-1]
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
            return reply if sent is call else reply[-1]
        except ResponseError as error:
            attempts = attempts or _Attempts(where, call)
            server, sent, pause = attempts.after(error, server, sent)
        except RedisError as error:
            raise _unavailable(where, error) from error
        await asyncio.sleep(pause)


def execute_each(where: Topology, calls: Sequence[Call]) -> list[Any]:
    """Run independent calls, in one round trip per server; return each reply, or the UnavailableError in its place."""
    if where.master is not None and 0 < len(calls) <= MAX_PIPELINE:
        return _pipeline(where, where.master, calls)
    if not where.servers():
        where.wait_until_known()
    parts = _parts(where, calls, MAX_PIPELINE)
    return _in_order(parts, [_pipeline(where, server, [calls[i] for i in part]) for server, part in parts])


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


def _pipeline(where: Topology, server: Server | None, calls: Sequence[Call], *, loaded: bool = False) -> list[Any]:
    """Send calls to one server as one message; those that it says it did not run are sent again."""
    try:
        if server is None or server.breaker.error is not None:
            server = _require(where, server)
        replies: list[Any] = server.send(Message(calls), keep_errors=True)
        if not loaded and (unknown := _not_loaded(replies)):
            server.send(_load_scripts(calls, unknown))
            again = _pipeline(where, server, [calls[i] for i in unknown], loaded=True)
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
    except (UnavailableError, RedisError) as error:
        return [_failure(where, error)] * len(calls)
    for i, reply in enumerate(replies):
        if isinstance(reply, ResponseError):
            replies[i] = _rejected(where, server, calls[i], reply) or _send_again(where, calls[i])
    return replies


async def _apipeline(
    where: Topology, server: Server | None, calls: Sequence[Call], *, loaded: bool = False
) -> list[Any]:
    """As `_pipeline`, without blocking the event loop."""
    try:
        if server is None or server.breaker.error is not None:
            server = _require(where, server)
        replies: list[Any] = await server.asend(Message(calls), keep_errors=True)
        if not loaded and (unknown := _not_loaded(replies)):
            await server.asend(_load_scripts(calls, unknown))
            again = await _apipeline(where, server, [calls[i] for i in unknown], loaded=True)
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
    except (UnavailableError, RedisError) as error:
        return [_failure(where, error)] * len(calls)
    for i, reply in enumerate(replies):
        if isinstance(reply, ResponseError):
            replies[i] = _rejected(where, server, calls[i], reply) or await _asend_again(where, calls[i])
    return replies


def _not_loaded(replies: Sequence[Any]) -> list[int]:
    return [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def _load_scripts(calls: Sequence[Call], unknown: Sequence[int]) -> Message:
    """Return the message that loads the scripts of these calls."""
    scripts = {script.sha: script for i in unknown if (script := calls[i].script) is not None}
    return Message(Call(None, "", pack(("SCRIPT", "LOAD", each.text))) for each in scripts.values())


def _failure(where: Topology, error: UnavailableError | RedisError) -> UnavailableError:
    return error if isinstance(error, UnavailableError) else _unavailable(where, error)


def _rejected(where: Topology, server: Server, call: Call, error: ResponseError) -> UnavailableError | None:
    """Return the UnavailableError of a call that may not be sent again; None for one that was redirected."""
    if where.clustered and next_attempt(error, loaded=True, is_refund=call.is_refund) is not None:
        return None
    server.breaker.log_error(error)
    return _unavailable(where, error)


def _send_again(where: Topology, call: Call) -> Any:
    try:
        return execute(where, call)
    except UnavailableError as failure:
        return failure


async def _asend_again(where: Topology, call: Call) -> Any:
    try:
        return await aexecute(where, call)
    except UnavailableError as failure:
        return failure


class _Attempts:
    """Further attempts at a call, for as long as servers reply that nothing was run, within the timeout."""

    def __init__(self, where: Topology, call: Call) -> None:
        self.where, self.call = where, call
        self.deadline, self.loaded = time.monotonic() + where.timeout, False

    def after(self, error: ResponseError, server: Server, sent: Call) -> tuple[Server, Call, float]:
        """Return where to send what, and after which pause; UnavailableError when that would not help."""
        where, call = self.where, self.call
        if not where.clustered and isinstance(error, (AskError, MovedError, ClusterCrossSlotError)):
            wrong = UnavailableError(
                f"{server.name} is a node of a cluster, and the cache's client is for a single server: set OPTIONS"
                "['CONNECTION_FACTORY'] of the cache to 'rlaas_django.cluster.ConnectionFactory'."
            )
            server.breaker.log_error(wrong)
            raise wrong from error
        attempt = next_attempt(error, loaded=self.loaded, is_refund=call.is_refund)
        if attempt is None or time.monotonic() > self.deadline:
            server.breaker.log_error(error)
            raise _unavailable(where, error) from error
        if attempt.load_script and call.script is not None:
            self.loaded = True  # not by EVAL: servers evict what it brings
            return server, sent.after("SCRIPT", "LOAD", call.script.text), 0.0
        server = self._redirect(error, server, attempt.address)
        return server, call.after("ASKING") if attempt.asking else call, attempt.pause

    def _redirect(self, error: ResponseError, server: Server, address: Address | None) -> Server:
        where = self.where
        if not isinstance(where, ClusterTopology):
            return server
        if address is None:
            target = where.server_for(self.call.key) or server
        else:
            target = where.server_at((address[0] or server.address[0], address[1]))
            if isinstance(error, MovedError):
                where.moved(error.slot_id, target)
        return target if target.breaker.error is None else _require(where, target)


def _require(where: Topology, server: Server | None) -> Server:
    """Return a server that may be called; UnavailableError when none is known or its circuit breaker is open."""
    where.refresh_soon()
    if server is None:
        raise UnavailableError(where.error)
    if not server.breaker.allows_call():
        raise UnavailableError(server.breaker.error)
    return server


def _unavailable(where: Topology, error: Exception) -> UnavailableError:
    where.refresh_soon()
    return UnavailableError(str(error))


def run_commands(commands: Sequence[Sequence[Word]], server: Server | None = None) -> list[Any]:
    """Run plain commands of one key each, in one round trip per server; those without a key name a server.

    For statistics and pages, not for decisions.
    """
    if not commands:
        return []
    where = topology() if server is None else Topology(server, server.timeout)
    calls = [Call(None, _key(each), pack(each)) for each in commands]
    if where.clustered:
        return [execute(where, call, timeout=ADMIN_TIMEOUT) for call in calls]
    replies: list[Any] = execute(where, Message(calls), timeout=ADMIN_TIMEOUT)
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
