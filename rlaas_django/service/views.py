"""The views: who calls, by which method, under which limit; then the endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from .. import limiter
from ..backend import UnavailableError
from ..core.callers import Caller
from ..decorators import rate_limit_exempt
from ..http.responses import in_thread
from . import auth
from .answers import ProblemError, fails_closed, problem_response

ANYBODY = Caller("anybody", frozenset())
UNAVAILABLE = ProblemError(503, "Redis is unavailable.", {"Retry-After": "1"})

# Awaits the first of two functions in a sync view, and the second in an async one.
Call = Callable[..., Awaitable[Any]]


class Endpoint(NamedTuple):
    """A function of endpoints.py, by which methods it is called, and by whom."""

    function: Callable[..., Awaitable[HttpResponse]]
    methods: tuple[str, ...]
    verb: str | None = None  # None: anybody may call it

    async def respond(
        self, request: HttpRequest, call: Call, **arguments: Any
    ) -> HttpResponse:
        """Return the response to a request."""
        try:
            self._require_method(request)
            caller = await self._caller(request, call)
            await _require_quota(caller, call)
            response = await self.function(request, caller, call, **arguments)
        except ProblemError as problem:
            response = problem_response(problem)
        except UnavailableError:
            response = problem_response(UNAVAILABLE)

        response.headers["Cache-Control"] = "no-store"
        if response.status_code != 204:
            # Without it, servers send the response in chunks.
            response.headers["Content-Length"] = str(len(response.content))
        return response

    def _require_method(self, request: HttpRequest) -> None:
        allowed = self.methods
        if "GET" in allowed:
            allowed = (*allowed, "HEAD")
        if request.method not in allowed:
            detail = f"Use {' or '.join(self.methods)}."
            raise ProblemError(405, detail, {"Allow": ", ".join(allowed)})

    async def _caller(self, request: HttpRequest, call: Call) -> Caller:
        if self.verb is None:
            return ANYBODY
        caller = auth.by_token(request)
        if caller is None:
            by_site = auth.by_site
            caller = await call(by_site, in_thread(by_site), request, self.verb)
        auth.require_verb(caller, self.verb)
        return caller


async def _require_quota(caller: Caller, call: Call) -> None:
    """Raise a ProblemError where a caller is over its own limit."""
    if caller.limit is None:
        return
    decision = await call(
        limiter.check,
        limiter.acheck,
        caller.name,
        caller.limit,
        source=caller.source,
    )
    if decision.unavailable:
        raise fails_closed(decision)
    if not decision.allowed:
        name = caller.limit
        detail = f"This caller is over its own limit, {name!r}; nothing was checked."
        raise ProblemError(429, detail, decision=decision)


def sync_view(endpoint: Endpoint) -> Callable[..., HttpResponse]:
    """Return the view of an endpoint for WSGI."""

    @rate_limit_exempt  # a caller may have a limit of its own
    @csrf_exempt  # `auth` checks it where no token says who calls
    @transaction.non_atomic_requests
    def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        return _run(endpoint.respond(request, _call_sync, **arguments))

    return view


def async_view(endpoint: Endpoint) -> Callable[..., Awaitable[HttpResponse]]:
    """Return the view of an endpoint for ASGI."""

    @rate_limit_exempt
    @csrf_exempt
    @transaction.non_atomic_requests
    async def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        return await endpoint.respond(request, _call_async, **arguments)

    return view


async def _call_sync(function: Any, _: Any, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


async def _call_async(_: Any, function: Any, *arguments: Any, **options: Any) -> Any:
    return await function(*arguments, **options)


def _run(coroutine: Coroutine[Any, Any, HttpResponse]) -> HttpResponse:
    """Return the result of a coroutine that waits for nothing: it ends at once."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("A sync view waited for something.")
