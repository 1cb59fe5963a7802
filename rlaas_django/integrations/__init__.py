"""Other frameworks and packages; each module is imported where its package is used."""

from __future__ import annotations

from ..runtime import registry


def is_api_view(view_class: object) -> bool:
    """Return whether a class is one of Django REST framework's views."""
    return hasattr(view_class, "initialize_request") and hasattr(
        view_class, "handle_exception"
    )


registry.register_adapter(is_api_view, "rlaas_django.integrations.drf_views")
