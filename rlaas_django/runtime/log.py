"""The logger `rlaas_django`, which an attack must not flood.

It writes at most RATE_LIMITER['LOG_LINES_PER_SECOND'] lines.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from ..core.decision import Outcome
from . import process

MAX_TEXT = 200  # characters of what a client sent

logger = logging.getLogger("rlaas_django")
lines_per_second = 10  # set by `conf` with each new configuration


class LoggedError(Exception):
    """An error that was logged where it occurred."""


def warning(message: str, *args: Any) -> None:
    if admits(logging.WARNING):
        logger.warning(message, *args)


def error(message: str, *args: Any) -> None:
    if admits(logging.ERROR):
        logger.error(message, *args)


def refusal(outcome: Outcome, method: str, path: str, *, block: bool) -> bool:
    """Log a refusal; return whether its line was suppressed."""
    if not admits(logging.WARNING):
        return logger.isEnabledFor(logging.WARNING)

    if outcome.policy.shadow:
        result = "would be refused"
    elif block:
        result = "refused"
    else:
        result = "over the limit"

    logger.warning(
        "%s policy=%s identity=%s count=%d/%d retry_after=%.3f%s %s %s",
        result,
        outcome.policy,
        outcome.identity,
        outcome.current_count,
        outcome.limit,
        outcome.retry_after,
        " override=block" if outcome.blocked else "",
        # Last, as the client chooses them.
        escaped(method),
        escaped(path),
    )
    return False


def escaped(text: str) -> str:
    """Return client-controlled text on one line and within bounds."""
    shortened = text[:MAX_TEXT]
    return shortened.encode("unicode_escape", "backslashreplace").decode("ascii")


def admits(level: int) -> bool:
    """Return whether a line may be written now; if so, it counts as written."""
    if not logger.isEnabledFor(level):
        return False

    admitted, suppressed = _budget.take(int(time.monotonic()), lines_per_second)
    if suppressed:
        logger.warning(
            "Suppressed %d log lines (RATE_LIMITER['LOG_LINES_PER_SECOND']).",
            suppressed,
        )
    return admitted


class Budget:
    """The lines of one second."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._written = 0
        self._suppressed = 0

    def take(self, second: int, maximum: int) -> tuple[bool, int]:
        """Return whether there is room for a line, and how many were suppressed.

        These are reported once, in a line that is the first of its second.
        """
        with self._lock:
            reported = 0
            if second != self._second:
                self._second = second
                self._written = 0
                if self._suppressed and maximum:
                    reported = self._suppressed
                    self._suppressed = 0
                    self._written = 1

            if self._written >= maximum:
                self._suppressed += 1
                return False, reported

            self._written += 1
            return True, reported


_budget = Budget()
process.on_fork(_budget.reset)
