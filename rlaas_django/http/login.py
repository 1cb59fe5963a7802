"""Which request Django's `authenticate()` is called for, and whether it failed.

For `charge_when`, and for the response to an attempt that auth.py refused.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver
from django.http.response import HttpResponseBase

from .request_state import STATE, RequestState

# The request of this context.
current: ContextVar[RequestState | None] = ContextVar(
    "rate_limit_request", default=None
)

# Of the request whose attempt auth.py refused in this context. Django reports that as a
# failure, but no password was compared.
refused: ContextVar[RequestState | None] = ContextVar(
    "rate_limit_login_refused", default=None
)


def login_failed(response: HttpResponseBase) -> bool:  # noqa: ARG001
    """Charge a request in which `authenticate()` refused credentials.

    Whatever the status of its response is.

    >>> @rate_limit("5/m", key="ip", method="POST", charge_when=login_failed)
    """
    state = current.get()
    return state is not None and state.login_failed


def served(request: Any) -> RequestState | None:
    """Return the state of a request; without one, that of the request of this context.

    None where it is not within limits: a task that its view has started may go on.
    """
    state: RequestState | None = getattr(request, STATE, None) or current.get()
    if state is None or state.depth == 0:
        return None
    return state


@receiver(user_login_failed)
def _note_failure(*, request: Any = None, **_: Any) -> None:
    state = served(request)
    if state is not None and state is not refused.get():
        state.login_failed = True
    refused.set(None)
