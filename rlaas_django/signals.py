"""The signals. A receiver that raises never breaks a request.

`rate_limited(sender, request, decision)`: a policy refused a request; or, where
`decision.allowed`, a shadow policy would have.

`backend_failed(sender, error, decision)`: Redis is unavailable, and `decision` was made
without it.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .core.decision import Decision

__all__ = ["backend_failed", "rate_limited"]

rate_limited = Signal()
backend_failed = Signal()


def send(signal: Signal, **arguments: Any) -> None:
    if signal.receivers:
        signal.send_robust(sender=Decision, **arguments)


async def asend(signal: Signal, **arguments: Any) -> None:
    if signal.receivers:
        await signal.asend_robust(sender=Decision, **arguments)
