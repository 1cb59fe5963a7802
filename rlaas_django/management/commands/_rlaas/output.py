"""What a subcommand prints: lines and tables for people, or JSON. Nothing reaches the terminal unescaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from django.core.management.base import OutputWrapper
from django.core.management.color import Style

from ....core.text import printable


class Styled(NamedTuple):
    """Text in one of the styles of Django's commands: SUCCESS, WARNING, ERROR, NOTICE."""

    text: object
    style: str


class Output:
    """The output of one subcommand; `as_json` says whether it was called with --json."""

    def __init__(self, stdout: OutputWrapper, style: Style | None, *, as_json: bool = False) -> None:
        self.stdout, self.as_json = stdout, as_json
        self._style = style  # None: without colours
        self._encoding = getattr(stdout, "encoding", None) or "utf-8"

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks on."""
        return self.stdout.isatty()

    def line(self, *parts: object, sep: str = "") -> None:
        """Print a line of texts, some of them `Styled`."""
        self.stdout.write(sep.join(self._shown(part) for part in parts))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; a column whose name begins with > is aligned to the right."""
        cells: list[Sequence[object]] = [[name.lstrip(">") for name in columns], *rows]
        widths = [max(len(self._text(row[i])) for row in cells) for i in range(len(columns))]
        for number, row in enumerate(cells):
            parts = []
            for name, width, cell in zip(columns, widths, row, strict=True):
                padding = " " * (width - len(self._text(cell)))
                shown = self._shown(cell if number else Styled(cell, "MIGRATE_HEADING"))
                parts.append(padding + shown if name.startswith(">") else shown + padding)
            self.stdout.write("  ".join(parts).rstrip())

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print a value as JSON; on one line, where it is one of many, without indent."""
        text = json.dumps(value, indent=indent, default=str)
        self.stdout.write(text.replace("\x7f", "\\u007f"))  # the one control character that json leaves as it is

    def _text(self, part: object) -> str:
        text = printable(str(part.text if isinstance(part, Styled) else part))
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, part: object) -> str:
        text = self._text(part)
        if self._style is None or not isinstance(part, Styled):
            return text
        return str(getattr(self._style, part.style)(text))
