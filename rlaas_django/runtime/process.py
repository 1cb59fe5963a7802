"""State of the process: what a fork or a test has to start afresh."""

from __future__ import annotations

import os
from collections.abc import Callable

_resets: list[Callable[[], object]] = []


def on_fork(reset: Callable[[], object]) -> None:
    """Call `reset` in every forked process, and in `rlaas_django.testing.reset()`."""
    _resets.append(reset)


def reset() -> None:
    """Drop connections, locks, caches and counters of this process."""
    for function in _resets:
        function()


os.register_at_fork(after_in_child=reset)
