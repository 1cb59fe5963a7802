"""What a subcommand prints: lines and tables for people, or JSON. Nothing reaches the terminal unescaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.core.management.base import OutputWrapper
from django.core.management.color import Style
from django.utils import timezone

from ....core.text import printable


class Styled(NamedTuple):
    """Text in one of the styles of Django's commands: SUCCESS, WARNING, ERROR, NOTICE."""

    text: object
    style: str


class Output:
    """The output of one subcommand; `as_json` says whether it was called with --json."""

    def __init__(
        self,
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        style: Style | None,
        *,
        as_json: bool = False,
    ) -> None:
        self.stdout, self.stderr, self.as_json = stdout, stderr, as_json
        self._style = style  # None: without colours
        self._encoding = getattr(stdout, "encoding", None) or "utf-8"

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks on."""
        return self.stdout.isatty()

    def line(self, *parts: object, sep: str = "") -> None:
        """Print a line of texts, some of them `Styled`."""
        self.stdout.write(sep.join(self._shown(part) for part in parts))

    def warn(self, text: str) -> None:
        """Print a line to standard error, beside the results."""
        self.stderr.write(self._text(text))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; a column whose name begins with > is aligned to the right."""
        cells: list[Sequence[object]] = [[name.lstrip(">") for name in columns], *rows]
        widths = [
            max(len(self._text(row[i])) for row in cells) for i in range(len(columns))
        ]
        for number, row in enumerate(cells):
            parts = []
            for name, width, cell in zip(columns, widths, row, strict=True):
                padding = " " * (width - len(self._text(cell)))
                shown = self._shown(cell if number else Styled(cell, "MIGRATE_HEADING"))
                parts.append(
                    padding + shown if name.startswith(">") else shown + padding
                )
            self.stdout.write("  ".join(parts).rstrip())

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print a value as JSON; on one line, where it is one of many, without indent."""
        text = json.dumps(value, indent=indent, default=str)
        self.stdout.write(
            text.replace("\x7f", "\\u007f")
        )  # the one control character that json leaves as it is

    def _text(self, part: object) -> str:
        text = printable(str(part.text if isinstance(part, Styled) else part))
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, part: object) -> str:
        text = self._text(part)
        if self._style is None or not isinstance(part, Styled):
            return text
        return str(getattr(self._style, part.style)(text))


def local(at: datetime) -> datetime:
    """Return a time in the current time zone; with USE_TZ off, all times are."""
    return timezone.localtime(at) if timezone.is_aware(at) else at


def duration(seconds: float) -> str:
    """Return seconds as `0.4 s`, `38 s`, `4 min 10 s`, `2 h 5 min` or `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    left = math.ceil(seconds)
    parts = [
        (left // 86_400, "d"),
        (left // 3_600 % 24, "h"),
        (left // 60 % 60, "min"),
        (left % 60, "s"),
    ]
    first = next(i for i, (number, _) in enumerate(parts) if number)
    return " ".join(
        f"{number} {unit}" for number, unit in parts[first : first + 2] if number
    )


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 line`, `2,000 lines`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """Return a share as `12.3 %`, with three digits that matter."""
    return f"{100 * share:.3g} %" if share < 0.0999 else f"{100 * share:.1f} %"


def size(number: float) -> str:
    """Return bytes as `118 B`, `1.7 kB`, `119 MB` or `2.0 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return (
                f"{number:.3g} {unit}"
                if unit == "B" or number >= 9.95
                else f"{number:.1f} {unit}"
            )
        number /= 1000
    return f"{number:,.1f} TB"
