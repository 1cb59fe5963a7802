import logging

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RlaasDjangoConfig(AppConfig):
    name = "rlaas_django"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = _("Rate limits")

    def ready(self) -> None:
        from . import checks, stats  # noqa: F401  (to import the checks registers them)
        from .http.responses import SuppressedRefusals, strip_figures_from_cached_pages
        from .runtime import observers

        observers.add(stats.record, count=stats.count)
        strip_figures_from_cached_pages()
        logging.getLogger("django.request").addFilter(SuppressedRefusals())
