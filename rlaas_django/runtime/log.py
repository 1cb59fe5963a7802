"""The logger `rlaas_django`, limited to RATE_LIMITER['LOG_LINES_PER_SECOND']: an attack must not flood the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from ..core.decision import Outcome
from . import process

logger = logging.getLogger("rlaas_django")

lines_per_second = 10  # set by `conf` with each new configuration


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
    refused = (
        "would be refused"
        if outcome.policy.shadow
        else "refused"
        if block
        else "over the limit"
    )
    figures = (
        outcome.policy,
        outcome.identity,
        outcome.current_count,
        outcome.limit,
        outcome.retry_after,
    )
    override = (
        " override=block" if outcome.blocked else ""
    )  # before what the client chooses
    line = "%s policy=%s identity=%s count=%d/%d retry_after=%.3f%s %s %s"
    logger.warning(line, refused, *figures, override, escaped(method), escaped(path))
    return False


def escaped(text: str) -> str:
    """Return client-controlled text on one line and within bounds."""
    return text[:200].encode("unicode_escape", "backslashreplace").decode("ascii")


def admits(level: int) -> bool:
    """Return whether a line of this level may be written now; if so, it counts as written."""
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
        self._second = self._written = self._suppressed = 0

    def take(self, second: int, maximum: int) -> tuple[bool, int]:
        """Return whether there is room for a line, and how many suppressed lines are to be reported before it."""
        with self._lock:
            report = 0
            if second != self._second:
                self._second, self._written = second, 0
                if self._suppressed and maximum:
                    report, self._suppressed, self._written = self._suppressed, 0, 1
            if self._written >= maximum:
                self._suppressed += 1
                return False, report
            self._written += 1
            return True, report


_budget = Budget()
process.on_fork(_budget.reset)
