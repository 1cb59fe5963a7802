"""The peers that can be asked natively from async code; and the documents' script by redis.asyncio."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import redis.asyncio

from . import server
from .contender import Answer, Rate
from .peers import DOCUMENTS_SCRIPT

AsyncAsk = Callable[[str], Awaitable[Answer]]


def documents(rate: Rate) -> AsyncAsk:
    script = redis.asyncio.Redis.from_url(server.url()).register_script(DOCUMENTS_SCRIPT)

    async def ask(identity: str) -> Answer:
        key = f"documents:{rate.limit}-{rate.window}:{identity}"
        allowed, count, ttl = await script([key], [time.time_ns() // 1_000_000, rate.window, rate.limit])
        return allowed == 1, None, rate.limit - count, ttl

    return ask


def throttled(rate: Rate) -> AsyncAsk:
    from throttled.asyncio import RedisStore, Throttled, per_duration

    quota = per_duration(timedelta(seconds=rate.window), rate.limit)
    prefix = f"throttled-{rate.limit}-{rate.window}"
    throttle = Throttled(using="gcra", quota=quota, store=RedisStore(server=server.url()), key_prefix=prefix)

    async def ask(identity: str) -> Answer:
        result = await throttle.limit(identity)
        return not result.limited, result.state.retry_after, result.state.remaining, result.state.reset_after

    return ask


def limits(rate: Rate) -> AsyncAsk:
    from limits import RateLimitItemPerSecond
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import MovingWindowRateLimiter

    storage = RedisStorage(f"async+{server.url()}", implementation="redispy")
    limiter, item = MovingWindowRateLimiter(storage), RateLimitItemPerSecond(rate.limit, rate.window)

    async def ask(identity: str) -> Answer:
        allowed = await limiter.hit(item, identity)
        stats = await limiter.get_window_stats(item, identity)
        return allowed, stats.reset_time - time.time(), stats.remaining

    return ask


def smart(rate: Rate) -> AsyncAsk:
    from django_smart_ratelimit.backends import get_async_backend

    backend = get_async_backend("redis")

    async def ask(identity: str) -> Answer:
        count = await backend.aincr(identity, rate.window)
        return count <= rate.limit, None, rate.limit - count

    return ask


def fast(rate: Rate) -> AsyncAsk:
    from django_fast_ratelimit import Action, aget_ratelimit

    async def ask(identity: str) -> Answer:
        key = identity.encode()
        found = await aget_ratelimit(group="bench", key=key, rate=tuple(rate), action=Action.INCREASE)
        return not found.request_limit, found.end - time.time(), found.limit, found.count

    return ask
