"""The nouns: rates, policies, and what was decided. No Django, no Redis."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

FIXED_WINDOW = "fixed-window-algo"
SLIDING_WINDOW = "sliding-window-algo"
SLIDING_WINDOW_COMPACT = "sliding-window-compact-algo"
SLIDING_WINDOW_COUNTER = "sliding-window-counter-algo"
TOKEN_BUCKET = "token-bucket-algo"  # noqa: S105
ALGORITHMS = (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)

DEFAULT = "default"  # the name of the policy that the settings describe at their top level
FAILURE_MODES = ("open", "closed", "local")
KEYS = ("user", "ip", "user_or_ip", "token", "global")
KEY_PREFIXES = ("header:", "get:", "post:")

RATE_FORMS = 'write "5/m", "30/10s", "1000/h", "5/60" (seconds) or (5, 60)'
KEY_FORMS = (
    'Write "user", "ip", "user_or_ip", "token", "global", "header:<name>", "get:<name>", '
    '"post:<name>", a callable taking the request, or the dotted path of one'
)

YEAR = 365 * 86_400
# The scripts multiply limit and window in doubles; below 2^52 their quotients round the right way too.
MAX_PRODUCT = 2**52

RateFunction = Callable[[Any], Any]
KeyFunction = Callable[[Any], Any]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_RATE = re.compile(r"([0-9]{1,16})/(?=.)([0-9]{0,16})([smhd]?)")
LONGEST_NAME = 100
NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class PolicyError(ValueError):
    """A rate or a policy that cannot be; the message has the value, the reason and the accepted form."""


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: `; did you mean 'search'?` when a known one is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def shown(value: object) -> str:
    """A value in a message; Python refuses to write a number of some thousand digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


@dataclass(frozen=True, slots=True)
class Rate:
    """So many units per window of whole seconds.

    >>> Rate.parse("30/10s")
    Rate(limit=30, window=10)
    """

    limit: int
    window: int

    def __post_init__(self) -> None:
        for word, number in (("limit", self.limit), ("window", self.window)):
            if type(number) is not int:
                raise PolicyError(f"The {word} {shown(number)} is not a whole number; {RATE_FORMS}.")
            if number < 1:
                raise PolicyError(f"The {word} {shown(number)} is below 1; {RATE_FORMS}.")
        if self.window > YEAR:
            raise PolicyError(f"The window of {shown(self.window)} seconds is over a year; at most {YEAR} will do.")
        if self.limit > self.most(self.window):
            raise PolicyError(
                f"The limit {shown(self.limit)} is too large to be counted exactly over {self.window} seconds; "
                f"at most {self.most(self.window)} will do."
            )

    @staticmethod
    def most(window: int) -> int:
        """The largest limit, or burst, that stays exact over this window."""
        return MAX_PRODUCT // (window * 1000)

    @classmethod
    def parse(cls, value: Any) -> Rate:
        """Read `"5/m"`, `"30/10s"`, `"5/60"` or `(5, 60)`; PolicyError for anything else."""
        try:
            match value:
                case Rate():
                    return value
                case str() if found := _RATE.fullmatch(value):
                    limit, number, unit = found.groups()
                    return cls(int(limit), int(number or 1) * _UNITS[unit])
                case (limit, window):
                    return cls(limit, window)
        except PolicyError as error:
            raise PolicyError(f"{shown(value)} is not a rate. {error}") from None
        raise PolicyError(f"{shown(value)} is not a rate; {RATE_FORMS}.")

    def __str__(self) -> str:
        unit = next(unit for unit in "dhms" if self.window % _UNITS[unit] == 0)
        number = self.window // _UNITS[unit]
        return f"{self.limit}/{'' if number == 1 else number}{unit}"


RateLike = str | tuple[int, int] | Rate


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Policy:
    """A named limit: so much, for whom, by which algorithm.

    A policy's name is its counter, so a policy equals its name: `decision.policy == "login"`.

    >>> Policy("search", "30/10s", key="ip", algo="token-bucket-algo", burst=60)
    """

    name: str
    rate: Rate | RateFunction
    key: str | KeyFunction
    algo: str | None  # None: the one that the settings choose
    burst: int | None
    on_failure: str
    shadow: bool

    def __init__(
        self,
        name: str,
        rate: RateLike | RateFunction,
        *,
        key: str | KeyFunction = "user_or_ip",
        algo: str | None = None,
        burst: int | None = None,
        on_failure: str = "open",
        shadow: bool = False,
    ) -> None:
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise PolicyError(f"{name!r} is not a policy name; write 1 to 100 of A-Z a-z 0-9 _ . -")
        values = {
            "name": name,
            "rate": rate if callable(rate) else Rate.parse(rate),
            "key": key,
            "algo": algo,
            "burst": burst,
            "on_failure": on_failure,
            "shadow": shadow,
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)
        for problem in self._problems():
            raise PolicyError(f"Policy {name!r}: {problem}")

    def _problems(self) -> Iterable[str]:
        for word, function in (("rate", self.rate), ("key", self.key)):
            if inspect.iscoroutinefunction(function):
                yield f"{word} {function!r} is an async function; write a plain one."
        if not is_key(self.key):
            yield f"key {self.key!r} is not known{nearest(self.key, KEYS)} {KEY_FORMS}."
        if self.algo is not None and self.algo not in ALGORITHMS:
            yield unknown_algorithm(self.algo)
        if self.on_failure not in FAILURE_MODES:
            yield f"on_failure {self.on_failure!r} is not one of {', '.join(FAILURE_MODES)}."
        if type(self.shadow) is not bool:
            yield f"shadow {self.shadow!r} is not True or False."
        if self.burst is not None:
            yield from self._burst_problems(self.burst)

    def _burst_problems(self, burst: object) -> Iterable[str]:
        if type(burst) is not int or burst < 1:
            yield f"burst {shown(burst)} is not a whole number of at least 1."
        elif isinstance(self.rate, Rate) and burst > Rate.most(self.rate.window):
            most = Rate.most(self.rate.window)
            yield f"burst {shown(burst)} is too large to be counted exactly; at most {most} will do."
        if self.algo not in (None, TOKEN_BUCKET):
            yield f"burst goes with {TOKEN_BUCKET!r}, not with {self.algo!r}."

    @property
    def fixed_rate(self) -> Rate:
        """The rate; PolicyError when only a request can tell it."""
        if not isinstance(self.rate, Rate):
            raise PolicyError(f"Policy {self.name!r} takes its rate from a request, and there is none here.")
        return self.rate

    @property
    def capacity(self) -> int:
        """The most units at once: the burst of a token bucket, else the limit."""
        return self.burst or self.fixed_rate.limit

    @property
    def window(self) -> int:
        """Seconds."""
        return self.fixed_rate.window

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.name == other
        if isinstance(other, Policy):
            return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


Policies = str | Policy | Sequence[str | Policy] | None  # None: the default


def unknown_algorithm(algo: object) -> str:
    return f"algorithm {algo!r} is not known{nearest(algo, ALGORITHMS)} Write one of {', '.join(ALGORITHMS)}."


def is_key(key: object) -> bool:
    if not isinstance(key, str):
        return callable(key)
    prefixed = any(key.startswith(prefix) and len(key) > len(prefix) for prefix in KEY_PREFIXES)
    return key in KEYS or prefixed or bool(_DOTTED_PATH.fullmatch(key))


class Terms(NamedTuple):
    """A policy in the scripts' words."""

    algo: str
    limit: int
    window: int  # ms
    capacity: int


class Left(int):
    """Seconds of a fixed window that are left, which get less, where other windows stay as long as they are."""


class Outcome(NamedTuple):
    """What one policy said. `identity` is the part of the Redis key that tells who was asking."""

    policy: Policy
    identity: str
    allowed: bool
    limit: int
    current_count: int
    remaining: int
    retry_after: float
    reset_after: float
    ttl: int
    degraded: bool = False  # decided without Redis


def undecided(outcome: Outcome) -> bool:
    """Whether it was refused for want of Redis, and not for being over a limit."""
    return outcome.degraded and not outcome.allowed and outcome.policy.on_failure == "closed"


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """The refusing outcome with the longest wait, else the one with least remaining; shadows only if all are."""
    every = [*outcomes]
    return every[0] if len(every) == 1 else max(every, key=_strictness)


def _strictness(outcome: Outcome) -> tuple[bool, bool, float]:
    refused = not outcome.allowed
    return not outcome.policy.shadow, refused, outcome.retry_after if refused else -outcome.remaining


class Decision:
    """The answer to one request: the strictest policy's figures, and every policy's outcome.

    >>> decision = check("alice")
    >>> decision.allowed, decision.remaining, decision.retry_after
    (True, 4, 0.0)
    """

    # By hand, as one is made for every request: a frozen dataclass takes three times as long.
    __slots__ = ("_strictest", "allowed", "outcomes", "receipts")

    def __init__(self, allowed: bool, outcomes: tuple[Outcome, ...], receipts: list[Any] | None = None) -> None:
        self.allowed = allowed
        # What `refund` sends; taken out of the list by the first who asks, so that it is given back once.
        self.receipts: list[Any] = [] if receipts is None else receipts
        self.outcomes = outcomes  # what each policy said
        self._strictest = outcomes[0] if len(outcomes) == 1 else strictest(outcomes)

    @property
    def origin(self) -> tuple[Decision, float]:
        """The decision that was made, and how many seconds ago it was told first."""
        return self, 0.0

    def __reduce__(self) -> Any:
        """A copy is what was told; only the decision itself can be given back."""
        return Decision, (self.allowed, self.outcomes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return (self.allowed, self.outcomes) == (other.allowed, other.outcomes)

    def __hash__(self) -> int:
        return hash((self.allowed, self.outcomes))

    def __repr__(self) -> str:
        return f"Decision(allowed={self.allowed}, outcomes={self.outcomes})"

    @property
    def policy(self) -> Policy:
        return self._strictest.policy

    @property
    def limit(self) -> int:
        """Units per window; for a token bucket its burst."""
        return self._strictest.limit

    @property
    def current_count(self) -> int:
        """Units in the window before this request."""
        return self._strictest.current_count

    @property
    def remaining(self) -> int:
        """Units left after this request."""
        return self._strictest.remaining

    @property
    def retry_after(self) -> float:
        """Exact seconds until this request would pass; 0.0 when allowed, inf when its cost can never fit."""
        return 0.0 if self.allowed else self._strictest.retry_after

    @property
    def reset_after(self) -> float:
        """Seconds until the quota is whole again."""
        return self._strictest.reset_after

    @property
    def degraded(self) -> bool:
        """Whether a policy was decided without Redis."""
        for outcome in self.outcomes:  # noqa: SIM110  (three times as fast as any())
            if outcome.degraded:
                return True
        return False

    @property
    def unavailable(self) -> bool:
        """Whether it was refused for want of Redis alone: nobody was over a limit."""
        refusing = [each for each in self.outcomes if not (each.allowed or each.policy.shadow)]
        return bool(refusing) and all(map(undecided, refusing))

    @property
    def ttl(self) -> int:
        """Seconds: the window size, and for the fixed window what is left of it, rounded up."""
        return self._strictest.ttl


class Repeated(Decision):
    """A refusal told again so many seconds later: what there was to wait is that much shorter."""

    __slots__ = ("_age", "_refusal")

    allowed = False
    degraded = False
    receipts: list[Any] = []  # noqa: RUF012

    def __init__(self, refusal: Decision, age: float) -> None:
        self._refusal, self._age, self._strictest = refusal, age, refusal._strictest

    def __getattr__(self, name: str) -> Any:
        """The outcomes are settled when somebody asks for them."""
        if name != "outcomes":
            raise AttributeError(name)
        self.outcomes = tuple([_later(outcome, self._age) for outcome in self._refusal.outcomes])
        return self.outcomes

    @property
    def origin(self) -> tuple[Decision, float]:
        return self._refusal, self._age

    @property
    def retry_after(self) -> float:
        return max(0.0, self._strictest.retry_after - self._age)

    @property
    def reset_after(self) -> float:
        return max(0.0, self._strictest.reset_after - self._age)

    @property
    def ttl(self) -> int:
        return _later(self._strictest, self._age).ttl


def _later(outcome: Outcome, age: float) -> Outcome:
    policy, identity, allowed, limit, count, remaining, retry_after, reset_after, ttl, degraded = outcome
    retry_after, reset_after = max(0.0, retry_after - age), max(0.0, reset_after - age)
    if isinstance(ttl, Left):
        ttl = Left(math.ceil(reset_after))
    return Outcome(policy, identity, allowed, limit, count, remaining, retry_after, reset_after, ttl, degraded)


def seconds(milliseconds: int) -> float:
    """A time of the scripts' replies, in ms; -1 says never."""
    return math.inf if milliseconds < 0 else milliseconds / 1000
