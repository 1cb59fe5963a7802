"""The code that runs, as the page shows it."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

FOR_LINTERS = re.compile(r" *# (noqa|type: ignore).*")
STRINGS = {
    getattr(tokenize, name, None)
    for name in ("STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
}


def of_function(function: Callable[..., Any]) -> str:
    """Return a function with its decorators: `inspect` looks through `wraps`."""
    return inspect.getsource(function).strip()


def of_variable(module: ModuleType, name: str) -> str:
    """Return the statement that gives a module's variable its value."""
    text = inspect.getsource(module)
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign):
            continue
        if ast.unparse(statement.targets[0]) == name:
            return ast.get_source_segment(text, statement) or ""
    raise LookupError(f"{module.__name__} does not assign {name}.")


def highlighted(text: str) -> SafeString:
    """Return Python as HTML, its words marked for the style sheet."""
    text = FOR_LINTERS.sub("", text)
    pieces = [(_marked(kind, piece),) for kind, piece in _pieces(text)]
    return format_html_join("", "{}", pieces)


def _marked(kind: str, piece: str) -> str:
    if not kind:
        return piece
    return format_html('<span class="{}">{}</span>', kind, piece)


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text in pieces, each with its kind."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    done = 0
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if not token.string.strip():
            continue
        begin = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        yield "", text[done:begin]
        yield _kind(token, before), text[begin:end]
        done = end
        before = token.string


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
    if before == "def":
        return "name"
    return ""
