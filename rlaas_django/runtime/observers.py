"""Who observes decisions: the statistics, and integrations with metrics. Each decision is observed once.

A request is observed when its outermost limits are left, whatever the number of its checks; `check()` in code is
observed at once. An observer is called in the thread of the request: it must not block, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..core.decision import Decision, Outcome

# Results: of a decision one of the first four, of a policy in it one of all.
ALLOWED, REFUSED, OVER, DEGRADED, OTHER = (
    "allowed",
    "refused",
    "over",
    "degraded",
    "other",
)

REQUEST, CODE = (
    "request",
    "code",
)  # sources: a view or the middleware; `check()` without a label of the caller's
MAX_METHOD, MAX_TEXT = (
    16,
    300,
)  # characters of a request's method, and of its path and its user agent


class Observation(NamedTuple):
    """A request, or a check in code, and what was decided about it."""

    decision: Decision  # of all policies
    refusal: (
        Decision | None
    )  # what the request was refused by: not a shadow policy, nor limits with block=False
    source: str
    method: str = ""
    path: str = ""
    address: str = ""  # of the client of a request that exceeded a limit
    user_agent: str = ""  # likewise
    latencies: tuple[
        float, ...
    ] = ()  # seconds per call to Redis; measured only if an observer asks for it
    is_continued: bool = (
        False  # the request was observed before, and other limits were checked since
    )
    is_cached: bool = False  # a refusal was repeated from memory

    @property
    def result(self) -> str:
        """What the client got: refused, over (a limit, but not refused), degraded (decided without Redis), allowed."""
        return overall(result for _, result in self.results())

    def results(self) -> Iterator[tuple[Outcome, str]]:
        """Yield the result of each policy; `other`: it allows a request that another policy refused."""
        refusing = (
            ()
            if self.refusal is None
            else [each.policy.name for each in self.refusal.outcomes]
        )
        for outcome in self.decision.outcomes:
            if outcome.degraded and (outcome.allowed or outcome.failed_closed):
                yield outcome, DEGRADED
            elif outcome.allowed:
                yield outcome, ALLOWED if self.refusal is None else OTHER
            elif outcome.policy.shadow or outcome.policy.name not in refusing:
                yield outcome, OVER
            else:
                yield outcome, REFUSED


def overall(results: Iterable[str]) -> str:
    """Return the result of a decision from the results of its policies."""
    found = {*results}
    return next((each for each in (REFUSED, DEGRADED, OVER) if each in found), ALLOWED)


Observer = Callable[[Observation], object]
Count = Callable[[Decision], bool]

observers: dict[Observer, Count | None] = {}
measures_latency = False  # whether an observer wants it
only_count: Count | None = None  # that of the only observer
_timed: list[Observer] = []  # those that want the latency


def add(
    observer: Observer, *, latency: bool = False, count: Count | None = None
) -> None:
    """Have an observer called with each observation; with `latency`, calls to Redis are timed for it.

    `count` is a shortcut: while this is the only observer, it gets each allowed decision. An Observation, which takes
    longer to make, is made only if it returns False.
    """
    observers.setdefault(observer, count)
    if latency:
        _timed.append(observer)
    _update()


def remove(observer: Observer) -> None:
    """Call the observer no more."""
    del observers[observer]
    _timed[:] = [each for each in _timed if each != observer]
    _update()


def _update() -> None:
    global measures_latency, only_count
    measures_latency = bool(_timed)
    only_count = (
        next(iter(observers.values())) if len(observers) == 1 and not _timed else None
    )


def observe(decision: Decision, source: str) -> None:
    """Pass a decision that belongs to no request to the observers; `source` is the label of who asked for it."""
    if decision.allowed and (count := only_count) and count(decision):
        return
    latencies = (
        (decision.latency,) if measures_latency and decision.latency is not None else ()
    )
    refusal = None if decision.allowed else decision
    observation = Observation(
        decision,
        refusal,
        source[:MAX_TEXT],
        latencies=latencies,
        is_cached=decision.is_cached,
    )
    for observer in [*observers]:
        observer(observation)
