"""How the cost of a decision grows with the number of users, and of policies."""

from __future__ import annotations

import random

from . import ours, server
from .contender import Ask, Contender, Failed
from .contenders import BY_NAME
from .measure import (
    BATCH,
    Crowd,
    Effort,
    Ratios,
    against_ping,
    beside_ping,
    crowd,
    progress,
    ratios,
    rounds,
    tiers,
    time_per_call,
)
from .report import Cell, Findings, Goal, Table

FIRST = "user-first"
COPY = """
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call("COPY", KEYS[1], (string.gsub(KEYS[1], "user%-first", "user-" .. i)))
end
"""
LOG, COMPACT, BUCKET = (f"rlaas_django, {algo}" for algo in (ours.DEFAULT, ours.COMPACT, ours.BUCKET))
BY_USERS = [LOG, COMPACT, BUCKET, "throttled-py, GCRA", "limits, moving window", "the documents' ZSET script"]
BY_POLICIES = [*BY_USERS, "pyrate-limiter", "Django REST framework"]
POLICIES = (1, 2, 3, 5, 10)


def growth(effort: Effort) -> Findings:
    """Cost at 1,000,000 users against 1,000, and of 10 policies against 1"""
    few, many = 1_000, effort(1_000_000, 100_000)
    names = effort(BY_USERS, BY_USERS[:2])
    users = [[name, _users(BY_NAME[name], few, many, effort(40, 10))] for name in names]
    policies = _policies(effort(30, 5))
    measured = users[0][1]
    goal = Goal(
        f"cost at {many:,} users ÷ at {few:,}", 1.15, True, measured, note="" if many > 100_000 else "quick run"
    )
    tables = [
        Table(f"One allowed decision at {many:,} users, as a multiple of one at {few:,}", ("", "ratio"), users),
        Table("So many policies, as a multiple of one", ("", *map(str, POLICIES[1:])), policies),
    ]
    return Findings(tables, [goal])


def _users(contender: Contender, few: int, many: int, number: int) -> Cell:
    """Two databases, of few and of many users, changed about under the client by SWAPDB."""
    client = server.client()
    try:
        ask = contender.build(tiers(1_000, 1))
        for users in (few, many):
            client.swapdb(0, 1)
            _fill(ask, users, contender.name)
        found: dict[int, Ratios] = {few: [], many: []}
        for _ in rounds(number, f"growth: {contender.name}"):
            for users in (few, many):
                client.swapdb(0, 1)
                found[users].append(_time(ask, users))
        return ratios(found[many], found[few])
    except Exception as error:  # noqa: BLE001 - shown
        return Failed.by(error)
    finally:
        client.flushall()


def _fill(ask: Ask, users: int, name: str) -> None:
    """One user asks; the others are copies of what that left behind."""
    client = server.client()
    ask(FIRST)
    keys = [key for key in client.scan_iter() if FIRST.encode() in key]
    for start in range(1, users + 1, 20_000):
        progress(f"growth: {name}, user {start:,} of {users:,}")
        for key in keys:
            client.eval(COPY, 1, key, start, min(users, start + 19_999))
    if client.dbsize() < users:
        raise RuntimeError(f"{client.dbsize()} keys for {users} users")


def _time(ask: Ask, users: int) -> float | None:
    """Of users by chance, after some that do not count; so the code is warm, and their data is not."""
    chosen = iter([f"user-{random.randint(1, users)}" for _ in range(2 * BATCH)])

    def some() -> float:
        return time_per_call(lambda: ask(next(chosen)), BATCH)

    some()
    return against_ping(some)


def _policies(number: int) -> list[list[Cell]]:
    crowds: dict[tuple[str, int], Crowd | Failed] = {
        (name, policies): crowd(BY_NAME[name], tiers(100, policies)) for name in BY_POLICIES for policies in POLICIES
    }
    found = beside_ping(crowds, number, "growth: policies")
    server.client().flushall()
    return [[name, *(ratios(found[name, each], found[name, 1]) for each in POLICIES[1:])] for name in BY_POLICIES]
