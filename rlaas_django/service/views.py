"""The views: who calls, what is asked, the call of the limiter, the response. The async view differs by `await`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from .. import limiter
from ..backend import UnavailableError
from ..core.callers import Caller
from ..core.decision import Decision
from ..decorators import rate_limit_exempt
from . import auth
from .answers import unavailable, with_headers
from .endpoints import Operation
from .problems import ProblemError

ANYBODY = Caller("anybody", frozenset())


class Endpoint(NamedTuple):
    """A function of endpoints.py, who may call it, and by which methods."""

    prepare: Callable[..., Operation | HttpResponse]
    methods: tuple[str, ...]
    verb: str | None = None  # None: anybody may

    def require_method(self, request: HttpRequest) -> None:
        allowed = (*self.methods, "HEAD") if "GET" in self.methods else self.methods
        if request.method not in allowed:
            raise ProblemError(
                405, f"Use {' or '.join(self.methods)}.", {"Allow": ", ".join(allowed)}
            )


def sync_view(endpoint: Endpoint) -> Callable[..., HttpResponse]:
    """Return the view of an endpoint for WSGI."""

    @rate_limit_exempt  # a caller has a limit of its own, if it has any
    @csrf_exempt  # where a token says who calls; `auth` checks it where the site's function does
    @transaction.non_atomic_requests
    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        try:
            endpoint.require_method(request)
            caller = ANYBODY
            if endpoint.verb is not None:
                caller = auth.by_token(request) or auth.by_site(request, endpoint.verb)
                auth.require_verb(caller, endpoint.verb)
            if caller.limit is not None:
                decision = limiter.check(
                    caller.name, caller.limit, source=caller.source
                )
                if not decision.allowed:
                    return _own_refusal(decision)
            operation = endpoint.prepare(request, caller, **kwargs)
            return _finish(
                operation
                if isinstance(operation, HttpResponse)
                else operation.respond(operation.call())
            )
        except (ProblemError, UnavailableError) as error:
            return _finish(_problem(error))

    return view


def async_view(endpoint: Endpoint) -> Callable[..., Awaitable[HttpResponse]]:
    """Return the view of an endpoint for ASGI."""

    @rate_limit_exempt
    @csrf_exempt
    @transaction.non_atomic_requests
    async def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        try:
            endpoint.require_method(request)
            caller = ANYBODY
            if endpoint.verb is not None:
                caller = auth.by_token(request) or await auth.aby_site(
                    request, endpoint.verb
                )
                auth.require_verb(caller, endpoint.verb)
            if caller.limit is not None:
                decision = await limiter.acheck(
                    caller.name, caller.limit, source=caller.source
                )
                if not decision.allowed:
                    return _own_refusal(decision)
            operation = endpoint.prepare(request, caller, **kwargs)
            return _finish(
                operation
                if isinstance(operation, HttpResponse)
                else operation.respond(await operation.acall())
            )
        except (ProblemError, UnavailableError) as error:
            return _finish(_problem(error))

    return view


def _own_refusal(decision: Decision) -> HttpResponse:
    """Return the response to a caller that is over its own limit."""
    problem = ProblemError(
        429,
        f"This caller is over its own limit, {decision.policy.name!r}; nothing was checked.",
    )
    if decision.unavailable:
        problem = unavailable(
            f"Redis is unavailable, and policy {decision.policy.name!r} fails closed."
        )
    return _finish(with_headers(problem.response(), decision))


def _problem(error: ProblemError | UnavailableError) -> HttpResponse:
    problem = (
        unavailable("Redis is unavailable.")
        if isinstance(error, UnavailableError)
        else error
    )
    return problem.response()


def _finish(response: HttpResponse) -> HttpResponse:
    response.headers["Cache-Control"] = "no-store"
    if response.status_code != 204:
        response.headers["Content-Length"] = str(
            len(response.content)
        )  # or servers send it in chunks
    return response
