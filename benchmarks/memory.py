"""Bytes on the server for one user whose limit is used up."""

from __future__ import annotations

import random

from rlaas_django import Policy, check
from rlaas_django.testing import frozen_clock

from . import ours, server
from .chart import Bar, Chart
from .contender import OURS, Contender, Failed, Rate
from .contenders import field
from .measure import DAY, Effort, Spread, figure, progress
from .report import Findings, Goal, Table, best

LIMITS = (5, 100, 1_000, 10_000)
WINDOW = 60
START = 1_700_000_040_000  # ms, a multiple of the window
Sizes = dict[str, dict[int, int | Failed]]


def memory(effort: Effort) -> Findings:
    """Bytes per user with the limit used up, by MEMORY USAGE, at limits of 5 to 10,000"""
    limits = effort(LIMITS, LIMITS[:-1])
    everyone = field(effort)
    sizes: Sizes = {each.name: {limit: _size(each, limit) for limit in limits} for each in everyone}
    progress()
    rows = [[each.name, *(_cell(sizes[each.name][limit]) for limit in limits)] for each in everyone]
    columns = ("limit per minute", *(f"{limit:,}" for limit in limits))
    note = (
        "Ours over a minute, at random moments, as gaps of 0 ms would flatter the compact log; the others as fast as "
        "it goes, which does not change their sizes. Keys are counted whole, with their names and expiry."
    )
    tables = [Table("Bytes per user", columns, rows, note), _kept(limits)]
    return Findings(tables, [_goal(sizes)], [_chart(everyone, sizes)])


def _cell(size: int | Failed) -> str | Failed:
    return size if isinstance(size, Failed) else f"{size:,}"


def _size(contender: Contender, limit: int) -> int | Failed:
    progress(f"memory: {contender.name}, limit {limit:,}")
    server.client().flushdb()
    try:
        if contender.kind == OURS:
            algo = contender.name.partition(", ")[2]
            return _over_a_minute(algo, limit)[0]
        ask = contender.build([Rate(limit, DAY)])
        for _ in range(limit):
            ask("alice")
        return _bytes()
    except Exception as error:  # noqa: BLE001 - shown
        return Failed.by(error)
    finally:
        server.client().flushdb()


def _over_a_minute(algo: str, limit: int, minutes: int = 1) -> list[int]:
    """Bytes once the limit is used up, and then now and again."""
    policy = Policy("memory", (limit, WINDOW), algo=algo)
    jitter, sizes = random.Random(f"{algo}{limit}"), []
    with frozen_clock(START) as clock:
        for i in range(minutes * limit):
            clock.ms = START + int((i + jitter.random()) * WINDOW * 1000 / limit)
            check("alice", policy)
            if i + 1 >= limit and (i + 1 - limit) % max(1, limit // 50) == 0:
                sizes.append(_bytes())
    return sizes


def _bytes() -> int:
    client = server.client()
    return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter())


def _kept(limits: tuple[int, ...]) -> Table:
    """The logs while the limit is kept used up: the compact one is cleared up now and then."""
    rows = []
    for algo in (ours.DEFAULT, ours.COMPACT):
        sizes = []
        for limit in limits:
            progress(f"memory: {algo} kept used up, limit {limit:,}")
            server.client().flushdb()
            sizes.append(f"{max(_over_a_minute(algo, limit, minutes=2)):,}")
        rows.append([algo, *sizes])
    server.client().flushdb()
    progress()
    columns = ("limit per minute", *(f"{limit:,}" for limit in limits))
    return Table("The most while a log is kept used up for another minute", columns, rows)


def _goal(sizes: Sizes) -> Goal:
    per_request = {
        name: Spread.of([size / 1_000])
        for name, by_limit in sizes.items()
        if isinstance(size := by_limit[1_000], int) and size > 1_000
    }
    compact = next(name for name in sizes if name.endswith(ours.COMPACT))
    logs = {name: each for name, each in per_request.items() if not name.startswith("rlaas_django")}
    measured = per_request.get(compact, Failed("no log was kept"))
    return Goal("bytes per request in the exact log at 1,000", 2, True, measured, best(logs))


def _chart(everyone: list[Contender], sizes: Sizes) -> Chart:
    bars = [
        Bar(each.name, each.kind, Spread.of([size / 1000]))
        for each in everyone
        if isinstance(size := sizes[each.name][1_000], int)
    ]
    title = f"Memory per user at a limit of {figure(1_000)}"
    return Chart("memory", title, "kB on the server (MEMORY USAGE), the limit used up. Less is better.", bars)
