"""What a decision costs the server: its CPU per check, by its own count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlaas_django import Policy, check
from rlaas_django.testing import frozen_clock

from . import ours, server
from .measure import Effort, Spread, progress, rounds
from .memory import START
from .report import Findings, Goal, Table

LIMITS = (5, 100, 1_000, 10_000)
WINDOW = 60
# Together they reach over one clearing-up of the compact log at the largest limit, or its cost would not show.
TURNS, CALLS = 13, 100
NO_OP = "no-op"


@dataclass(frozen=True)
class Spent:
    """What the server has spent: in scripts, by its own count of commands, and altogether, reading and replying too."""

    calls: int = 0
    script: float = 0
    process: float = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.calls + other.calls, self.script + other.script, self.process + other.process)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.calls - other.calls, self.script - other.script, self.process - other.process)


class Steady:
    """Someone whose limit is used up all the time: whenever a unit dies, the next request comes, and is allowed."""

    def __init__(self, algo: str, limit: int) -> None:
        # The counter takes the previous window to have been even, so at the full rate it refuses now and then.
        pace = 2 if algo == ours.COUNTER else 1
        self.policy = Policy(f"{algo}-{limit}", (limit, WINDOW), algo=algo)
        self.tick = pace * WINDOW * 1000 // limit
        self.ms = START

    def ask(self, times: int) -> None:
        with frozen_clock(self.ms) as clock:
            for _ in range(times):
                clock.tick(self.tick)
                decision = check("alice", self.policy, source=None)  # not in the statistics, which run a script, too
                if not decision.allowed or decision.degraded:
                    raise RuntimeError(f"no steady state: {decision}")
            self.ms = clock.ms


Case = tuple[str, int]
Round = dict[Case | str, Spent]


def cpu(effort: Effort) -> Findings:
    """Server CPU per allowed check of an identity at its limit, by algorithm and limit"""
    limits = effort(LIMITS, (LIMITS[0], LIMITS[-1]))
    algos = effort(ours.ALGORITHMS, (ours.DEFAULT, ours.COMPACT))
    cases = {(algo, limit): Steady(algo, limit) for limit in limits for algo in algos}
    for (algo, limit), steady in cases.items():
        progress(f"cpu: using up {algo}, limit {limit:,}")
        steady.ask(limit)
    found = [_round(cases) for _ in rounds(effort(7, 2), "cpu")]
    server.client().flushdb()
    tables = [
        _table("Time in the script (INFO commandstats)", found, algos, limits, "script"),
        _table("CPU of the whole server (INFO cpu)", found, algos, limits, "process"),
    ]
    growths = {algo: _growth(found, algo, "script") for algo in algos}
    worst = max(growths, key=lambda algo: growths[algo].median)
    measure, note = f"server CPU per decision, limit {LIMITS[-1]:,} ÷ limit {LIMITS[0]}", f"the worst, {worst}"
    return Findings(tables, [Goal(measure, 1.3, True, growths[worst], note=note)])


def _round(cases: dict[Case, Steady]) -> Round:
    """Everyone in turn, several times over, so that a slow moment of the machine falls on all."""
    client = server.client()
    no_op = client.script_load("return 1")
    words = ["key", *["1000"] * 10]  # about as many as a check has
    spent: Round = dict.fromkeys([NO_OP, *cases], Spent())
    for _ in range(TURNS):
        before = _spent()
        for _ in range(CALLS):
            client.evalsha(no_op, 1, *words)
        spent[NO_OP] += _spent() - before
        for case, steady in cases.items():
            before = _spent()
            steady.ask(CALLS)
            spent[case] += _spent() - before
    if any(each.calls != TURNS * CALLS for each in spent.values()):
        raise RuntimeError("someone else ran scripts on this server")
    return spent


def _spent() -> Spent:
    client = server.client()
    commands, process = client.info("commandstats"), client.info("cpu")
    scripts = commands.get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    return Spent(scripts["calls"], scripts["usec"], process["used_cpu_user"] + process["used_cpu_sys"])


def _ratio(found: list[Round], case: Case, other: Case | str, measure: str) -> Spread:
    return Spread.of(getattr(spent[case], measure) / getattr(spent[other], measure) for spent in found)


def _growth(found: list[Round], algo: str, measure: str) -> Spread:
    return _ratio(found, (algo, LIMITS[-1]), (algo, LIMITS[0]), measure)


def _table(title: str, found: list[Round], algos: Sequence[str], limits: Sequence[int], measure: str) -> Table:
    rows = [
        [
            algo,
            *(_ratio(found, (algo, limit), NO_OP, measure) for limit in limits),
            _growth(found, algo, measure),
        ]
        for algo in algos
    ]
    columns = ("limit per minute", *(f"{limit:,}" for limit in limits), f"{LIMITS[-1]:,} ÷ {LIMITS[0]}")
    return Table(f"{title}, as a multiple of a no-op EVALSHA", columns, rows)
