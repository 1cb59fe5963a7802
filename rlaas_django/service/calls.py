"""How endpoints, which are written once, call the limiter from sync and async views.

An endpoint is an async function. It awaits `call(limiter.check, limiter.acheck, ...)`,
which calls the first function in a sync view, and awaits the second in an async one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Call = Callable[..., Awaitable[Any]]


async def call_sync(function: Any, _: Any, *arguments: Any, **options: Any) -> Any:
    """Call the first of two functions."""
    return function(*arguments, **options)


async def call_async(_: Any, function: Any, *arguments: Any, **options: Any) -> Any:
    """Await the second of two functions."""
    return await function(*arguments, **options)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that only makes sync calls.

    It never waits, so it needs no event loop: it ends at its first step.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("A sync view waited for something.")
