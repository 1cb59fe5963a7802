"""The circuit breaker of one server: while it is open, calls are skipped, but for one probe per interval."""

from __future__ import annotations

import random
import threading
import time

from ..runtime import log

# Seconds from the failure that opens the breaker to the first probe: short, as one call may fail by itself.
FIRST_INTERVAL = 0.15
MAX_INTERVAL = 2.0  # it doubles with each failed probe, up to this
LOG_INTERVAL = 1.0  # seconds between two lines about errors
JITTER = (
    0.25  # up to this share is added at random, so that processes do not probe together
)


class CircuitBreaker:
    """Closed while the server replies, open after a failure, half-open while a probe is under way."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self.error: str | None = (
            None  # why it is open; None: closed. (An exception would keep its caller's frames.)
        )
        self.failed = False  # whether a call has failed since the last reply
        self.opened_at = 0.0
        self.skipped = 0  # calls that were not made while open
        self.interval = self._next_probe = self._next_line = 0.0
        self._half_open = False
        self._lock = threading.Lock()

    def allows_call(self) -> bool:
        """Return whether to make a call: always while closed, once per interval while open."""
        if self.error is None:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._next_probe:
                self.skipped += 1
                return False
            self._next_probe = now + max(
                self.timeout, self._jittered()
            )  # one probe at a time
            self._half_open = True
            return True

    def record_failure(self, error: Exception, *, opens: bool = True) -> None:
        """Open, or stay open for longer; with `opens=False` only if the call before failed, too.

        Failures of calls that were under way when it opened change nothing.
        """
        with self._lock:
            if self.error is not None and not self._half_open:
                return
            opens, self.failed = opens or self.failed, True
            if opens:
                now = time.monotonic()
                if self.error is None:
                    self.opened_at, self.skipped, self.interval = now, 0, FIRST_INTERVAL
                else:
                    self.interval = min(2 * self.interval, MAX_INTERVAL)
                self.error, self._half_open = str(error) or repr(error), False
                self._next_probe = now + self._jittered()
        self.log_error(error)

    def record_success(self) -> None:
        """Close."""
        if not self.failed:
            return
        with self._lock:
            was_open, self.error, self.failed, self._half_open = (
                self.error is not None,
                None,
                False,
                False,
            )
            if not was_open:
                return
            seconds, skipped = self.open_for, self.skipped
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
