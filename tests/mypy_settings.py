"""For mypy's Django plugin, which ends without the chance to stop a server."""

SECRET_KEY = "types"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rlaas_django",
]
