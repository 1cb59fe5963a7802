"""A refusal repeated from memory, against one asked of Redis."""

from __future__ import annotations

from . import ours
from .contender import Failed, Rate
from .measure import DAY, Crowd, Effort, Spread, ratios, rounds
from .report import Findings, Goal, Table

ASKED, REPEATED = 50, 1_000  # per round; what is repeated takes less than the second for which it may be


def refusal(effort: Effort) -> Findings:
    """Time of a refusal repeated from memory (`LOCAL_REFUSALS`), as a multiple of one asked of Redis"""
    rows = [
        [contender.name, *_measure(contender.name, algo, effort(40, 8))]
        for contender, algo in zip(ours.CONTENDERS, ours.ALGORITHMS, strict=True)
    ]
    note = f"with each figure read: {rows[0][6]}"
    goal = Goal(
        "a refusal repeated from memory ÷ one asked of Redis", 0.02, True, rows[0][3], "1.0 (nobody does)", note
    )
    kinds = ("asked of Redis, µs", "from memory, µs", "ratio")
    columns = ("", *kinds, *(f"{kind}, each figure read" for kind in kinds))
    return Findings([Table("A refusal from memory", columns, rows)], [goal])


def _measure(name: str, algo: str, number: int) -> tuple[Spread | Failed, ...]:
    """Of `check()` itself, and of `check()` and all the figures for headers."""
    found: list[Spread | Failed] = []
    for build in (ours.build_bare, ours.build):
        crowd = Crowd(build(algo, [Rate(5, DAY)]), 5, refused=True)
        asked, repeated = [], []
        for _ in rounds(number, f"refusal: {name}"):
            crowd.ask(crowd.identity)  # after a change of settings, what is kept of them is made anew
            asked.append(crowd.time(crowd.take(ASKED)))
            with ours.local_refusals(on=True):
                crowd.ask(crowd.identity)  # from here on it is remembered
                repeated.append(crowd.time(crowd.take(REPEATED)))
        found += [Spread.of(each and each * 1e6 for each in times) for times in (asked, repeated)]
        found.append(ratios(repeated, asked))
    return tuple(found)
