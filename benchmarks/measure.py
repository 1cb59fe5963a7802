"""How it is measured: in rounds, everyone in turn, each beside redis-py's `ping()`; medians and quartiles of ratios."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from . import server
from .contender import Ask, Contender, Failed, Rate

BATCH = 24
DAY = 86_400  # a window that does not end while it is measured
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Ratios = list[float | None]  # one per round; None: the round did not count


class Effort(NamedTuple):
    """How much of it to do: `effort(full, quick)`."""

    quick: bool

    def __call__(self, full, quick):
        return quick if self.quick else full


class Spread(NamedTuple):
    """A median, with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        known = sorted(value for value in values if value is not None)
        if not known:
            raise ValueError("no round counted")
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, median, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        if self.low == self.high:
            return figure(self.median)
        return f"{figure(self.median)} ({figure(self.low)} to {figure(self.high)})"


def figure(number: float) -> str:
    """A number with about three digits that mean something."""
    for bound, form in ((0.1, ".4f"), (10, ".2f"), (100, ".1f")):
        if abs(number) < bound:
            return f"{number:{form}}"
    return f"{number:,.0f}"


def spread(result: Ratios | Failed) -> Spread | Failed:
    if isinstance(result, Failed):
        return result
    try:
        return Spread.of(result)
    except ValueError as error:
        return Failed.by(error)


def ratios(over: Ratios | Failed, under: Ratios | Failed) -> Spread | Failed:
    """One through the other, round by round."""
    for each in (over, under):
        if isinstance(each, Failed):
            return each
    return spread([a / b if a and b else None for a, b in zip(over, under, strict=True)])


def progress(text: str = "") -> None:
    """Tell what is being done, in a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r{text[:100]:<100}", end="" if text else "\r", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def rounds(number: int, name: str) -> Iterable[int]:
    """Rounds with a garbage collection between them, and none within, in someone's time; `timeit` does so too.

    A collection leaves the caches of the processor cold, of which who comes first must not be the one to suffer.
    """
    try:
        for i in range(number):
            progress(f"{name}: round {i + 1} of {number}")
            gc.collect()
            gc.disable()
            time_per_call(server.client().ping, 100)
            yield i
    finally:
        gc.enable()
        progress()


def time_per_call(action: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - began) / times


class Crowd:
    """Identities in the state that a case asks for: half used up, or used up."""

    _numbers = itertools.count()

    def __init__(self, ask: Ask, limit: int, refused: bool) -> None:
        self.ask = ask
        self.limit = limit
        self.refused = refused
        self.renew()

    def renew(self) -> None:
        self.identity = f"user{next(self._numbers)}"
        used = self.limit if self.refused else self.limit // 2
        for _ in range(used):
            self.ask(self.identity)
        self.left = self.limit - used

    def take(self, number: int) -> list[str]:
        if self.refused:
            return [self.identity] * number
        taken = []
        for _ in range(number):
            if not self.left:
                self.renew()
            self.left -= 1
            taken.append(self.identity)
        return taken

    def time(self, identities: Sequence[str]) -> float | None:
        """Seconds per decision; None when one was not as expected, because a window has just ended."""
        ask = self.ask
        began = time.perf_counter()
        answers = [ask(identity) for identity in identities]
        taken = time.perf_counter() - began
        if any(answer[0] is self.refused for answer in answers):
            self.renew()
            return None
        return taken / len(identities)


def crowd(contender: Contender, rates: Sequence[Rate], refused: bool = False) -> Crowd | Failed:
    progress(f"preparing {contender.name}, limit {rates[0].limit:,}, {'refused' if refused else 'allowed'}")
    try:
        return Crowd(contender.build(rates), rates[0].limit, refused)
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and is shown so
        return Failed.by(error)


def beside_ping(crowds: Mapping[Key, Crowd | Failed], number: int, name: str) -> dict[Key, Ratios | Failed]:
    """In each round everyone in turn, from another one on each time: 24 decisions between 12 pings and another 12."""
    results: dict[Key, Ratios | Failed] = {
        key: crowd if isinstance(crowd, Failed) else [] for key, crowd in crowds.items()
    }
    for i in rounds(number, name):
        for key, crowd in rotated(crowds.items(), i * len(crowds) // number):
            so_far = results[key]
            if isinstance(so_far, Failed) or isinstance(crowd, Failed):
                continue
            try:
                so_far.append(against_ping(partial(crowd.time, crowd.take(BATCH))))
            except Exception as error:  # noqa: BLE001
                results[key] = Failed.by(error)
    return results


def against_ping(run: Callable[[], float | None]) -> float | None:
    """A time per decision, as a multiple of the `ping()` just before and after it."""
    ping = server.client().ping
    before = time_per_call(ping, BATCH // 2)
    taken = run()
    after = time_per_call(ping, BATCH // 2)
    return None if taken is None else 2 * taken / (before + after)


def rotated(items: Iterable[Item], by: int) -> list[Item]:
    listed = [*items]
    return listed[by:] + listed[:by]


def tiers(limit: int, number: int) -> list[Rate]:
    """So many limits at once; each allows more in a longer time, but less of it, as pyrate-limiter wants them."""
    return [Rate(i * limit - i * (i - 1) // 2, i * DAY) for i in range(1, number + 1)]
