"""From the site's cache to its Redis servers: the django-redis client, the scripts registered with it, the topology."""

from __future__ import annotations

from typing import Any

import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django_redis import get_redis_connection
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from .. import conf
from ..cluster import ConnectionFactory
from . import scripts
from .connection import ASYNC_CLASSES, MAX_CONNECTIONS, ConnectionOptions
from .server import Server
from .topology import ClusterTopology, SentinelTopology, Topology


def redis_client(alias: str) -> Any:
    """Return the raw client of a cache, for writing; one of a cluster connects at once."""
    entry = conf.cache_entry(alias)
    try:
        client: Any = get_redis_connection(alias)
    except NotImplementedError:  # not django-redis, or its ShardClient
        # Django's own RedisCache has no public way to its client.
        cache: Any = getattr(caches[alias], "_cache", None)
        client = cache.get_client(write=True) if hasattr(cache, "get_client") else None
    if type(client).__module__.startswith("valkey."):
        client = _as_redis_client(client)
    if not isinstance(client, (redis.Redis, redis.RedisCluster)):
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] names {alias!r}, whose backend {entry.get('BACKEND')!r} gives no Redis client; "
            f"use {conf.REDIS_BACKENDS}."
        )
    return client


_CONNECTION_CLASSES = {each.__name__: each for each, _ in ASYNC_CLASSES}


def _as_redis_client(client: Any) -> redis.Redis | None:
    """Return a redis-py client for the one server of a valkey-py client (django-valkey); None if there are more."""
    pool = getattr(client, "connection_pool", None)  # a cluster has none
    connection_class = _CONNECTION_CLASSES.get(
        getattr(pool, "connection_class", type).__name__
    )
    if pool is None or connection_class is None:  # Sentinel's, or the site's own
        return None
    # What valkey-py adds to the site's options is of its own classes.
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name not in ("parser_class", "retry")
    }
    return redis.Redis(
        connection_pool=redis.ConnectionPool(
            connection_class, pool.max_connections, **options
        )
    )


def registered_scripts(alias: str) -> dict[str, Any]:
    """Register the Lua scripts with a cache's client, and return them by name.

    Decisions call them by their SHA-1 over connections of their own (pool.py says why); a server that does not know one
    yet replies NOSCRIPT, and gets it by SCRIPT LOAD.
    """
    client = redis_client(alias)
    return {
        script.name: client.register_script(script.text) for script in scripts.SCRIPTS
    }


def topology(alias: str | None = None) -> Topology:
    """Return where the servers of a cache are; left out: of RATE_LIMITER['CACHE']."""
    config = conf.config()
    alias = alias or config.cache
    topologies: dict[str, Topology] = config.derived.topologies
    # Two threads may make one at the same time: it has no connections yet,
    # and both use the first.
    return topologies.get(alias) or topologies.setdefault(
        alias, make_topology(alias, config.timeout)
    )


def connection_options(alias: str) -> dict[str, Any]:
    """Return the options of the cache's own connections; nothing is sent."""
    nodes = _cluster_nodes(alias)
    options: dict[str, Any] = (
        nodes[0] if nodes else redis_client(alias).connection_pool.connection_kwargs
    )
    return options


def make_topology(alias: str, timeout: float) -> Topology:
    """Return where the servers of a cache are, with connections and circuit breakers of their own."""
    if nodes := _cluster_nodes(alias):
        maximum = nodes[0].get("max_connections", MAX_CONNECTIONS)
        options = ConnectionOptions.of(
            nodes[0].get("connection_class", redis.Connection), nodes[0], maximum
        )
        seeds = [
            (str(node.get("host", "localhost")), int(node.get("port", 6379)))
            for node in nodes
        ]
        return ClusterTopology(options, seeds, timeout)
    pool: Any = redis_client(alias).connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return _sentinel(pool, timeout)
    options = ConnectionOptions.of(
        pool.connection_class, pool.connection_kwargs, pool.max_connections
    )
    return Topology(Server(options, timeout), timeout)


def _sentinel(pool: Any, timeout: float) -> Topology:
    secure = issubclass(pool.connection_class, redis.SSLConnection)
    connection_class = redis.SSLConnection if secure else redis.Connection
    master = ConnectionOptions.of(
        connection_class, pool.connection_kwargs, pool.max_connections
    )
    manager = pool.sentinel_manager
    addresses = [
        client.connection_pool.connection_kwargs for client in manager.sentinels
    ]
    limits = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(each["host"], each["port"]) for each in addresses],
        min_other_sentinels=manager.min_other_sentinels,
        sentinel_kwargs={**manager.sentinel_kwargs, **limits},
    )
    return SentinelTopology(pool.service_name, sentinel, master, timeout)


def _cluster_nodes(alias: str) -> list[dict[str, Any]]:
    """Return the connection options of each node that LOCATION names; none where the cache is not of a cluster."""
    entry = conf.cache_entry(alias)
    options = entry.get("OPTIONS") or {}
    factory = (
        import_string(options["CONNECTION_FACTORY"])
        if options.get("CONNECTION_FACTORY")
        else None
    )
    if factory is None or not issubclass(factory, ConnectionFactory):
        return []
    location = entry["LOCATION"]
    urls = (
        location
        if isinstance(location, (list, tuple, set))
        else str(location).split(",")
    )
    return [factory(options).node_options(url) for url in urls]
