"""Failed logins, as Django's `user_login_failed` signal reports them.

They are for `charge_when`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver
from django.http.response import HttpResponseBase


class Attempt:
    """What happened within one request.

    An object, because async receivers have contexts of their own.
    """

    def __init__(self) -> None:
        self.failed = False
        self.ended = False


_current: ContextVar[Attempt | None] = ContextVar(
    "rate_limit_login_attempt", default=None
)


def login_failed(response: HttpResponseBase) -> bool:  # noqa: ARG001
    """Charge a request in which `authenticate()` refused credentials.

    Whatever the status of its response is.

    >>> @rate_limit("5/m", key="ip", method="POST", charge_when=login_failed)
    """
    attempt = _current.get()
    return attempt is not None and attempt.failed


def watch() -> Attempt | None:
    """Watch for failed logins until `unwatch`; None where limits around these do."""
    outer = _current.get()
    if outer is not None and not outer.ended:
        return None
    attempt = Attempt()
    _current.set(attempt)
    return attempt


def unwatch(attempt: Attempt) -> None:
    attempt.ended = True  # a task that the view has started still has it in its context
    _current.set(None)


@receiver(user_login_failed)
def _note_failure(**_: Any) -> None:
    attempt = _current.get()
    if attempt is not None:
        attempt.failed = True
