"""The algorithms of `lua/` in this process' memory, for when Redis cannot be asked; bounded, so that it stays small."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .policy import FIXED_WINDOW, SLIDING_WINDOW, SLIDING_WINDOW_COMPACT, SLIDING_WINDOW_COUNTER, TOKEN_BUCKET

MOST_STAMPS = 500_000  # of all logs together, at 16 bytes: 8 MB
LONGEST_LOG = 50_000  # stamps; so that no single log drives out all others


class Question(NamedTuple):
    """One policy's part of a request."""

    policy: str
    identity: str
    algo: str
    limit: int
    window: int  # ms
    capacity: int  # the burst of a token bucket, else the limit
    shadow: bool


class Answer(NamedTuple):
    """What the scripts reply for one policy."""

    allowed: bool
    count: int  # type: ignore[assignment]  # units before this request; nobody needs a tuple's own count()
    remaining: int  # after it
    retry_after: int  # ms; 0 when allowed, -1 never
    reset_after: int  # ms
    charged_at: int  # -1: not charged


class State(Protocol):
    """What one identity used under one policy, in whole numbers."""

    def look(self, question: Question, now: int, cost: int) -> tuple[int, int, int]:
        """Units counted; until a cost that fits, but not now, would pass; until nothing is counted. Changes nothing."""

    def charge(self, question: Question, now: int, cost: int) -> tuple[int, int]:
        """Until nothing is counted, and charged_at, by which `refund` finds this charge."""

    def refund(self, question: Question, now: int, cost: int, charged_at: int) -> int:
        """Units given back."""

    def __len__(self) -> int:
        """How many stamps it keeps."""


class Log:
    """Both sliding logs: the ms in which units were charged, and for each how many there were by then.

    So a dear cost takes no more room than a cheap one, and a look is two searches, whatever the limit. What is dead at
    a charge is passed for good, and removed once it is the greater part. At LONGEST_LOG, stamps are merged with later
    ones close by: some units count up to 1/25,000 of the window longer, and nothing extra is admitted.
    """

    __slots__ = ("head", "stamps", "totals")

    def __init__(self) -> None:
        self.stamps, self.totals, self.head = array("q"), array("q"), 0

    def look(self, question: Question, now: int, cost: int) -> tuple[int, int, int]:
        limit, dead = question.limit, now - question.window
        alive = bisect_right(self.stamps, dead, self.head)
        if alive == len(self.stamps):
            return 0, 0, 0
        total, wait = self.totals[-1], 0
        count = total - self._before(alive)
        if count + cost > limit >= cost:
            wait = self.stamps[bisect_left(self.totals, total + cost - limit, alive)] - dead
        return count, wait, self.stamps[-1] - dead

    def charge(self, question: Question, now: int, cost: int) -> tuple[int, int]:
        self.head = bisect_right(self.stamps, now - question.window, self.head)
        if 2 * self.head > len(self.stamps) or len(self.stamps) >= LONGEST_LOG:
            self._shrink(question.window)
        stamps, totals = self.stamps, self.totals
        at = bisect_left(stamps, now, self.head)
        if at == len(stamps):
            stamps.append(now)
            totals.append(self._before(at) + cost)
        else:  # in the same ms, or the clock stepped back
            if stamps[at] != now:
                stamps.insert(at, now)
                totals.insert(at, self._before(at))
            self._add(at, cost)
        return stamps[-1] + question.window - now, now

    def refund(self, question: Question, now: int, cost: int, charged_at: int) -> int:
        at = bisect_left(self.stamps, charged_at, self.head)
        if charged_at + question.window <= now or at == len(self.stamps) or self.stamps[at] != charged_at:
            return 0
        counted = self.totals[at] - self._before(at)
        given = min(cost, counted)
        self._add(at, -given)
        if given == counted:
            del self.stamps[at], self.totals[at]
        return given

    def __len__(self) -> int:
        return len(self.stamps)

    def _before(self, at: int) -> int:
        return self.totals[at - 1] if at else 0

    def _add(self, at: int, units: int) -> None:
        for i in range(at, len(self.totals)):
            self.totals[i] += units

    def _shrink(self, window: int) -> None:
        stamps, totals, dead = self.stamps[self.head :], self.totals[self.head :], self._before(self.head)
        if len(self.stamps) >= LONGEST_LOG:
            near = 2 * window // LONGEST_LOG + 1  # ms; of those within, the last stays
            kept = [i for i, stamp in enumerate(stamps, 1) if i == len(stamps) or stamps[i] // near != stamp // near]
            stamps, totals = array("q", [stamps[i - 1] for i in kept]), array("q", [totals[i - 1] for i in kept])
        self.stamps, self.totals, self.head = stamps, array("q", [total - dead for total in totals]), 0


class Window:
    """Fixed window: the index of the latest one, and its units.

    A clock that stepped back stays in that window, which admits nothing twice.
    """

    __slots__ = ("current", "index", "previous")
    fades = False  # whether the units of the window before still count, fewer and fewer

    def __init__(self) -> None:
        self.index, self.previous, self.current = 0, 0, 0

    def look(self, question: Question, now: int, cost: int) -> tuple[int, int, int]:
        limit, window = question.limit, question.window
        index, previous, current = self._read(now, window)
        left, wait = (index + 1) * window - now, 0
        count = current + _ceil(previous * min(left, window), window)
        if count + cost > limit >= cost:
            if current + cost <= limit:  # the window before has to fade
                wait = left - (limit - current - cost) * window // previous
            else:
                wait = left + (max(0, window - (limit - cost) * window // current) if self.fades else 0)
        return count, wait, left + window if self.fades and current else left if count else 0

    def charge(self, question: Question, now: int, cost: int) -> tuple[int, int]:
        self.index, self.previous, current = self._read(now, question.window)
        self.current = current + cost
        start = self.index * question.window
        return start + (2 if self.fades else 1) * question.window - now, start

    def refund(self, question: Question, now: int, cost: int, charged_at: int) -> int:
        index, previous, current = self._read(now, question.window)
        behind = index - charged_at // question.window
        if behind not in (0, 1):
            return 0
        given = min(cost, previous if behind else current)
        if given:
            self.index = index
            self.previous, self.current = (previous - given, current) if behind else (previous, current - given)
        return given

    def __len__(self) -> int:
        return 0

    def _read(self, now: int, window: int) -> tuple[int, int, int]:
        index = now // window
        if self.index >= index:
            return self.index, self.previous, self.current
        return index, self.current if self.fades and self.index == index - 1 else 0, 0


class SlidingCounter(Window):
    """Sliding window counter: the units of the window before count as far as it is still in sight."""

    __slots__ = ()
    fades = True


class Bucket:
    """Token bucket: what is missing at a stamp, in 1/window of a unit, so that a ms refills exactly `limit` of it."""

    __slots__ = ("stamp", "used")

    def __init__(self) -> None:
        self.used, self.stamp = 0, 0

    def look(self, question: Question, now: int, cost: int) -> tuple[int, int, int]:
        limit, window = question.limit, question.window
        used, stamp = self._read(now, limit)
        over = used - (question.capacity - cost) * window
        wait = stamp - now + _ceil(over, limit) if over > 0 else 0
        return _ceil(used, window), wait, stamp - now + _ceil(used, limit) if used else 0

    def charge(self, question: Question, now: int, cost: int) -> tuple[int, int]:
        used, self.stamp = self._read(now, question.limit)
        self.used = used + cost * question.window
        return self.stamp - now + _ceil(self.used, question.limit), now

    def refund(self, question: Question, now: int, cost: int, _charged_at: int) -> int:
        used, stamp = self._read(now, question.limit)
        given = min(cost, _ceil(used, question.window))
        if given:
            self.used, self.stamp = max(0, used - given * question.window), stamp
        return given

    def __len__(self) -> int:
        return 0

    def _read(self, now: int, limit: int) -> tuple[int, int]:
        if self.stamp >= now:
            return self.used, self.stamp  # later than now: the clock stepped back, and refills nothing until then
        return max(0, self.used - (now - self.stamp) * limit), now


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


_STATES: dict[str, Callable[[], State]] = {
    FIXED_WINDOW: Window,
    SLIDING_WINDOW: Log,
    SLIDING_WINDOW_COMPACT: Log,
    SLIDING_WINDOW_COUNTER: SlidingCounter,
    TOKEN_BUCKET: Bucket,
}
Key = tuple[str, str, str, int]


class Memory:
    """What identities used in one process, those seen last.

    >>> Memory().check([Question("p", "alice", "fixed-window-algo", 5, 60_000, 5, False)], 0, 1, True, 10_000)
    [Answer(allowed=True, count=0, remaining=4, retry_after=0, reset_after=60000, charged_at=0)]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()
        _memories.add(self)

    def check(self, questions: Sequence[Question], now: int, cost: int, charge: bool, most: int) -> list[Answer]:
        """Decide all or nothing, as check.lua does; without `charge`, look and touch nothing.

        `most` states are kept, one for each identity under a policy.
        """
        charge = charge and cost > 0
        looks, answers, passes = [], [], True
        with self._lock:
            for question in questions:
                key, state = self._find(question, charge)
                count, wait, reset_after = state.look(question, now, cost)
                allowed = count + cost <= question.capacity
                passes = passes and (allowed or question.shadow)
                looks.append((question, key, state, allowed, count, wait, reset_after))
            for question, key, state, allowed, count, wait, reset_after in looks:
                left, charged_at = max(0, question.capacity - count), -1
                retry_after = 0 if allowed else -1 if cost > question.capacity else wait
                if charge and passes and allowed:
                    left -= cost
                    reset_after, charged_at = self._charge(key, state, question, now, cost)
                answers.append(Answer(allowed, count, left, retry_after, reset_after, charged_at))
            if charge:
                self._make_room(most)
        return answers

    def refund(self, question: Question, now: int, cost: int, charged_at: int) -> int:
        """Give back what was charged, never more than is still counted; the units given back."""
        with self._lock:
            state = self._states.get(_key(question))
            if state is None:
                return 0
            self._stamps -= len(state)
            given = state.refund(question, now, cost, charged_at)
            self._stamps += len(state)
            return given

    def clear(self) -> None:
        with self._lock:
            self._forget()

    def __len__(self) -> int:
        return len(self._states)

    def _find(self, question: Question, touch: bool) -> tuple[Key, State]:
        """The state, or one that is not kept yet. A refusal is use too, lest those who are refused be forgotten."""
        key = _key(question)
        state = self._states.get(key)
        if state is None:
            state = _STATES[question.algo]()
        elif touch:
            self._states.move_to_end(key)
        return key, state

    def _charge(self, key: Key, state: State, question: Question, now: int, cost: int) -> tuple[int, int]:
        state = self._states.setdefault(key, state)
        self._stamps -= len(state)
        charged = state.charge(question, now, cost)
        self._stamps += len(state)
        return charged

    def _make_room(self, most: int) -> None:
        while len(self._states) > most or self._stamps > MOST_STAMPS:
            self._stamps -= len(self._states.popitem(last=False)[1])

    def _forget(self) -> None:
        self._states: OrderedDict[Key, State] = OrderedDict()
        self._stamps = 0

    def _after_fork(self) -> None:
        if self._lock.locked():  # by a thread that is not here, and may have been amid a charge
            self._forget()
        self._lock = threading.Lock()


def _key(question: Question) -> Key:
    """The limit is not in it: raising it keeps the usage."""
    return question.policy, question.identity, question.algo, question.window


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()


def _after_fork() -> None:
    for memory in _memories:
        memory._after_fork()


os.register_at_fork(after_in_child=_after_fork)
