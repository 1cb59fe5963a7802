"""The only reader of Django's settings: RATE_LIMITER, turned into values once and again when it is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from .policy import ALGORITHMS, DEFAULT, SLIDING_WINDOW, Policy, PolicyError, nearest, unknown_algorithm

DEFAULTS: dict[str, Any] = {
    "USE_ALGO": SLIDING_WINDOW,
    "WINDOW_SIZE": 60,
    "MAX_REQUESTS": 5,
    "POLICIES": {},
    "MIDDLEWARE": [],
    "CACHE": "default",
    "IPV6_PREFIX": 64,
}
POLICY_OPTIONS = ("rate", "key", "algo", "burst", "on_failure", "shadow")
REDIS_BACKENDS = "django_redis.cache.RedisCache or django.core.cache.backends.redis.RedisCache"


class Problem(NamedTuple):
    """Something wrong in the settings, as a system check tells it."""

    id: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """RATE_LIMITER, read and checked."""

    algo: str
    cache: str
    ipv6_prefix: int
    policies: Mapping[str, Policy]  # the default policy among them
    middleware: tuple[Any, ...] = field(default=())

    def policy(self, name: str) -> Policy:
        try:
            return self.policies[name]
        except KeyError:
            raise ImproperlyConfigured(
                f"RATE_LIMITER['POLICIES'] has no policy {name!r}{nearest(name, self.policies)}"
            ) from None


def raw() -> Any:
    return getattr(settings, "RATE_LIMITER", None)


def cache_entry(alias: str) -> dict[str, Any]:
    """The entry of CACHES for an alias; its identity changes when the setting does."""
    try:
        entry: dict[str, Any] = settings.CACHES[alias]
    except KeyError:
        raise ImproperlyConfigured(
            f"RATE_LIMITER['CACHE'] should name an alias in CACHES, not {alias!r}{nearest(alias, settings.CACHES)}"
        ) from None
    return entry


def secret() -> bytes:
    """What credentials are digested with."""
    return settings.SECRET_KEY.encode()


def config() -> Config:
    """The settings in force. A replaced setting (override_settings) is a new object, and is read again."""
    global _current
    value = raw()
    known, current = _current
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
    if options["USE_ALGO"] not in ALGORITHMS:
        problems.append(Problem("E002", f"RATE_LIMITER['USE_ALGO']: {unknown_algorithm(options['USE_ALGO'])}"))
    prefix = options["IPV6_PREFIX"]
    if type(prefix) is not int or not 1 <= prefix <= 128:
        problems.append(Problem("E006", f"RATE_LIMITER['IPV6_PREFIX'] should be 1 to 128, not {prefix!r}."))
    policies = dict(_policies(options, problems))
    if problems:
        return None
    return Config(options["USE_ALGO"], options["CACHE"], prefix, policies, tuple(options["MIDDLEWARE"]))


def _unknown_keys(value: Mapping[str, Any]) -> Iterator[Problem]:
    for key in value:
        if key not in DEFAULTS:
            yield Problem(
                "E001",
                f"RATE_LIMITER has no key {key!r}{nearest(key, DEFAULTS)}",
                f"The keys are {', '.join(DEFAULTS)}.",
            )


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
    for option in definition:
        if option not in POLICY_OPTIONS:
            raise PolicyError(
                f"there is no option {option!r}{nearest(option, POLICY_OPTIONS)} "
                f"The options are {', '.join(POLICY_OPTIONS)}."
            )
    # A burst under the default algorithm is refused here, at `manage.py check`, and not at the first request.
    defaults = {"algo": algo} if algo in ALGORITHMS else {}
    return Policy(name, **{**defaults, **definition})
