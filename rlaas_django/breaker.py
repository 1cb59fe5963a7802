"""Whether a server is worth asking: after a failed call nobody waits for it but one probe per interval."""

from __future__ import annotations

import random
import threading
import time

from . import log

FIRST_INTERVAL = 1.0  # seconds after a failed call until the next is tried
LONGEST_INTERVAL = 2.0  # it doubles with each failed probe, up to this
JITTER = 0.25  # so much longer at random, that many processes do not knock at once


class Breaker:
    """Of one server and process: closed while it answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: str | None = None  # why it is open; None: it is closed. (An error would keep its caller's stack.)
        self.since = 0.0
        self.unasked = 0  # calls that were not made while it was open
        self._interval = 0.0
        self._next_probe = 0.0
        self._next_line = 0.0
        self._probing = False
        self.renew_lock()

    def renew_lock(self) -> None:
        self._lock = threading.Lock()  # in a fork: the parent's may have been held

    def admits(self) -> bool:
        """Whether to make a call: any while closed; while open the one that is to find out."""
        if self.error is None:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._next_probe:
                self.unasked += 1
                return False
            self._next_probe = now + self._interval * random.uniform(1, 1 + JITTER)  # noqa: S311
            self._probing = True
            return True

    def failed(self, error: Exception) -> None:
        """A call had no answer. Those that were under way when it opened say nothing new."""
        with self._lock:
            if self.error is not None and not self._probing:
                return
            now = time.monotonic()
            if self.error is None:
                self.since, self.unasked, self._interval = now, 0, FIRST_INTERVAL
            else:
                self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            self.error, self._probing = str(error) or repr(error), False
            self._next_probe = now + self._interval * random.uniform(1, 1 + JITTER)  # noqa: S311
        self.complain(error)

    def succeeded(self) -> None:
        """A call was answered."""
        if self.error is None:
            return
        with self._lock:
            if self.error is None:
                return
            self.error, self._probing = None, False
            away, unasked = self.away, self.unasked
        log.warning("%s answers again, after %.1f s; %d calls were not made meanwhile.", self.name, away, unasked)

    def complain(self, error: Exception) -> None:
        """A line in the log, at most one per interval."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + FIRST_INTERVAL
            log.error("%s could not be asked: %s", self.name, log.escaped(str(error)))

    @property
    def away(self) -> float:
        """Seconds since it opened."""
        return time.monotonic() - self.since

    @property
    def next_probe_in(self) -> float:
        """Seconds."""
        return max(0.0, self._next_probe - time.monotonic())
