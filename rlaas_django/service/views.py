"""The views: who calls, by which method, under which limit; then the endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from .. import limiter
from ..backend import UnavailableError
from ..core.callers import Caller
from ..decorators import rate_limit_exempt
from .answers import ProblemError, fails_closed, problem_response
from .auth import authenticate
from .calls import Call, call_async, call_sync, run

ANYBODY = Caller("anybody", frozenset())
UNAVAILABLE = ProblemError("Redis is unavailable.", 503, {"Retry-After": "1"})


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

            caller = ANYBODY
            if self.verb is not None:
                caller = await authenticate(request, self.verb, call)
            if caller.limit is not None:
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
        """Raise a ProblemError for another method."""
        allowed = self.methods
        if "GET" in allowed:
            allowed = (*allowed, "HEAD")

        if request.method not in allowed:
            detail = f"Use {' or '.join(self.methods)}."
            raise ProblemError(detail, 405, {"Allow": ", ".join(allowed)})


async def _require_quota(caller: Caller, call: Call) -> None:
    """Raise a ProblemError where a caller is over its own limit."""
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
        raise ProblemError(detail, 429, decision=decision)


def sync_view(endpoint: Endpoint) -> Callable[..., HttpResponse]:
    """Return the view of an endpoint for WSGI."""

    @rate_limit_exempt  # a caller may have a limit of its own
    @csrf_exempt  # `auth` checks it where no token says who calls
    @transaction.non_atomic_requests
    def view(request: HttpRequest, **arguments: Any) -> Any:
        return run(endpoint.respond(request, call_sync, **arguments))

    return view


def async_view(endpoint: Endpoint) -> Callable[..., Awaitable[HttpResponse]]:
    """Return the view of an endpoint for ASGI."""

    @rate_limit_exempt
    @csrf_exempt
    @transaction.non_atomic_requests
    async def view(request: HttpRequest, **arguments: Any) -> Any:
        return await endpoint.respond(request, call_async, **arguments)

    return view
