"""The only reader of Django's settings.

RATE_LIMITER is parsed once per change.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.encoding import force_bytes
from django.utils.module_loading import import_string

from .core.algorithms import SLIDING_WINDOW, is_algorithm
from .core.callers import Service, parse_tokens
from .core.keys import Encoding, Network, parse_network
from .core.login import DEFAULTS as LOGIN_DEFAULTS
from .core.login import LoginPolicies, parse_login
from .core.options import ACCEPTED, PROXY_HEADERS
from .core.policy import DEFAULT, Policy, PolicyError, nearest, shown, unknown_algorithm
from .core.rules import Rule, parse_rule, refuse_unknown
from .runtime import log, process

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
    "SERVICE": {},
    "LOGIN": LOGIN_DEFAULTS,
}
SERVICE_OPTIONS = ("TOKENS", "AUTHENTICATE")
POLICY_OPTIONS = ("rate", "key", "algo", "burst", "on_failure", "shadow", "label")
# What rules and decorators have: a policy says how much, and for whom; they say when.
OPTIONS_ELSEWHERE = ("method", "cost", "charge_when")
# In TRUSTED_PROXIES: a client of a unix socket, which has no address, is a proxy.
UNIX = "unix"


class Problem(NamedTuple):
    """A mistake in the settings, as a system check reports it."""

    id: str
    message: str
    hint: str | None = None


@dataclass(slots=True)
class Derived:
    """What other modules make of a Config.

    Another Config starts with none of it.
    """

    topologies: dict[str, Any] = field(default_factory=dict)  # by the alias of a cache
    policy_sets: dict[Any, Any] = field(default_factory=dict)  # compiled, by policies
    # The same for other caches than that of the settings, by their aliases.
    other_policy_sets: dict[str, dict[Any, Any]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    limits: dict[Any, Any] = field(default_factory=dict)  # compiled, by Limits
    refusals: Any = None  # the refusal cache

    def close(self) -> None:
        """Close the connections of settings that are replaced."""
        for topology in list(self.topologies.values()):
            topology.close()


@dataclass(frozen=True, slots=True)
class Config:
    """RATE_LIMITER, parsed and checked."""

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
    proxies_are_known: bool  # also where there are none
    proxy_headers: tuple[str, ...]  # as META names them
    encoding: Encoding
    headers: frozenset[str]
    response: Any
    log_lines: int
    service: Service
    login: LoginPolicies
    derived: Derived = field(default_factory=Derived, repr=False, compare=False)
    pid: int = field(default_factory=os.getpid, repr=False, compare=False)

    def policy(self, policy: str | Policy) -> Policy:
        """Return a policy that is given as such, or by its name."""
        if isinstance(policy, Policy):
            return policy
        if policy in self.policies:
            return self.policies[policy]
        hint = nearest(policy, self.policies)
        raise ImproperlyConfigured(
            f"RATE_LIMITER['POLICIES'] has no policy {policy!r}{hint}"
        )


def raw() -> Any:
    """Return RATE_LIMITER as it is written."""
    return getattr(settings, "RATE_LIMITER", None)


def cache_entry(alias: str) -> dict[str, Any]:
    """Return the entry of CACHES for an alias."""
    if alias not in settings.CACHES:
        hint = nearest(alias, settings.CACHES)
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] should name an alias in CACHES, not {alias!r}{hint}"
        )
    return dict(settings.CACHES[alias])


def secret() -> bytes:
    """Return what credentials are digested with."""
    return force_bytes(settings.SECRET_KEY)


def debug() -> bool:
    return bool(settings.DEBUG)


def middleware() -> list[str]:
    return [*settings.MIDDLEWARE]


def cache_aliases() -> list[str]:
    return [*settings.CACHES]


def require_app() -> None:
    """Raise ImproperlyConfigured unless the app is installed."""
    if apps.apps_ready and not apps.is_installed("rlaas_django"):
        raise ImproperlyConfigured(
            "Add 'rlaas_django' to INSTALLED_APPS: "
            "its system checks and templates need it."
        )


_replacement: Config | None = None


@cache
def config() -> Config:
    """Return the settings in force."""
    if _replacement is not None:
        return _replacement

    problems: list[Problem] = []
    parsed = read(raw(), problems)
    if parsed is None:
        raise ImproperlyConfigured(" ".join(problem.message for problem in problems))
    log.lines_per_second = parsed.log_lines
    return parsed


@contextmanager
def replaced(**values: Any) -> Iterator[None]:
    """Have some other values in force within the block.

    For the replay of a log, which may use another cache and waits longer.
    """
    global _replacement
    replacement = replace(config(), **values, derived=Derived())
    _replacement = replacement
    _drop_config()
    try:
        yield
    finally:
        _replacement = None
        _drop_config()


@receiver(setting_changed)
def _reload(*, setting: str, **_: object) -> None:
    if setting in ("RATE_LIMITER", "CACHES", "SECRET_KEY"):
        _drop_config()


# Kept in a forked process, unused: to close an asyncio transport there would close the
# parent's connection.
_inherited_configs: list[Config] = []


def _drop_config() -> None:
    """Drop the settings in force, and close what was opened for them."""
    if not config.cache_info().currsize:
        return
    dropped = config()
    config.cache_clear()

    if dropped.pid == os.getpid():
        dropped.derived.close()
    else:
        _inherited_configs.append(dropped)


process.on_fork(_drop_config)


def read(value: Any, problems: list[Problem]) -> Config | None:
    """Parse RATE_LIMITER into a Config.

    Return None if it is invalid, and append the reasons to `problems`.
    """
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        problems.append(
            Problem("E001", f"RATE_LIMITER should be a dict, not {value!r}.")
        )
        return None

    options = {**DEFAULTS, **value}
    problems += _problems(options)
    policies = {policy.name: policy for policy in _policies(options, problems)}
    rules = tuple(_rules(options["MIDDLEWARE"], policies, problems))
    proxies = tuple(_proxies(options["TRUSTED_PROXIES"], problems))
    response = _imported("RATE_LIMITER['RESPONSE']", options["RESPONSE"], problems)
    service = _service(options["SERVICE"], policies, problems)
    login = _login(options["LOGIN"], policies, problems)
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
        proxies_are_known=options["TRUSTED_PROXIES"] is not None,
        proxy_headers=PROXY_HEADERS[options["PROXY_HEADER"]],
        encoding=Encoding(options["IPV6_PREFIX"], secret),
        headers=frozenset(options["HEADERS"]),
        response=response,
        log_lines=options["LOG_LINES_PER_SECOND"],
        service=service,
        login=login,
    )


def _problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with single values."""
    for key in options:
        if key not in DEFAULTS:
            yield Problem(
                "E001",
                f"RATE_LIMITER has no key {key!r}{nearest(key, DEFAULTS)}",
                f"The keys are {', '.join(DEFAULTS)}.",
            )

    algo = options["USE_ALGO"]
    if not is_algorithm(algo):
        yield Problem("E002", f"RATE_LIMITER['USE_ALGO']: {unknown_algorithm(algo)}")

    for key, (is_valid, expected) in ACCEPTED.items():
        if not is_valid(options[key]):
            value = shown(options[key])
            yield Problem(
                "E006", f"RATE_LIMITER[{key!r}] should {expected}, not {value}."
            )


def _policies(options: Mapping[str, Any], problems: list[Problem]) -> Iterator[Policy]:
    try:
        yield Policy(DEFAULT, (options["MAX_REQUESTS"], options["WINDOW_SIZE"]))
    except PolicyError as error:
        where = "RATE_LIMITER['MAX_REQUESTS'] and ['WINDOW_SIZE']"
        problems.append(Problem("E003", f"{where}: {error}"))

    where = "RATE_LIMITER['POLICIES']"
    if not isinstance(options["POLICIES"], Mapping):
        problems.append(
            Problem("E004", f"{where} should be a dict of names and policies.")
        )
        return
    for name, definition in options["POLICIES"].items():
        try:
            yield _policy(name, definition, options["USE_ALGO"])
        except PolicyError as error:
            problems.append(Problem("E004", f"{where}[{name!r}]: {error}"))


def _policy(name: Any, definition: Any, algo: Any) -> Policy:
    if name == DEFAULT:
        raise PolicyError(
            "'default' is the policy of MAX_REQUESTS and WINDOW_SIZE; "
            "choose another name."
        )
    if not isinstance(definition, Mapping) or "rate" not in definition:
        raise PolicyError(
            f'{definition!r} is not a policy; write {{"rate": "5/m", "key": "ip"}}.'
        )
    for option in OPTIONS_ELSEWHERE:
        if option in definition:
            raise PolicyError(f"{option!r} belongs on the rule or the decorator.")
    refuse_unknown(definition, POLICY_OPTIONS)

    # With the algorithm, so that a burst without a token bucket is found here and not
    # by the first request.
    if is_algorithm(algo):
        definition = {"algo": algo, **definition}
    return Policy(name, **definition)


def _rules(
    entries: Any, policies: Mapping[str, Policy], problems: list[Problem]
) -> Iterator[Rule]:
    where = "RATE_LIMITER['MIDDLEWARE']"
    if not isinstance(entries, (list, tuple)):
        problems.append(
            Problem("E008", f"{where} should be a list of rules, not {entries!r}.")
        )
        return
    for index, entry in enumerate(entries):
        try:
            yield parse_rule(entry, policies)
        except (PolicyError, re.error) as error:
            problems.append(Problem("E008", f"{where}[{index}]: {error}"))


def _proxies(networks: Any, problems: list[Problem]) -> Iterator[Network | str]:
    where = "RATE_LIMITER['TRUSTED_PROXIES']"
    if not isinstance(networks, list | tuple | None):
        problems.append(Problem("E009", f"{where} should be a list, not {networks!r}."))
        return
    for network in networks or ():
        if network == UNIX:
            yield UNIX
            continue
        try:
            # As text, since a number would be taken for an address.
            yield parse_network(str(network))
        except ValueError:
            problems.append(
                Problem(
                    "E009",
                    f"{where}: {network!r} is not an address or network.",
                    'Write addresses or networks such as "10.0.0.0/8", '
                    'or "unix" for a server behind a unix socket.',
                )
            )


def _service(
    options: Any, policies: Mapping[str, Policy], problems: list[Problem]
) -> Service:
    where = "RATE_LIMITER['SERVICE']"
    try:
        if not isinstance(options, Mapping):
            raise PolicyError("it should be a dict.")
        refuse_unknown(options, SERVICE_OPTIONS)
        digests = tuple(parse_tokens(options.get("TOKENS", {}), policies))
    except PolicyError as error:
        problems.append(Problem("E020", f"{where}: {error}"))
        return Service()
    authenticate = _imported(
        f"{where}['AUTHENTICATE']", options.get("AUTHENTICATE"), problems
    )
    return Service(digests, authenticate)


def _login(
    value: Any, policies: Mapping[str, Policy], problems: list[Problem]
) -> LoginPolicies:
    try:
        return parse_login(value, policies)
    except PolicyError as error:
        problems.append(Problem("E021", f"RATE_LIMITER['LOGIN']: {error}"))
        return {}


def _imported(where: str, value: Any, problems: list[Problem]) -> Any:
    """Return a callable, importing its dotted path."""
    function = value
    if isinstance(value, str):
        try:
            function = import_string(value)
        except ImportError as error:
            problems.append(Problem("E010", f"{where}: {error}"))
            return None
    if function is not None and not callable(function):
        problems.append(
            Problem(
                "E010", f"{where} should be a callable or its dotted path: {value!r}."
            )
        )
    return function
