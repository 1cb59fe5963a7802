"""Rates and policies. No Django, no Redis."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from .algorithms import ALGORITHMS, Algo, is_algorithm

# The name of the policy that the settings describe at their top level.
DEFAULT = "default"
EVERY_POLICY = "*"  # in place of a policy's name: all of them
OnFailure = Literal["open", "closed", "local"]
FAILURE_MODES = get_args(OnFailure)
KEYS = ("user", "ip", "user_or_ip", "token", "global")
KEY_PREFIXES = ("header:", "get:", "post:")

RATE_FORMS = (
    'write "5/m", "5 per minute", "30/10s", "10_000/day", "5/60" (seconds) or (5, 60)'
)
KEY_FORMS = (
    'Write "user", "ip", "user_or_ip", "token", "global", "header:<name>", '
    '"get:<name>", "post:<name>", a callable taking the request, or the dotted path '
    "of one"
)

YEAR = 365 * 86_400
# The scripts multiply limit and window in doubles; below 2^52 their quotients also
# round the right way.
MAX_PRODUCT = 2**52

RateFunction = Callable[[Any], Any]
KeyFunction = Callable[[Any], Any]

_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3_600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
# With single underscores between digits, as in Python.
_NUMBER = "([0-9](?:_?[0-9]){0,15})"
_UNIT = f"({'|'.join(_UNITS)})"
_RATE = re.compile(rf"{_NUMBER}/(?=.){_NUMBER}?{_UNIT}?")
_RATE_IN_WORDS = re.compile(rf"{_NUMBER} per (?:{_NUMBER} ?)?{_UNIT}")
MAX_NAME_LENGTH = 100
NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_LENGTH}}}")
# What a string of a structured field (RFC 9651) has without escapes.
LABEL = re.compile(r"[ !#-\[\]-~]{1,100}")
DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class PolicyError(ValueError):
    """An invalid rate or policy.

    It names the value, the reason and the accepted form.
    """


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word.

    `; did you mean 'search'?` when a known word is close, otherwise a full stop.
    """
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    if not close:
        return "."
    return f"; did you mean {by_lower[close[0]]!r}?"


def shown(value: object) -> str:
    """Return a value as text for a message.

    Python refuses to write a number of some thousand digits.
    """
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of units per window of whole seconds.

    >>> Rate.parse("30/10s")
    Rate(limit=30, window=10)
    """

    limit: int
    window: int

    def __post_init__(self) -> None:
        _require_positive("limit", self.limit)
        _require_positive("window", self.window)

        if self.window > YEAR:
            raise PolicyError(
                f"The window of {shown(self.window)} seconds is over a year; "
                f"at most {YEAR} is accepted."
            )

        maximum = self.maximum(self.window)
        if self.limit > maximum:
            raise PolicyError(
                f"The limit {shown(self.limit)} is too large to be counted exactly "
                f"over {self.window} seconds; at most {maximum} is accepted."
            )

    @staticmethod
    def maximum(window: int) -> int:
        """Return the largest limit, or burst, that is counted exactly over a window."""
        return MAX_PRODUCT // (window * 1000)

    @classmethod
    def parse(cls, value: Any) -> Rate:
        """Parse `"5/m"`, `"5 per minute"`, `"30/10s"`, `"5/60"` or `(5, 60)`.

        Anything else raises PolicyError.
        """
        try:
            match value:
                case Rate():
                    return value
                case str() if match := (
                    _RATE.fullmatch(value) or _RATE_IN_WORDS.fullmatch(value)
                ):
                    limit, number, unit = match.groups()
                    return cls(int(limit), int(number or 1) * _UNITS[unit or "s"])
                case (limit, window):
                    return cls(limit, window)
        except PolicyError as error:
            raise PolicyError(f"{shown(value)} is not a rate. {error}") from None
        raise PolicyError(f"{shown(value)} is not a rate; {RATE_FORMS}.")

    def __str__(self) -> str:
        unit = next(unit for unit in "dhms" if self.window % _UNITS[unit] == 0)
        number = self.window // _UNITS[unit]
        if number == 1:
            return f"{self.limit}/{unit}"
        return f"{self.limit}/{number}{unit}"


def _require_positive(word: str, number: object) -> None:
    if type(number) is not int:
        reason = "not a whole number"
    elif number < 1:
        reason = "below 1"
    else:
        return
    raise PolicyError(f"The {word} {shown(number)} is {reason}; {RATE_FORMS}.")


RateLike = str | tuple[int, int] | Rate


@dataclass(frozen=True, slots=True)
class Policy:
    """A named limit.

    It says how much, for whom and by which algorithm. Policies of one name share a
    counter.

    >>> Policy("search", "30/10s", key="ip", algo="token-bucket-algo", burst=60)
    """

    name: str
    rate: RateLike | RateFunction  # parsed: a Rate or a function
    _: KW_ONLY
    key: str | KeyFunction = "user_or_ip"
    algo: Algo | None = None  # None: RATE_LIMITER['USE_ALGO']
    burst: int | None = None
    on_failure: OnFailure = "open"
    shadow: bool = False
    label: str = ""  # what clients see in headers and bodies; by default the name

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and NAME.fullmatch(self.name)):
            raise PolicyError(
                f"{self.name!r} is not a policy name; "
                "write 1 to 100 of A-Z a-z 0-9 _ . -"
            )
        if not callable(self.rate):
            object.__setattr__(self, "rate", Rate.parse(self.rate))
        if self.label == "":
            object.__setattr__(self, "label", self.name)

        problem = next(iter(self._problems()), None)
        if problem is not None:
            raise PolicyError(f"Policy {self.name!r}: {problem}")

    def _problems(self) -> Iterable[str]:
        for word, function in (("rate", self.rate), ("key", self.key)):
            if inspect.iscoroutinefunction(function):
                yield f"{word} {function!r} is an async function; write a plain one."

        if not is_key(self.key):
            yield f"key {self.key!r} is not known{nearest(self.key, KEYS)} {KEY_FORMS}."
        elif not _is_hashable(self.key):  # what it returns is kept by key
            yield (
                f"key {self.key!r} cannot be hashed; "
                "write a function, or give its class a __hash__."
            )

        if self.algo is not None and not is_algorithm(self.algo):
            yield unknown_algorithm(self.algo)
        if self.on_failure not in FAILURE_MODES:
            modes = ", ".join(FAILURE_MODES)
            yield f"on_failure {self.on_failure!r} is not one of {modes}."
        if not (isinstance(self.label, str) and LABEL.fullmatch(self.label)):
            yield (
                f"label {self.label!r} is not 1 to 100 printable ASCII characters "
                'without " and \\.'
            )
        if type(self.shadow) is not bool:
            yield f"shadow {self.shadow!r} is not True or False."
        if self.burst is not None:
            yield from self._burst_problems(self.burst)

    def _burst_problems(self, burst: object) -> Iterable[str]:
        if type(burst) is not int or burst < 1:
            yield f"burst {shown(burst)} is not a whole number of at least 1."
        elif isinstance(self.rate, Rate) and burst > Rate.maximum(self.rate.window):
            yield (
                f"burst {shown(burst)} is too large to be counted exactly; "
                f"at most {Rate.maximum(self.rate.window)} is accepted."
            )
        if self.algo is not None and not _has_burst(self.algo):
            yield _misplaced_burst(self.algo)

    @property
    def fixed_rate(self) -> Rate:
        """The rate.

        PolicyError when it is a function of the request.
        """
        if not isinstance(self.rate, Rate):
            raise PolicyError(
                f"Policy {self.name!r} takes its rate from a request; "
                "check it from a view."
            )
        return self.rate

    @property
    def capacity(self) -> int:
        """The most units at once.

        The burst of a token bucket, otherwise the limit.
        """
        return self.burst or self.fixed_rate.limit

    @property
    def window(self) -> int:
        """The window in seconds."""
        return self.fixed_rate.window

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


Policies = str | Policy | Sequence[str | Policy] | None  # None: the default


def unknown_algorithm(algo: object) -> str:
    """Return the message for an unknown algorithm."""
    return (
        f"algorithm {algo!r} is not known{nearest(algo, ALGORITHMS)} "
        f"Write one of {', '.join(ALGORITHMS)}."
    )


def is_key(key: object) -> bool:
    """Return whether `key` is one of the accepted forms of a policy's key."""
    if not isinstance(key, str):
        return callable(key)
    if key in KEYS or DOTTED_PATH.fullmatch(key):
        return True
    return any(key.startswith(prefix) and key != prefix for prefix in KEY_PREFIXES)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _has_burst(algo: str) -> bool:
    return is_algorithm(algo) and ALGORITHMS[algo].has_burst


def _misplaced_burst(algo: str) -> str:
    """Return the message for a burst of an algorithm that has none."""
    names = [repr(record.name) for record in ALGORITHMS.values() if record.has_burst]
    return f"burst goes with {' or '.join(names)}, not with {algo!r}."


class ScriptArguments(NamedTuple):
    """A policy as the scripts take it."""

    algo: str
    limit: int
    window: int  # ms
    capacity: int
    ttl: int  # ms; how long the state is kept after a charge


@lru_cache(maxsize=1024)
def script_arguments(
    policy: Policy, default_algo: str, processes: int = 1
) -> ScriptArguments:
    """Return the script arguments of a policy under the algorithm of the settings.

    The limit is that of one of some processes, which is one unit at least.
    """
    algo = policy.algo or default_algo
    if policy.burst is not None and not _has_burst(algo):
        raise PolicyError(f"Policy {policy.name!r}: {_misplaced_burst(algo)}")

    window = policy.window * 1000
    ttl = window * ALGORITHMS[algo].ttl_windows
    limit = max(1, policy.fixed_rate.limit // processes)
    capacity = max(1, policy.capacity // processes)
    return ScriptArguments(algo, limit, window, capacity, ttl)
