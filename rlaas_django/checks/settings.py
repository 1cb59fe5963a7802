"""Check the settings, so that `manage.py check` finds a mistake before a user does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import django
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import backend, conf
from ..conf import Problem
from ..core.algorithms import ALGORITHMS
from ..core.keys import key_kind
from ..core.policy import DEFAULT, Policy, Rate
from ..http.identity import BY_USER
from ..http.rules import EVERYTHING
from ..http.site_functions import site_function
from ..middleware import RateLimitMiddleware

MIDDLEWARE = "rlaas_django.middleware.RateLimitMiddleware"
AUTHENTICATION = "AuthenticationMiddleware"
LARGE_LOG = 1000


@checks.register("caches")
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Check RATE_LIMITER, and what it says about CACHES and MIDDLEWARE."""
    problems: list[Problem] = []
    config = conf.read(conf.raw(), problems)

    if config is not None:
        for find_problems in CHECKS:
            problems.extend(find_problems(config))

    return as_messages(problems)


@checks.register("security", deploy=True)
def check_proxies(**_: Any) -> list[checks.CheckMessage]:
    """Warn where nobody has said which proxies there are."""
    value = conf.raw() or {}
    if not isinstance(value, dict) or value.get("TRUSTED_PROXIES") is not None:
        return []

    problem = Problem(
        "W004",
        "RATE_LIMITER['TRUSTED_PROXIES'] is not set. Behind a proxy all clients would "
        "share its address, and behind a unix socket they would have none.",
        'List the proxies, such as ["10.0.0.0/8"] or ["unix"]; [] says that clients '
        "connect directly.",
    )

    return as_messages([problem])


@checks.register("caches", deploy=True)
def check_shared_cache(**_: Any) -> list[checks.CheckMessage]:
    """Warn where the limiter shares a Redis database with the site.

    Only with --deploy, since nearly every site begins with one cache.
    """
    config = conf.read(conf.raw(), [])
    if config is None:
        return []

    alias = config.cache
    location = _location(alias)
    if location is None:
        return []

    sharing = [
        other
        for other in conf.cache_aliases()
        if other != alias and _location(other) == location
    ]
    if sharing:
        users = f"CACHES[{sharing[0]!r}], on the same database"
    elif alias == "default":
        users = "the whole site"
    else:
        return []

    problem = Problem(
        "W009",
        f"The limiter shares CACHES[{alias!r}] with {users}: cache.clear() deletes "
        "every counter and override, and a server that evicts keys to make room for "
        "others (maxmemory-policy allkeys-*) may drop them.",
        "Add an alias of its own to CACHES, with another database such as "
        '"redis://.../1" or, better, another server, and name it in '
        "RATE_LIMITER['CACHE'].",
    )

    return as_messages([problem])


@checks.register("caches", deploy=True)
def check_deployed_store(**_: Any) -> list[checks.CheckMessage]:
    """Report a deployment whose decisions are counted in each process."""
    config = conf.read(conf.raw(), [])
    if config is None or not backend.counts_in_process(config.cache):
        return []

    problem = Problem(
        "E017",
        "A deployment without Redis admits each limit once per process, and again "
        "after each restart.",
        _redis_entry(config.cache),
    )
    return as_messages([problem])


def _redis_entry(alias: str) -> str:
    return (
        f'CACHES = {{"{alias}": {{"BACKEND": "django_redis.cache.RedisCache", '
        '"LOCATION": "redis://127.0.0.1:6379/0", "OPTIONS": {"SOCKET_TIMEOUT": 0.25, '
        '"SOCKET_CONNECT_TIMEOUT": 0.25}}}'
    )


def as_messages(problems: Iterable[Problem]) -> list[checks.CheckMessage]:
    """Return problems as Django reports them, each once."""
    classes = {"E": checks.Error, "W": checks.Warning}
    return [
        classes[problem.id[0]](
            problem.message,
            hint=problem.hint,
            id=f"rlaas_django.{problem.id}",
        )
        for problem in dict.fromkeys(problems)
    ]


def middleware_position() -> int | None:
    """Return where RateLimitMiddleware, or a subclass, stands in MIDDLEWARE."""
    for position, path in enumerate(conf.middleware()):
        with contextlib.suppress(Exception):  # Django reports what is wrong with it
            if issubclass(site_function(path), RateLimitMiddleware):
                return position

    return None


def policy_problems(policy: Policy, config: conf.Config) -> Iterator[Problem]:
    """Report what is wrong with a policy, wherever it is defined."""
    algorithm = ALGORITHMS[policy.algo or config.algo]
    limit = 0
    if isinstance(policy.rate, Rate):
        limit = policy.rate.limit
    is_large = algorithm.alternative and limit >= LARGE_LOG
    if is_large and policy.key != "global":  # which has one counter
        yield Problem(
            "W002",
            f"Policy {policy.name!r} keeps up to {limit} entries per identity in a "
            f"ZSET: about {limit * algorithm.bytes_per_unit:,} MB per million users.",
            f"{algorithm.alternative!r} makes the same decisions in a sixtieth of the "
            "memory.",
        )

    if key_kind(policy.key) == "key":
        yield from _function_problems(f"Policy {policy.name!r}: its key", policy.key)


def option_problems(where: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Report options of a rule or a decorator whose dotted path is wrong."""
    for option, value in options.items():
        if isinstance(value, str):
            yield from _function_problems(f"{where}: its {option}", value)


def _function_problems(where: str, function: Any) -> Iterator[Problem]:
    """Import a dotted path here rather than with the first request."""
    try:
        is_callable = callable(site_function(function))
    except ImportError as error:
        yield Problem("E011", f"{where} {function!r} cannot be imported: {error}")
        return

    if not is_callable:
        yield Problem("E011", f"{where} {function!r} is not a callable.")


def _location(alias: str) -> tuple[Any, ...] | None:
    """Return the server and the database of a cache; None if it is not on Redis."""
    try:
        options = backend.connection_options(alias)
        entry = conf.cache_entry(alias)
    except Exception:  # noqa: BLE001  (`_cache_problems` reports what is wrong)
        return None

    server = options.get("server") or options.get("path") or options.get("host")
    port = options.get("port") or 6379
    database = options.get("db") or 0

    return server or entry.get("LOCATION"), port, database


# What is wrong with a Config, by what it concerns


def _cache_problems(config: conf.Config) -> Iterator[Problem]:
    alias = config.cache
    try:
        conf.cache_entry(alias)
    except ImproperlyConfigured as error:
        yield Problem("E005", str(error))
        return

    if backend.counts_in_process(alias):
        yield Problem("W016", backend.not_on_redis(alias), _redis_entry(alias))
        return

    try:
        options = backend.connection_options(alias)
    except Exception as error:  # noqa: BLE001  (cache backends raise what they like)
        yield Problem(
            "E007",
            f"The limiter cannot use CACHES[{alias!r}]: {error}",
            _redis_entry(alias),
        )

        return

    if options.get("socket_timeout") is None and "server" not in options:
        yield Problem(
            "W001",
            f"CACHES[{alias!r}] sets no socket timeout. The limiter has its own, "
            "RATE_LIMITER['TIMEOUT']; but while Redis hangs, whatever else uses this "
            "cache waits for redis-py's default: 5 seconds since redis-py 8, for ever "
            "before.",
            "Set socket_timeout and socket_connect_timeout in its OPTIONS, to 0.25 "
            "seconds say; for django-redis, SOCKET_TIMEOUT and SOCKET_CONNECT_TIMEOUT.",
        )


def _policy_problems(config: conf.Config) -> Iterator[Problem]:
    for policy in config.policies.values():
        yield from policy_problems(policy, config)


def _rule_problems(config: conf.Config) -> Iterator[Problem]:
    for index, rule in enumerate(config.rules):
        where = f"RATE_LIMITER['MIDDLEWARE'][{index}]"
        options = {"cost": rule.cost, "charge_when": rule.charge_when}
        yield from option_problems(where, options)


def _proxy_problems(config: conf.Config) -> Iterator[Problem]:
    networks = [proxy for proxy in config.proxies if not isinstance(proxy, str)]
    if any(network.prefixlen == 0 for network in networks):
        yield Problem(
            "W003",
            "RATE_LIMITER['TRUSTED_PROXIES'] covers every address: any client can "
            "pretend to be any other.",
            "List only your proxies' own addresses.",
        )

    version = django.VERSION[:3]
    mistakes_underscores = version < (5, 2, 13) or (6, 0) <= version < (6, 0, 4)
    if config.proxies and mistakes_underscores:
        yield Problem(
            "W006",
            "This version of Django takes X_Forwarded_For for X-Forwarded-For under "
            "ASGI: with a header that the proxy does not overwrite, a client can "
            "pretend to be any other.",
            "Upgrade to Django 5.2.13, 6.0.4 or later.",
        )


def _middleware_problems(config: conf.Config) -> Iterator[Problem]:
    position = middleware_position()
    if position is None:
        if config.rules:
            yield Problem(
                "W007",
                f"RATE_LIMITER['MIDDLEWARE'] has rules, but MIDDLEWARE has no "
                f"{MIDDLEWARE}: nothing applies them.",
                f"Add it to MIDDLEWARE, below {AUTHENTICATION}.",
            )
        return

    if config.enabled and not config.rules and "MAX_REQUESTS" not in (conf.raw() or {}):
        yield Problem(
            "W024",
            "The middleware has no rules, and RATE_LIMITER['MAX_REQUESTS'] is not set: "
            f"the whole site, the admin included, is limited to "
            f"{config.policies[DEFAULT].rate} per client.",
            "Set MAX_REQUESTS, and rules such as "
            '"MIDDLEWARE": [{"path": "/admin/", "exempt": True}, '
            '{"path": "/", "policies": ["default"]}]. '
            '{"path": "/", "exempt": True} limits no path.',
        )

    by_user = _policies_by_user(config)
    below = conf.middleware()[position:]
    if by_user and any(path.endswith(AUTHENTICATION) for path in below):
        yield Problem(
            "W005",
            f"RateLimitMiddleware comes before {AUTHENTICATION}, so users are "
            f"counted by IP address under {', '.join(map(repr, by_user))}.",
            f"Put it below django.contrib.auth.middleware.{AUTHENTICATION} in "
            "MIDDLEWARE.",
        )


def _policies_by_user(config: conf.Config) -> list[str]:
    """Return the policies by user that the middleware applies."""
    rules = config.rules or (EVERYTHING,)
    names = {name for rule in rules for name in rule.policies}
    return sorted(name for name in names if config.policies[name].key in BY_USER)


def _unreachable_rules(config: conf.Config) -> Iterator[Problem]:
    for index, rule in enumerate(config.rules):
        for earlier in range(index):
            if config.rules[earlier].covers(rule):
                yield Problem(
                    "W008",
                    f"RATE_LIMITER['MIDDLEWARE'][{index}] is never reached: "
                    f"[{earlier}] matches all that it matches.",
                    "The first match applies: put the narrower rule before the wider "
                    "one.",
                )

                break


CHECKS = (
    _cache_problems,
    _policy_problems,
    _rule_problems,
    _proxy_problems,
    _middleware_problems,
    _unreachable_rules,
)
