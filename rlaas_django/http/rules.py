"""Which limits the middleware applies to a request.

Those of the first rule that matches, unless the view is exempt.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from django.http import HttpRequest
from django.urls import Resolver404, ResolverMatch, get_resolver, resolve

from .. import conf
from ..core.policy import DEFAULT
from ..core.rules import Rule
from ..runtime import registry
from .limits import Limits
from .view_names import view_class_of

# In the path of every page of the admin panel, wherever the admin is.
OWN_PAGES = "/rlaas_django/ratelimit/"

EVERYTHING = Rule(None, None, None, (DEFAULT,))
EXEMPT = Rule(None, None, None, ())

_loaded: set[Any] = set()  # the URLconfs that were imported, and with them the views


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
    urlconf = getattr(request, "urlconf", None)
    if urlconf not in _loaded:
        with suppress(Exception):  # Django tells what is wrong with the URLs
            _ = get_resolver(urlconf).url_patterns
        _loaded.add(urlconf)
    return registry.has_exempt_views or OWN_PAGES in request.path_info


def _is_exempt(request: HttpRequest) -> bool:
    """Return whether the view is exempt, or a page of the admin panel."""
    try:
        match = resolve(request.path_info, getattr(request, "urlconf", None))
    except Resolver404:
        return False

    for view in (match.func, view_class_of(match.func)):
        if getattr(view, "rate_limit_exempt", False):
            return True
    return _is_own_page(match)


def _is_own_page(match: ResolverMatch) -> bool:
    name = match.url_name or ""
    in_admin = match.app_names[-1:] == ["admin"]
    return in_admin and name.startswith("rlaas_django_ratelimit_")
