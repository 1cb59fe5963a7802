import logging

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from . import integrations  # noqa: F401  (registers adapters, before any view is made)


class RlaasDjangoConfig(AppConfig):
    name = "rlaas_django"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = _("Rate limits")

    def ready(self) -> None:
        from . import checks  # noqa: F401  (to import the checks registers them)
        from .http.refusals import SuppressedRefusals
        from .runtime import observers
        from .stats import recorder

        observers.add(recorder.record, count=recorder.count)
        _register_background_jobs()
        logging.getLogger("django.request").addFilter(SuppressedRefusals())


def _register_background_jobs() -> None:
    from .limiter import networks
    from .operators.actions import restore_lost_overrides
    from .runtime.background import AT_EXIT, AT_START, WHEN_STALLED, register
    from .stats import recorder

    # At once, so that overrides of networks are in force within a second.
    register(networks.refresh, AT_START, WHEN_STALLED)
    register(recorder.flush, WHEN_STALLED, AT_EXIT)
    register(restore_lost_overrides)
