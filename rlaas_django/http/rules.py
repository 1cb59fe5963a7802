"""Which limits the middleware applies to a request.

Those of the first rule that matches, unless the view is exempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

from django.http import HttpRequest
from django.urls import (
    LocalePrefixPattern,
    Resolver404,
    ResolverMatch,
    URLPattern,
    URLResolver,
    get_resolver,
    resolve,
)
from django.urls.resolvers import RoutePattern
from django.utils.functional import Promise

from .. import conf
from ..core.policy import DEFAULT
from ..core.rules import Rule
from .limits import Limits
from .view_names import view_class_of

# In the path of every page of the admin panel, wherever the admin is.
OWN_PAGES = "/rlaas_django/ratelimit/"

EVERYTHING = Rule(None, None, None, (DEFAULT,))
EXEMPT = Rule(None, None, None, ())

# What a regular expression begins with; a character before a quantifier may be absent.
_find_literal = re.compile(r"\^((?:[\w/-](?![?*{]))*)").match


def limits_of_request(request: HttpRequest) -> Limits:
    """Return the limits of a request; none where no rule matches, or it is exempt."""
    rule = _matching_rule(request)
    if rule.policies and _may_be_exempt(request) and _is_exempt(request):
        rule = EXEMPT
    return _limits(rule)


def _matching_rule(request: HttpRequest) -> Rule:
    rules = conf.config().rules
    if not rules:
        return EVERYTHING
    for rule in rules:
        if rule.matches(request.path_info, request.method):
            return rule
    return EXEMPT


@cache
def _limits(rule: Rule) -> Limits:
    return Limits(
        rule.policies,
        cost=rule.cost,
        charge_when=rule.charge_when,
        before_view=False,
    )


def _may_be_exempt(request: HttpRequest) -> bool:
    """Return whether the view matters; if not, Django alone resolves the URL."""
    path = request.path_info
    resolver = get_resolver(getattr(request, "urlconf", None))
    prefixes: tuple[str, ...] = ()
    with suppress(Exception):  # Django tells what is wrong with the URLs
        prefixes = _exempt_prefixes(resolver)
    return OWN_PAGES in path or path.startswith(prefixes)


@lru_cache(maxsize=64)
def _exempt_prefixes(resolver: URLResolver) -> tuple[str, ...]:
    """Return what the paths of exempt views begin with, as far as it is literal."""
    return tuple(set(_walk(resolver.url_patterns, "/", is_literal=True)))


def _walk(
    patterns: Iterable[URLPattern | URLResolver], prefix: str, *, is_literal: bool
) -> Iterator[str]:
    """Yield what the path of each exempt view begins with, as far as it is literal."""
    for pattern in patterns:
        literal = ""
        is_whole = False
        if is_literal:
            literal, is_whole = _literal_part(pattern.pattern)
        if isinstance(pattern, URLResolver):
            below = pattern.url_patterns
            yield from _walk(below, prefix + literal, is_literal=is_whole)
        elif _is_marked_exempt(pattern.callback):
            yield prefix + literal


def _literal_part(route: Any) -> tuple[str, bool]:
    """Return what each path of a route begins with, and whether that is all of it."""
    is_translated = any(isinstance(value, Promise) for value in vars(route).values())
    if is_translated or isinstance(route, LocalePrefixPattern):
        return "", False

    text = str(route)
    if isinstance(route, RoutePattern):
        literal, bracket, _ = text.partition("<")
        return literal, not bracket
    found = _find_literal(text)
    if found is None or "|" in text:
        return "", False
    return found[1], False


def _is_exempt(request: HttpRequest) -> bool:
    """Return whether the view is exempt, or a page of the admin panel."""
    try:
        match = resolve(request.path_info, getattr(request, "urlconf", None))
    except Resolver404:
        return False
    return _is_marked_exempt(match.func) or _is_own_page(match)


def _is_marked_exempt(view: Any) -> bool:
    marked = (view, view_class_of(view))
    return any(getattr(each, "rate_limit_exempt", False) for each in marked)


def _is_own_page(match: ResolverMatch) -> bool:
    name = match.url_name or ""
    in_admin = match.app_names[-1:] == ["admin"]
    return in_admin and name.startswith("rlaas_django_ratelimit_")
