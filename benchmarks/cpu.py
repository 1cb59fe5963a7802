"""What a decision costs the server: its CPU per check, and its memory per identity."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import redis

from rlaas_django import Policy, backend, check, limiter
from rlaas_django.limiter import Clock
from rlaas_django.policy import ALGORITHMS, SLIDING_WINDOW, SLIDING_WINDOW_COMPACT, SLIDING_WINDOW_COUNTER
from rlaas_django.scripts import Script
from rlaas_django.testing import frozen_clock

LIMITS = (5, 100, 1_000, 10_000)
WINDOW = 60
WINDOW_MS = WINDOW * 1000
START = 1_700_000_040_000  # a multiple of the window
GOAL = 1.3

ROUNDS = 7
# Together they reach over one clearing-up of the compact log at the largest limit, or its cost would not show.
TURNS, CALLS = 13, 100


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


@dataclass
class Identity:
    """Someone whose limit is used up all the time: whenever a unit dies, the next request comes, and is allowed."""

    policy: Policy
    tick: int
    ms: int = START

    def ask(self, clock: Clock, times: int) -> None:
        clock.ms = self.ms
        for _ in range(times):
            clock.tick(self.tick)
            decision = check("alice", self.policy)
            if not decision.allowed or decision.degraded:
                raise RuntimeError(f"no steady state: {decision}")
        self.ms = clock.ms


def server() -> str:
    info = backend.client("default").info("server")
    # Valkey gives a version of Redis too, for clients that ask for one.
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"


def cpu() -> None:
    """Server CPU per allowed check of an identity at its limit, as a multiple of a no-op EVALSHA"""
    identities = {(algo, limit): steady(algo, limit) for limit in LIMITS for algo in ALGORITHMS}
    with frozen_clock(START) as clock:
        for (algo, limit), identity in identities.items():
            progress(f"cpu: filling {algo} {limit}")
            identity.ask(clock, limit)
        rounds = []
        for i in range(ROUNDS):
            progress(f"cpu: round {i + 1}/{ROUNDS}")
            rounds.append(one_round(identities, clock))
    progress("")
    print("Time in the script (INFO commandstats), as a multiple of a no-op EVALSHA")
    print_table(lambda *case: f"{median_ratio(rounds, case, None, 'script'):.1f}")
    print("CPU of the whole server (INFO cpu), as a multiple of the same")
    print_table(lambda *case: f"{median_ratio(rounds, case, None, 'process'):.2f}")
    print_goals(rounds)


def steady(algo: str, limit: int) -> Identity:
    # The counter takes the previous window to have been even, so at the full rate it refuses now and then.
    pace = 2 if algo == SLIDING_WINDOW_COUNTER else 1
    return Identity(Policy(f"{algo}-{limit}", (limit, WINDOW), algo=algo), pace * WINDOW_MS // limit)


Case = tuple[str, int]
Round = dict[Case | None, Spent]  # None: the no-op


def one_round(identities: dict[Case, Identity], clock: Clock) -> Round:
    """Everyone in turn, several times over, so that a slow moment of the machine falls on all."""
    client = backend.client("default")
    no_op = no_op_call(client)
    spent: Round = dict.fromkeys([None, *identities], Spent())
    for _ in range(TURNS):
        before = spent_by(client)
        for _ in range(CALLS):
            backend.run(no_op)
        spent[None] += spent_by(client) - before
        for case, identity in identities.items():
            before = spent_by(client)
            identity.ask(clock, CALLS)
            spent[case] += spent_by(client) - before
    if any(each.calls != TURNS * CALLS for each in spent.values()):
        raise RuntimeError("someone else ran scripts on this server")
    return spent


def no_op_call(client: redis.Redis) -> backend.Call:
    """A script that does nothing, with the keys and arguments of a check."""
    text = "return 1"
    no_op = Script("no-op", "", text, client.script_load(text))
    return limiter._plan("alice", Policy("no-op", (1000, WINDOW)), 1).call._replace(script=no_op)


def spent_by(client: redis.Redis) -> Spent:
    commands, process = client.info("commandstats"), client.info("cpu")
    scripts = commands["cmdstat_evalsha"]
    return Spent(scripts["calls"], scripts["usec"], process["used_cpu_user"] + process["used_cpu_sys"])


def median_ratio(rounds: Iterable[Round], case: Case | None, other: Case | None, measure: str) -> float:
    return statistics.median(getattr(spent[case], measure) / getattr(spent[other], measure) for spent in rounds)


def print_goals(rounds: Sequence[Round]) -> None:
    print(f"Goals: at most {GOAL}; in the script, and of the whole server")
    cases = [
        (f"compact / ZSET at {limit:,}", (SLIDING_WINDOW_COMPACT, limit), (SLIDING_WINDOW, limit)) for limit in LIMITS
    ]
    first, last = LIMITS[0], LIMITS[-1]
    cases.append(
        (f"compact at {last:,} / at {first:,}", (SLIDING_WINDOW_COMPACT, last), (SLIDING_WINDOW_COMPACT, first))
    )
    for name, case, other in cases:
        script, process = (median_ratio(rounds, case, other, measure) for measure in ("script", "process"))
        print(f"  {name:<28}{script:>8.2f}{process:>8.2f}  {'met' if script <= GOAL else 'MISSED'}")


def memory() -> None:
    """Bytes per identity with the limit used up, by MEMORY USAGE"""
    used_up: dict[Case, int] = {}
    most: dict[Case, int] = {}
    for limit in LIMITS:
        for algo in ALGORITHMS:
            progress(f"memory: {algo} {limit}")
            used_up[algo, limit], most[algo, limit] = usage(algo, limit)
    progress("")
    print("Bytes per identity (MEMORY USAGE), the limit used up within a minute")
    print_table(lambda *case: f"{used_up[case]:,}")
    print("The most while it was kept used up for another minute")
    print_table(lambda *case: f"{most[case]:,}")


def usage(algo: str, limit: int) -> tuple[int, int]:
    """Bytes when the limit is used up, and the most in the window after that."""
    client, policy = backend.client("default"), Policy("memory", (limit, WINDOW), algo=algo)
    client.flushdb()
    jitter, sizes = random.Random(f"{algo}{limit}"), []
    with frozen_clock(START) as clock:
        for i in range(2 * limit):
            clock.ms = START + int((i + jitter.random()) * WINDOW_MS / limit)
            check("alice", policy)
            if i + 1 >= limit and (i + 1 - limit) % max(1, limit // 50) == 0:
                # The fixed window has a key per window, of which one counts.
                sizes.append(max(client.memory_usage(key, samples=0) for key in client.keys("rlaas:*")))
    client.flushdb()
    return sizes[0], max(sizes)


def print_table(cell: Callable[[str, int], str]) -> None:
    print(f"  {'limit per minute':<28}" + "".join(f"{limit:>12,}" for limit in LIMITS))
    for algo in ALGORITHMS:
        print(f"  {algo:<28}" + "".join(f"{cell(algo, limit):>12}" for limit in LIMITS))
    print()


def progress(text: str) -> None:
    print(f"\r{text:<60}", end="" if text else "\r", file=sys.stderr, flush=True)
