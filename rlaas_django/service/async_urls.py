"""The URLs of the service with async views, for a site that runs under ASGI."""

from .urls import app_name, patterns
from .views import async_view

__all__ = ["app_name", "urlpatterns"]

urlpatterns = patterns(async_view)
