"""Signals. A receiver that raises never breaks a request.

`rate_limited(sender, request, decision)`: a policy refused, or, when `decision.allowed`, a shadow would have.
`backend_failed(sender, error, decision)`: Redis could not be asked, and `decision` was made without it.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .policy import Decision

rate_limited = Signal()
backend_failed = Signal()


def tell(signal: Signal, **facts: Any) -> None:
    if signal.receivers:
        signal.send_robust(sender=Decision, **facts)


async def atell(signal: Signal, **facts: Any) -> None:
    if signal.receivers:
        await signal.asend_robust(sender=Decision, **facts)
