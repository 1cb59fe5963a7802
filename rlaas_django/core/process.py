"""State that belongs to one process, and starts afresh in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable

_resets: list[Callable[[], None]] = []


def on_fork(reset: Callable[[], None]) -> None:
    """Call `reset` in every child that this process forks: locks may be held there, and data is the parent's."""
    _resets.append(reset)


def reset() -> None:
    """Reset all state of this process; also for tests."""
    for each in _resets:
        each()


os.register_at_fork(after_in_child=reset)
