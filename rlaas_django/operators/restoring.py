"""The background job that restores overrides which Redis has lost."""

from __future__ import annotations

import time

from django.db import connections

from ..limiter import overrides
from ..models import Override
from ..runtime import process

INTERVAL = 30.0  # seconds between two restores, and between two comparisons
NO_DATABASE = "django.db.backends.dummy"  # what Django makes of DATABASES = {}


class State:
    """When to restore and to compare next (by `time.monotonic`), and where to go on."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.next_restore = 0.0
        self.next_comparison = 0.0
        self.compared = ""  # the last identity that was compared


state = State()
process.on_fork(state.reset)


def restore_lost_overrides() -> None:
    """Write to Redis what it lacks of the overrides in the database.

    All of them at once after Redis was emptied. Every 30 seconds they are also
    compared: Redis may have evicted some, or was unavailable when they were set or
    ended.
    """
    now = time.monotonic()
    if now < min(state.next_restore, state.next_comparison) or not _has_database():
        return

    is_lost = overrides.is_lost()  # raises while Redis is unavailable: both stay due
    if is_lost and now >= state.next_restore:
        state.next_restore = now + INTERVAL
        Override.restore()
    if now >= state.next_comparison:
        _compare(now)


def _compare(now: float) -> None:
    """Compare some of the overrides with Redis, in the next round some more."""
    after = state.compared
    # Should this fail, the next comparison begins anew, and not at once.
    state.compared = ""
    state.next_comparison = now + INTERVAL

    state.compared = Override.publish_missing(after)
    if state.compared:
        state.next_comparison = now


def _has_database() -> bool:
    databases = connections.settings.values()
    return any(database["ENGINE"] != NO_DATABASE for database in databases)
