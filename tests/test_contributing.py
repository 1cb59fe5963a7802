"""CONTRIBUTING.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlaas_django"
NOT_OURS = {"charge_when", "charge_on_error", "django_redis", "setting_changed", "test_docs"}
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def definitions() -> set[str]:
    """Return every name that the package defines: modules, classes, functions, methods, constants, Lua functions."""
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {path.parent.name for path in PACKAGE.rglob("*.py")}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
    for path in PACKAGE.glob("lua/*.lua"):
        names.update(re.findall(r"(?:function|local) (\w+)", path.read_text("utf-8")))
    return names


def test_the_tree_is_the_tree():
    tree = TEXT[TEXT.index("```text\nrlaas_django/") : TEXT.index("## The path of one request")]
    listed, folder = set(), ""
    for line in tree.splitlines()[2:]:
        name, indent = line.strip().partition(" ")[0], len(line) - len(line.lstrip())
        if name.endswith("/") and indent == 2:
            folder = name
        elif name.endswith(".py"):
            listed.add((folder if indent == 4 else "") + name)
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.stat().st_size}
    assert listed == {name for name in found if "migrations" not in name and name.count("/__init__") == 0} | {
        "limiter/__init__.py"
    }


def test_functions_and_files_that_are_named_exist():
    known, text = definitions(), re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for word in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"(backend|limiter|http|core|stats|admin|lua|tests)/[\w/.]+", word):
            assert (PACKAGE / word).exists() or (ROOT / word).exists(), word
        elif found := re.fullmatch(r"([A-Za-z_][\w.]*)\(\)?.*|(_?[a-z]+_[a-z_]+)", word):
            name = (found[1] or found[2]).rpartition(".")[2]
            assert name in known or name in NOT_OURS, word
