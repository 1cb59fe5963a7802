"""Numbers and times for people, and who may see names of users."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

from django.contrib.auth import get_permission_codename, get_user_model
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import number_format


def sees_users(request: HttpRequest) -> bool:
    """Return whether staff may see the names and e-mail addresses of users, and find users by them."""
    options, user = get_user_model()._meta, cast("Any", request.user)
    names = [get_permission_codename(verb, options) for verb in ("view", "change")]
    return any(user.has_perm(f"{options.app_label}.{name}") for name in names)


def local_time(timestamp: float) -> datetime:
    """Return seconds since the epoch as a datetime in the current time zone."""
    return datetime.fromtimestamp(timestamp, tz=timezone.get_current_timezone())


def grouped(number: int) -> str:
    """Return a number with thousands separators."""
    return number_format(number, force_grouping=True)
