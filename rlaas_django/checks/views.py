"""Check the limits of views, and the rules of the middleware above them."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from django.core import checks
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from .. import conf
from ..conf import Problem
from ..core.algorithms import TOKEN_BUCKET
from ..core.policy import Policy, nearest
from ..core.rules import Rule, cost_problem
from ..http.identity import BY_USER
from ..http.rules import EVERYTHING
from ..http.site_functions import site_function
from ..http.view_names import view_class_of, view_name
from ..runtime import registry
from ..runtime.registry import LimitedView
from .settings import (
    MIDDLEWARE,
    as_messages,
    middleware_position,
    option_problems,
    policy_problems,
)

Route = tuple[str, Any]  # a path, and its view
UPDATE_CACHE = "django.middleware.cache.UpdateCacheMiddleware"
# Authentication whose user Django's own middleware already knows.
SESSION_AUTHENTICATION = {"SessionAuthentication", "SessionAuth"}


@checks.register("caches")
def check_views(**_: Any) -> list[checks.CheckMessage]:
    """Check the limits in use, once the URLs have imported the views."""
    config = conf.read(conf.raw(), [])
    if config is None:  # `check_settings` says why
        return []

    routes = _routes()
    views = sorted(registry.limited_views(), key=lambda view: view.name)
    problems = [
        *_definition_problems(views, config),
        *_shared_names(views),
        *_limit_problems(views, config),
        *_views_counted_by_address(routes, views, config),
        *_cached_figures(views),
        *_service_problems(config),
    ]
    if middleware_position() is not None:
        problems += _rules_counted_by_address(routes, config)
        problems += _charged_in_two_ways(routes, views, config)

    return as_messages(problems)


# The site's URLs


def _routes() -> list[Route]:
    """Return the views of the site, each with a path like those that lead to it."""
    try:
        return list(_walk(get_resolver().url_patterns, "/"))
    except Exception:  # noqa: BLE001  (Django's own checks report what is wrong)
        return []


def _walk(patterns: Iterable[URLPattern | URLResolver], prefix: str) -> Iterator[Route]:
    for pattern in patterns:
        path = prefix + _example(str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from _walk(pattern.url_patterns, path)
        else:
            yield path, pattern.callback


def _example(route: str) -> str:
    """Return text that a route matches, or what a regular expression begins with."""
    if route.startswith("^"):
        return re.split(r"[^\w/-]", route[1:], maxsplit=1)[0]
    return re.sub(r"<[^>]*>", "1", route)


def _rules_of_path(path: str, config: conf.Config) -> Iterator[Rule]:
    """Yield the rules that apply to a path, by one method or another."""
    for rule in config.rules or (EVERYTHING,):
        if rule.matches_path(path):
            yield rule
            if rule.methods is None:
                return


# Limits of decorators and throttles


def _definition_problems(
    views: list[LimitedView], config: conf.Config
) -> Iterator[Problem]:
    """Report policies that do not exist, or that have two definitions."""
    definitions: dict[str, Policy] = dict(config.policies)
    for view in views:
        for policy in sorted(view.policies, key=str):
            if isinstance(policy, str):
                if policy not in config.policies:
                    yield Problem(
                        "E013",
                        f"{view.name} is limited by policy {policy!r}, which "
                        "RATE_LIMITER['POLICIES'] does not have"
                        f"{nearest(policy, config.policies)}",
                    )
            elif policy.name not in definitions:
                definitions[policy.name] = policy
                yield from policy_problems(policy, config)
            elif definitions[policy.name] != policy:
                yield Problem(
                    "E012",
                    f"{view.name} defines policy {policy.name!r}, which is defined "
                    "otherwise elsewhere; a policy's name is its counter.",
                    "Give one of them another name, or another group.",
                )


def _shared_names(views: list[LimitedView]) -> Iterator[Problem]:
    """Report views that share a counter because they share a name."""
    view_ids: defaultdict[str, set[int]] = defaultdict(set)
    for view in views:
        view_ids[view.name] |= view.views

    for name, ids in view_ids.items():
        if len(ids) > 1:
            yield Problem(
                "W012",
                f"{len(ids)} views are named {name} and share a counter: they are "
                "lambdas, partials, or made by the same function.",
                "Give each a name of its own, such as "
                '@rate_limit("5/m", group="search"), or all of them the same.',
            )


def _limit_problems(views: list[LimitedView], config: conf.Config) -> Iterator[Problem]:
    """Report limits that do not work under the settings or where they stand."""
    for view in views:
        for policy in _known_policies(view, config):
            yield from _policy_of_view_problems(view, policy, config)

        yield from option_problems(view.name, view.options)


def _known_policies(view: LimitedView, config: conf.Config) -> Iterator[Policy]:
    for policy in (*view.policies, *view.unnamed):
        if isinstance(policy, Policy):
            yield policy
        elif policy in config.policies:
            yield config.policies[policy]


def _policy_of_view_problems(
    view: LimitedView, policy: Policy, config: conf.Config
) -> Iterator[Problem]:
    algo = policy.algo or config.algo
    problem = cost_problem(view.options.get("cost"), policy, algo)
    if policy.burst is not None and algo != TOKEN_BUCKET:
        yield Problem(
            "E014",
            f"{view.name}: burst goes with {TOKEN_BUCKET!r}, and "
            f"RATE_LIMITER['USE_ALGO'] is {algo!r}.",
            f"Write algo={TOKEN_BUCKET!r}, or leave burst out.",
        )
    elif problem is not None:
        yield Problem(
            "E015",
            f"{view.name}, under policy {policy.name!r} ({policy.rate}): {problem}",
        )


def _views_counted_by_address(
    routes: list[Route], views: list[LimitedView], config: conf.Config
) -> Iterator[Problem]:
    """Report decorators by user above the authentication of a framework."""
    by_session = {view_name(view) for _, view in routes if not _authenticators(view)}
    early = [
        view
        for view in views
        if view.before_authentication and view.name not in by_session
    ]
    for view in (*early, *_limits_of_dispatch(routes)):
        for policy in _known_policies(view, config):
            if policy.key in BY_USER:
                yield Problem(
                    "W013",
                    f"{view.name} is limited by user under {policy.name!r}, before "
                    "its framework has authenticated users: its clients are counted "
                    "by IP address.",
                    "Put @rate_limit on the class of the view, on its methods, or "
                    "below @api_view.",
                )


def _limits_of_dispatch(routes: list[Route]) -> Iterator[LimitedView]:
    """Yield what method_decorator puts on `dispatch`, around the authentication."""
    for _, view in routes:
        if _authenticators(view):
            dispatch = getattr(view_class_of(view), "dispatch", None)
            for decorator in getattr(dispatch, "rate_limited_by", ()):
                for limits in decorator.limits():
                    yield limits._replace(name=view_name(view))


def _cached_figures(views: list[LimitedView]) -> Iterator[Problem]:
    """Report pages that are cached together with the figures of a client."""
    paths = conf.middleware()
    if UPDATE_CACHE not in paths:
        return

    position = middleware_position()
    is_outside = position is not None and position < paths.index(UPDATE_CACHE)
    is_limited = position is not None or views
    if is_limited and not is_outside:
        yield Problem(
            "W015",
            "UpdateCacheMiddleware caches pages together with their rate limit "
            "headers: they would repeat the figures of another client.",
            "Cache single views instead, by cache_page below @rate_limit; or put "
            f"{MIDDLEWARE} above {UPDATE_CACHE} in MIDDLEWARE, with keys that "
            "need no user.",
        )


def _service_problems(config: conf.Config) -> Iterator[Problem]:
    try:
        path = reverse("rlaas_service:check")
    except Exception:  # noqa: BLE001  (its URLs are not included, or Django reports it)
        return

    if not config.service.is_open:
        yield Problem(
            "W020",
            f"The HTTP service at {path} has no callers: every request gets a 403.",
            "Run `manage.py rlaas token new <name>` and put what it prints into "
            "RATE_LIMITER['SERVICE']['TOKENS'], or set "
            "RATE_LIMITER['SERVICE']['AUTHENTICATE'].",
        )


# Rules of the middleware, and the views below them


def _rules_counted_by_address(
    routes: list[Route], config: conf.Config
) -> Iterator[Problem]:
    """Report rules by user above views whose framework authenticates the user."""
    reported = set()
    for path, view in routes:
        authenticators = ", ".join(_authenticators(view))
        if not authenticators or getattr(view, "rate_limit_exempt", False):
            continue

        for rule in _rules_of_path(path, config):
            for name in rule.policies:
                if name in reported or config.policies[name].key not in BY_USER:
                    continue

                reported.add(name)
                yield Problem(
                    "W013",
                    f"The middleware limits {path} by user under {name!r}, before "
                    f"{authenticators} has authenticated the user: its clients are "
                    "counted by IP address.",
                    "Use @rate_limit or a throttle on the view, which know the user; "
                    "or another key in the rule.",
                )


def _authenticators(view: Any) -> list[str]:
    """Return what a framework authenticates a view with, apart from the session."""
    view_class: Any = view_class_of(view)
    if hasattr(view_class, "authentication_classes"):
        return _without_session(view_class.authentication_classes)

    if getattr(view, "__module__", "") != "ninja.operation":
        return []

    path_view = inspect.getclosurevars(view).nonlocals.get("self")
    operations = getattr(path_view, "operations", ())

    return _without_session(
        type(callback)
        for operation in operations
        for callback in operation.auth_callbacks
    )


def _without_session(authenticators: Iterable[type]) -> list[str]:
    names = set()
    for authenticator in authenticators:
        bases = {base.__name__ for base in authenticator.__mro__}
        if bases.isdisjoint(SESSION_AUTHENTICATION):
            names.add(authenticator.__name__)

    return sorted(names)


def _charged_in_two_ways(
    routes: list[Route], views: list[LimitedView], config: conf.Config
) -> Iterator[Problem]:
    """Report a policy that a rule and a decorator of a view charge differently."""
    for path, view in routes:
        name = view_name(view)
        limits = [limited_view for limited_view in views if limited_view.name == name]
        for rule in _rules_of_path(path, config):
            for limited_view in limits:
                yield from _compare_charges(rule, limited_view)


def _compare_charges(rule: Rule, view: LimitedView) -> Iterator[Problem]:
    options = view.options
    methods = options.get("methods")
    if methods and rule.methods and methods.isdisjoint(rule.methods):
        return

    charge = _charge(options.get("cost"), options.get("charge_when"))
    if charge == _charge(rule.cost, rule.charge_when):
        return

    shared = set(rule.policies).intersection(map(str, view.policies))
    for policy in sorted(shared):
        yield Problem(
            "W014",
            f"The middleware and {view.name} both apply policy {policy!r}, with "
            "another cost or charge_when: a request is charged once, by the rule.",
            "Write the same in both, or leave the policy out of one of them.",
        )


def _charge(cost: Any, charge_when: Any) -> tuple[Any, Any]:
    """Return how much is charged and when, with dotted paths imported."""
    if cost is None:
        cost = 1

    with contextlib.suppress(ImportError):  # reported by `option_problems`
        return site_function(cost), site_function(charge_when)

    return cost, charge_when
