"""How far a long subcommand is: a bar on a terminal, and lines now and then where standard error goes elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

BAR_INTERVAL, LINE_INTERVAL = 0.1, 2.0  # seconds


class Progress:
    """Progress, written to standard error, so that standard output has the results alone."""

    def __init__(
        self, unit: str, stream: TextIO | None = None, *, quiet: bool = False
    ) -> None:
        self.unit, self.stream, self.quiet = unit, stream or sys.stderr, quiet
        self.is_terminal = self.stream.isatty()
        self.started = time.monotonic()
        self._next = self.started + (0 if self.is_terminal else LINE_INTERVAL)

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.started

    def show(self, done: int, share: float | None) -> None:
        """Show that so much is done, which is this share of all; None: nobody knows."""
        now = time.monotonic()
        if self.quiet or now < self._next:
            return
        self._next = now + (BAR_INTERVAL if self.is_terminal else LINE_INTERVAL)
        elapsed = now - self.started
        rate = done / elapsed if elapsed else 0
        text = f"{done:,} {self.unit}, {rate:,.0f}/s"
        if share:
            text = f"{share:4.0%} {text}, {elapsed / share - elapsed:.0f} s left"
        if not self.is_terminal:
            self.stream.write(f"{text}\n")
        else:
            width = shutil.get_terminal_size().columns - 1
            filled = round(20 * (share or 0))
            bar = f"[{'#' * filled}{' ' * (20 - filled)}] " if share is not None else ""
            self.stream.write(f"\r\x1b[K{(bar + text)[:width]}")
        self.stream.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self.is_terminal and not self.quiet:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
