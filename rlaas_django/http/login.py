"""What Django's `authenticate()` did within a request.

For `charge_when`, and for the response to an attempt that auth.py refused.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver
from django.http.response import HttpResponseBase

from ..core.decision import Decision
from .request_state import RequestState

LOGINS = "_rate_limit_logins"  # the attribute of a request that has them

# Whether every request is watched, not only where `charge_when` needs it: since
# auth.py was imported.
watches_all = False


class Logins:
    """What happened within one request.

    An object, because async receivers have contexts of their own, and threads none.
    """

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.failed = False
        self.succeeded = False
        self.refusal: Decision | None = None  # of an attempt that was not made
        self.ended = False

    def note(self, decision: Decision) -> None:
        """Note what auth.py decided about an attempt."""
        self.state.add(decision)
        if not decision.allowed:
            self.refusal = decision

    @property
    def is_refused(self) -> bool:
        """Whether an attempt was refused, and no other one succeeded."""
        return self.refusal is not None and not self.succeeded


_current: ContextVar[Logins | None] = ContextVar("rate_limit_logins", default=None)

# Of the request whose attempt auth.py refused in this context. Django reports that as a
# failure, but no password was compared.
refused: ContextVar[Logins | None] = ContextVar(
    "rate_limit_login_refused", default=None
)


def login_failed(response: HttpResponseBase) -> bool:  # noqa: ARG001
    """Charge a request in which `authenticate()` refused credentials.

    Whatever the status of its response is.

    >>> @rate_limit("5/m", key="ip", method="POST", charge_when=login_failed)
    """
    logins = _current.get()
    return logins is not None and logins.failed


def watch(state: RequestState) -> Logins | None:
    """Watch for logins until `unwatch`; None where limits around these do."""
    outer = _current.get()
    if outer is not None and outer.state is state and not outer.ended:
        return None
    logins = Logins(state)
    setattr(state.request, LOGINS, logins)
    _current.set(logins)
    return logins


def unwatch(logins: Logins) -> None:
    logins.ended = True  # a task that the view has started still has it in its context
    _current.set(None)


def logins_of(request: Any) -> Logins | None:
    """Return what watches a request; without one, the request of this context."""
    logins: Logins | None = getattr(request, LOGINS, None) or _current.get()
    if logins is None or logins.ended:
        return None
    return logins


@receiver(user_login_failed)
def _note_failure(*, request: Any = None, **_: Any) -> None:
    logins = logins_of(request)
    if logins is not None and logins is not refused.get():
        logins.failed = True
    refused.set(None)
