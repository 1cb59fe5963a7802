"""What is compared: someone who is asked about an identity under some rates, and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import environment

OURS, PEER, BESIDE = "ours", "peer", "beside"  # beside: not to be had as a package, for comparison


class Rate(NamedTuple):
    limit: int
    window: int  # seconds


# Whether it is allowed; the seconds to wait where there is such a figure; then the other figures for headers.
# An answer whose first is None is not looked at.
Answer = tuple
Ask = Callable[[str], Answer]


class Contender(NamedTuple):
    name: str
    kind: str
    called: str  # in a table's words, what one decision consists of
    build: Callable[[Sequence[Rate]], Ask]
    variant: bool = False  # a further way of someone who is there already; left out of a quick run


class Failed(NamedTuple):
    """In the place of a figure: why there is none."""

    error: str

    def __str__(self) -> str:
        return f"failed: {self.error}"

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        if isinstance(error, ImportError) and environment.failures():
            return cls("; ".join(f"{name}: {reason}" for name, reason in environment.failures().items()))
        return cls(f"{type(error).__name__}: {error}".replace("\n", " ")[:200])


def in_turn(asks: Sequence[Ask]) -> Ask:
    """Several limits, of someone who takes one at a time: one call each, until one refuses."""
    if len(asks) == 1:
        return asks[0]

    def ask(identity: str) -> Answer:
        answer: Answer = ()
        for each in asks:
            answer = each(identity)
            if not answer[0]:
                break
        return answer

    return ask


def for_each_rate(build: Callable[[Rate], Ask]) -> Callable[[Sequence[Rate]], Ask]:
    return lambda rates: in_turn([build(rate) for rate in rates])
