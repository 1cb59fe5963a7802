"""The code has air: one statement says one thing, functions are short, modules are small.

Tokens are those of Python's tokenizer, without comments and layout: lines can be packed, tokens cannot. How many there
are in all is not tested, only how close they stand. The layers are contracts of import-linter, in pyproject.toml.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlaas_django"
pytestmark = pytest.mark.skipif(not PACKAGE.exists(), reason="there is no source: see tests/support/installed.py")

LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
BRANCHES = (
    ast.AsyncFor,
    ast.ExceptHandler,
    ast.For,
    ast.If,
    ast.IfExp,
    ast.While,
    ast.comprehension,
    ast.match_case,
)


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in modules():
        for node in ast.walk(tree_of(path)):
            yield path, node


def functions() -> Iterator[tuple[str, ast.AST]]:
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def tokens_in(path: Path) -> int:
    """Return the number of tokens; an f-string is one, as before Python 3.12, which splits it."""
    count = depth = 0
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            depth += 1
        elif name == "FSTRING_END":
            depth -= 1
        if depth == 0 and token.type not in LAYOUT:
            count += 1
    return count


def decision_points(function: ast.AST) -> int:
    """Return the branches of a function, with boolean operators."""
    points = 0
    for node in ast.walk(function):
        points += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            points += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            points += len(node.ifs)
    return points


def is_parallel(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to several names: `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def test_there_is_air_between_the_tokens():
    tokens = sum(tokens_in(path) for path in modules())
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in modules())
    assert tokens / lines <= 5.3


def test_no_line_is_longer_than_88_columns():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in modules()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > 88 and "://" not in line
    ]
    assert long == []


def test_modules_are_few_and_small():
    assert len(modules()) <= 130
    assert [path.name for path in modules() if len(path.read_text("utf-8").splitlines()) > 450] == []


def test_functions_are_short():
    assert [name for name, function in functions() if function.end_lineno - function.lineno + 1 > 50] == []


def test_functions_have_few_decision_points():
    assert [name for name, function in functions() if decision_points(function) > 12] == []


def test_parallel_assignments_are_rare():
    assert sum(is_parallel(node) for _, node in nodes()) <= 25


def test_conditional_expressions_are_rare():
    assert sum(isinstance(node, ast.IfExp) for _, node in nodes()) <= 200


def test_no_conditional_expression_is_inside_another():
    nested = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.IfExp)
        and any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
    ]
    assert nested == []
