"""Who observes decisions: the statistics, and integrations with metrics.

Each decision is observed once: a request when its outermost limits are left, whatever
the number of its checks, and `check()` in code at once. An observer is called in the
thread of the request: it must not block, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..core.decision import Decision, Outcome

# Results of a decision, and of a policy in it.
ALLOWED = "allowed"
REFUSED = "refused"
OVER = "over"  # a limit, but not refused
DEGRADED = "degraded"  # decided without Redis
OTHER = "other"  # of a policy only: it allows a request that another policy refused

# Sources.
REQUEST = "request"  # a view or the middleware
CODE = "code"  # `check()` without a label of the caller's

MAX_METHOD = 16  # characters of a request's method
MAX_TEXT = 300  # characters of its path and its user agent


class Observation(NamedTuple):
    """A request, or a check in code, and what was decided about it."""

    decision: Decision  # of all policies
    # What the request was refused by: not a shadow policy, nor limits with block=False.
    refusal: Decision | None
    source: str
    method: str = ""
    path: str = ""
    address: str = ""  # of the client of a request that exceeded a limit
    user_agent: str = ""  # likewise
    # Seconds per call to Redis; measured only if an observer wants them.
    latencies: tuple[float, ...] = ()
    is_cached: bool = False  # a cached refusal

    @property
    def result(self) -> str:
        """What the client got: REFUSED, OVER, DEGRADED or ALLOWED."""
        return overall(result for _, result in self.results())

    def results(self) -> Iterator[tuple[Outcome, str]]:
        """Yield the result of each policy."""
        for outcome in self.decision.outcomes:
            yield outcome, self._result_of(outcome)

    def _result_of(self, outcome: Outcome) -> str:
        if outcome.degraded and (outcome.allowed or outcome.failed_closed):
            return DEGRADED
        if outcome.allowed:
            return ALLOWED if self.refusal is None else OTHER
        if outcome.policy.shadow or self.refusal is None:
            return OVER

        refusing = {refused.policy.name for refused in self.refusal.outcomes}
        return REFUSED if outcome.policy.name in refusing else OVER


def overall(results: Iterable[str]) -> str:
    """Return the result of a decision from the results of its policies."""
    found = {*results}
    for result in (REFUSED, DEGRADED, OVER):
        if result in found:
            return result
    return ALLOWED


Observer = Callable[[Observation], object]
Count = Callable[[Decision], bool]

observers: dict[Observer, Count | None] = {}
timed: set[Observer] = set()  # those that want the latency
only_count: Count | None = None  # that of the only observer


def add(
    observer: Observer, *, latency: bool = False, count: Count | None = None
) -> None:
    """Have an observer called with each observation.

    With `latency`, calls to Redis are timed for it. `count` is a shortcut: while this
    is the only observer, it gets each allowed decision, and an Observation, which takes
    longer to make, is made only if it returns False.
    """
    observers.setdefault(observer, count)
    if latency:
        timed.add(observer)
    _update()


def remove(observer: Observer) -> None:
    """Stop calling an observer."""
    del observers[observer]
    timed.discard(observer)
    _update()


def _update() -> None:
    global only_count
    only_count = None
    if len(observers) == 1 and not timed:
        (only_count,) = observers.values()


def observe(decision: Decision, source: str) -> None:
    """Pass a decision that belongs to no request to the observers.

    `source` is the label of the caller.
    """
    count = only_count
    if decision.allowed and count is not None and count(decision):
        return

    latencies: tuple[float, ...] = ()
    if decision.latency is not None:
        latencies = (decision.latency,)
    observation = Observation(
        decision,
        None if decision.allowed else decision,
        source[:MAX_TEXT],
        latencies=latencies,
        is_cached=decision.is_cached,
    )
    for observer in [*observers]:
        observer(observation)
