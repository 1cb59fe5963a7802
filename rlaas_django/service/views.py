"""The views: who calls, by which method, under which limit; then the endpoint.

An endpoint is an async function, written once for sync and async views. It awaits
`call(limiter.check, limiter.acheck, ...)`, which calls the first function in a sync
view, and awaits the second in an async one.
"""

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
from ..http.site_functions import in_thread
from .answers import ProblemError, problem_response, require_available
from .auth import by_site, by_token, require_verb

Call = Callable[..., Awaitable[Any]]

ANYBODY = Caller("anybody", frozenset())
UNAVAILABLE = ProblemError("Redis is unavailable.", 503, {"Retry-After": "1"})


class Endpoint(NamedTuple):
    """A function of endpoints.py, by whom it is called, and by which methods."""

    function: Callable[..., Awaitable[HttpResponse]]
    verb: str | None  # None: anybody may call it
    methods: tuple[str, ...]
    # The units that a request takes of the caller's own limit.
    cost: Callable[[HttpRequest], int] = lambda _: 1

    async def respond(
        self, request: HttpRequest, call: Call, **arguments: Any
    ) -> HttpResponse:
        """Return the response to a request."""
        try:
            self._require_method(request)
            caller = await self._authenticate(request, call)
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
        if request.method not in self.methods:
            detail = f"Use {' or '.join(self.methods)}."
            raise ProblemError(detail, 405, {"Allow": ", ".join(self.methods)})

    async def _authenticate(self, request: HttpRequest, call: Call) -> Caller:
        """Return who calls, if it may do this, and is not over its own limit."""
        if self.verb is None:
            return ANYBODY

        caller = by_token(request)
        if caller is None:
            caller = await call(by_site, in_thread(by_site), request, self.verb)

        require_verb(caller, self.verb)
        if caller.limit is not None:
            await _require_quota(caller, call, self.cost(request))

        return caller


async def _require_quota(caller: Caller, call: Call, cost: int) -> None:
    """Raise a ProblemError where a request is over its caller's own limit."""
    decision = await call(
        limiter.check,
        limiter.acheck,
        caller.name,
        caller.limit,
        cost=cost,
        source=caller.source,
    )

    require_available(decision)
    if not decision.allowed:
        name = caller.limit
        detail = f"This caller is over its own limit, {name!r}; nothing was checked."
        if cost > decision.limit:
            detail += f" Send at most {decision.limit:,} checks at once."
        raise ProblemError(detail, 429, decision=decision)


def sync_view(*endpoint: Any) -> Any:
    """Return the view of an endpoint for WSGI."""
    respond = Endpoint(*endpoint).respond

    def view(request: HttpRequest, **arguments: Any) -> Any:
        return _run(respond(request, _call_sync, **arguments))

    return _marked(view)


def async_view(*endpoint: Any) -> Any:
    """Return the view of an endpoint for ASGI."""
    respond = Endpoint(*endpoint).respond

    async def view(request: HttpRequest, **arguments: Any) -> Any:
        return await respond(request, _call_async, **arguments)

    return _marked(view)


def _marked(view: Any) -> Any:
    """Exempt a view from what Django and our middleware do for the site's own views.

    A caller may have a limit of its own, and `auth` protects against CSRF where no
    token says who calls.
    """
    view = transaction.non_atomic_requests(view)
    return rate_limit_exempt(csrf_exempt(view))


async def _call_sync(function: Any, _: Any, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


async def _call_async(_: Any, function: Any, *arguments: Any, **options: Any) -> Any:
    return await function(*arguments, **options)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that only makes sync calls.

    It never waits, so it needs no event loop: it ends at its first step.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("A sync view waited for something.")
