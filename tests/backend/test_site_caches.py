"""The limiter on, and beside, every cache of a site: its keys and values are the site's own, and stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis
from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from rlaas_django import Policy, acheck, check, peek
from rlaas_django.testing import reset_all

from tests.support.internals import redis_client

POLICY = Policy("p", "2/m", key="ip")
OPTIONS = {"KEY_PREFIX": "shop", "VERSION": 7, "TIMEOUT": 60}
VALUE = {"cart": [1, 2, 3], "name": "ä"}
BACKENDS = {
    "django-redis": {"BACKEND": "django_redis.cache.RedisCache", **OPTIONS},
    "django-redis, JSON": {
        "BACKEND": "django_redis.cache.RedisCache",
        "OPTIONS": {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
        **OPTIONS,
    },
    "django-redis, compressed": {
        "BACKEND": "django_redis.cache.RedisCache",
        "OPTIONS": {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"},
        **OPTIONS,
    },
    "Django": {"BACKEND": "django.core.cache.backends.redis.RedisCache", **OPTIONS},
    "django-valkey": {"BACKEND": "django_valkey.cache.ValkeyCache", **OPTIONS},
    "django-valkey, JSON": {
        "BACKEND": "django_valkey.cache.ValkeyCache",
        "OPTIONS": {"SERIALIZER": "django_valkey.serializers.json.JSONSerializer"},
        **OPTIONS,
    },
}


@pytest.fixture(params=BACKENDS)
def site_cache(request, settings, own, configure):
    """The site's cache, on a server of the test's own, which the limiter uses, too."""
    if "valkey" in request.param:
        pytest.importorskip("django_valkey")
    entry = {**BACKENDS[request.param], "LOCATION": own.url}
    settings.CACHES = {**settings.CACHES, "site": entry}
    configure(CACHE="site")
    return caches["site"]


def test_the_limiter_uses_the_cache_of_the_site_and_leaves_its_values(site_cache, clock):
    site_cache.set("cart", VALUE)
    assert [check("203.0.113.9", POLICY).allowed for _ in range(3)] == [True, True, False]
    assert not peek("203.0.113.9", POLICY).degraded
    assert site_cache.get("cart") == VALUE
    keys = sorted(redis_client("site").keys())
    assert keys == [b"rlaas:rate_limit:p/ip=203.0.113.9", b"shop:7:cart"]


async def test_and_so_do_async_checks(site_cache, clock):
    await sync_to_async(site_cache.set)("cart", VALUE)
    assert [(await acheck("203.0.113.9", POLICY)).allowed for _ in range(3)] == [True, True, False]
    assert await sync_to_async(site_cache.get)("cart") == VALUE


def test_django_has_no_cache_of_the_limiter_to_close_after_a_request(site_cache, clock):
    def opened_by_a_decision():
        assert check("203.0.113.9", POLICY).allowed
        return caches.all(initialized_only=True)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(opened_by_a_decision).result() == []


class OwnParser(redis.connection.DefaultParser):
    """A parser that the site chooses, and that counts the replies."""

    replies = 0

    def read_response(self, *args, **options):
        OwnParser.replies += 1
        return super().read_response(*args, **options)


def choose_parser(connection):
    connection.set_parser(OwnParser)
    connection.on_connect()


class OwnConnection(redis.Connection):
    def __init__(self, **options):
        super().__init__(**{**options, "parser_class": OwnParser})


@pytest.mark.parametrize(
    "options",
    [{"parser_class": OwnParser}, {"redis_connect_func": choose_parser}, {"connection_class": OwnConnection}],
    ids=["option", "function", "class"],
)
def test_replies_are_read_by_the_parser_that_the_site_chooses(target, use_url, clock, options):
    use_url(target.node.url, **options)
    before = OwnParser.replies
    assert [check("203.0.113.9", POLICY).allowed for _ in range(3)] == [True, True, False]
    assert not check("203.0.113.9", POLICY).degraded
    assert OwnParser.replies >= before + 4


def test_emptying_the_counters_leaves_the_values_of_the_site(site_cache, clock):
    site_cache.set("cart", VALUE)
    check("203.0.113.9", POLICY)
    reset_all()
    assert peek("203.0.113.9", POLICY).current_count == 0
    assert site_cache.get("cart") == VALUE


@pytest.mark.parametrize("pool", [None, SimpleNamespace(connection_class=type("SentinelManagedConnection", (), {}))])
def test_clusters_and_sentinels_of_django_valkey_are_refused_with_what_to_use(monkeypatch, pool):
    client = type("Client", (), {"__module__": "valkey.client", "connection_pool": pool})()
    monkeypatch.setattr(caches["default"].client, "get_client", lambda write: client)
    with pytest.raises(ImproperlyConfigured, match="gives no Redis client; use django_redis"):
        redis_client("default")
