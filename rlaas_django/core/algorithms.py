"""The algorithms.

There is a record of each, with all that Python code knows about it.

To add one takes a record here, a Lua file, a class that counts in the process, and a
model in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .counters import (
    CompactLog,
    Counter,
    FixedWindow,
    SlidingLog,
    SlidingWindowCounter,
    TokenBucket,
)

FIXED_WINDOW: Final = "fixed-window-algo"
SLIDING_WINDOW: Final = "sliding-window-algo"
SLIDING_WINDOW_COMPACT: Final = "sliding-window-compact-algo"
SLIDING_WINDOW_COUNTER: Final = "sliding-window-counter-algo"
TOKEN_BUCKET: Final = "token-bucket-algo"  # noqa: S105

# For type checkers; at run time, the names of the records count.
Algo = Literal[
    "fixed-window-algo",
    "sliding-window-algo",
    "sliding-window-compact-algo",
    "sliding-window-counter-algo",
    "token-bucket-algo",
]


def gettext_noop(text: str) -> str:
    """Return text as it is.

    makemessages collects it, by the name of this function.
    """
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What is to be known about an algorithm."""

    name: Algo  # in settings
    label: str
    choose_when: str
    lua: str  # its file in lua/, without the ending
    counter: type[Counter]  # what counts alike in the process

    # What the key of a counter ends in. Where another window would give the state
    # another meaning, the window is in the ending, so that changing the window
    # needs no flush.
    key_ending: str = ""

    # How long the state is kept after a charge.
    ttl_windows: int = 2

    # Whether windows begin at multiples of their length. The script adds the
    # window's index to the key, and a decision's `ttl` is what is left of it.
    is_aligned: bool = False

    has_burst: bool = False

    # The memory that each unit of the limit takes; 0: it does not grow with the limit.
    bytes_per_unit: int = 0

    # The greatest cost, and the algorithm that decides alike without that bound.
    max_cost: int | None = None
    alternative: str = ""

    # Which requests before one count against it, for a replayed log: those in a
    # fixed or a sliding window, or as the counter weighs them.
    demand: str = "sliding"


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            name=FIXED_WINDOW,
            label=gettext_noop("fixed window"),
            choose_when="it takes the least memory, but admits up to twice the limit "
            "around a boundary",
            lua="fixed_window",
            counter=FixedWindow,
            ttl_windows=1,
            is_aligned=True,
            demand="fixed",
        ),
        Algorithm(
            name=SLIDING_WINDOW,
            label=gettext_noop("sliding window"),
            choose_when="exact, and its entries can be read with redis-cli",
            lua="sliding_window",
            counter=SlidingLog,
            bytes_per_unit=120,  # of a ZSET past 128 entries, as MEMORY USAGE counts
            # It writes an entry per unit, and 100,000 of them keep Redis from other
            # calls for 183 ms.
            max_cost=10_000,
            alternative=SLIDING_WINDOW_COMPACT,
        ),
        Algorithm(
            name=SLIDING_WINDOW_COMPACT,
            label=gettext_noop("sliding window, compact"),
            choose_when="exact, and it takes the least memory of the exact ones",
            lua="sliding_window_compact",
            counter=CompactLog,
            key_ending=":log",
            bytes_per_unit=2,
        ),
        Algorithm(
            name=SLIDING_WINDOW_COUNTER,
            label=gettext_noop("sliding window counter"),
            choose_when="approximate, but its memory does not grow with the limit",
            lua="sliding_window_counter",
            counter=SlidingWindowCounter,
            key_ending=":counter-{window}",
            demand="counter",
        ),
        Algorithm(
            name=TOKEN_BUCKET,
            label=gettext_noop("token bucket"),
            choose_when="its memory does not grow with the limit; it admits a burst, "
            "and then a steady rate",
            lua="token_bucket",
            counter=TokenBucket,
            key_ending=":bucket-{window}",
            has_burst=True,
        ),
    )
}


def is_algorithm(name: object) -> bool:
    """Return whether there is an algorithm of this name."""
    return isinstance(name, str) and name in ALGORITHMS
