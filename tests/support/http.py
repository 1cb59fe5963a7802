"""Small sites behind Django's WSGI and ASGI handlers, and the one place that says what a refusal looks like.

A *way* is a handler and a kind of view: "wsgi, def" or "asgi, async def". The quick tier goes one way; tests of code
that the async side has of its own are marked `@both_ways`; the long tier goes all four.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import inspect
import itertools
import json
import re
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import http_sfv
import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path

from tests.support.internals import conf

OURS = "rlaas_django.middleware.RateLimitMiddleware"
AUTHENTICATION = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
KINDS = ("def", "async def")
BOTH_WAYS = ["wsgi, def", "asgi, async def"]


class Ulid:
    """A primary key that is an object of a package's own."""

    def __str__(self) -> str:
        return "01ARZ3NDEKTSV4RRFFQ69G5FAV"


# What a user may have for a primary key; the tuple is that of a composite one.
PRIMARY_KEYS = [
    7,
    "seven",
    uuid.UUID(int=7),
    Decimal("7.50"),
    (7, "seven"),
    Ulid(),
    b"seven",
    datetime.date(2000, 1, 2),
]


def _ways(*quick: str) -> list[Any]:
    """Return every way, those that are not named here in the long tier."""
    every = [f"{handler}, {kind}" for handler, kind in itertools.product(("wsgi", "asgi"), KINDS)]
    return [way if way in quick else pytest.param(way, marks=pytest.mark.slow) for way in every]


EVERY_WAY = _ways("wsgi, def")  # the parameters of the fixture `site`
both_ways = pytest.mark.parametrize("site", _ways(*BOTH_WAYS), indirect=True)
OUR_HEADERS = "(x-)?ratelimit|retry-after|cache-control"
FAMILIES = ("RateLimit", "X-RateLimit")
LONG_WAIT = 120  # seconds; from here on the text is in words, such as "2 hours"
PROBLEM_JSON = "application/problem+json"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


def ok(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
    return HttpResponse("ok")


def as_kind(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a view as it is, or as `async def`."""
    if kind == "def":
        return function

    @functools.wraps(function)
    async def view(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return view


def call(view: Callable[..., Any], request: HttpRequest | None = None, *args: Any, **kwargs: Any) -> Any:
    """Return what a view gives, sync or async, without a handler around it."""
    request = RequestFactory().get("/") if request is None else request
    if iscoroutinefunction(view):
        return asyncio.run(view(request, *args, **kwargs))
    return view(request, *args, **kwargs)


@contextlib.contextmanager
def caller() -> Iterator[Callable[..., Any]]:
    """`call`, many times on one event loop."""
    with asyncio.Runner() as runner:

        def call_one(view: Callable[..., Any]) -> Any:
            response = view(RequestFactory().get("/"))
            return runner.run(response) if inspect.iscoroutine(response) else response

        yield call_one


class AsgiClient(AsyncClient):
    """A client at an address of its own; at none, as behind a unix socket."""

    def __init__(self, address: str | None, **options: Any) -> None:
        super().__init__(**options)
        self.address = address

    async def request(self, **scope: Any) -> Any:
        return await super().request(**{"client": self.address and [self.address, 0], **scope})


class Site:
    """Some views behind a handler: `Site("asgi, async def", settings)`.

    `view` turns a function into this site's kind of view. Requests come from `address`. Every refusal is checked to be
    complete, but for its body where `own_body` says that it is the site's own.
    """

    def __init__(self, way: str, settings: Any) -> None:
        self.handler, self.kind = way.split(", ")
        self.settings = settings
        self.address: str | None = "203.0.113.9"
        self.raises = True
        self.own_body = False
        self.cookies: Any = None

    def view(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return as_kind(self.kind, function)

    def serve(self, views: Any, middleware: Iterable[str] = ()) -> Any:
        """Serve one view at /, or views by route."""
        urlconf: Any = types.ModuleType("tests.urlconf")
        routes = views if isinstance(views, Mapping) else {"": views}
        urlconf.urlpatterns = [path(route, view) for route, view in routes.items()]
        self.settings.ROOT_URLCONF = urlconf
        self.settings.MIDDLEWARE = [*middleware]
        return views

    def client(self, address: str | None = None) -> Client | AsgiClient:
        """Return a client for one thread or task, with the cookies of the user who logged in."""
        address = address or self.address
        if self.handler == "asgi":
            client: Any = AsgiClient(address, raise_request_exception=self.raises)
        else:
            client = Client(raise_request_exception=self.raises, REMOTE_ADDR=address or "")
        if self.cookies is not None:
            client.cookies = self.cookies
        return client

    def log_in(self, user: Any) -> None:
        client = self.client()
        client.force_login(user)
        self.cookies = client.cookies

    def request(self, method: str, where: str = "/", *args: Any, address: str | None = None, **options: Any) -> Any:
        function = getattr(self.client(address), method)
        # Not asyncio.run: so, what Django does in its one thread for sync code is done in this, which has the database.
        response = (async_to_sync(function) if self.handler == "asgi" else function)(where, *args, **options)
        assert_complete_if_refused(response, own_body=self.own_body)
        return response

    def get(self, where: str = "/", **options: Any) -> Any:
        return self.request("get", where, **options)

    def post(self, where: str = "/", data: Any = None, **options: Any) -> Any:
        return self.request("post", where, data or {}, **options)

    def statuses(self, count: int, where: str = "/", **options: Any) -> list[int]:
        return [self.get(where, **options).status_code for _ in range(count)]


def templates(files: Mapping[str, str], *context_processors: str) -> list[dict[str, Any]]:
    """Return a TEMPLATES setting with these files."""
    options = {
        "loaders": [("django.template.loaders.locmem.Loader", files)],
        "context_processors": [*context_processors],
    }
    return [{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": options}]


def counters(client: Any) -> list[str]:
    """Return the keys that algorithms have written; statistics may come at any time."""
    return sorted(key.decode() for key in client.keys("rlaas:rate_limit:*"))


def own_policy(view: Any) -> str:
    """Return the name of the policy that a rate on a view makes: the view's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{view.__module__}.{view.__qualname__}")


class Refusal(NamedTuple):
    """What a client reads in a refusal."""

    retry_after: int | None
    policies: dict[str, tuple[int, int]]  # quota and window
    usage: dict[str, tuple[int, int]]  # remaining and reset
    violated: list[str] | None  # in JSON only
    body: str


def assert_refusal(
    response: Any,
    *,
    policies: Mapping[str, tuple[int, int]] | Iterable[str] | None = None,
    violated: Iterable[str] | None = None,
    status: int = 429,
    wait: int | type | None = int,
    media_type: str | None = None,
    own_body: bool = False,
    families: Iterable[str] = FAMILIES,
) -> Refusal:
    """Check all that a 429 or 503 promises.

    `policies` are the enforced ones of the request, perhaps with quota and window; left out: those that are listed.
    `wait` is the seconds of Retry-After; None: there is none, as no wait helps.
    """
    assert response.status_code == status, response.content
    if policies is None:
        policies = rate_limit_fields(response)[0] if "RateLimit" in families and status == 429 else ["unknown"]
        assert policies
    assert_clean_headers(response)
    retry_after = _retry_after(response, wait)
    assert "no-store" in response.headers["Cache-Control"]
    fields = _assert_rate_limit_fields(response, policies if status == 429 else (), families)
    if own_body:
        return Refusal(retry_after, *fields, None, "")
    if retry_after is not None:  # draft -11, section 6
        assert all(t <= retry_after for _, t in fields[1].values())
    assert response.headers["Cache-Control"] == "no-store"
    assert "accept" in [name.strip().lower() for name in response.headers["Vary"].split(",")]
    found, body = _assert_body(response, status, retry_after)
    if media_type is not None:
        assert _media_type(response) == media_type
    if found is not None:
        assert found
        assert set(found) <= set(policies) or policies == ["unknown"]
        if violated is not None:
            assert found == [*violated]
    return Refusal(retry_after, *fields, found, body)


def assert_complete_if_refused(response: Any, *, own_body: bool = False) -> None:
    """Check a response that is a refusal for all that a refusal promises."""
    if response.status_code in (429, 503):
        assert_refusal(
            response,
            status=response.status_code,
            wait=int if "Retry-After" in response.headers else None,
            own_body=own_body,
            families=conf.config().headers,
        )


def assert_clean_headers(response: Any) -> dict[str, str]:
    """Check that no value has a line break and no header of ours is there twice; return ours."""
    headers = response.headers
    items = headers.multi_items() if hasattr(headers, "multi_items") else headers.items()
    assert not [value for _, value in items if re.search(r"[\r\n\0]", str(value))]
    ours = [(name.lower(), value) for name, value in items if re.match(OUR_HEADERS, name.lower())]
    assert len(dict(ours)) == len(ours)
    return dict(ours)


def assert_waiting_helps(response: Any, again: Callable[[], Any], clock: Any) -> None:
    """Check that a client who waits exactly as long as Retry-After says is admitted."""
    clock.tick(int(response.headers["Retry-After"]) * 1000)
    assert again().status_code == 200


def rate_limit_fields(response: Any) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Return (quota, window) and (remaining, reset) by policy, as a parser of structured fields reads them."""
    return _field(response, "RateLimit-Policy", "q", "w"), _field(response, "RateLimit", "r", "t")


def _field(response: Any, name: str, *parameters: str) -> dict[str, tuple[int, int]]:
    parsed = http_sfv.List()
    parsed.parse(response.headers[name].encode("ascii"))
    items = {}
    for item in parsed:
        assert type(item.value) is str
        assert item.value not in items
        assert list(item.params) == [*parameters]
        assert all(type(number) is int and number >= 0 for number in item.params.values())
        items[item.value] = tuple(item.params.values())
    return items


def _retry_after(response: Any, wait: Any) -> int | None:
    if wait is None:
        assert "Retry-After" not in response.headers
        return None
    assert re.fullmatch(r"[1-9][0-9]*", response.headers["Retry-After"])
    seconds = int(response.headers["Retry-After"])
    assert wait in (int, seconds)
    return seconds


def _assert_rate_limit_fields(response: Any, policies: Any, families: Iterable[str]) -> tuple[dict, dict]:
    wanted = {"RateLimit": ("RateLimit-Policy", "RateLimit")}
    wanted["X-RateLimit"] = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")
    for family, names in wanted.items():
        for name in names:
            assert (name in response.headers) == (family in families and bool(policies)), name
    quotas, usage = {}, {}
    if policies and "RateLimit" in families:
        quotas, usage = rate_limit_fields(response)
        assert set(quotas) == set(policies)
        assert list(usage) == list(quotas)
        assert all(quota and window for quota, window in quotas.values())
        if isinstance(policies, Mapping):
            assert quotas == policies
    if policies and "X-RateLimit" in families:
        numbers = [response.headers[name] for name in wanted["X-RateLimit"]]
        assert all(re.fullmatch(r"0|[1-9][0-9]*", number) for number in numbers)
        if quotas:
            limit, remaining, reset = map(int, numbers)
            listed = [usage[name][1] for name in quotas if (quotas[name][0], usage[name][0]) == (limit, remaining)]
            assert listed  # the strictest's
            assert min(listed) <= reset
    return quotas, usage


def _media_type(response: Any) -> str:
    return response.headers["Content-Type"].partition(";")[0]


def _method(response: Any) -> str:
    """Return the request's method, as Django's two clients and httpx keep it."""
    request = response.request
    return (request.get("REQUEST_METHOD") or request["method"]) if isinstance(request, dict) else request.method


def _assert_body(response: Any, status: int, retry_after: int | None) -> tuple[list[str] | None, str]:
    body = response.content.decode()
    violated = None
    if not body:
        assert _method(response) == "HEAD"
        return None, body
    if _media_type(response) == PROBLEM_JSON:
        problem = json.loads(body)
        assert list(problem) == ["type", "title", "status", "detail", "violated-policies"]
        kind = {429: "quota-exceeded", 503: "temporary-reduced-capacity"}[status]
        assert problem["type"] == f"https://iana.org/assignments/http-problem-types#{kind}"
        assert problem["status"] == status
        assert problem["title"]
        shown, violated = problem["detail"], problem["violated-policies"]
    elif _media_type(response) == "text/html":
        assert body.startswith("<!DOCTYPE html>")
        assert "</html>" in body
        shown = re.sub(r"<[^>]*>", "", body)
    else:
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert body.endswith("\n")
        shown = body
    assert retry_after is None or retry_after >= LONG_WAIT or re.search(rf"\b{retry_after}\b", shown)
    return violated, body
