"""What one decision costs, with the figures that headers need, as a multiple of redis-py's `ping()`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from . import ours, peers, server
from .chart import Bar, Chart
from .contender import BESIDE, OURS, PEER, Answer, Ask, Contender, Failed, Rate
from .contenders import field
from .measure import Effort, Ratios, Spread, beside_ping, crowd, ratios, spread, tiers
from .report import Findings, Goal, Table, best


class Case(NamedTuple):
    policies: int
    limit: int
    refused: bool

    def __str__(self) -> str:
        outcome = "refused" if self.refused else "allowed"
        return f"{outcome}, limit {self.limit:,}" + (f", {self.policies} policies" if self.policies > 1 else "")


ALLOWED, REFUSED, THREE = Case(1, 5, False), Case(1, 5, True), Case(3, 5, False)


def _ping(_: Sequence[Rate]) -> Ask:
    ping = server.client().ping

    def ask(identity: str) -> Answer:
        return None, ping()

    return ask


CONTROL = Contender("redis-py `ping()` again", BESIDE, "`ping()`: how steady the measure is", _ping)


class Results(NamedTuple):
    everyone: list[Contender]
    ratios: dict[tuple[str, Case], Ratios | Failed]

    def of(self, each: Contender, case: Case) -> Spread | Failed:
        return spread(self.ratios[each.name, case])

    def three(self, each: Contender) -> Spread | Failed:
        return ratios(self.ratios[each.name, THREE], self.ratios[each.name, ALLOWED])

    def those(self, kind: str) -> list[Contender]:
        return [each for each in self.everyone if each.kind == kind]


def decision(effort: Effort) -> Findings:
    """Time of one decision, with the figures for headers, as a multiple of redis-py's `ping()` beside it"""
    everyone = field(effort, peers.WITHOUT_FIGURES, *ours.BY_REDIS_PY, ours.IN_PROCESS, CONTROL)
    cases = [
        Case(policies, limit, refused)
        for policies, limit, refused in itertools.product((1, 3), (5, 1_000), (False, True))
        if policies == 1 or limit == 5 or not effort.quick
    ]
    crowds = {
        (each.name, case): crowd(each, tiers(case.limit, case.policies), case.refused)
        for case in cases
        for each in everyone
    }
    results = Results(everyone, beside_ping(crowds, effort(40, 6), "decision"))
    server.client().flushdb()
    return Findings([_table(results, cases), _called(everyone)], _goals(results), [_chart(results)])


def _table(results: Results, cases: list[Case]) -> Table:
    columns = ("decision ÷ ping", *map(str, cases), "3 policies ÷ 1")
    rows = [[each.name, *(results.of(each, case) for case in cases), results.three(each)] for each in results.everyone]
    note = "The median of the rounds, with the quartiles. `LOCAL_REFUSALS` is off: each refusal is asked of Redis."
    return Table("One decision, as a multiple of `ping()`", columns, rows, note)


def _called(everyone: list[Contender]) -> Table:
    return Table("What was called for one decision", ("", "called"), [[each.name, each.called] for each in everyone])


def _goals(results: Results) -> list[Goal]:
    default, rivals = results.those(OURS)[0], results.those(PEER)
    return [
        Goal(
            f"one decision with figures for headers, {outcome}, ÷ `ping()`",
            bound,
            True,
            results.of(default, case),
            best({each.name: results.of(each, case) for each in rivals}),
            _range(results, case),
        )
        for outcome, case, bound in (
            ("allowed", ALLOWED, 1.05),
            ("refused, asked of Redis", REFUSED, 1.05),
            ("allowed by three policies", THREE, 1.3),
        )
    ]


def _range(results: Results, case: Case) -> str:
    """How it is with the other algorithms, and with a limit of 1,000."""
    both = (case, case._replace(limit=1_000))
    found = [results.of(each, like) for each in results.those(OURS) for like in both]
    medians = [each.median for each in found if isinstance(each, Spread)]
    return f"over algorithms, limits 5 and 1,000: {min(medians):.2f} to {max(medians):.2f}" if medians else ""


def _chart(results: Results) -> Chart:
    found = {each: results.of(each, ALLOWED) for each in results.everyone if each is not CONTROL}
    return Chart(
        "decision",
        "One allowed decision, with the figures for headers",
        "Time as a multiple of redis-py's ping() beside it; client and server on one core. Less is better.",
        [Bar(each.name, each.kind, value) for each, value in found.items() if isinstance(value, Spread)],
        1.0,
        "ping()",
    )
