import logging

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RlaasDjangoConfig(AppConfig):
    name = "rlaas_django"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = _("Rate limits")

    def ready(self) -> None:
        from . import stats
        from .checks import server, settings  # noqa: F401  (registers the checks)
        from .http.responses import SuppressedRefusals, strip_figures_from_cached_pages
        from .runtime import observers

        observers.add(stats.record, count=stats.count)
        _register_background_jobs()
        strip_figures_from_cached_pages()
        logging.getLogger("django.request").addFilter(SuppressedRefusals())


def _register_background_jobs() -> None:
    from .backend import UnavailableError as ignored
    from .limiter import networks
    from .operators.restoring import restore_lost_overrides
    from .runtime.background import register
    from .stats import recorder

    # At once, so that overrides of networks are in force within a second.
    register(networks.refresh, ignored=ignored, at_start=True, when_stalled=True)
    register(recorder.flush, ignored=ignored, when_stalled=True, at_exit=True)
    register(restore_lost_overrides, ignored=ignored)
