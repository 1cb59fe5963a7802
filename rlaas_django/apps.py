from django.apps import AppConfig


class RlaasDjangoConfig(AppConfig):
    name = "rlaas_django"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Rate limits"

    def ready(self) -> None:
        from . import checks  # noqa: F401  (registers them)
