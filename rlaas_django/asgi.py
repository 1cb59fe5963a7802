"""For ASGI servers: write the statistics of the last second when the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .stats import background

__all__ = ["flush_on_shutdown"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def flush_on_shutdown(application: Application) -> Application:
    """Return an ASGI application that answers lifespan events, which Django does not, and flushes on shutdown.

    >>> application = flush_on_shutdown(get_asgi_application())

    uvicorn ends by SIGTERM, after which Python's `atexit` functions do not run.
    """

    async def wrapped(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()  # lifespan.startup
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await asyncio.to_thread(background.run, background.EXIT_TIMEOUT)
        await send({"type": "lifespan.shutdown.complete"})

    return wrapped
