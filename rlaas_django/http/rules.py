"""Which limits the middleware applies to a request: those of the first rule that matches, unless the view is exempt."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from django.urls import Resolver404, ResolverMatch, get_resolver, resolve

from .. import conf
from ..core.policy import DEFAULT
from ..core.rules import Rule
from ..runtime import registry
from .limits import Limits, decorated, with_limits_of_view

OWN_PAGES = "/rlaas_django/ratelimit/"  # in the path of every page of the admin panel, wherever the admin is

EVERYTHING = Rule(None, None, None, (DEFAULT,))
EXEMPT = Rule(None, None, None, ())

_loaded: set[Any] = set()  # the URLconfs that were imported, and with them the views


def limits_of_request(request: HttpRequest) -> Limits:
    """Return the limits of a request; none where it is exempt, or where rules are written and none matches."""
    rule = _matching_rule(request)
    if not rule.policies or not _needs_view(request):
        return _limits(rule)
    try:
        match = resolve(request.path_info, getattr(request, "urlconf", None))
    except Resolver404:
        return _limits(rule)
    return (
        _limits(EXEMPT)
        if _is_exempt(match)
        else with_limits_of_view(_limits(rule), match.func, request)
    )


def _matching_rule(request: HttpRequest) -> Rule:
    rules = conf.config().rules
    if not rules:
        return EVERYTHING
    return next(
        (rule for rule in rules if rule.matches(request.path_info, request.method)),
        EXEMPT,
    )


def _limits(rule: Rule) -> Limits:
    derived = conf.config().derived.rules
    limits: Limits | None = derived.get(rule)
    if limits is None:
        limits = Limits(
            rule.policies, rule.cost, charge_when=rule.charge_when, before_view=False
        )
        derived[rule] = limits
    return limits


def _needs_view(request: HttpRequest) -> bool:
    """Return whether the limits depend on the view. If they do not, the URL is resolved once, by Django."""
    urlconf = getattr(request, "urlconf", None)
    if urlconf not in _loaded:
        with suppress(Exception):  # Django tells what is wrong with the URLs
            _ = get_resolver(urlconf).url_patterns
        _loaded.add(urlconf)
    return bool(decorated or registry.exempt_views) or OWN_PAGES in request.path_info


def _is_exempt(match: ResolverMatch) -> bool:
    view = match.func
    for each in (view, getattr(view, "view_class", getattr(view, "cls", None))):
        if getattr(each, "rate_limit_exempt", False):
            return True
    return match.app_names[-1:] == ["admin"] and (match.url_name or "").startswith(
        "rlaas_django_ratelimit_"
    )
