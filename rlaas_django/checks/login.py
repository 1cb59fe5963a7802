"""Check that RATE_LIMITER['LOGIN'] limits every comparison of a password."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from django.contrib.auth import get_backends
from django.core import checks

from .. import conf
from ..conf import Problem
from .settings import MIDDLEWARE, as_messages, middleware_position

MIXIN = "rlaas_django.auth.LoginRateLimitMixin"


@checks.register("caches")
def check_logins(**_: Any) -> list[checks.CheckMessage]:
    """Check which authentication backends are limited."""
    config = conf.read(conf.raw(), [])
    if config is None or not config.login:
        return []

    try:
        backends = get_backends()
    except Exception:  # noqa: BLE001  (Django reports what is wrong with a backend)
        return []
    return as_messages(_problems(backends))


def _problems(backends: Sequence[Any]) -> Iterator[Problem]:
    if not any(map(_is_limited, backends)):
        if "LOGIN" in (conf.raw() or {}):
            yield Problem(
                "W021",
                "RATE_LIMITER['LOGIN'] is set, but no backend in "
                "AUTHENTICATION_BACKENDS applies it.",
                "Use 'rlaas_django.auth.ModelBackend' in place of Django's, or put "
                f"{MIXIN} before the base of a backend of your own.",
            )
        return

    for backend in backends:
        if _compares_passwords(backend) and not _is_limited(backend):
            name = f"{type(backend).__module__}.{type(backend).__qualname__}"
            yield Problem(
                "W022",
                f"{name} in AUTHENTICATION_BACKENDS compares passwords that "
                "RATE_LIMITER['LOGIN'] does not limit.",
                f"Use a class of {MIXIN} and {type(backend).__qualname__}.",
            )

    if middleware_position() is None:
        yield Problem(
            "W023",
            f"MIDDLEWARE has no {MIDDLEWARE}: too many attempts to log in are refused "
            "as a wrong password is, not with a 429 and Retry-After.",
            "Add it to MIDDLEWARE, or decorate the views that log in.",
        )


def _is_limited(backend: Any) -> bool:
    """Return whether a backend is of our mixin, by an attribute that it has."""
    return getattr(backend, "limits_logins", False)


def _compares_passwords(backend: Any) -> bool:
    """Return whether a backend takes a name and a password, as far as it shows."""
    # Not where the app of users is not installed.
    from django.contrib.auth.backends import BaseBackend

    if type(backend).authenticate is BaseBackend.authenticate:
        return False
    try:
        signature = inspect.signature(backend.authenticate)
        signature.bind(None, username="", password="")
    except (TypeError, ValueError):
        return False
    return True
