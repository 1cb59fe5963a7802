"""A path per view: /sync/<entry>/<outcome> and /async/<entry>/<outcome>."""

from django.urls import path

from .views import ENTRIES, LIMITS

urlpatterns = [
    path(entry.path(kind, outcome), entry.view(kind, outcome))
    for entry in ENTRIES
    for kind in ("sync", "async")
    for outcome in LIMITS
]
