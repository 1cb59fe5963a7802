"""The django-redis client of the site's cache, and the scripts registered with it.

From the same cache: where its Redis servers are, and how to connect to them.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import redis
from django.core.cache import caches
from django.core.cache.backends.db import BaseDatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.memcached import BaseMemcachedCache
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django_redis import get_redis_connection
from redis.sentinel import Sentinel, SentinelConnectionPool

from .. import conf
from ..cluster import ConnectionFactory
from .connection import (
    CONNECTION_CLASSES,
    MAX_CONNECTIONS,
    ConnectionOptions,
    timeouts,
)
from .process_store import ProcessServer
from .scripts import SCRIPTS
from .server import Server
from .topology import ClusterTopology, SentinelTopology, Topology

REDIS_BACKENDS = (
    "django_redis.cache.RedisCache, django.core.cache.backends.redis.RedisCache or "
    "django_valkey.cache.ValkeyCache"
)
# Those of Django that are not on Redis.
_OTHER_BACKENDS = (
    BaseDatabaseCache,
    BaseMemcachedCache,
    DummyCache,
    FileBasedCache,
    LocMemCache,
)


def counts_in_process(alias: str | None = None) -> bool:
    """Return whether decisions by a cache are counted in this process.

    By default the cache is RATE_LIMITER['CACHE']. They are where its backend is one of
    Django's own that is not Redis; whatever else is wrong with a cache is an error.
    """
    alias = alias or conf.config().cache
    try:
        backend = import_string(str(conf.cache_entry(alias).get("BACKEND")))
        return issubclass(backend, _OTHER_BACKENDS)
    except Exception:  # noqa: BLE001  (to make the client says what is wrong)
        return False


def redis_client(alias: str) -> Any:
    """Return the raw client of a cache, for writing.

    One of a cluster connects at once.
    """
    entry = conf.cache_entry(alias)
    # In a context of its own: Django closes the caches of a request's context after it,
    # which takes 21,000 instructions of a request that has not opened any.
    client: Any = copy_context().run(_open_client, alias)
    if type(client).__module__.startswith("valkey."):
        client = _as_redis_client(client)

    if not isinstance(client, (redis.Redis, redis.RedisCluster)):
        raise ImproperlyConfigured(
            f"{entry.get('BACKEND')!r} gives no Redis client; use {REDIS_BACKENDS}."
        )
    return client


def registered_scripts(alias: str) -> dict[str, Any]:
    """Register the Lua scripts with a cache's client, and return them by name.

    Decisions send the SHA-1 of these scripts over connections of their own (pool.py
    says why). A server that does not know one yet replies NOSCRIPT, and gets it by
    SCRIPT LOAD.
    """
    client = redis_client(alias)
    return {script.name: client.register_script(script.text) for script in SCRIPTS}


def topology(alias: str | None = None) -> Topology:
    """Return where the servers of a cache are.

    By default the cache is RATE_LIMITER['CACHE'].
    """
    config = conf.config()
    alias = alias or config.cache
    topologies: dict[str, Topology] = config.derived.topologies
    known = topologies.get(alias)
    if known is not None:
        return known
    # Of two that threads make at the same time, both use the first; the other has no
    # connections yet.
    return topologies.setdefault(alias, _make_topology(alias, config.timeout))


def _make_topology(alias: str, timeout: float) -> Topology:
    """Return where the servers of a cache are, with connections of their own."""
    if counts_in_process(alias):
        server: Any = ProcessServer(alias, timeout)
        return Topology(server, timeout)
    if nodes := _cluster_nodes(alias):
        return _cluster(nodes, timeout)

    pool: Any = redis_client(alias).connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return _sentinel(pool, timeout)

    options = ConnectionOptions.of(
        pool.connection_class, pool.connection_kwargs, pool.max_connections
    )
    return Topology(Server(options, timeout), timeout)


def connection_options(alias: str) -> dict[str, Any]:
    """Return the options of the cache's own connections.

    Nothing is sent.
    """
    if nodes := _cluster_nodes(alias):
        return nodes[0]
    options: dict[str, Any] = redis_client(alias).connection_pool.connection_kwargs
    return options


def _cluster(nodes: list[dict[str, Any]], timeout: float) -> Topology:
    options = [
        ConnectionOptions.of(
            node.get("connection_class", redis.Connection),
            node,
            node.get("max_connections", MAX_CONNECTIONS),
        )
        for node in nodes
    ]
    return ClusterTopology(options[0], [node.address for node in options], timeout)


def _cluster_nodes(alias: str) -> list[dict[str, Any]]:
    """Return the connection options of each node that LOCATION names.

    There are none if the cache is not of a cluster.
    """
    entry = conf.cache_entry(alias)
    options = entry.get("OPTIONS") or {}
    path = options.get("CONNECTION_FACTORY")
    factory: Any = import_string(path) if path else object
    if not issubclass(factory, ConnectionFactory):
        return []

    urls = entry["LOCATION"]
    if isinstance(urls, str):
        urls = urls.split(",")
    return [factory(options).node_options(url) for url in urls]


def _sentinel(pool: Any, timeout: float) -> Topology:
    connection_class: type = redis.Connection
    if issubclass(pool.connection_class, redis.SSLConnection):
        connection_class = redis.SSLConnection
    master = ConnectionOptions.of(
        connection_class, pool.connection_kwargs, pool.max_connections
    )

    manager = pool.sentinel_manager
    clients = [client.connection_pool.connection_kwargs for client in manager.sentinels]
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(options["host"], options["port"]) for options in clients],
        min_other_sentinels=manager.min_other_sentinels,
        sentinel_kwargs={**manager.sentinel_kwargs, **timeouts(timeout)},
    )
    return SentinelTopology(pool.service_name, sentinel, master, timeout)


def _open_client(alias: str) -> Any:
    """Open a cache, and return its client; None where it gives none."""
    try:
        return get_redis_connection(alias)
    except NotImplementedError:  # not django-redis, or its ShardClient
        return _django_client(alias)


def _django_client(alias: str) -> Any:
    """Return the client of Django's own RedisCache, which has no public way to it."""
    cache: Any = getattr(caches[alias], "_cache", None)
    return cache.get_client(write=True) if hasattr(cache, "get_client") else None


def _as_redis_client(client: Any) -> redis.Redis | None:
    """Return a redis-py client for the server of a valkey-py client (django-valkey).

    None for a cluster, Sentinels, or a connection class of the site's own.
    """
    pool = getattr(client, "connection_pool", None)  # a cluster has none
    name = getattr(pool, "connection_class", type).__name__
    classes = {known.__name__: known for known in CONNECTION_CLASSES}
    if pool is None or name not in classes:
        return None

    # What valkey-py adds to the site's options is of its own classes.
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name not in ("parser_class", "retry")
    }
    return redis.Redis(
        connection_pool=redis.ConnectionPool(
            classes[name], pool.max_connections, **options
        )
    )
