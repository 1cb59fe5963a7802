"""The system checks, by what they look at; to import this package registers them."""

from . import server, settings, views

__all__ = ["server", "settings", "views"]
