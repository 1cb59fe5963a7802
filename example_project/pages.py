"""The start page and what its script asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model, login, logout
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.middleware.csrf import get_token
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from rlaas_django import peek, reset

from . import redis_server
from .cards import PANELS, SECTIONS
from .figures import figures
from .middleware import policies_at
from .people import ADMIN, PEOPLE


def in_demo_only(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Guard a view that no site on the network should have."""

    @functools.wraps(view)
    def guarded(*args: Any, **kwargs: Any) -> HttpResponse:
        if not settings.DEBUG:
            raise Http404
        return view(*args, **kwargs)

    return guarded


def asking(request: HttpRequest) -> dict[str, Any]:
    """Return who is asking, by a name for each kind of key."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return {"user": request.user.pk, "ip": request.META["REMOTE_ADDR"], "token": token}


@require_GET
def start(request: HttpRequest) -> HttpResponse:
    context = {
        "sections": SECTIONS,
        "people": [*PEOPLE, ""],
        "admin": ADMIN,
        "own_redis": redis_server.own is not None,
    }
    return render(request, "demo/start.html", context)


@require_GET
def counters(request: HttpRequest) -> JsonResponse:
    """Return the figures of each panel, without charging anything."""
    figures_by_panel = {}
    for name, panel in PANELS.items():
        policies = policies_at(panel.url, request)
        if policies:
            outcomes = peek(asking(request), policies).outcomes
            figures_by_panel[name] = [figures(outcome) for outcome in outcomes]
    return JsonResponse(figures_by_panel)


@require_POST
@in_demo_only
def reset_panel(request: HttpRequest, name: str) -> JsonResponse:
    """Reset what this visitor used of a view's limits."""
    if name not in PANELS:
        raise Http404

    keys = 0
    policies = policies_at(PANELS[name].url, request)
    if policies:
        keys = reset(asking(request), policies)
    return JsonResponse({"keys": keys})


@require_POST
@in_demo_only
def switch_redis(_: HttpRequest, action: str) -> JsonResponse:
    """Stop the demo's own Redis, or start it again, empty."""
    server = redis_server.own
    if server is None:
        raise Http404  # a Redis that somebody else runs

    with server.switching:
        if action == "stop" and server.answers():
            server.kill()
        elif action == "start" and not server.answers():
            server.launch()
    return JsonResponse({"running": action == "start"})


@require_POST
@in_demo_only
def act_as(request: HttpRequest) -> HttpResponse:
    """Log in as one of the demo's people without a password, or as nobody."""
    username = request.POST.get("username", "")
    logout(request)
    if username:
        people = get_user_model().objects.filter(username__in=PEOPLE)
        login(request, get_object_or_404(people, username=username))

    # The page's script keeps its results; without it, there is a new page.
    if request.headers.get("Accept") == "application/json":
        return JsonResponse({"username": username, "csrf": get_token(request)})
    return redirect("start")
