"""The only module that knows Redis: connections from the site's CACHES, and scripts run on them, sync and async.

A script that may have run is never sent again. So commands go over a connection of the pool and not through redis-py's
client, which repeats a call that timed out when the cache is configured to.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NamedTuple

import redis
import redis.asyncio
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import NoScriptError, RedisError, ResponseError

from . import conf
from .scripts import Script

Command = tuple[Any, ...]

# What our connections take over from the cache's pool; the rest is of redis-py's own making, or repeats calls.
_SHARED_OPTIONS = {
    *("host", "port", "path", "db", "username", "password", "credential_provider", "client_name", "protocol"),
    *("socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type"),
    *("encoding", "encoding_errors", "health_check_interval"),
    "server",  # fakeredis'
}

MOST_CONNECTIONS = 100  # per process, and per loop
LONGEST_WAIT = 5.0  # seconds for one of them, where the cache sets no socket timeout


class UnavailableError(Exception):
    """Redis could not be asked, or gave an error for an answer; the cause is what it said."""


class Call(NamedTuple):
    """A script with its keys and arguments, ready to be sent."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | int, ...]


def run(call: Call) -> Any:
    """Run a script on the server of the site's cache, and give its reply; UnavailableError when there is none."""
    try:
        return _run(call)
    except RedisError as error:
        raise UnavailableError(str(error)) from error


async def arun(call: Call) -> Any:
    """As `run`, natively async."""
    try:
        return await _arun(call)
    except RedisError as error:
        raise UnavailableError(str(error)) from error


def execute(commands: Sequence[Command]) -> list[Any]:
    """Run plain commands of one key each, in one round trip; for statistics and pages, not for decisions."""
    if not commands:
        return []
    try:
        pipeline: Any = client(conf.config().cache).pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = pipeline.execute()
    except RedisError as error:
        raise UnavailableError(str(error)) from error
    return replies


def _run(call: Call) -> Any:
    pool = _pool()
    connection: Any = pool.get_connection()
    try:
        dialogue = _dialogue(call)
        command = next(dialogue)
        while True:
            try:
                connection.send_command(*command)
                reply = connection.read_response()
            except ResponseError as error:
                command = dialogue.throw(error)
            else:
                command = dialogue.send(reply)
    except StopIteration as done:
        return done.value
    except ResponseError:
        raise  # the server answered, and the connection is in order
    except BaseException:
        connection.disconnect()  # a reply may still be on its way, and must not reach the next caller
        raise
    finally:
        pool.release(connection)


async def _arun(call: Call) -> Any:
    pool = await _async_pool()
    connection = await pool.get_connection()
    try:
        dialogue = _dialogue(call)
        command = next(dialogue)
        while True:
            try:
                await connection.send_command(*command)
                reply = await connection.read_response()
            except ResponseError as error:
                command = dialogue.throw(error)
            else:
                command = dialogue.send(reply)
    except StopIteration as done:
        return done.value
    except ResponseError:
        raise
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


def _dialogue(call: Call) -> Generator[Command, Any, Any]:
    """The commands that run a script. NOSCRIPT says that it did not run; then that server is given it, to keep."""
    command = ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    try:
        return (yield command)
    except NoScriptError:
        yield ("SCRIPT", "LOAD", call.script.text)
        return (yield command)


# One pool per alias for the process, and one per running loop, each with the entry of CACHES that it was made of:
# another entry (override_settings) means another pool.
_pools: dict[str, tuple[dict[str, Any], redis.ConnectionPool]] = {}
_async_pools: dict[asyncio.AbstractEventLoop, dict[str, tuple[dict[str, Any], Any, AsyncGenerator[None]]]] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held


os.register_at_fork(after_in_child=_renew_lock)


def _pool() -> redis.ConnectionPool:
    alias = conf.config().cache
    entry = conf.cache_entry(alias)
    known = _pools.get(alias)
    if known is None or known[0] is not entry:
        model = client(alias).connection_pool
        pool: Any = redis.BlockingConnectionPool
        known = _pools[alias] = entry, pool(connection_class=model.connection_class, **_options(model))
    return known[1]


def _options(model: redis.ConnectionPool) -> dict[str, Any]:
    """Of a pool of ours, like the cache's: a pool that is used up makes its callers wait. An error would be answered
    as a server that is down, and to ask often enough at once would be a way around every limit."""
    options = {
        option: value
        for option, value in model.connection_kwargs.items()
        if option in _SHARED_OPTIONS or option.startswith("ssl_")
    }
    return {
        **options,
        "max_connections": min(model.max_connections, MOST_CONNECTIONS),
        "timeout": options.get("socket_timeout") or LONGEST_WAIT,
    }


def client(alias: str) -> redis.Redis:
    """The raw client of a cache, for writing: django-redis' or Django's own."""
    entry = conf.cache_entry(alias)
    cache: Any = caches[alias]
    try:
        raw = cache.client.get_client(True) if hasattr(cache, "client") else cache._cache.get_client(write=True)
    except (AttributeError, NotImplementedError):
        raw = None
    if not isinstance(raw, redis.Redis):
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] names {alias!r}, whose backend {entry.get('BACKEND')!r} gives no Redis client; "
            f"use {conf.REDIS_BACKENDS}."
        )
    return raw


async def _async_pool() -> Any:
    loop = asyncio.get_running_loop()
    alias = conf.config().cache
    entry = conf.cache_entry(alias)
    known = _async_pools.get(loop, {}).get(alias)
    if known is None or known[0] is not entry:
        model = client(alias).connection_pool
        connection_class = _async_connection_class(model.connection_class)
        pool: Any = redis.asyncio.BlockingConnectionPool(connection_class=connection_class, **_options(model))
        guard = _closing_with_the_loop(loop, alias, pool)
        with _lock:
            for dead in [each for each in _async_pools if each.is_closed()]:
                del _async_pools[dead]
            _async_pools.setdefault(loop, {})[alias] = entry, pool, guard
        await anext(guard)
        return pool
    return known[1]


async def _closing_with_the_loop(loop: asyncio.AbstractEventLoop, alias: str, pool: Any) -> AsyncGenerator[None]:
    """Suspended until the loop shuts its generators down, which is the last chance to close a connection in order."""
    try:
        yield
    finally:
        with _lock:
            mine = _async_pools.get(loop, {})
            if alias in mine and mine[alias][1] is pool:
                del mine[alias]
            if not mine:
                _async_pools.pop(loop, None)
        await pool.disconnect()


def _async_connection_class(sync: Any) -> Any:
    if sync.__module__.partition(".")[0] == "fakeredis":
        import fakeredis

        return getattr(fakeredis, "FakeAsyncRedisConnection", None) or fakeredis.FakeAsyncConnection
    if issubclass(sync, redis.SSLConnection):
        return redis.asyncio.SSLConnection
    if issubclass(sync, redis.UnixDomainSocketConnection):
        return redis.asyncio.UnixDomainSocketConnection
    return redis.asyncio.Connection
