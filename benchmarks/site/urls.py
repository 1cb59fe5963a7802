"""A path per view: /sync/<entry>/<outcome> and /async/<entry>/<outcome>; the HTTP service, and a bare JSON view."""

from django.http import JsonResponse
from django.urls import include, path

from .views import ENTRIES, LIMITS


def bare_json(request):
    return JsonResponse({"ok": True})


async def abare_json(request):
    return JsonResponse({"ok": True})


urlpatterns = [
    path("sync/rlaas/", include("rlaas_django.service.urls")),
    path("async/rlaas/", include("rlaas_django.service.async_urls")),
    path("sync/json", bare_json),
    path("async/json", abare_json),
]
urlpatterns += [
    path(entry.path(kind, outcome), entry.view(kind, outcome))
    for entry in ENTRIES
    for kind in ("sync", "async")
    for outcome in LIMITS
]
