"""URLs for tests of the admin: the panel, and a view to be limited by."""

from django.contrib import admin
from django.http import HttpResponse
from django.urls import path
from rlaas_django import rate_limit


@rate_limit("3/m", key="user_or_ip", group="page")
def page(request):
    return HttpResponse("ok")


urlpatterns = [path("admin/", admin.site.urls), path("page/", page)]
