"""What the demo adds to each request: a strict policy for its content, and a memory of the limits that were met."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from rlaas_django import Policy

GetResponse = Callable[[HttpRequest], HttpResponseBase]

# The policies of each path, as they were for a user: a plan's rate differs between users.
_policies: dict[tuple[str, object], tuple[Policy, ...]] = {}


def policies_at(path: str, request: HttpRequest) -> tuple[Policy, ...]:
    """The policies that decided the user's last request to this path; none before the first."""
    return _policies.get((path, request.user.pk), ())


def remember_policies(get_response: GetResponse) -> GetResponse:
    """`request.rate_limit` tells which policies decided, so the page can peek at them without a list of its own."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if decision := getattr(request, "rate_limit", None):
            _policies[request.path, request.user.pk] = tuple(
                outcome.policy for outcome in decision.outcomes
            )
        return response

    return middleware


def content_security_policy(get_response: GetResponse) -> GetResponse:
    """Nothing from elsewhere, nothing inline: the pages, the admin's included, do without."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.headers["Content-Security-Policy"] = "default-src 'self'"
        return response

    return middleware
