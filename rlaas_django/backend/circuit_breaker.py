"""The circuit breaker of one server.

While it is open, calls are skipped, but for one probe per interval.
"""

from __future__ import annotations

import random
import threading
import time

from ..runtime import log

# Seconds from the failure that opens the breaker to the first probe: short, as one call
# may fail by itself.
FIRST_INTERVAL = 0.15
MAX_INTERVAL = 2.0  # it doubles with each failed probe, up to this
LOG_INTERVAL = 1.0  # seconds between two lines about errors
# Up to this share is added at random, so that processes do not probe together.
JITTER = 0.25


class CircuitBreaker:
    """Closed while the server replies, and open after a failure.

    It is half-open while a probe is under way.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        # Why it is open; None: closed. An exception would keep its caller's frames.
        self.error: str | None = None
        self.failed = False  # whether a call has failed since the last reply
        self.opened_at = 0.0
        self.skipped = 0  # calls that were not made while open
        self.interval = 0.0
        self._next_probe = 0.0
        self._next_line = 0.0
        self._half_open = False
        self._lock = threading.Lock()

    def allows_call(self) -> bool:
        """Return whether to make a call.

        While open, that is once per interval.
        """
        if self.error is None:
            return True

        with self._lock:
            now = time.monotonic()
            if now < self._next_probe:
                self.skipped += 1
                return False
            # One probe at a time.
            self._next_probe = now + max(self.timeout, self._jittered())
            self._half_open = True
            return True

    def record_failure(self, error: Exception, *, opens: bool = True) -> None:
        """Open, or stay open for longer.

        With `opens=False` only if the call before also failed. Failures of calls that
        were under way when it opened change nothing.
        """
        with self._lock:
            if self.error is not None and not self._half_open:
                return
            if opens or self.failed:
                self._open(error)
            self.failed = True
        self.log_error(error)

    def _open(self, error: Exception) -> None:
        now = time.monotonic()
        if self.error is None:
            self.opened_at = now
            self.skipped = 0
            self.interval = FIRST_INTERVAL
        else:
            self.interval = min(2 * self.interval, MAX_INTERVAL)
        self.error = str(error) or repr(error)
        self._half_open = False
        self._next_probe = now + self._jittered()

    def record_success(self) -> None:
        """Close."""
        if not self.failed:
            return

        with self._lock:
            was_open = self.error is not None
            self.error = None
            self.failed = False
            self._half_open = False
            seconds = self.open_for
            skipped = self.skipped
        if was_open:
            log.warning(
                "%s available again after %.1f s (%d calls skipped).",
                self.name,
                seconds,
                skipped,
            )

    def log_error(self, error: Exception) -> None:
        """Log an error, at most once a second."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LOG_INTERVAL
            log.error("%s unavailable: %s", self.name, log.escaped(str(error)))

    @property
    def open_for(self) -> float:
        """Seconds since it opened."""
        return time.monotonic() - self.opened_at

    @property
    def next_probe_in(self) -> float:
        """Seconds until the next probe."""
        return max(0.0, self._next_probe - time.monotonic())

    def _jittered(self) -> float:
        return self.interval * random.uniform(1, 1 + JITTER)  # noqa: S311
