"""Each algorithm again, in a few lines of plain Python that share nothing with the Lua.

A model keeps what it must in the plainest way (lists of stamps, fractions) and returns what an outcome has, times in
ms: (allowed, current_count, remaining, retry_after, reset_after). Waits are found by search: the first ms at which the
same check would be allowed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction

NEVER = float("inf")


class Model:
    def __init__(self, limit: int, window: int, burst: int | None = None) -> None:
        self.limit, self.window = limit, window
        self.capacity = burst or limit

    def check(self, now: int, cost: int) -> tuple:
        """As the limiter's `check`: decide, and charge when allowed."""
        count = self.count(now)
        if count + cost > self.capacity:
            return False, count, max(0, self.capacity - count), self.wait(now, cost), self.whole(now)
        self.charge(now, cost)
        return True, count, self.capacity - count - cost, 0, self.whole(now)

    def wait(self, now: int, cost: int) -> float:
        if cost > self.capacity:
            return NEVER
        return self.first(now, lambda then: self.count(then) + cost <= self.capacity)

    def whole(self, now: int) -> int:
        return self.first(now, lambda then: self.count(then) == 0)

    def more(self, now: int) -> int:
        """Return how long it is until more can be used than now; 0 where nothing is used."""
        count = self.count(now)
        if not count:
            return 0
        return self.first(now, lambda then: self.count(then) < count)

    def first(self, now: int, holds) -> int:
        """Return how long it is until something holds that, with no further charge, holds ever after."""
        if holds(now):
            return 0
        step = 1
        while not holds(now + step):
            step *= 2
        low, high = step // 2, step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(now + middle) else (middle, high)
        return high

    def count(self, now: int) -> int:
        raise NotImplementedError

    def charge(self, now: int, cost: int) -> None:
        raise NotImplementedError


class Log(Model):
    """Every unit's stamp; a unit counts until it is a window old."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.stamps: list[int] = []

    def count(self, now: int) -> int:
        return len(self.stamps) - bisect_right(self.stamps, now - self.window)

    def charge(self, now: int, cost: int) -> None:
        self.stamps = sorted([stamp for stamp in self.stamps if stamp > now - self.window] + [now] * cost)


class Fixed(Model):
    """A count per window."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[int, int] = {}

    def count(self, now: int) -> int:
        return self.counts.get(now // self.window, 0)

    def charge(self, now: int, cost: int) -> None:
        self.counts[now // self.window] = self.count(now) + cost


class Counter(Fixed):
    """Last window's count fades out over this one; parts of a unit count as a unit."""

    def count(self, now: int) -> int:
        index, elapsed = divmod(now, self.window)
        faded = Fraction(self.counts.get(index - 1, 0) * (self.window - elapsed), self.window)
        return self.counts.get(index, 0) + -(-faded.numerator // faded.denominator)

    def charge(self, now: int, cost: int) -> None:
        index = now // self.window
        self.counts[index] = self.counts.get(index, 0) + cost


class Bucket(Model):
    """Units missing from the bucket, a fraction; it refills by limit / window per ms."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.missing, self.at = Fraction(0), 0

    def level(self, now: int) -> Fraction:
        return max(Fraction(0), self.missing - Fraction(self.limit, self.window) * (now - self.at))

    def count(self, now: int) -> int:
        missing = self.level(now)
        return -(-missing.numerator // missing.denominator)

    def charge(self, now: int, cost: int) -> None:
        self.missing, self.at = self.level(now) + cost, now


class Replay:
    """The charges of a trace, replayed without those that were refunded."""

    def __init__(self, *args) -> None:
        self.args, self.charges = args, []

    def count(self, algo: str, now: int) -> int:
        """Return what would be counted now if the refunded charges had never been made."""
        model = MODELS[algo](*self.args)
        for charged_at, cost in self.charges:
            model.charge(charged_at, cost)
        return model.count(now)


MODELS = {
    "fixed-window-algo": Fixed,
    "sliding-window-algo": Log,
    "sliding-window-compact-algo": Log,
    "sliding-window-counter-algo": Counter,
    "token-bucket-algo": Bucket,
}


def random_trace(rng: random.Random, limit: int, window_ms: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield waits in ms and costs: bursts in one ms, a flow around the rate, idle gaps, costs beyond the limit."""
    fair = max(1, window_ms // limit)
    while length > 0:
        pattern = rng.choice(["burst", "flow", "flow", "rush", "idle", "edge"])
        run = min(length, rng.randint(1, 12))
        length -= run
        for i in range(run):
            tick = {
                "burst": 0,
                "flow": rng.randint(0, 2 * fair),
                "rush": rng.randint(0, max(1, fair // 4)),
                "idle": rng.randint(0, 4 * window_ms) if i == 0 else 0,
                "edge": rng.choice([window_ms - 1, window_ms, window_ms + 1, 1]) if i == 0 else rng.randint(0, 1),
            }[pattern]
            cost = rng.choice([1, 1, 1, 1, 2, max(1, limit // 3), limit, limit + 1]) if rng.random() < 0.4 else 1
            yield tick, cost
