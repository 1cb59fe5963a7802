"""The views: one line each, and around it what each contender's documentation puts there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import NamedTuple

import redis.asyncio
from django.http import HttpResponse

from benchmarks import async_peers, peers, server
from benchmarks.contender import BESIDE, OURS, PEER, Ask, Rate

View = Callable[..., object]
LIMITS = {"allowed": 1_000, "refused": 1}  # per day; the database is emptied between rounds
DAY = 86_400


def bare(request):
    return HttpResponse("ok")


async def abare(request):
    return HttpResponse("ok")


def ping(request):
    server.client().ping()
    return HttpResponse("ok")


_async_client = None


async def aping(request):
    global _async_client
    _async_client = _async_client or redis.asyncio.Redis.from_url(server.url())
    await _async_client.ping()
    return HttpResponse("ok")


def ours(algo: str, limit: int, view: View) -> View:
    from rlaas_django import rate_limit

    return rate_limit((limit, DAY), key="ip", algo=algo, group=f"{view.__name__}-{algo}-{limit}")(view)


def ruled(limit: int, view: View) -> View:
    """A rule of the middleware, which never refuses, and a decorator below it: two checks."""
    from rlaas_django import rate_limit
    from rlaas_django.middleware import RateLimitMiddleware

    return RateLimitMiddleware(rate_limit((limit, DAY), key="ip", group=f"{view.__name__}-ruled-{limit}")(view))


def django_ratelimit(limit: int, view: View) -> View:
    from django_ratelimit.decorators import ratelimit

    return ratelimit(key="ip", rate=f"{limit}/d", group=f"{limit}")(view)


def smart(algorithm: str, limit: int, view: View) -> View:
    from django_smart_ratelimit import rate_limit

    return rate_limit(key="ip", rate=f"{limit}/d", backend="redis", algorithm=algorithm)(view)


def fast(limit: int, view: View) -> View:
    from django_fast_ratelimit import decorate

    return decorate(key="ip", rate=f"{limit}/d", group=f"{limit}", block=True)(view)


def drf(limit: int | None, view: View) -> View:
    from rest_framework.decorators import api_view, throttle_classes
    from rest_framework.throttling import AnonRateThrottle

    class Throttle(AnonRateThrottle):
        rate = f"{limit}/day"
        scope = f"bench{limit}"

    limited = throttle_classes([Throttle] if limit else [])
    return api_view(["GET"])(limited(wraps(view)(lambda request: view(request))))


def ninja(limit: int | None, view: View) -> View:
    from ninja import NinjaAPI
    from ninja.throttling import AnonRateThrottle

    api = NinjaAPI(urls_namespace=f"ninja-{view.__name__}-{limit}", openapi_url=None, docs_url=None)
    api.get("/", throttle=[AnonRateThrottle(f"{limit}/d")] if limit else [])(view)
    return api.urls[0][0].callback


def guarded(build: Callable[[Rate], Ask], limit: int, view: View) -> View:
    """For those who come without a decorator for Django: a plain one, with the headers that their figures make."""
    ask = build(Rate(limit, DAY))

    @wraps(view)
    def wrapper(request):
        allowed, wait, *figures = ask(request.META["REMOTE_ADDR"])
        response = view(request) if allowed else HttpResponse("Too many requests", status=429)
        return _with_headers(response, allowed, wait, figures)

    return wrapper


def aguarded(build: Callable[[Rate], Callable], limit: int, view: View) -> View:
    ask = None

    @wraps(view)
    async def wrapper(request):
        nonlocal ask
        ask = ask or build(Rate(limit, DAY))  # its client belongs to the running loop
        allowed, wait, *figures = await ask(request.META["REMOTE_ADDR"])
        response = await view(request) if allowed else HttpResponse("Too many requests", status=429)
        return _with_headers(response, allowed, wait, figures)

    return wrapper


def _with_headers(response, allowed, wait, figures):
    response["X-RateLimit-Remaining"] = str(figures[0])
    if not allowed and wait is not None:
        response["Retry-After"] = str(int(wait) + 1)
    return response


def as_it_is(limit: int, view: View) -> View:
    return view


class Entry(NamedTuple):
    """A line of the table; its views are made by `decorate(limit, view)`."""

    name: str
    kind: str
    decorate: Callable[[int, View], View]
    adecorate: Callable[[int, View], View] | None = None  # None: takes no async view, so has a sync one under ASGI too
    status: int = 429  # of a refusal; 200: nobody is refused
    bare: str = "a bare view"  # what it is to be compared with, for a framework of its own
    variant: bool = False  # left out of a quick run

    @property
    def slug(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())

    def path(self, kind: str, outcome: str) -> str:
        return f"{kind}/{self.slug}/{outcome}"

    def view(self, kind: str, outcome: str) -> View:
        try:
            if kind == "async" and self.adecorate:
                return self.adecorate(LIMITS[outcome], abare)
            return self.decorate(LIMITS[outcome], bare)
        except Exception as error:  # noqa: BLE001 - shown in its line of the table
            message = f"{type(error).__name__}: {error}"
            return lambda request: HttpResponse(message, status=500)


BARE = Entry("a bare view", BESIDE, as_it_is, as_it_is, 200)
BARE_DRF = Entry("a bare view of Django REST framework", BESIDE, lambda _, view: drf(None, view), status=200)
BARE_NINJA = Entry(
    "a bare view of django-ninja", BESIDE, lambda _, view: ninja(None, view), lambda _, view: ninja(None, view), 200
)
DEFAULT_ALGO = "sliding-window-algo"
ENTRIES = [
    BARE,
    Entry("redis-py `ping()` in the view", BESIDE, lambda *_: ping, lambda *_: aping, 200),
    *(
        Entry(f"rlaas_django, {algo}", OURS, partial(ours, algo), partial(ours, algo), variant=algo != DEFAULT_ALGO)
        for algo in (DEFAULT_ALGO, "sliding-window-compact-algo", "token-bucket-algo")
    ),
    Entry("rlaas_django, a rule and a decorator", OURS, ruled, ruled, variant=True),
    Entry(
        "throttled-py, GCRA",
        PEER,
        partial(guarded, partial(peers.throttled, "gcra")),
        partial(aguarded, async_peers.throttled),
    ),
    Entry(
        "limits, moving window",
        PEER,
        partial(guarded, partial(peers.limits, "moving-window")),
        partial(aguarded, async_peers.limits),
    ),
    Entry("pyrate-limiter", PEER, partial(guarded, lambda rate: peers.pyrate([rate]))),
    Entry(
        "django-smart-ratelimit, sliding window",
        PEER,
        partial(smart, "sliding_window"),
        partial(smart, "sliding_window"),
    ),
    Entry(
        "django-smart-ratelimit, token bucket",
        PEER,
        partial(smart, "token_bucket"),
        partial(smart, "token_bucket"),
        variant=True,
    ),
    Entry("django-ratelimit", PEER, django_ratelimit, status=403),
    Entry("django-fast-ratelimit", PEER, fast, status=403),
    BARE_DRF,
    Entry("Django REST framework", PEER, drf, bare=BARE_DRF.name),
    BARE_NINJA,
    Entry("django-ninja", PEER, ninja, ninja, bare=BARE_NINJA.name),
    Entry(
        "the documents' ZSET script",
        BESIDE,
        partial(guarded, peers.documents),
        partial(aguarded, async_peers.documents),
    ),
]
