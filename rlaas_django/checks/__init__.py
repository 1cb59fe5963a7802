"""The system checks, by what they look at; importing this package registers them."""

from . import login, server, settings, views  # noqa: F401
