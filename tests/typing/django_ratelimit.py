"""What type checkers know of views under django-ratelimit's decorator; first, the example of its page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import assert_type

from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rlaas_django.integrations.django_ratelimit import ALL, Usage, get_usage, is_ratelimited, ratelimit


@ratelimit(key="ip", rate="5/m", method=ratelimit.UNSAFE)
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("welcome")


def search(request: HttpRequest) -> HttpResponse:
    if is_ratelimited(request, group="search", key="ip", rate="30/m", increment=True):
        return HttpResponse("slow down", status=429)
    return HttpResponse("results")


# A decorated view keeps its own signature.


@ratelimit(group="g", key="user_or_ip", rate=(5, 60), method=ALL, block=False)
def numbered(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(number)


@ratelimit("g", "header:X-Tenant", "5/m", ["POST", "PUT"])
async def asynchronous(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse(slug)


assert_type(login(HttpRequest()), HttpResponse)
assert_type(numbered(HttpRequest(), 5), HttpResponse)
a_view: Callable[[HttpRequest, str], Awaitable[HttpResponse]] = asynchronous
path("numbered/<int:number>", numbered)

numbered(HttpRequest(), "5")  # type: ignore[arg-type]


class Page(View):
    @method_decorator(ratelimit(key="ip", rate="5/m", method="GET"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


# The arguments.


def tenant(group: str, request: HttpRequest) -> str:
    return f"{group}-{request.headers.get('X-Tenant')}"


def rate_of(group: str, request: HttpRequest) -> str | tuple[int, int] | None:
    return None if request.user.is_anonymous else "5/m"


ratelimit(key=tenant, rate=rate_of)
ratelimit(key="shop.limits.tenant", rate="shop.limits.rate_of")
assert_type(ratelimit.UNSAFE, list[str])
assert_type(ratelimit.ALL, tuple[None])

ratelimit(key=5, rate="5/m")  # type: ignore[arg-type]
ratelimit(key="ip", rate=5)  # type: ignore[arg-type]
ratelimit(key="ip", rate="5/m", block=None)  # type: ignore[arg-type]
ratelimit(kee="ip")  # type: ignore[call-arg]
is_ratelimited(HttpRequest(), key=lambda request: "")  # type: ignore[arg-type, misc]

usage = get_usage(HttpRequest(), fn=login, key="ip", rate="5/m")
assert_type(is_ratelimited(HttpRequest(), "g", None, "ip", "5/m", ratelimit.ALL, True), bool)
assert_type(usage, Usage | None)
if usage is not None:
    assert_type(usage["count"], int)
    assert_type(usage["should_limit"], bool)
    usage["left"]  # type: ignore[typeddict-item]
