"""What an error says.

Whether the whole server is concerned, and what to do next.
"""

from __future__ import annotations

from enum import Enum

from redis import exceptions

from ..runtime.log import LoggedError

# Replies to every command. Not OOM and MISCONF: such a server still knows who is over a
# limit.
_WHOLE_SERVER = (
    exceptions.ReadOnlyError,
    exceptions.NoPermissionError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
)

# Programming errors, e.g. a name missing in another redis-py version. Raised again: no
# server reply causes them, and falling back would hide them.
PROGRAMMING_ERRORS = (AttributeError, NameError, TypeError)


class UnavailableError(LoggedError):
    """Redis is unavailable, or replied with an error.

    `__cause__` is the error of redis-py; None for a call that was not sent, or that was
    one of a batch.
    """


def not_on_redis(alias: str) -> str:
    """Return what operators should know of a cache that counts in the process."""
    return (
        f"CACHES[{alias!r}] is not on Redis: each process counts by itself; "
        "configure Redis for more than one process."
    )


class PoolExhaustedError(exceptions.ConnectionError):
    """All connections were in use for too long.

    The server is not to blame.
    """


class UnexpectedReplyError(exceptions.InvalidResponse):
    """A reply that does not fit its call.

    Later replies on the connection may also be those of other calls.
    """

    def __init__(self, reply: object) -> None:
        super().__init__(f"unexpected reply: {reply!r:.100}")


def as_redis_error(error: Exception, server: str, timeout: float) -> Exception:
    """Return the error of redis-py that says what an error of a connection means."""
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return exceptions.TimeoutError(f"timeout after {timeout:g} s")
    if isinstance(error, (OSError, exceptions.ResponseError)):  # to AUTH or SELECT
        return exceptions.ConnectionError(str(error))
    if isinstance(error, exceptions.RedisError):
        return error
    return exceptions.InvalidResponse(
        f"{server} did not reply as Redis does: {error!r}"
    )


def concerns_whole_server(error: exceptions.ResponseError) -> bool:
    """Return whether the server would also reply so to any other call."""
    text = str(error)
    if isinstance(error, _WHOLE_SERVER):
        return "slot not served" not in text
    # BUSY: a script that does not end. READONLY inside a script's error: Redis < 7.
    # Protocol error: Redis 7.0 rejects a call of more than ten arguments without a
    # password like this, and closes the connection.
    return text.startswith(("BUSY ", "Protocol error")) or "-READONLY " in text


class NextAttempt(Enum):
    """How to send a call again."""

    LOAD = "with its script"
    REDIRECT = "where the error says"
    ASKING = "where the error says, with ASKING before it"
    LATER = "after a pause, where the topology says"


def next_attempt(
    error: exceptions.ResponseError, *, loaded: bool = False, is_refund: bool = False
) -> NextAttempt | None:
    """Return how to send a call again after NOSCRIPT, MOVED, ASK or TRYAGAIN.

    None after any other error: these alone say that nothing was run.
    """
    if isinstance(error, exceptions.NoScriptError):
        return None if loaded else NextAttempt.LOAD
    if isinstance(error, exceptions.MovedError):  # which redis-py derives from AskError
        return NextAttempt.REDIRECT
    if isinstance(error, exceptions.AskError):
        # A refund of the fixed window names a key that never exists, so ASK does not
        # say where its counter is.
        return NextAttempt.LATER if is_refund else NextAttempt.ASKING
    if isinstance(error, exceptions.TryAgainError):
        return NextAttempt.LATER
    return None
