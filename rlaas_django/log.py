"""The logger `rlaas_django`, kept short: under attack the log must not become the next victim."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from . import conf

logger = logging.getLogger("rlaas_django")

_lock = threading.Lock()
_second, _written, _left_out = 0, 0, 0


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held


os.register_at_fork(after_in_child=_renew_lock)


def warning(message: str, *args: Any) -> None:
    if has_room(logging.WARNING):
        logger.warning(message, *args)


def error(message: str, *args: Any) -> None:
    if has_room(logging.ERROR):
        logger.error(message, *args)


def escaped(text: str) -> str:
    """What a client sent, on one line and within bounds."""
    return text[:200].encode("unicode_escape", "backslashreplace").decode("ascii")


def has_room(level: int) -> bool:
    """Whether a line of this level may be written now; who is told so has taken the room of one."""
    if not logger.isEnabledFor(level):
        return False
    write, left_out = _admit(int(time.monotonic()))
    if left_out:
        logger.warning("%d lines were left out: RATE_LIMITER['LOG_LINES_PER_SECOND'] was reached.", left_out)
    return write


def _admit(second: int) -> tuple[bool, int]:
    """Whether there is room for a line, and how many were left out before it that are still to be told of."""
    global _second, _written, _left_out
    most = conf.config().log_lines
    with _lock:
        before = 0
        if second != _second:
            _second, _written = second, 0
            if _left_out and most:
                before, _left_out, _written = _left_out, 0, 1
        if _written >= most:
            _left_out += 1
            return False, before
        _written += 1
        return True, before
