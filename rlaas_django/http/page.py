"""The refusal as a page: what the template `rlaas_django/429.html` shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.sites.shortcuts import get_current_site
from django.core.exceptions import (
    DisallowedHost,
    ImproperlyConfigured,
    ObjectDoesNotExist,
)
from django.db import DatabaseError
from django.http import HttpRequest
from django.templatetags.static import static
from django.utils import timezone

STYLESHEET, SCRIPT = "rlaas_django/429.css", "rlaas_django/429.js"


def context(request: HttpRequest, wait: int | None) -> dict[str, Any]:
    """Return what the template needs besides the decision; `wait` is in seconds, None when waiting does not help."""
    return {
        "site_name": _site_name(request),
        "wait": wait,
        "retry_at": None
        if wait is None
        else timezone.localtime(datetime.now(UTC) + timedelta(seconds=wait)),
        # A link repeats a GET only; what a form has sent, the browser has to send again.
        "retry_url": request.get_full_path()
        if request.method in ("GET", "HEAD")
        else "",
        "stylesheet": _static_url(STYLESHEET),
        "script": _static_url(SCRIPT),
    }


def _site_name(request: HttpRequest) -> str:
    """Return the name of django.contrib.sites, or the host; "" if there is none: a refusal must not fail on that."""
    try:
        return get_current_site(request).name
    except (DisallowedHost, ImproperlyConfigured, ObjectDoesNotExist, DatabaseError):
        return ""


def _static_url(path: str) -> str:
    """Return the URL of a static file, or "" if there is none, such as before `collectstatic` has run."""
    try:
        return static(path)
    except (ImproperlyConfigured, ValueError):
        return ""
