"""System checks: what is wrong in the settings is found by `manage.py check`, not by the first user."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import django
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.urls import get_resolver, reverse

from .. import backend, conf
from ..conf import Problem
from ..core.algorithms import ALGORITHMS, TOKEN_BUCKET
from ..core.keys import key_kind
from ..core.policy import DEFAULT, Policy, Rate, nearest
from ..core.rules import cost_problem
from ..http.site_functions import site_function
from ..http.unknown_users import BY_USER, rules_counted_by_address
from ..middleware import RateLimitMiddleware
from ..runtime import registry

OURS = "rlaas_django.middleware.RateLimitMiddleware"
LARGE_LOG = 1000  # entries


@checks.register("caches")
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    problems: list[Problem] = []
    config = conf.read(conf.raw(), problems)
    if config is not None:
        for check in CHECKS:
            problems += check(config)
    return [as_message(problem) for problem in problems]


@checks.register("security", deploy=True)
def check_proxies(**_: Any) -> list[checks.CheckMessage]:
    value = conf.raw() or {}
    if not isinstance(value, dict) or value.get("TRUSTED_PROXIES") is not None:
        return []
    problem = Problem(
        "W004",
        "RATE_LIMITER['TRUSTED_PROXIES'] is not set. Behind a proxy all clients would share its address, "
        "and behind a unix socket they would have none.",
        'List the proxies, such as ["10.0.0.0/8"] or ["unix"]; [] says that clients connect directly.',
    )
    return [as_message(problem)]


@checks.register("caches", deploy=True)
def check_shared_cache(**_: Any) -> list[checks.CheckMessage]:
    """Only with --deploy: nearly every site begins with one cache."""
    config = conf.read(conf.raw(), [])
    location = None if config is None else _location(config.cache)
    if config is None or location is None:
        return []
    alias = config.cache
    sharing = [
        each
        for each in conf.cache_aliases()
        if each != alias and _location(each) == location
    ]
    if alias != "default" and not sharing:
        return []
    users = (
        f"CACHES[{sharing[0]!r}], on the same database" if sharing else "the whole site"
    )
    problem = Problem(
        "W009",
        f"The limiter shares CACHES[{alias!r}] with {users}: cache.clear() deletes every counter and override, and "
        "a server that evicts keys to make room for others (maxmemory-policy allkeys-*) may drop them.",
        'Add an alias of its own to CACHES, with another database such as "redis://.../1" or, better, another server, '
        "and name it in RATE_LIMITER['CACHE'].",
    )
    return [as_message(problem)]


def as_message(problem: Problem) -> checks.CheckMessage:
    kind = checks.Error if problem.id.startswith("E") else checks.Warning
    return kind(problem.message, hint=problem.hint, id=f"rlaas_django.{problem.id}")


def _cache(config: conf.Config) -> Iterator[Problem]:
    alias = config.cache
    try:
        entry = conf.cache_entry(alias)
    except ImproperlyConfigured as error:
        yield Problem("E005", str(error))
        return
    try:
        options = backend.connection_options(alias)
    except Exception as error:  # noqa: BLE001  (whatever a cache backend raises when it cannot be made)
        yield Problem(
            "E007",
            f"RATE_LIMITER['CACHE'] should name a cache on Redis; {alias!r} is not: {error}",
        )
        return
    if options.get("socket_timeout") is None and "server" not in options:
        names = ("socket_timeout", "socket_connect_timeout")
        if str(entry.get("BACKEND", "")).startswith("django_redis"):
            names = ("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT")
        yield Problem(
            "W001",
            f"CACHES[{alias!r}] sets no socket timeout. The limiter has its own, RATE_LIMITER['TIMEOUT']; but while "
            "Redis hangs, whatever else uses this cache waits for redis-py's default: 5 seconds since redis-py 8, for "
            "ever before.",
            f"Set OPTIONS[{names[0]!r}] and OPTIONS[{names[1]!r}], to 0.25 seconds say.",
        )


def _location(alias: str) -> tuple[Any, ...] | None:
    """Return the server and the database of a cache; None if it is not on Redis."""
    with contextlib.suppress(Exception):  # `_cache` reports what is wrong
        options = backend.connection_options(alias)
        place = (
            options.get("server")
            or options.get("path")
            or options.get("host")
            or conf.cache_entry(alias)["LOCATION"]
        )
        return place, options.get("port") or 6379, options.get("db") or 0
    return None


def _policies(config: conf.Config) -> Iterator[Problem]:
    for policy in config.policies.values():
        yield from _large_log(policy, config)
        yield from _key(policy)
    for i, rule in enumerate(config.rules):
        where = f"RATE_LIMITER['MIDDLEWARE'][{i}]"
        yield from _functions(
            where, {"cost": rule.cost, "charge_when": rule.charge_when}
        )


def _key(policy: Policy) -> Iterator[Problem]:
    if key_kind(policy.key) == "key":
        yield from _function(f"Policy {policy.name!r}: its key", policy.key)


def _functions(name: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Check what is given by a dotted path."""
    for option, function in options.items():
        if isinstance(function, str):
            yield from _function(f"{name}: its {option}", function)


def _function(name: str, function: Any) -> Iterator[Problem]:
    """Import a dotted path here rather than with the first request."""
    try:
        if not callable(site_function(function)):
            yield Problem("E011", f"{name} {function!r} is not a callable.")
    except ImportError as error:
        yield Problem("E011", f"{name} {function!r} cannot be imported: {error}")


def _large_log(policy: Policy, config: conf.Config) -> Iterator[Problem]:
    algorithm = ALGORITHMS[policy.algo or config.algo]
    if not algorithm.alternative or not isinstance(policy.rate, Rate):
        return
    limit = policy.rate.limit
    if limit >= LARGE_LOG:
        yield Problem(
            "W002",
            f"Policy {policy.name!r} keeps up to {limit} entries per identity in a "
            f"ZSET: about {limit * algorithm.bytes_per_unit:,} MB per million users.",
            f"{algorithm.alternative!r} makes the same decisions in a sixtieth of the "
            "memory.",
        )


def _all_proxies(config: conf.Config) -> Iterator[Problem]:
    if any(
        not isinstance(network, str) and network.prefixlen == 0
        for network in config.proxies
    ):
        message = "RATE_LIMITER['TRUSTED_PROXIES'] covers every address: any client can pretend to be any other."
        yield Problem("W003", message, "List only your proxies' own addresses.")


def _django_version(config: conf.Config) -> Iterator[Problem]:
    version = django.VERSION[:3]
    if config.proxies and (version < (5, 2, 13) or (6, 0) <= version < (6, 0, 4)):
        message = (
            f"Django {'.'.join(map(str, version))} takes X_Forwarded_For for X-Forwarded-For under ASGI: with a header "
            "that the proxy does not overwrite, a client can pretend to be any other."
        )
        yield Problem("W006", message, "Upgrade to Django 5.2.13, 6.0.4 or later.")


def _middleware(config: conf.Config) -> Iterator[Problem]:
    names = conf.middleware()
    at = next((i for i, name in enumerate(names) if _is_ours(name)), None)
    if at is None:
        if config.rules:
            message = f"RATE_LIMITER['MIDDLEWARE'] has rules, but MIDDLEWARE has no {OURS}: nothing applies them."
            yield Problem(
                "W007", message, "Add it to MIDDLEWARE, below AuthenticationMiddleware."
            )
        return
    ruled = (
        {name for rule in config.rules for name in rule.policies}
        if config.rules
        else {DEFAULT}
    )
    by_user = sorted(name for name in ruled if config.policies[name].key in BY_USER)
    users = "AuthenticationMiddleware"
    if by_user and any(name.endswith(users) for name in names[at:]):
        listed = ", ".join(map(repr, by_user))
        message = f"RateLimitMiddleware comes before {users}, so users are counted by IP address under {listed}."
        yield Problem(
            "W005",
            message,
            f"Put it below django.contrib.auth.middleware.{users} in MIDDLEWARE.",
        )
    with contextlib.suppress(
        Exception
    ):  # Django's own checks tell what is wrong with the URLs
        for policy, path, how in rules_counted_by_address(config):
            message = f"The middleware limits {path} by user under {policy!r}, before {how} has authenticated the user"
            hint = "Use @rate_limit or a throttle on the view, which know the user; or another key in the rule."
            yield Problem(
                "W013", f"{message}: its clients are counted by IP address.", hint
            )


def _is_ours(middleware: str) -> bool:
    if middleware == OURS:
        return True
    with contextlib.suppress(Exception):  # Django tells what is wrong with it
        return issubclass(site_function(middleware), RateLimitMiddleware)
    return False


def _unreachable_rules(config: conf.Config) -> Iterator[Problem]:
    for i, rule in enumerate(config.rules):
        before = next(
            (j for j, earlier in enumerate(config.rules[:i]) if earlier.covers(rule)),
            None,
        )
        if before is not None:
            message = f"RATE_LIMITER['MIDDLEWARE'][{i}] is never reached: [{before}] matches all that it matches."
            yield Problem(
                "W008",
                message,
                "The first match applies: put the narrower rule before the wider one.",
            )


def _decorated_views(config: conf.Config) -> Iterator[Problem]:
    """Views are looked at once the URLs have imported them."""
    with contextlib.suppress(
        Exception
    ):  # Django's own checks tell what is wrong with the URLs
        _ = get_resolver().url_patterns
    views = sorted(registry.limited_views(), key=lambda view: view.name)
    yield from _definitions(views, config)
    yield from _shared_names(views)
    for view in views:
        known = [
            config.policies.get(each) if isinstance(each, str) else each
            for each in view.policies
        ]
        for policy in (each for each in (*known, *view.unnamed) if each is not None):
            yield from _applied(view, policy, config)
        yield from _functions(view.name, view.options)


def _definitions(
    views: list[registry.LimitedView], config: conf.Config
) -> Iterator[Problem]:
    """Report policies that do not exist, or that have two definitions."""
    defined: dict[str, Policy] = dict(config.policies)
    for name, policy in (
        (view.name, policy)
        for view in views
        for policy in sorted(view.policies, key=str)
    ):
        if isinstance(policy, Policy):
            if policy.name not in defined:
                yield from _large_log(policy, config)
                yield from _key(policy)
            if defined.setdefault(policy.name, policy) != policy:
                yield Problem(
                    "E012",
                    f"{name} defines policy {policy.name!r}, which is defined otherwise elsewhere; "
                    "a policy's name is its counter.",
                    "Give one of them another name, or another group.",
                )
        elif policy not in config.policies:
            yield Problem(
                "E013",
                f"{name} is limited by policy {policy!r}, which RATE_LIMITER['POLICIES'] does not have"
                f"{nearest(policy, config.policies)}",
            )


def _shared_names(views: list[registry.LimitedView]) -> Iterator[Problem]:
    ids: defaultdict[str, set[int]] = defaultdict(set)
    for view in views:
        ids[view.name] |= view.views
    for name, sharing in ids.items():
        if len(sharing) > 1:
            yield Problem(
                "W012",
                f"{len(sharing)} views are named {name} and share a counter: they are lambdas, partials, or made by "
                "the same function.",
                'Give each a name of its own, such as @rate_limit("5/m", group="search"), or all of them the same.',
            )


def _applied(
    view: registry.LimitedView, policy: Policy, config: conf.Config
) -> Iterator[Problem]:
    """Report what works under other settings, under another policy of that name, or below other decorators."""
    algo = policy.algo or config.algo
    if policy.burst is not None and algo != TOKEN_BUCKET:
        message = f"{view.name}: burst goes with {TOKEN_BUCKET!r}, and RATE_LIMITER['USE_ALGO'] is {algo!r}."
        yield Problem(
            "E014", message, f"Write algo={TOKEN_BUCKET!r}, or leave burst out."
        )
    elif problem := cost_problem(view.options.get("cost"), policy, algo):
        yield Problem(
            "E015",
            f"{view.name}, under policy {policy.name!r} ({policy.rate}): {problem}",
        )
    if view.before_authentication and policy.key in BY_USER:
        message = f"{view.name} is limited by user under {policy.name!r}, before its framework has authenticated users"
        hint = "Put @rate_limit below the other decorators, next to the view of the framework."
        yield Problem(
            "W013", f"{message}: its clients are counted by IP address.", hint
        )


def _service(config: conf.Config) -> Iterator[Problem]:
    try:
        where = reverse("rlaas_service:check")
    except Exception:  # noqa: BLE001  (NoReverseMatch: its URLs are not included; others Django's own checks tell of)
        return
    if not config.service.is_open:
        yield Problem(
            "W020",
            f"The HTTP service at {where} has no callers: every request gets a 403.",
            "Run `manage.py rlaas token new <name>` and put what it prints into RATE_LIMITER['SERVICE']['TOKENS'], "
            "or set RATE_LIMITER['SERVICE']['AUTHENTICATE'].",
        )


CHECKS = (
    _cache,
    _policies,
    _all_proxies,
    _django_version,
    _middleware,
    _unreachable_rules,
    _decorated_views,
    _service,
)
