"""What a subcommand prints: lines and tables for people, or JSON, and its progress.

Nothing reaches the terminal unescaped.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TextIO

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.utils import timezone

from ..core.text import printable

BAR_INTERVAL = 0.1  # seconds
LINE_INTERVAL = 2.0  # seconds
BAR_WIDTH = 20  # characters
CLEAR_LINE = "\r\x1b[K"
HEADING = "MIGRATE_HEADING"


class Styled(NamedTuple):
    """Text in one of the styles of Django's commands: SUCCESS, WARNING, ERROR."""

    text: object
    style: str


class Output:
    """The output of one subcommand; `as_json` says whether --json was given."""

    def __init__(
        self,
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        style: Style | None,
        *,
        as_json: bool = False,
    ) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.as_json = as_json
        self._style = style  # None: without colours
        self._encoding = getattr(stdout, "encoding", None) or "utf-8"

    def line(self, *parts: object) -> None:
        """Print a line of texts, some of them `Styled`."""
        self.stdout.write("".join(self._shown(part) for part in parts))

    def warn(self, text: str) -> None:
        """Print a line to standard error, beside the results."""
        self.stderr.write(self._text(text))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; a column whose name begins with > is aligned to the right."""
        heading = [Styled(name.lstrip(">"), HEADING) for name in columns]
        table: list[Sequence[object]] = [heading, *rows]
        widths = [
            max(len(self._text(cell)) for cell in column)
            for column in zip(*table, strict=True)
        ]

        for row in table:
            cells = []
            for name, width, cell in zip(columns, widths, row, strict=True):
                alignment = ">" if name.startswith(">") else "<"
                cells.append(self._shown(cell, f"{alignment}{width}"))
            self.stdout.write("  ".join(cells).rstrip())

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print a value as JSON; without indent on one line, as one of many."""
        text = json.dumps(value, indent=indent, default=str)
        # The one control character that json leaves as it is.
        self.stdout.write(text.replace("\x7f", "\\u007f"))

    def _text(self, part: object) -> str:
        """Return a text without its style, safe to print."""
        if isinstance(part, Styled):
            part = part.text

        # Durations have no-break spaces, which a terminal of another encoding lacks.
        text = printable(str(part).replace("\u00a0", " "))
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, part: object, form: str = "") -> str:
        """Return a text as it is printed, in its style."""
        text = format(self._text(part), form)
        if self._style is None or not isinstance(part, Styled):
            return text
        return str(getattr(self._style, part.style)(text))


class Progress:
    """How far a long subcommand is, on standard error.

    On a terminal it is a bar; elsewhere it is a line now and then.
    """

    def __init__(self, unit: str, *, quiet: bool = False) -> None:
        self._unit = unit
        self._quiet = quiet
        self._stream: TextIO = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._interval = BAR_INTERVAL if self._is_terminal else LINE_INTERVAL
        self._started = time.monotonic()
        self._shown_at = self._started

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._started

    def show(self, done: int, share: float | None) -> None:
        """Show that so much is done, which is this share of all if that is known."""
        now = time.monotonic()
        if self._quiet or now - self._shown_at < self._interval:
            return

        self._shown_at = now
        elapsed = now - self._started
        text = f"{done:,} {self._unit}, {done / elapsed:,.0f}/s"
        if share:
            text = f"{share:4.0%} {text}, {elapsed / share - elapsed:.0f} s left"

        if not self._is_terminal:
            self._stream.write(f"{text}\n")
        else:
            filled = "#" * round(BAR_WIDTH * (share or 0))
            line = f"[{filled:{BAR_WIDTH}}] {text}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(CLEAR_LINE + line[:width])
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self._is_terminal and not self._quiet:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()


def minute(at: datetime | None) -> str:
    """Return a time as `2026-11-18 15:40` in the current time zone; '' for None."""
    if at is None:
        return ""
    if timezone.is_aware(at):  # with USE_TZ off, all times are in it
        at = timezone.localtime(at)
    return f"{at:%Y-%m-%d %H:%M}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 line`, `2,000 lines`."""
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def percent(share: float) -> str:
    """Return a share as `12.3 %`, with three digits that matter."""
    digits = ".3g" if share < 0.0999 else ".1f"
    return f"{100 * share:{digits}} %"


def size(number: float) -> str:
    """Return bytes as `118 B`, `1.7 kB`, `119 MB` or `2.0 GB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]

    unit = units[0]
    digits = ".3g"
    if unit == "TB" or (unit != "B" and number < 9.95):
        digits = ",.1f"
    return f"{number:{digits}} {unit}"
