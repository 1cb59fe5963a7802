"""What the demo adds to requests: a content policy, and the limits that were met."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from rlaas_django import Policy

GetResponse = Callable[[HttpRequest], HttpResponseBase]

# By path and user: the rate of a plan differs between users.
_policies: dict[tuple[str, object], tuple[Policy, ...]] = {}


def policies_at(path: str, request: HttpRequest) -> tuple[Policy, ...]:
    """Return the policies that decided the user's last request to this path."""
    return _policies.get((path, request.user.pk), ())


def remember_policies(get_response: GetResponse) -> GetResponse:
    """Note which policies decided, so that the page can peek at them."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        decision = getattr(request, "rate_limit", None)
        if decision is not None:
            policies = tuple(outcome.policy for outcome in decision.outcomes)
            _policies[request.path, request.user.pk] = policies
        return response

    return middleware


def content_security_policy(get_response: GetResponse) -> GetResponse:
    """Allow nothing from elsewhere and nothing inline, in the admin as well."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.headers["Content-Security-Policy"] = "default-src 'self'"
        return response

    return middleware
