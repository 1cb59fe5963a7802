"""Run calls on the servers that have their keys. The async twins differ by `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import AskError, ClusterCrossSlotError, MovedError, RedisError, ResponseError

from .client import topology
from .commands import Call, Word, commands_call, load_call
from .errors import NextAttempt, UnavailableError, next_attempt
from .server import Server
from .topology import ClusterTopology, Topology

ADMIN_TIMEOUT = 1.0  # seconds that a page waits for a reply, where a decision waits for RATE_LIMITER['TIMEOUT']


def execute(where: Topology, call: Call, *, timeout: float | None = None) -> Any:
    """Run a call on the server that has its keys, and return the reply; UnavailableError when there is none."""
    server = where.master or where.server_for(call.key)
    if server is None:
        where.wait_until_known()
        server = where.server_for(call.key)
    if server is None or server.breaker.error is not None:
        server = _require(where, server)
    try:
        return server.send(call, timeout=timeout)
    except ResponseError as error:
        return _send_again(where, call, server, error, timeout)
    except RedisError as error:
        raise _unavailable(where, error) from error


async def aexecute(where: Topology, call: Call) -> Any:
    """As `execute`, without blocking the event loop."""
    server = where.master or where.server_for(call.key)
    if server is None:
        await where.await_until_known()
        server = where.server_for(call.key)
    if server is None or server.breaker.error is not None:
        server = _require(where, server)
    try:
        return await server.asend(call)
    except ResponseError as error:
        return await _asend_again(where, call, server, error)
    except RedisError as error:
        raise _unavailable(where, error) from error


def _send_again(where: Topology, call: Call, server: Server, error: ResponseError, timeout: float | None) -> Any:
    """Send a call again for as long as the server replies that nothing was run, within the timeout."""
    deadline, loaded = time.monotonic() + where.timeout, False
    while True:
        attempt = _next_attempt(where, call, server, error, deadline, loaded)
        time.sleep(attempt.pause)
        try:
            if attempt.load_script and call.script is not None:
                loaded = True
                server.send(load_call(call.script))
            server = _redirect(where, call, server, error, attempt)
            if attempt.asking:
                return server.send(call.with_asking(), timeout=timeout)[-1]
            return server.send(call, timeout=timeout)
        except ResponseError as another:
            error = another
        except RedisError as failure:
            raise _unavailable(where, failure) from failure


async def _asend_again(where: Topology, call: Call, server: Server, error: ResponseError) -> Any:
    """As `_send_again`, without blocking the event loop."""
    deadline, loaded = time.monotonic() + where.timeout, False
    while True:
        attempt = _next_attempt(where, call, server, error, deadline, loaded)
        await asyncio.sleep(attempt.pause)
        try:
            if attempt.load_script and call.script is not None:
                loaded = True
                await server.asend(load_call(call.script))
            server = _redirect(where, call, server, error, attempt)
            if attempt.asking:
                return (await server.asend(call.with_asking()))[-1]
            return await server.asend(call)
        except ResponseError as another:
            error = another
        except RedisError as failure:
            raise _unavailable(where, failure) from failure


def _next_attempt(
    where: Topology, call: Call, server: Server, error: ResponseError, deadline: float, loaded: bool
) -> NextAttempt:
    """Return how to send a call again; UnavailableError when that would not help."""
    if not where.clustered and isinstance(error, (AskError, MovedError, ClusterCrossSlotError)):
        wrong = UnavailableError(
            f"{server.name} is a node of a cluster, and the cache's client is for a single server: set OPTIONS"
            "['CONNECTION_FACTORY'] of the cache to 'rlaas_django.cluster.ConnectionFactory'."
        )
        server.breaker.log_error(wrong)
        raise wrong from error
    attempt = next_attempt(error, loaded=loaded, is_refund=call.is_refund)
    if attempt is None or time.monotonic() > deadline:
        server.breaker.log_error(error)
        raise _unavailable(where, error) from error
    return attempt


def _redirect(where: Topology, call: Call, server: Server, error: ResponseError, attempt: NextAttempt) -> Server:
    """Return the server for the next attempt."""
    if not isinstance(where, ClusterTopology):
        return server
    if attempt.address is not None:
        host, port = attempt.address
        target = where.server_at((host or server.address[0], port))
        if isinstance(error, MovedError):
            where.moved(error.slot_id, target)
    else:
        target = where.server_for(call.key) or server
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
    where = topology()
    if not commands:
        return []
    if server is not None:
        if server.breaker.error is not None:
            _require(where, server)
        return _run_on(server, commands)
    if where.clustered:
        return [execute(where, commands_call(_key(each), each), timeout=ADMIN_TIMEOUT) for each in commands]
    replies: Any = execute(where, commands_call("", *commands), timeout=ADMIN_TIMEOUT)
    return replies if len(commands) > 1 else [replies]


def _run_on(server: Server, commands: Sequence[Sequence[Word]]) -> list[Any]:
    try:
        replies: Any = server.send(commands_call("", *commands), timeout=ADMIN_TIMEOUT)
    except RedisError as error:
        server.breaker.log_error(error)
        raise UnavailableError(str(error)) from error
    return replies if len(commands) > 1 else [replies]


def _key(command: Sequence[Word]) -> str:
    """Return the key of a command."""
    if len(command) < 2:
        return ""
    return str(command[2] if command[0] == "MEMORY" else command[1])


def servers() -> list[Server]:
    """Return the servers that have keys; UnavailableError when none is known."""
    where = topology()
    if not where.servers():
        where.wait_until_known()
    if any(server.breaker.error is not None for server in where.servers()):
        where.refresh_soon()
    if not where.servers():
        raise UnavailableError(where.error)
    return where.servers()
