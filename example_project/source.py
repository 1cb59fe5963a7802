"""The code that runs, as the page shows it."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import keyword
import tokenize
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

STRINGS = {
    getattr(tokenize, name, None)
    for name in ("STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
}


def of_function(function: Callable[..., Any]) -> str:
    """With its decorators, which `inspect` finds through functools.wraps."""
    return inspect.getsource(function).strip()


def of_variable(module: ModuleType, name: str) -> str:
    """The statement that gives a module's variable its value."""
    text = inspect.getsource(module)
    for statement in ast.parse(text).body:
        if (
            isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == name
        ):
            return ast.get_source_segment(text, statement) or ""
    raise LookupError(f"{module.__name__} does not assign {name}.")


def highlighted(text: str) -> SafeString:
    """Python as HTML, its words marked for the style sheet."""
    return format_html_join(
        "", "{}", ((_marked(kind, piece),) for kind, piece in _pieces(text))
    )


def _marked(kind: str, piece: str) -> str:
    return format_html('<span class="{}">{}</span>', kind, piece) if kind else piece


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    done, before = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip():
            begin, end = (
                starts[row - 1] + column for row, column in (token.start, token.end)
            )
            yield "", text[done:begin]
            yield _kind(token, before), text[begin:end]
            done, before = end, token.string


def _kind(token: tokenize.TokenInfo, before: str) -> str:
    if token.type == tokenize.COMMENT:
        return "comment"
    if token.type in STRINGS:
        return "string"
    if token.type == tokenize.NUMBER:
        return "number"
    if token.string == "@" or before == "@":
        return "decorator"
    if keyword.iskeyword(token.string):
        return "keyword"
    return "name" if before == "def" else ""
