"""The only reader of Django's settings: RATE_LIMITER, turned into values once and again when it is replaced."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.encoding import force_bytes
from django.utils.module_loading import import_string

from .policy import ALGORITHMS, DEFAULT, SLIDING_WINDOW, Policy, PolicyError, nearest, shown, unknown_algorithm

DEFAULTS: dict[str, Any] = {
    "ENABLED": True,
    "USE_ALGO": SLIDING_WINDOW,
    "WINDOW_SIZE": 60,
    "MAX_REQUESTS": 5,
    "POLICIES": {},
    "MIDDLEWARE": [],
    "CACHE": "default",
    "TIMEOUT": 0.1,
    "LOCAL_REFUSALS": True,
    "LOCAL_SHARE": 1,
    "LOCAL_IDENTITIES": 10_000,
    "TRUSTED_PROXIES": None,
    "PROXY_HEADER": None,
    "IPV6_PREFIX": 64,
    "HEADERS": ["RateLimit", "X-RateLimit"],
    "RESPONSE": None,
    "LOG_LINES_PER_SECOND": 10,
}
POLICY_OPTIONS = ("rate", "key", "algo", "burst", "on_failure", "shadow")
RULE_OPTIONS = ("path", "regex", "methods", "policies", "exempt")
_BOUNDS = {
    "IPV6_PREFIX": (1, 128),
    "LOG_LINES_PER_SECOND": (0, 1_000_000),
    "LOCAL_SHARE": (1, 1_000_000),
    "LOCAL_IDENTITIES": (1, 10_000_000),
}
HEADER_FAMILIES = ("RateLimit", "X-RateLimit")
REDIS_BACKENDS = "django_redis.cache.RedisCache or django.core.cache.backends.redis.RedisCache"
PROXY_HEADERS = {
    None: ("HTTP_X_FORWARDED_FOR", "HTTP_FORWARDED"),  # the first that is there
    "X-Forwarded-For": ("HTTP_X_FORWARDED_FOR",),
    "Forwarded": ("HTTP_FORWARDED",),
}
UNIX = "unix"  # in TRUSTED_PROXIES: who connects through a unix socket, and so has no address, is a proxy

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Problem(NamedTuple):
    """Something wrong in the settings, as a system check tells it."""

    id: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of RATE_LIMITER['MIDDLEWARE']: which requests, and what holds for them."""

    path: str | None
    regex: re.Pattern[str] | None
    methods: frozenset[str] | None
    policies: tuple[str, ...]  # none: exempt

    @property
    def matches_all(self) -> bool:
        return self.methods is None and self.regex is None and self.path in (None, "/")

    def matches(self, path: str, method: str | None) -> bool:
        if self.methods is not None and method not in self.methods:
            return False
        if self.regex is not None:
            return self.regex.search(path) is not None
        # By whole segments: what holds for /health does not hold for /healthcare.
        return self.path is None or path == self.path or path.startswith(self.path.rstrip("/") + "/")


@dataclass(frozen=True, slots=True)
class Config:
    """RATE_LIMITER, read and checked."""

    enabled: bool
    algo: str
    cache: str
    timeout: float
    local_refusals: bool
    local_share: int
    local_identities: int
    policies: Mapping[str, Policy]  # the default policy among them
    rules: tuple[Rule, ...]
    proxies: tuple[Network | str, ...]
    proxy_headers: tuple[str, ...]  # as META names them
    ipv6_prefix: int
    headers: frozenset[str]
    response: Any
    log_lines: int

    def policy(self, name: str) -> Policy:
        try:
            return self.policies[name]
        except KeyError:
            raise ImproperlyConfigured(
                f"RATE_LIMITER['POLICIES'] has no policy {name!r}{nearest(name, self.policies)}"
            ) from None


def with_head(methods: Iterable[str]) -> frozenset[str]:
    """Methods as they are matched; HEAD runs the view of GET, and would be a way around its limit."""
    upper = {method.upper() for method in methods}
    return frozenset(upper | {"HEAD"} if "GET" in upper else upper)


# Where Django keeps the settings that were read before; they are taken out when they change. To ask `settings` itself
# takes ten times as long, and every request asks.
read_before = vars(settings)


def raw() -> Any:
    try:
        return read_before["RATE_LIMITER"]
    except KeyError:
        return getattr(settings, "RATE_LIMITER", None)


def caches() -> Any:
    return read_before.get("CACHES") or settings.CACHES


def cache_entry(alias: str) -> dict[str, Any]:
    """The entry of CACHES for an alias; its identity changes when the setting does."""
    try:
        entry: dict[str, Any] = caches()[alias]
    except KeyError:
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] should name an alias in CACHES, not {alias!r}{nearest(alias, settings.CACHES)}"
        ) from None
    return entry


def middleware() -> list[str]:
    return [*settings.MIDDLEWARE]


def secret() -> bytes:
    """What credentials are digested with."""
    return force_bytes(settings.SECRET_KEY)


def config() -> Config:
    """The settings in force. A replaced setting (override_settings) is a new object, and is read again."""
    global _current
    known, current = _current
    if current is not None and known is not None and read_before.get("RATE_LIMITER") is known:
        return current
    value = raw()
    if known is not value or current is None:
        problems: list[Problem] = []
        current = read(value, problems)
        if current is None:
            raise ImproperlyConfigured(" ".join(problem.message for problem in problems))
        _current = value, current
    return current


_current: tuple[Any, Config | None] = (None, None)


def read(value: Any, problems: list[Problem]) -> Config | None:
    """Turn RATE_LIMITER into a Config; None, with the reasons in `problems`, when it cannot be."""
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        problems.append(Problem("E001", f"RATE_LIMITER should be a dict, not {value!r}."))
        return None
    problems += _unknown_keys(value)
    options = {**DEFAULTS, **value}
    problems += _wrong_values(options)
    policies = dict(_policies(options, problems))
    rules = tuple(_rules(options["MIDDLEWARE"], policies, problems))
    proxies = tuple(_proxies(options["TRUSTED_PROXIES"], problems))
    response = _imported("RESPONSE", options["RESPONSE"], problems)
    if problems:
        return None
    return Config(
        enabled=options["ENABLED"],
        algo=options["USE_ALGO"],
        cache=options["CACHE"],
        timeout=float(options["TIMEOUT"]),
        local_refusals=options["LOCAL_REFUSALS"],
        local_share=options["LOCAL_SHARE"],
        local_identities=options["LOCAL_IDENTITIES"],
        policies=policies,
        rules=rules,
        proxies=proxies,
        proxy_headers=PROXY_HEADERS[options["PROXY_HEADER"]],
        ipv6_prefix=options["IPV6_PREFIX"],
        headers=frozenset(options["HEADERS"]),
        response=response,
        log_lines=options["LOG_LINES_PER_SECOND"],
    )


def _unknown_keys(value: Mapping[str, Any]) -> Iterator[Problem]:
    for key in value:
        if key not in DEFAULTS:
            yield Problem(
                "E001",
                f"RATE_LIMITER has no key {key!r}{nearest(key, DEFAULTS)}",
                f"The keys are {', '.join(DEFAULTS)}.",
            )


def _wrong_values(options: Mapping[str, Any]) -> Iterator[Problem]:
    if options["USE_ALGO"] not in ALGORITHMS:
        yield Problem("E002", f"RATE_LIMITER['USE_ALGO']: {unknown_algorithm(options['USE_ALGO'])}")
    for key in ("ENABLED", "LOCAL_REFUSALS"):
        if type(options[key]) is not bool:
            yield Problem("E006", f"RATE_LIMITER[{key!r}] should be True or False, not {shown(options[key])}.")
    for key, (least, most) in _BOUNDS.items():
        number = options[key]
        if type(number) is not int or not least <= number <= most:
            yield Problem("E006", f"RATE_LIMITER[{key!r}] should be {least} to {most}, not {shown(number)}.")
    timeout = options["TIMEOUT"]
    if type(timeout) not in (int, float) or not 0.001 <= timeout <= 60:
        yield Problem("E006", f"RATE_LIMITER['TIMEOUT'] should be 0.001 to 60 seconds, not {shown(timeout)}.")
    if not isinstance(options["CACHE"], str):
        yield Problem("E006", f"RATE_LIMITER['CACHE'] should be text, not {options['CACHE']!r}.")
    if options["PROXY_HEADER"] not in [*PROXY_HEADERS]:
        yield Problem(
            "E006",
            "RATE_LIMITER['PROXY_HEADER'] should be 'X-Forwarded-For', 'Forwarded' or None, "
            f"not {options['PROXY_HEADER']!r}.",
        )
    families = options["HEADERS"]
    if not isinstance(families, (list, tuple)) or not all(family in HEADER_FAMILIES for family in families):
        yield Problem("E006", f"RATE_LIMITER['HEADERS'] should list some of {list(HEADER_FAMILIES)}, not {families!r}.")


def _policies(options: Mapping[str, Any], problems: list[Problem]) -> Iterator[tuple[str, Policy]]:
    try:
        yield DEFAULT, Policy(DEFAULT, (options["MAX_REQUESTS"], options["WINDOW_SIZE"]))
    except PolicyError as error:
        problems.append(Problem("E003", f"RATE_LIMITER['MAX_REQUESTS'] and ['WINDOW_SIZE']: {error}"))
    if not isinstance(options["POLICIES"], Mapping):
        problems.append(Problem("E004", "RATE_LIMITER['POLICIES'] should be a dict of names and policies."))
        return
    for name, definition in options["POLICIES"].items():
        try:
            yield name, _policy(name, definition, options["USE_ALGO"])
        except PolicyError as error:
            problems.append(Problem("E004", f"RATE_LIMITER['POLICIES'][{name!r}]: {error}"))


def _policy(name: Any, definition: Any, algo: str) -> Policy:
    if name == DEFAULT:
        raise PolicyError("'default' is the policy of MAX_REQUESTS and WINDOW_SIZE; choose another name.")
    if not isinstance(definition, Mapping) or "rate" not in definition:
        raise PolicyError(f'{definition!r} is not a policy; write {{"rate": "5/m", "key": "ip"}}.')
    _refuse_unknown(definition, POLICY_OPTIONS)
    # A burst under the default algorithm is refused here, at `manage.py check`, and not at the first request.
    defaults = {"algo": algo} if algo in ALGORITHMS else {}
    return Policy(name, **{**defaults, **definition})


def _refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            raise PolicyError(
                f"there is no option {option!r}{nearest(option, known)} The options are {', '.join(known)}."
            )


def _rules(lines: Any, policies: Mapping[str, Policy], problems: list[Problem]) -> Iterator[Rule]:
    if not isinstance(lines, (list, tuple)):
        problems.append(Problem("E008", f"RATE_LIMITER['MIDDLEWARE'] should be a list of rules, not {lines!r}."))
        return
    for i, line in enumerate(lines):
        try:
            yield _rule(line, policies)
        except (PolicyError, re.error) as error:
            problems.append(Problem("E008", f"RATE_LIMITER['MIDDLEWARE'][{i}]: {error}"))


def _rule(line: Any, policies: Mapping[str, Policy]) -> Rule:
    if not isinstance(line, Mapping):
        raise PolicyError(f'{line!r} is not a rule; write {{"path": "/api/", "policies": ["search"]}}.')
    _refuse_unknown(line, RULE_OPTIONS)
    path, regex, methods = line.get("path"), line.get("regex"), line.get("methods")
    if not isinstance(path, str | None) or (path is not None and not path.startswith("/")):
        raise PolicyError(f"path {path!r} does not begin with a slash.")
    if not isinstance(regex, str | None):
        raise PolicyError(f"regex {regex!r} is not text.")
    if path is not None and regex is not None:
        raise PolicyError("a rule has a path or a regex, not both.")
    if not isinstance(methods, list | tuple | None) or not all(isinstance(method, str) for method in methods or ()):
        raise PolicyError(f'methods {methods!r} is not a list; write ["POST"].')
    return Rule(
        path,
        None if regex is None else re.compile(regex),
        None if methods is None else with_head(methods),
        _rule_policies(line, policies),
    )


def _rule_policies(line: Mapping[str, Any], policies: Mapping[str, Policy]) -> tuple[str, ...]:
    exempt, named = line.get("exempt", False), line.get("policies")
    if type(exempt) is not bool or (exempt and named is not None):
        raise PolicyError("a rule has policies, or exempt: True.")
    if exempt:
        return ()
    if named is None:
        return (DEFAULT,)
    if not isinstance(named, (list, tuple)) or not named:
        raise PolicyError(f'policies {named!r} is not a list of names; write ["search"].')
    for name in named:
        if name not in [*policies]:
            raise PolicyError(f"RATE_LIMITER['POLICIES'] has no policy {name!r}{nearest(name, policies)}")
    return tuple(named)


def _proxies(networks: Any, problems: list[Problem]) -> Iterator[Network | str]:
    if not isinstance(networks, list | tuple | None):
        problems.append(Problem("E009", f"RATE_LIMITER['TRUSTED_PROXIES'] should be a list, not {networks!r}."))
        return
    for network in networks or ():
        try:
            yield UNIX if network == UNIX else ipaddress.ip_network(network, strict=False)
        except ValueError:
            problems.append(
                Problem(
                    "E009",
                    f"RATE_LIMITER['TRUSTED_PROXIES']: {network!r} is no address or network.",
                    'Write addresses or networks such as "10.0.0.0/8", or "unix" for a server behind a unix socket.',
                )
            )


def _imported(key: str, value: Any, problems: list[Problem]) -> Any:
    """A callable, or what its dotted path leads to."""
    try:
        found = import_string(value) if isinstance(value, str) else value
    except ImportError as error:
        problems.append(Problem("E010", f"RATE_LIMITER[{key!r}]: {error}"))
        return None
    if found is not None and not callable(found):
        problems.append(Problem("E010", f"RATE_LIMITER[{key!r}] should be a callable or its dotted path: {value!r}."))
    return found
