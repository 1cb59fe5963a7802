"""Failed logins, as Django's `user_login_failed` signal reports them, for `charge_when`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver
from django.http.response import HttpResponseBase


class Attempt:
    """What happened within one request. An object, because async receivers have contexts of their own."""

    failed = ended = False


_current: ContextVar[Attempt | None] = ContextVar(
    "rate_limit_login_attempt", default=None
)


def login_failed(response: HttpResponseBase) -> bool:  # noqa: ARG001
    """Charge a request in which `authenticate()` refused credentials, whatever the status of its response is.

    >>> @rate_limit("5/m", key="ip", method="POST", charge_when=login_failed)
    """
    attempt = _current.get()
    return attempt is not None and attempt.failed


@contextmanager
def watched() -> Iterator[None]:
    """Watch for failed logins, for the `login_failed` of every limit around a view."""
    outer = _current.get()
    if outer is not None and not outer.ended:
        yield
        return
    attempt = Attempt()
    token = _current.set(attempt)
    try:
        yield
    finally:
        attempt.ended = (
            True  # a task that the view has started still has it in its context
        )
        _current.reset(token)


@receiver(user_login_failed)
def _note_failure(**_: Any) -> None:
    if (attempt := _current.get()) is not None:
        attempt.failed = True
