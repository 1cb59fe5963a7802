"""Where the time of one decision goes: the way to the server and back, its script, and Python, step by step."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import hiredis
from rlaas_django import Policy, backend, check
from rlaas_django.backend.commands import pack
from rlaas_django.limiter import plan

from . import ours, server
from .measure import BATCH, DAY, Effort, Ratios, against_ping, rotated, rounds, spread, time_per_call
from .report import Findings, Table

USERS = 500
LIMITS = {"allowed": 1_000_000, "refused": 1}


class Step(NamedTuple):
    name: str
    run: Callable[[], object]


def profile(effort: Effort) -> Findings:
    """Where the time of one decision goes, step by step, as multiples of redis-py's `ping()`"""
    connected = socket.create_connection(("127.0.0.1", server.client().connection_pool.connection_kwargs["port"]))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connected:
        columns = {
            f"{algo.removesuffix('-algo')}, {outcome}": _steps(connected, algo, limit)
            for algo in (ours.DEFAULT, ours.COMPACT, ours.FIXED)
            for outcome, limit in LIMITS.items()
        }
        found = _measure(columns, effort(40, 8))
    server.client().flushdb()
    names = [step.name for step in next(iter(columns.values()))]
    rows = [[name, *(spread(found[column, name]) for column in columns)] for name in names]
    note = (
        "Each step has those before it in it. The first two are what the machine takes for any client; what the third "
        "is longer than the second is the script's; the rest is Python's."
    )
    return Findings([Table("From a bare socket to a decision", ("÷ ping", *columns), rows, note)])


def _steps(connected: socket.socket, algo: str, limit: int) -> list[Step]:
    policy = Policy(f"profile-{algo}-{limit}", (limit, DAY), algo=algo)
    identities = itertools.cycle([f"user{n}" for n in range(USERS)])
    ask = partial(_decide, policy, identities)
    for _ in range(2 * USERS):
        ask()
    planned = [plan(f"user{n % USERS}", policy, 1) for n in range(8 * USERS)]
    calls = itertools.cycle([each.pack() for each in planned])
    does_nothing = server.client().script_load("return 1")
    words = next(calls).packed.split(b"\r\n")[4::2]
    no_op = pack(("EVALSHA", does_nothing, *words[1:]))
    replies = hiredis.Reader()
    connection = server.client().connection_pool.get_connection()

    def bare(packed: bytes) -> None:
        connected.sendall(packed)
        connected.recv(4096)

    def read() -> object:
        connected.sendall(next(calls).packed)
        replies.feed(connected.recv(4096))
        return replies.gets()

    def by_connection() -> object:
        connection.send_packed_command((next(calls).packed,), check_health=False)
        return connection.read_response()

    return [
        Step("PING over a bare socket", partial(bare, pack(("PING",)))),
        Step("an EVALSHA of as many words that does nothing", partial(bare, no_op)),
        Step("the script, packed beforehand", lambda: bare(next(calls).packed)),
        Step("and its reply read", read),
        Step("over redis-py's connection, by its `read_response()`", by_connection),
        Step(
            "read from its parser, with pool, circuit breaker and timeout",
            lambda: backend.execute(backend.topology(), next(calls)),
        ),
        Step("`check()`, with the figures for headers", ask),
    ]


def _decide(policy: Policy, identities: itertools.cycle) -> object:
    return ours.figures(check(next(identities), policy))


def _measure(columns: dict[str, list[Step]], number: int) -> dict[tuple[str, str], Ratios]:
    every = [(column, step) for column, steps in columns.items() for step in steps]
    found: dict[tuple[str, str], Ratios] = {(column, step.name): [] for column, step in every}
    for i in rounds(number, "profile"):
        for column, step in rotated(every, i * len(every) // number):
            found[column, step.name].append(against_ping(partial(time_per_call, step.run, BATCH)))
    return found
