"""The package uses the public API of redis-py, django-redis and Django only.

An attribute that begins with one underscore is private to the code that defines it. It is allowed on `self` and `cls`,
on modules and classes of the package, and inside the class that defines it (`other._value` in `__eq__`); but a class
must not use or override the private names of a base class that is not ours.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import rlaas_django

PACKAGE = Path(rlaas_django.__file__).parent
# Documented though they begin with an underscore: Django's Model API, and NamedTuple's.
PUBLIC = {"_meta", "_default_manager", "_base_manager", "_replace", "_asdict", "_fields", "_make"}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
# Django's RedisCache has no public way to its client.
EXCEPTIONS = {("backend/client.py", "_cache"): 1}


def parsed(root: Path = PACKAGE) -> dict[str, ast.Module]:
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


def is_private(name: str) -> bool:
    """Return whether a name is private; `_rlaas...`, which we set on requests, is ours."""
    return name.startswith("_") and not name.startswith(("__", "_rlaas")) and name not in PUBLIC


def own_names(tree: ast.Module) -> set[str]:
    """Return the names in a module that stand for modules and classes of the package."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("rlaas_django")):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name.startswith("rlaas_django")}
    return names


def defined_in(node: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines: its methods, its attributes, and those that it sets on self."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and is_self(each.value):
            names.add(each.attr)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        elif isinstance(each, ast.Assign):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return {name for name in names if is_private(name)}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def private_accesses(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the line and the name of each access to a private attribute of somebody else's object."""
    ours, found = own_names(tree), []

    def visit(node: ast.AST, inside: set[str]) -> None:
        if isinstance(node, ast.ClassDef):
            inside = inside | defined_in(node)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not allowed(node, inside):
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                found.append((node.lineno, name.value))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    def allowed(node: ast.Attribute, inside: set[str]) -> bool:
        if is_self(node.value) or (node.attr in inside and not is_super(node.value)):
            return True
        return isinstance(node.value, ast.Name) and node.value.id in ours

    visit(tree, set())
    return found


def test_no_private_attribute_of_somebody_else_is_used():
    left, found = dict(EXCEPTIONS), []
    for module, tree in parsed().items():
        for line, name in private_accesses(tree):
            if left.get((module, name)):
                left[module, name] -= 1
            else:
                found.append(f"{module}:{line}: {name}")
    assert not found, "private attributes of others:\n  " + "\n  ".join(found)
    assert not any(left.values()), f"exceptions that are no longer needed: {left}"


def own_classes() -> Iterator[type]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "migrations" in parts or parts[-1] == "__main__":
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        yield from (
            each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
        )


def private_names_of_bases(own: type) -> list[str]:
    """Return the private names of base classes that are not ours which a class uses on self, or overrides."""
    used = set(re.findall(r"(?:\bself\.|\bcls\.|\bsuper\(\)\.|\bdef )(_\w+)", source_of(own)))
    bases = [base for base in own.__mro__ if base.__module__.partition(".")[0] not in ("rlaas_django", "builtins")]
    return sorted(name for name in filter(is_private, used) if any(defines(base, name) for base in bases))


def defines(base: type, name: str) -> bool:
    return name in vars(base) or re.search(rf"\bself\.{name}\b", source_of(base)) is not None


@functools.cache
def source_of(each: type) -> str:
    try:
        return inspect.getsource(each)
    except (OSError, TypeError):  # made at run time, as a NamedTuple is, or written in C
        return ""


def test_no_class_uses_or_overrides_private_names_of_somebody_else_s_base():
    found = {own.__qualname__: names for own in own_classes() if (names := private_names_of_bases(own))}
    assert not found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("response._store", ["_store"]),
        ("connection._connect()", ["_connect"]),
        ("settings._wrapped._x", ["_x", "_wrapped"]),
        ("getattr(response.headers, '_store', None)", ["_store"]),
        ("setattr(response, '_has_been_logged', True)", ["_has_been_logged"]),
        ("import redis\nredis._compat", ["_compat"]),
        ("class A(redis.Connection):\n    def f(self):\n        super()._connect()", ["_connect"]),
        ("class A(Mixin):\n    def _connect(self):\n        super()._connect()", ["_connect"]),
        ("model._meta.fields", []),
        ("value._replace(a=1)", []),
        ("obj.__class__", []),
        ("from . import log\nlog._lock", []),
        ("class A:\n    def f(self):\n        return self._x", []),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("class A:\n    _x = 1\nA._x", []),
    ],
)
def test_what_counts_as_private(code, names):
    assert [name for _, name in private_accesses(ast.parse(code))] == names
