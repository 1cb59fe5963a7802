"""What a request's client has left of its limits, for pages that show it. Nothing is charged."""

from __future__ import annotations

from django.http import HttpRequest

from .. import conf, limiter
from ..core.decision import Decision, combine
from ..core.policy import DEFAULT
from .identity import RequestIdentity
from .limits import with_fixed_rates
from .request_state import STATE, RequestState


def rate_limit_status(request: HttpRequest, *policies: str) -> Decision:
    """Return the decision of these policies for this request, or peek if they were not checked.

    Without names: the default policy.
    """
    return status_of(request, *policies) or limiter.unlimited()


def status_of(request: HttpRequest, *policies: str) -> Decision | None:
    """As `rate_limit_status`; None where no policy limits this request."""
    names = policies or (DEFAULT,)
    state: RequestState | None = getattr(request, STATE, None)
    if state is not None and state.outcomes.keys() >= set(names):
        return combine(state.outcomes[name] for name in names)
    limiting = with_fixed_rates(
        tuple(conf.config().policy(name) for name in names), request
    )
    return limiter.peek(RequestIdentity(request), limiting) if limiting else None
