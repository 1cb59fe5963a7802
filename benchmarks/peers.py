"""The peers, each asked as its documentation says, with the figures that headers need; and the documents' script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from . import server
from .contender import BESIDE, PEER, Answer, Ask, Contender, Rate, for_each_rate

# As the source documents have it.
DOCUMENTS_SCRIPT = """
local key   = KEYS[1]
local now   = tonumber(ARGV[1])
local window = tonumber(ARGV[2]) * 1000
local limit = tonumber(ARGV[3])
redis.call("ZREMRANGEBYSCORE", key, 0, now - window)
local count = redis.call("ZCARD", key)
if count < limit then
    local member = tostring(now) .. "-" .. math.random()
    redis.call("ZADD", key, now, member)
    redis.call("PEXPIRE", key, window * 2)
    return {1, count, window/1000}
else
    redis.call("PEXPIRE", key, window * 2)
    return {0, count, window/1000}
end
"""


def documents(rate: Rate) -> Ask:
    script = server.client().register_script(DOCUMENTS_SCRIPT)

    def ask(identity: str) -> Answer:
        key = f"documents:{rate.limit}-{rate.window}:{identity}"
        allowed, count, ttl = script([key], [time.time_ns() // 1_000_000, rate.window, rate.limit])
        return allowed == 1, None, rate.limit - count, ttl

    return ask


def throttled(algorithm: str, rate: Rate) -> Ask:
    from throttled import RedisStore, Throttled, per_duration

    throttle = Throttled(
        using=algorithm,
        quota=per_duration(timedelta(seconds=rate.window), rate.limit),
        store=RedisStore(server=server.url()),
        key_prefix=f"throttled-{rate.limit}-{rate.window}",
    )

    def ask(identity: str) -> Answer:
        result = throttle.limit(identity)
        state = result.state
        return not result.limited, state.retry_after, state.limit, state.remaining, state.reset_after

    return ask


def limits(strategy: str, rate: Rate, figures: bool = True) -> Ask:
    from limits import RateLimitItemPerSecond
    from limits.storage import RedisStorage
    from limits.strategies import STRATEGIES

    limiter = STRATEGIES[strategy](RedisStorage(server.url()))
    item = RateLimitItemPerSecond(rate.limit, rate.window, namespace=strategy)

    def hit(identity: str) -> Answer:
        return limiter.hit(item, identity), None

    def ask(identity: str) -> Answer:
        allowed = limiter.hit(item, identity)
        stats = limiter.get_window_stats(item, identity)
        return allowed, stats.reset_time - time.time(), stats.remaining

    return ask if figures else hit


def pyrate(rates: Sequence[Rate]) -> Ask:
    from pyrate_limiter import BucketFactory, Limiter, RateItem, RedisBucket
    from pyrate_limiter import Rate as PyrateRate
    from pyrate_limiter.buckets.redis_bucket import LuaScript

    client = server.client()
    script = client.script_load(LuaScript.PUT_ITEM)
    bounds = [PyrateRate(rate.limit, rate.window * 1000) for rate in rates]
    name = "-".join(f"{rate.limit}-{rate.window}" for rate in rates)

    class PerIdentity(BucketFactory):
        def __init__(self) -> None:
            self.made: dict[str, RedisBucket] = {}

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, time.time_ns() // 1_000_000, weight=weight)

        def get(self, item: RateItem) -> RedisBucket:
            bucket = self.made.get(item.name)
            if bucket is None:
                bucket = self.made[item.name] = RedisBucket(bounds, client, f"pyrate-{name}:{item.name}", script)
            return bucket

    factory = PerIdentity()
    limiter = Limiter(factory)

    def ask(identity: str) -> Answer:
        allowed = limiter.try_acquire(identity, blocking=False)
        item = factory.wrap_item(identity)
        bucket = factory.get(item)
        return allowed, bucket.waiting(item) / 1000, rates[0].limit - bucket.count()

    return ask


def smart_window(rates: Sequence[Rate]) -> Ask:
    from django_smart_ratelimit.backends import get_backend
    from django_smart_ratelimit.context import RateLimitContext
    from django_smart_ratelimit.decorator import check_rate_limit

    backend = get_backend("redis")

    def ask(identity: str) -> Answer:
        limit, window = rates[0]
        context = RateLimitContext(None, key=identity, limit=limit, period=window)
        checked = check_rate_limit(context, backend)
        return checked.allowed, checked.reset_time - time.time(), checked.limit, checked.remaining

    def batch(identity: str) -> Answer:
        checks = [{"key": f"{identity}-{limit}", "limit": limit, "period": window} for limit, window in rates]
        answers = backend.check_batch(checks)
        resets = [backend.get_reset_time(each["key"]) for each in checks]
        return all(allowed for allowed, _ in answers), max(resets) - time.time(), answers

    return ask if len(rates) == 1 else batch


def smart_bucket(rate: Rate) -> Ask:
    from django_smart_ratelimit.algorithms import TokenBucketAlgorithm
    from django_smart_ratelimit.backends import get_backend

    backend, algorithm = get_backend("redis"), TokenBucketAlgorithm()

    def ask(identity: str) -> Answer:
        allowed, figures = algorithm.is_allowed(backend, f"{identity}-{rate.limit}", rate.limit, rate.window)
        return allowed, figures["time_to_refill"], figures["tokens_remaining"]

    return ask


def django_ratelimit(rate: Rate) -> Ask:
    from django_ratelimit.core import get_usage

    def ask(identity: str) -> Answer:
        # Its key function takes the identity from the request; here the request is the identity.
        usage = get_usage(identity, group="bench", key=lambda _, request: request, rate=tuple(rate), increment=True)
        return not usage["should_limit"], usage["time_left"], usage["limit"], usage["count"]

    return ask


def fast_ratelimit(rate: Rate) -> Ask:
    from django_fast_ratelimit import Action, get_ratelimit

    def ask(identity: str) -> Answer:
        found = get_ratelimit(group="bench", key=identity.encode(), rate=tuple(rate), action=Action.INCREASE)
        return not found.request_limit, found.end - time.time(), found.limit, found.count

    return ask


def drf(bound: Rate) -> Ask:
    from rest_framework.throttling import SimpleRateThrottle

    class Throttle(SimpleRateThrottle):
        rate = "the bound"

        def parse_rate(self, rate) -> Rate:
            return bound

        def get_cache_key(self, request, view) -> str:
            return f"drf-{bound.limit}-{bound.window}-{request}"

    return _throttling(Throttle, lambda throttle, identity: throttle.allow_request(identity, None))


def ninja(rate: Rate) -> Ask:
    from ninja.throttling import SimpleRateThrottle

    class Throttle(SimpleRateThrottle):
        def get_cache_key(self, request) -> str:
            return f"ninja-{rate.limit}-{rate.window}-{request}"

    throttle = Throttle(f"{rate.limit}/{rate.window}s")  # made once per operation
    return _throttling(lambda: throttle, lambda throttle, identity: throttle.allow_request(identity))


def _throttling(get, allow) -> Ask:
    def ask(identity: str) -> Answer:
        throttle = get()
        allowed = allow(throttle, identity)
        return allowed, throttle.wait(), throttle.num_requests, len(throttle.history)

    return ask


LIMITS_FIGURES = "`hit()` and `get_window_stats()`"
CONTENDERS = [
    Contender("throttled-py, GCRA", PEER, "`limit()`", for_each_rate(partial(throttled, "gcra"))),
    Contender("throttled-py, fixed window", PEER, "`limit()`", for_each_rate(partial(throttled, "fixed_window")), True),
    Contender(
        "throttled-py, sliding window", PEER, "`limit()`", for_each_rate(partial(throttled, "sliding_window")), True
    ),
    Contender("limits, moving window", PEER, LIMITS_FIGURES, for_each_rate(partial(limits, "moving-window"))),
    Contender("limits, fixed window", PEER, LIMITS_FIGURES, for_each_rate(partial(limits, "fixed-window")), True),
    Contender(
        "limits, sliding counter", PEER, LIMITS_FIGURES, for_each_rate(partial(limits, "sliding-window-counter")), True
    ),
    Contender("pyrate-limiter", PEER, "`try_acquire()`, `count()` and `waiting()`; all rates in one script", pyrate),
    Contender(
        "django-smart-ratelimit, sliding window",
        PEER,
        "`check_rate_limit()`; three: `check_batch()`, then `get_reset_time()` for each",
        smart_window,
    ),
    Contender(
        "django-smart-ratelimit, token bucket",
        PEER,
        "`TokenBucketAlgorithm.is_allowed()`",
        for_each_rate(smart_bucket),
        True,
    ),
    Contender("django-ratelimit", PEER, "`get_usage(increment=True)`", for_each_rate(django_ratelimit)),
    Contender("django-fast-ratelimit", PEER, "`get_ratelimit(action=INCREASE)`", for_each_rate(fast_ratelimit)),
    Contender("Django REST framework", PEER, "`allow_request()` and `wait()`", for_each_rate(drf)),
    Contender("django-ninja", PEER, "`allow_request()` and `wait()`", for_each_rate(ninja)),
    Contender("the documents' ZSET script", BESIDE, "redis-py's `Script`; gives no wait", for_each_rate(documents)),
]
# For who wants to know what the figures cost.
WITHOUT_FIGURES = Contender(
    "limits, moving window, no figures",
    BESIDE,
    "`hit()`, which says yes or no",
    for_each_rate(partial(limits, "moving-window", figures=False)),
    True,
)
