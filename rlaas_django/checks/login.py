"""Check that RATE_LIMITER['LOGIN'] limits every comparison of a password."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.contrib.auth import get_backends, get_user_model
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
            'Add it to MIDDLEWARE, with the rule {"path": "/", "exempt": True} if it '
            "is to limit nothing else; or decorate the views that log in.",
        )


def _is_limited(backend: Any) -> bool:
    """Return whether our mixin, or a class of it, is the first that authenticates."""
    return getattr(_authenticating_class(backend), "limits_logins", False)


def _authenticating_class(backend: Any) -> type:
    classes = type(backend).__mro__
    return next(cls for cls in classes if "authenticate" in vars(cls))


def _compares_passwords(backend: Any) -> bool:
    """Return whether a backend takes a name and a password, as far as it shows."""
    # Not where the app of users is not installed.
    from django.contrib.auth.backends import BaseBackend

    if _authenticating_class(backend) is BaseBackend:
        return False

    signature = inspect.signature(backend.authenticate)
    for name in ("username", get_user_model().USERNAME_FIELD, "email", "phone"):
        with suppress(TypeError):
            signature.bind(None, **{name: "", "password": ""})
            return True
    return False
