"""Middleware rules by user that are checked before a framework has authenticated the user, for the system checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

from .. import conf
from ..core.policy import DEFAULT
from ..runtime import registry

BY_USER = ("user", "user_or_ip")
SESSION = (
    "SessionAuthentication",
    "SessionAuth",
)  # whose user Django's middleware knows


def rules_counted_by_address(config: conf.Config) -> Iterator[tuple[str, str, str]]:
    """Yield policies of middleware rules, and views below them that a framework authenticates, and how."""
    seen = set()
    for path, view in _views(get_resolver().url_patterns, "/"):
        if not (how := ", ".join(_authenticators(view))) or getattr(
            view, "rate_limit_exempt", False
        ):
            continue
        rule = next((rule for rule in config.rules if rule.matches_path(path)), None)
        names = (
            (DEFAULT,) if not config.rules else () if rule is None else rule.policies
        )
        for policy in (config.policies[name] for name in names):
            if policy.key in BY_USER and policy.name not in seen:
                seen.add(policy.name)
                yield policy.name, path, how


def _views(
    patterns: Iterable[URLPattern | URLResolver], prefix: str
) -> Iterator[tuple[str, Any]]:
    """Yield the views of the site, each with a path that is like those that lead to it."""
    for pattern in patterns:
        path = prefix + _example(str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from _views(pattern.url_patterns, path)
        else:
            yield path, pattern.callback


def _example(route: str) -> str:
    """Return text that a route matches, or what a regular expression begins with."""
    if route.startswith("^"):
        return re.match(r"[\w/-]*", route[1:])[0]  # type: ignore[index]
    return re.sub(r"<[^>]*>", "1", route)


def _authenticators(view: Any) -> list[str]:
    """Return the names of what a framework authenticates a view with, but for the session."""
    view_class: Any = getattr(view, "cls", None)
    if registry.adapter_for(view_class) is not None:
        return _named(getattr(view_class, "authentication_classes", ()))
    if getattr(view, "__module__", "") != "ninja.operation":
        return []
    path_view = inspect.getclosurevars(view).nonlocals.get("self")
    callbacks = [
        each
        for operation in getattr(path_view, "operations", ())
        for each in operation.auth_callbacks
    ]
    return _named(type(each) for each in callbacks)


def _named(classes: Iterable[type]) -> list[str]:
    return sorted(
        {
            each.__name__
            for each in classes
            if not any(base.__name__ in SESSION for base in each.__mro__)
        }
    )
