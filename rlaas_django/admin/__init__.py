"""The panel in Django's admin: usage, refusals, shadow policies and overrides.

`RateLimitsOfUser` adds the usage of a user to the change page of your user model.
"""

from __future__ import annotations

from django.contrib import admin

from ..models import RateLimit
from .site import RateLimitAdmin, RateLimitsOfUser

__all__ = ["RateLimitAdmin", "RateLimitsOfUser"]

admin.site.register(RateLimit, RateLimitAdmin)
