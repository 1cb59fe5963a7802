"""The only module that knows Redis: the site's cache, what is sent there, and what an answer means.

A call is a dialogue without I/O of its own, which `run` and `arun` carry out.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.sentinel import SentinelConnectionPool

from . import conf
from .cluster import ConnectionFactory
from .scripts import Script
from .server import Server, UnavailableError
from .sites import Address, Cluster, Dialogue, Sentinel, Site
from .wire import Batch, Message, pack

__all__ = ["Call", "Server", "UnavailableError", "arun", "call", "client", "execute", "nodes", "run", "site"]

Command = tuple[Any, ...]

# What our connections take over from the cache's; the rest is of redis-py's own making, or repeats calls.
_SHARED_OPTIONS = {
    *("host", "port", "path", "db", "username", "password", "credential_provider", "client_name"),
    *("socket_keepalive", "socket_keepalive_options", "socket_type", "encoding", "encoding_errors"),
    "server",  # fakeredis'
}

MOST_CONNECTIONS = 100  # per process and server
PAUSE = 0.003  # seconds between two looks for a slot that is on its way from node to node
ASKING = pack(("ASKING",)).packed


class Runnable(Message, Protocol):
    """A script with its keys and arguments, ready to be sent."""

    @property
    def site(self) -> Site: ...
    @property
    def script(self) -> Script: ...
    @property
    def key(self) -> str:
        """One of its keys; all are in the same slot."""


class Call(NamedTuple):
    """Of any script."""

    site: Site
    script: Script
    key: str
    packed: bytes
    replies: int = 1


def call(script: Script, keys: Sequence[str], args: Iterable[str | int]) -> Call:
    return Call(site(), script, keys[0], pack(("EVALSHA", script.sha, len(keys), *keys, *args)).packed)


def run(call: Runnable, *, patient: bool = False) -> Any:
    """Run a script where its keys are, and give its reply; UnavailableError when there is none."""
    server = call.site.master or call.site.server(call.key)
    if server is None or server.breaker.error is not None:
        return _carry_out(_dialogue(call.site, call.key, call, call.script), patient)
    try:
        return server.send(call, patient=patient)
    except ResponseError as error:
        return _carry_out(_dialogue(call.site, call.key, call, call.script, after=(server, error)), patient)
    except RedisError as error:
        server.breaker.complain(error)
        raise UnavailableError(str(error)) from error


async def arun(call: Runnable) -> Any:
    """As `run`, natively async."""
    server = call.site.master or call.site.server(call.key)
    if server is None or server.breaker.error is not None:
        return await _acarry_out(_dialogue(call.site, call.key, call, call.script))
    try:
        return await server.asend(call)
    except ResponseError as error:
        return await _acarry_out(_dialogue(call.site, call.key, call, call.script, after=(server, error)))
    except RedisError as error:
        server.breaker.complain(error)
        raise UnavailableError(str(error)) from error


def execute(commands: Sequence[Command], node: Server | None = None) -> list[Any]:
    """Run plain commands of one key each, in one round trip per slot; those without a key name a node.

    For statistics and pages, not for decisions.
    """
    here = site()
    if not commands:
        return []
    if node is not None or not here.clustered:
        whole = pack(*commands)
        key = str(commands[0][1]) if len(commands[0]) > 1 else ""
        replies = _carry_out(_dialogue(here, key, whole, node=node), patient=True)
        return replies if whole.replies > 1 else [replies]
    replies = []
    for command in commands:
        key = str(command[2] if command[0] == "MEMORY" else command[1])
        replies.append(_carry_out(_dialogue(here, key, pack(command)), patient=True))
    return replies


def nodes() -> list[Server]:
    """The servers that have keys."""
    here = site()
    if not here.servers() or any(server.breaker.error is not None for server in here.servers()):
        _carry_out(here.find(), patient=False)
    return here.servers()


def _carry_out(dialogue: Dialogue, patient: bool) -> Any:
    server = None
    try:
        server, what = next(dialogue)
        while True:
            try:
                reply = server.send(what, patient=patient) if server else time.sleep(what)  # type: ignore[func-returns-value]
            except RedisError as error:
                server, what = dialogue.throw(error)
            else:
                server, what = dialogue.send(reply)
    except StopIteration as done:
        return done.value
    except (RedisError, RedisClusterException) as error:
        if server is not None:
            server.breaker.complain(error)
        raise UnavailableError(str(error)) from error


async def _acarry_out(dialogue: Dialogue) -> Any:
    server = None
    try:
        server, what = next(dialogue)
        while True:
            try:
                reply = await (server.asend(what) if server else asyncio.sleep(what))
            except RedisError as error:
                server, what = dialogue.throw(error)
            else:
                server, what = dialogue.send(reply)
    except StopIteration as done:
        return done.value
    except (RedisError, RedisClusterException) as error:
        if server is not None:
            server.breaker.complain(error)
        raise UnavailableError(str(error)) from error


def _dialogue(
    here: Site,
    key: str,
    message: Message,
    script: Script | None = None,
    node: Server | None = None,
    after: tuple[Server, ResponseError] | None = None,
) -> Dialogue:
    """Send a message where its key is. Every error that leads to another attempt says that nothing was run."""
    asking = False
    if after is None:
        if node is None:
            server = yield from _reach(here, key, here.server(key))
        elif node.breaker.admits():
            server = node
        else:
            raise UnavailableError(node.breaker.error)
    else:
        server, asking = yield from _another_way(here, key, after[0], asking, script, after[1])
    ends = time.monotonic() + server.timeout
    while True:
        try:
            if not asking:
                return (yield server, message)
            return (yield server, Batch(ASKING + message.packed, message.replies + 1))[-1]
        except ResponseError as error:
            if time.monotonic() > ends:
                raise
            server, asking = yield from _another_way(here, key, server, asking, script, error)


def _another_way(
    here: Site, key: str, server: Server, asking: bool, script: Script | None, error: ResponseError
) -> Dialogue:
    """After an answer that says that nothing was run: to whom to send it next, and whether to say ASKING there."""
    if isinstance(error, NoScriptError) and script is not None:
        yield server, pack(("SCRIPT", "LOAD", script.text))  # to keep: what EVAL brings may be dropped again
        return server, asking
    if isinstance(error, (AskError, MovedError, ClusterCrossSlotError)) and not isinstance(here, Cluster):
        wrong = UnavailableError(
            f"{server.name} is a node of a cluster, and the cache's client is for a single server: set OPTIONS"
            "['CONNECTION_FACTORY'] of the cache to 'rlaas_django.cluster.ConnectionFactory'."
        )
        server.breaker.complain(wrong)
        raise wrong from error
    if isinstance(here, Cluster):
        if isinstance(error, MovedError):  # before ASK, as redis-py has it for a kind of that
            yield from here.moved(error.slot_id, here.at(error.host, error.port, server))
            return (yield from _reach(here, key, here.server(key))), False
        # A refund of the fixed window names a key that there never is: its counter may still be where it was.
        if isinstance(error, AskError) and not (script and script.name == "refund"):
            there = here.at(error.host, error.port, server)
            if not there.breaker.admits():
                raise UnavailableError(there.breaker.error)
            return there, True
        if isinstance(error, (AskError, TryAgainError)):
            yield None, PAUSE
            return (yield from _reach(here, key, here.server(key))), False
    server.breaker.complain(error)
    raise error


def _reach(here: Site, key: str, server: Server | None) -> Dialogue:
    """A server that may be asked for a key. Who is to try one that did not answer looks first whether another has
    taken its place; where that takes long, the next one tries."""
    if server is not None and server.breaker.error is None:
        return server
    if server is not None and not server.breaker.admits():
        raise UnavailableError(server.breaker.error)
    started = time.monotonic()
    try:
        yield from here.find()
    except UnavailableError:
        if server is None or time.monotonic() - started > server.timeout / 2:
            raise
    found = here.server(key)
    if found is None:
        raise UnavailableError("No node of the cluster has the key's slot.")
    if found is not server and not found.breaker.admits():
        raise UnavailableError(found.breaker.error)
    return found


# One per alias for the process, with what it was made of: another entry of CACHES (override_settings) is another site.
_sites: dict[str, tuple[dict[str, Any], float, Site]] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held


os.register_at_fork(after_in_child=_renew_lock)


def site() -> Site:
    config = conf.config()
    alias, timeout = config.cache, config.timeout
    entry = conf.cache_entry(alias)
    known = _sites.get(alias)
    if known is not None and known[0] is entry and known[1] == timeout:
        return known[2]
    with _lock:
        known = _sites.get(alias)
        if known is None or known[0] is not entry or known[1] != timeout:
            known = _sites[alias] = entry, timeout, _site(alias, entry, timeout)
        return known[2]


def connection_options(alias: str) -> dict[str, Any]:
    """What the cache's own connections are made of; nothing is asked of a server."""
    entry = conf.cache_entry(alias)
    factory = _cluster_factory(entry)
    if factory is not None:
        return factory.node_options(_locations(entry)[0])
    options: dict[str, Any] = client(alias).connection_pool.connection_kwargs
    return options


def _cluster_factory(entry: dict[str, Any]) -> ConnectionFactory | None:
    options = entry.get("OPTIONS") or {}
    factory = import_string(options["CONNECTION_FACTORY"]) if options.get("CONNECTION_FACTORY") else None
    return factory(options) if factory and issubclass(factory, ConnectionFactory) else None


def _locations(entry: dict[str, Any]) -> list[str]:
    location = entry["LOCATION"]
    return [*location] if isinstance(location, (list, tuple, set)) else str(location).split(",")


def _site(alias: str, entry: dict[str, Any], timeout: float) -> Site:
    factory = _cluster_factory(entry)
    if factory is not None:
        return _cluster([factory.node_options(url) for url in _locations(entry)], timeout)
    pool: Any = client(alias).connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return Site(_server(pool.connection_class, pool.connection_kwargs, timeout, pool.max_connections))

    kind = redis.SSLConnection if issubclass(pool.connection_class, redis.SSLConnection) else redis.Connection

    def master(address: Address) -> Server:
        return _server(kind, {**pool.connection_kwargs, **_at(address)}, timeout, pool.max_connections)

    manager: Any = pool.sentinel_manager
    sentinels = [each.connection_pool for each in manager.sentinels]
    return Sentinel(
        pool.service_name,
        [_server(each.connection_class, each.connection_kwargs, timeout) for each in sentinels],
        master,
    )


def _cluster(seeds: list[dict[str, Any]], timeout: float) -> Cluster:
    kind = seeds[0].get("connection_class", redis.Connection)
    most = seeds[0].get("max_connections", MOST_CONNECTIONS)

    def node(address: Address) -> Server:
        return _server(kind, {**seeds[0], **_at(address)}, timeout, most)

    return Cluster([node((seed.get("host", "localhost"), int(seed.get("port", 6379)))) for seed in seeds], node)


def _at(address: Address) -> dict[str, Any]:
    return {"host": address[0], "port": address[1]}


def _server(kind: Any, options: dict[str, Any], timeout: float, most: int = MOST_CONNECTIONS) -> Server:
    shared = {
        option: value for option, value in options.items() if option in _SHARED_OPTIONS or option.startswith("ssl_")
    }
    return Server(kind, {**shared, "protocol": 2}, timeout, min(most, MOST_CONNECTIONS))


def client(alias: str) -> Any:
    """The raw client of a cache, for writing: django-redis' or Django's own."""
    entry = conf.cache_entry(alias)
    cache: Any = caches[alias]
    try:
        raw = cache.client.get_client(True) if hasattr(cache, "client") else cache._cache.get_client(write=True)
    except (AttributeError, NotImplementedError):
        raw = None
    if not isinstance(raw, (redis.Redis, redis.RedisCluster)):
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] names {alias!r}, whose backend {entry.get('BACKEND')!r} gives no Redis client; "
            f"use {conf.REDIS_BACKENDS}."
        )
    return raw
