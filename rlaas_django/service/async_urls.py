"""The URLs of the service with async views, for a site that runs under ASGI.

>>> path("rlaas/", include("rlaas_django.service.async_urls"))
"""

from . import urls
from .views import async_view

app_name = urls.app_name
urlpatterns = urls.patterns(async_view)
