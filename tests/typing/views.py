"""What type checkers know of limited views. Checked by mypy --strict and pyright (`make lint`), never run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import assert_type

from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rlaas_django import (
    Algo,
    Decision,
    OnFailure,
    Policy,
    Rate,
    RateLimitedRequest,
    rate_limit,
    rate_limit_exempt,
)
from rlaas_django.integrations.throttles import RateThrottle

# A decorated view keeps its own signature.


@rate_limit
def bare(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(number)


@rate_limit("login")
def named(request: HttpRequest, *, number: int = 1) -> HttpResponse:
    return HttpResponse(number)


@rate_limit("5/m", key="ip")
async def asynchronous(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse(slug)


@rate_limit
async def asynchronous_bare(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@rate_limit_exempt
def exempt(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


assert_type(bare(HttpRequest(), 5), HttpResponse)
assert_type(named(HttpRequest(), number=5), HttpResponse)
assert_type(exempt(HttpRequest()), HttpResponse)
a_view: Callable[[HttpRequest, str], Awaitable[HttpResponse]] = asynchronous
another: Callable[[HttpRequest], Awaitable[HttpResponse]] = asynchronous_bare
urlpatterns = [path("bare/<int:number>", bare), path("named/", named), path("asynchronous/<slug>", asynchronous)]

bare(HttpRequest(), "5")  # type: ignore[arg-type]
named(HttpRequest(), count=5)  # type: ignore[call-arg]
bare()  # type: ignore[call-arg]


# `request.rate_limit` is a decision.


@rate_limit("5/m", block=False)
def annotated(request: RateLimitedRequest) -> HttpResponse:
    assert_type(request.rate_limit, Decision)
    assert_type(request.rate_limit.retry_after, float)
    return HttpResponse(request.GET.get("q", ""))


path("annotated/", annotated)


# Classes and methods stay what they are.


@rate_limit
class Bare(View):
    answer = 42


@rate_limit("5/m", "1000/h", key="user")
class Page(View):
    answer = 42

    @method_decorator(rate_limit("5/m"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@method_decorator(rate_limit("5/m"), name="dispatch")
class Form(View):
    answer = 42


assert_type(Page.answer, int)
assert_type(Bare().answer, int)
assert_type(Form().answer, int)
path("page/", Page.as_view())
path("bare-page/", Bare.as_view())


# The options.


def tenant(request: HttpRequest) -> str | None:
    return request.headers.get("X-Tenant")


def rate_of(request: HttpRequest) -> str | tuple[int, int] | None:
    return "5/m"


def failed(response: HttpResponse) -> bool:
    return response.status_code == 401


def later(request: RateLimitedRequest, decision: Decision) -> HttpResponse:
    return HttpResponse(f"{decision.retry_after}", status=429)


async def alater(request: HttpRequest, decision: Decision) -> HttpResponse:
    return HttpResponse(status=429)


@rate_limit(
    Policy("site", "10000/h", key="global"), Rate(5, 60), (5, 3600), "1000/d", key=tenant, cost=2, method="POST"
)
def many(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@rate_limit(rate=rate_of, key="user", method=["POST", "PUT"], charge_when=failed, response=later)
@rate_limit(rate=rate_of)
@rate_limit(rate=rate_of, key="ip", cost=lambda request: 1, response=alater, group="g", label="l")
@rate_limit(rate="5/minute", algo="token-bucket-algo", burst=9, charge_when="rlaas_django.login_failed")
def functions(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


assert_type(many(HttpRequest()), HttpResponse)
assert_type(functions(HttpRequest()), HttpResponse)

rate_limit(5)  # type: ignore[call-overload]
rate_limit("5/m", key=5)  # type: ignore[call-overload]
rate_limit("5/m", kee="ip")  # type: ignore[call-overload]
rate_limit("5/m", charge_when=401)  # type: ignore[call-overload]
rate_limit("5/m", algo="fixed-window")  # type: ignore[call-overload]
rate_limit("5/m", on_failure="close")  # type: ignore[call-overload]
Policy("p", "5/m", algo="fixed-window")  # type: ignore[arg-type]
Policy("p", "5/m", on_failure="close")  # type: ignore[arg-type]

an_algorithm: Algo = "fixed-window-algo"
what_then: OnFailure = "closed"
rate_limit("5/m", algo=an_algorithm, on_failure=what_then)
Policy("p", "5/m", algo=an_algorithm, on_failure=what_then)


class Throttle(RateThrottle):
    algo = "fixed-window-algo"
    on_failure = "closed"


class MistypedThrottle(RateThrottle):
    algo = "fixed-window"  # type: ignore[assignment]
    on_failure = "close"  # type: ignore[assignment]


rate_limit("5/m", cost="a", block=None)  # type: ignore[call-overload]
rate_limit(rate_of)(many)  # type: ignore[arg-type]
