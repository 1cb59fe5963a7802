"""The admin and a few limited views, for the browser tests of the panel."""

from __future__ import annotations

from django.contrib.admin import AdminSite
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.urls import path
from rlaas_django import rate_limit
from rlaas_django.admin import RateLimitAdmin, RateLimitsOfUser
from rlaas_django.models import RateLimit


class UsersWithLimits(RateLimitsOfUser, UserAdmin):
    """A user admin with rate limits, as in docs/admin.md."""


site = AdminSite()
site.register(User, UsersWithLimits)
site.register(RateLimit, RateLimitAdmin)


def ok(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


urlpatterns = [
    path("favicon.ico", lambda request: HttpResponse(status=204)),
    path("admin/", site.urls),
    path("checkout/", rate_limit("5/h", group="checkout")(ok)),
    path("long/", rate_limit("5/h", group="example_project.views.sliding_window_compact")(ok)),
    path("login/", rate_limit("login")(ok)),
    path("search/", rate_limit("search", "trial")(ok)),
]
