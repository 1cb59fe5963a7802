"""The limited views, one for each thing that the demo shows.

The start page quotes them from this file.
"""

from django.contrib.auth.forms import AuthenticationForm
from django.shortcuts import redirect
from django.urls import include, path
from django.views.decorators.http import require_POST

from rlaas_django import Policy, login_failed, rate_limit

from .figures import answer


@rate_limit
def bare(request):
    return answer(request)


@rate_limit("3/10s", key="ip")
def inline(request):
    return answer(request)


@rate_limit(
    Policy("person", "5/2s", key="user"),
    Policy("token", "8/10s", key="token"),
    Policy("address", "20/m", key="ip"),
)
def several(request):
    return answer(request)


@rate_limit("4/10s")
async def asynchronous(request):
    return answer(request)


def rate_of_plan(request):
    plans = {"alice": "8/20s", "carol": None}
    return plans.get(request.user.get_username(), "3/20s")


@rate_limit(rate=rate_of_plan, key="user_or_ip")
def by_plan(request):
    return answer(request)


@require_POST
@rate_limit("3/30s", key="ip", charge_when=login_failed)
def log_in(request):
    form = AuthenticationForm(request, request.POST)
    if not form.is_valid():
        return answer(request, "Wrong: charged.")
    return answer(request, "Welcome: not charged.")


@rate_limit("10/20s", cost=3)
def export(request):
    return answer(request)


@rate_limit("5/10s", algo="fixed-window-algo")
def fixed_window(request):
    return answer(request)


@rate_limit("5/10s", algo="sliding-window-algo")
def sliding_window(request):
    return answer(request)


@rate_limit("5/10s", algo="sliding-window-compact-algo")
def sliding_window_compact(request):
    return answer(request)


@rate_limit("5/10s", algo="sliding-window-counter-algo")
def sliding_window_counter(request):
    return answer(request)


@rate_limit("5/10s", algo="token-bucket-algo", burst=8)
def token_bucket(request):
    return answer(request)


@rate_limit("3/10s", shadow=True)
def shadow(request):
    return answer(request)


@rate_limit("3/10s", block=False)
def feed(request):
    if request.rate_limit.allowed:
        return answer(request, "The feed, fresh.")
    return answer(request, "The feed of a minute ago.")


@rate_limit("3/10s", key="ip", on_failure="open")
def fail_open(request):
    return answer(request)


@rate_limit("3/10s", key="ip", on_failure="closed")
def fail_closed(request):
    return answer(request)


@rate_limit("3/10s", key="ip", on_failure="local")
def count_locally(request):
    return answer(request)


def service():
    return [path("rlaas/", include("rlaas_django.service.urls"))]


def report(request):
    return answer(request)


@rate_limit("1/20s", key="ip")
def second_visit(request):
    if request.path in request.headers.get("Referer", ""):
        return redirect("start")  # from “Try again” on the 429 page
    return redirect(request.path)  # which is one too many
