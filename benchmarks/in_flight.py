"""Async decisions, one at a time and 32 in flight, against redis-py's own async client with the same script."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import redis.asyncio
from rlaas_django import acheck

from . import async_peers, ours, server
from .async_peers import AsyncAsk
from .contender import BESIDE, OURS, PEER, Answer, Failed, Rate
from .measure import DAY, Effort, Ratios, rotated, rounds, spread
from .report import Findings, Goal, Table, best

RATE = Rate(1_000, DAY)
WIDTHS = (1, 32)
CALLS = 64
_numbers = itertools.count()


class Contender(NamedTuple):
    name: str
    kind: str
    called: str
    build: Callable[[Rate], AsyncAsk]


def _ours(algo: str, rate: Rate) -> AsyncAsk:
    policy = ours.policies(algo, [rate])

    async def ask(identity: str) -> Answer:
        return ours.figures(await acheck(identity, policy))

    return ask


def _same_script(rate: Rate) -> AsyncAsk:
    replay = ours.Replay(ours.build(ours.DEFAULT, [rate]))
    script = redis.asyncio.Redis.from_url(server.url()).register_script("")
    script.sha = replay.sha  # which the server knows already

    async def ask(identity: str) -> Answer:
        words = replay.words(identity)
        return None, await script(words[: replay.count], words[replay.count :])

    return ask


REFERENCE = Contender("the script of sliding-window-algo by redis.asyncio", BESIDE, "`Script`", _same_script)
FIELD = [
    REFERENCE,
    *(
        Contender(f"rlaas_django, {algo}", OURS, "`acheck()`", partial(_ours, algo))
        for algo in (ours.DEFAULT, ours.COMPACT, ours.BUCKET)
    ),
    Contender("the documents' ZSET script by redis.asyncio", BESIDE, "`Script`", async_peers.documents),
    Contender("throttled-py, GCRA", PEER, "`limit()`", async_peers.throttled),
    Contender("limits, moving window", PEER, "`hit()`, `get_window_stats()`", async_peers.limits),
    Contender("django-smart-ratelimit", PEER, "`aincr()`, which gives the count alone", async_peers.smart),
    Contender("django-fast-ratelimit", PEER, "`aget_ratelimit()`", async_peers.fast),
]
Results = dict[tuple[str, int], Ratios | Failed]


def in_flight(effort: Effort) -> Findings:
    """Async: time of one decision with 1 and 32 in flight, as a multiple of redis.asyncio's `Script` of our script"""
    results = asyncio.run(_measure(effort(40, 5)))
    rows = [[each.name, each.called, *(spread(results[each.name, width]) for width in WIDTHS)] for each in FIELD]
    note = "The first line is measured against itself, and tells how steady the others are."
    table = Table("Async", ("", "called", *(f"{width} in flight" for width in WIDTHS)), rows, note)
    return Findings([table], [_goal(results, width, bound) for width, bound in ((1, 0.65), (32, 0.3))])


def _goal(results: Results, width: int, bound: float) -> Goal:
    rivals = {each.name: spread(results[each.name, width]) for each in FIELD if each.kind == PEER}
    mine = spread(results[FIELD[1].name, width])
    return Goal(f"async, {width} in flight, ÷ `redis.asyncio` Script", bound, True, mine, best(rivals))


async def _measure(number: int) -> Results:
    asks = {each.name: await _prepared(each) for each in FIELD}
    reference = asks[REFERENCE.name]
    if isinstance(reference, Failed):
        raise RuntimeError(reference)
    results: Results = {
        (name, width): ask if isinstance(ask, Failed) else [] for name, ask in asks.items() for width in WIDTHS
    }
    for i in rounds(number, "async"):
        for (name, width), so_far in rotated(results.items(), i * len(results) // number):
            if isinstance(so_far, list):
                before = await _time(reference, width)
                taken = await _time(asks[name], width)
                so_far.append(2 * taken / (before + await _time(reference, width)))
    return results


async def _prepared(contender: Contender) -> AsyncAsk | Failed:
    """Ready, with as many connections as it will want."""
    try:
        ask = contender.build(RATE)
        if (await ask("first"))[0] is False:
            raise RuntimeError("the first is refused")
        await _time(ask, max(WIDTHS))
    except Exception as error:  # noqa: BLE001 - shown
        return Failed.by(error)
    return ask


async def _time(ask: AsyncAsk, width: int) -> float:
    """Seconds per decision when so many are under way at any time."""

    async def some() -> None:
        for _ in range(CALLS // width):
            await ask(f"async{next(_numbers) % 500}")

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(width)))
    return (time.perf_counter() - began) / CALLS
