"""Runs the tests of the core on a Redis Cluster: `python -m tests.support.on_cluster`, with arguments of pytest.

A plugin of pytest: it starts a cluster, puts the cache on it, and shows tests that look into Redis the keys without
their hash tags, as they are on a single server.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import redis

CORE = [f"tests/limiter/test_{module}.py" for module in ("algorithms", "limiter", "source_documents", "concurrency")]
# That a script keeps to its keys' slot is shown by all the others: a cluster refuses any other key.
NOT_HERE = {
    "test_expired_entries_are_read_once": "counts the commands of a server of its own, by INFO",
    "test_wrong_5_the_scripts_touch_only_their_keys_and_extensions_of_them": "watches a server of its own, by MONITOR",
}
ALL = redis.RedisCluster.PRIMARIES
ROOT = Path(__file__).parents[2]


def entry(urls: list[str], **options: object) -> dict[str, object]:
    """The cache's settings."""
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": urls,
        "OPTIONS": {"CONNECTION_FACTORY": "rlaas_django.cluster.ConnectionFactory", **options},
    }


class Untagged:
    """A cluster's client that takes and shows our keys without their hash tags."""

    def __init__(self, client: redis.RedisCluster) -> None:
        self.client = client

    def __getattr__(self, name: str):
        method = getattr(self.client, name)
        return lambda *args, **options: plain(method(*map(tagged, args), **options))

    # redis-py sends these to one node by default.

    def keys(self, pattern: str = "*") -> list[bytes]:
        return plain(self.client.keys(pattern, target_nodes=ALL))

    def dbsize(self) -> int:
        return self.client.dbsize(target_nodes=ALL)

    def script_flush(self) -> None:
        self.client.execute_command("SCRIPT FLUSH", target_nodes=ALL)

    def scan_iter(self, pattern: str, **options):
        return map(plain, self.client.scan_iter(pattern, **options))


def tagged(key):
    """`rlaas:rate_limit:p/{alice}:log` for `rlaas:rate_limit:p/alice:log`."""
    text = key.decode() if isinstance(key, bytes) else key
    if not isinstance(text, str) or not text.startswith("rlaas:rate_limit:"):
        return key
    return re.sub(r"^(rlaas:rate_limit:(?:[^/]*/)?)([^:]*)", r"\1{\2}", text)


def plain(reply):
    if isinstance(reply, list):
        return [plain(each) for each in reply]
    return re.sub(rb"[{}]", b"", reply) if isinstance(reply, bytes) and reply.startswith(b"rlaas:") else reply


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    from django.conf import settings
    from django.test import override_settings

    from tests.support import internals
    from tests.support.deployments import Cluster

    cluster = Cluster(node_timeout=5000)  # none is to fail over because the machine is busy
    config.add_cleanup(cluster.stop)
    override_settings(CACHES={**settings.CACHES, "default": entry(cluster.urls)}).enable()
    internals.wrap_client = lambda client: Untagged(client) if isinstance(client, redis.RedisCluster) else client


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [item for item in items if item.originalname in NOT_HERE or "fakeredis" in item.name]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]


def command(*arguments: str) -> list[str]:
    options = ["-q", "-p", "tests.support.on_cluster", "-p", "no:cacheprovider", "-m", "not slow"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


if __name__ == "__main__":
    import subprocess

    sys.exit(subprocess.run(command(*(sys.argv[1:] or CORE)), cwd=ROOT).returncode)
