import logging

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RlaasDjangoConfig(AppConfig):
    name = "rlaas_django"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = _("Rate limits")

    def ready(self) -> None:
        from . import checks, server_checks  # noqa: F401  (registers them)
        from .http.responses import SuppressedRefusals

        logging.getLogger("django.request").addFilter(SuppressedRefusals())
