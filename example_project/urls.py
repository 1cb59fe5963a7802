from django.contrib import admin
from django.templatetags.static import static
from django.urls import path
from django.views.generic import RedirectView

from . import api, pages, playground, views
from .cards import PANELS

urlpatterns = [
    path("", pages.start, name="start"),
    path("playground/", playground.page, name="playground"),
    path("playground/decide/", playground.decide, name="playground_decide"),
    path("counters/", pages.counters, name="counters"),
    path("reset/<str:name>/", pages.reset_panel, name="reset"),
    path("act-as/", pages.act_as, name="act_as"),
    path("redis/stop/", pages.switch_redis, {"action": "stop"}, name="stop_redis"),
    path("redis/start/", pages.switch_redis, {"action": "start"}, name="start_redis"),
    path("admin/", admin.site.urls),
    path("favicon.ico", RedirectView.as_view(url=static("demo/icon.svg"))),
    path("try/ninja/", api.api.urls),
    path("try/rest_framework/", api.rest_framework.as_view(), name="rest_framework"),
    *views.service(),
    # Each limited view under its own name: /try/bare/, /try/inline/ ...
    *[
        path(f"try/{name}/", panel.view, name=name)
        for name, panel in PANELS.items()
        if panel.view.__module__ == views.__name__ and not panel.route
    ],
]
