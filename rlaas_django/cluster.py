"""Redis Cluster for django-redis, which has no client for it.

>>> CACHES = {"default": {
...     "BACKEND": "django_redis.cache.RedisCache",
...     "LOCATION": ["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"],
...     "OPTIONS": {"CONNECTION_FACTORY": "rlaas_django.cluster.ConnectionFactory"},
... }}
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from django_redis import pool
from redis import RedisCluster
from redis.connection import parse_url

__all__ = ["ConnectionFactory"]


class ConnectionFactory(pool.ConnectionFactory):  # type: ignore[misc]
    """Gives the cache one cluster client per URL and process.

    The limiter takes the options of the nodes' connections from it.
    """

    clients: ClassVar[dict[tuple[int, str], RedisCluster]] = {}

    def connect(self, url: str) -> RedisCluster:
        key = (os.getpid(), url)
        if key not in self.clients:
            options = {**self._parameters(url), **self.redis_client_cls_kwargs}
            client = RedisCluster.from_url(url, **options)
            self.clients.setdefault(key, client)  # another thread may have been first
        return self.clients[key]

    def disconnect(self, connection: RedisCluster) -> None:
        connection.disconnect_connection_pools()  # type: ignore[no-untyped-call]

    def node_options(self, url: str) -> dict[str, Any]:
        """Return the options of a connection to the node at this URL; send nothing."""
        address = parse_url(url)  # type: ignore[no-untyped-call]
        return {**address, **self._parameters(url)}

    def _parameters(self, url: str) -> dict[str, Any]:
        parameters = {**self.make_connection_params(url), **self.pool_cls_kwargs}
        parameters.pop("url", None)
        parameters.pop("parser_class", None)
        return parameters
