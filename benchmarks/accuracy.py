"""Is the limit kept: by many at once, by an adversary at the boundary; and is the wait that is told the right one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from . import server
from .contender import Ask, Contender, Failed, Rate
from .contenders import field
from .measure import DAY, Effort, figure, progress
from .report import Cell, Findings, Table

PROCESSES, LIMIT, EACH = 16, 100, 40


def accuracy(effort: Effort) -> Findings:
    """Admitted by 16 processes at once, the most admitted in any window, and whether the wait told is right"""
    everyone = field(effort)
    crowded = {each.name: _most_admitted(each, effort(3, 1)) for each in everyone}
    attacks = effort(ATTACKS, ATTACKS[1:])
    worst = _worst_windows({each.name: _built(each, BOUND) for each in everyone}, attacks)
    waits = _waits({each.name: _built(each, FEW) for each in everyone}, effort(6, 2))
    progress()
    rows = [[each.name, crowded[each.name], worst[each.name], waits[each.name]] for each in everyone]
    columns = (
        "",
        f"admitted of {LIMIT}, by {PROCESSES} processes",
        "most in any window ÷ limit",
        "the wait told when refused",
    )
    note = (
        "The wait is exact when asking 30 ms before it is over is refused, and asking when it is over is admitted. "
        f"The most in any window is the worst of {len(attacks)} attacks in real time; fixed windows and buckets admit "
        "twice the limit by nature."
    )
    return Findings([Table("Is it kept?", columns, rows, note)])


# Many at once


def _most_admitted(contender: Contender, trials: int) -> Cell:
    progress(f"accuracy: {contender.name}, {PROCESSES} processes")
    counts = [_admitted(contender) for _ in range(trials)]
    return _failure(counts) or f"{max(counts):,}"


def _failure(counts: list[int | Failed]) -> Failed | None:
    return next((count for count in counts if isinstance(count, Failed)), None)


def _admitted(contender: Contender) -> int | Failed:
    server.client().flushdb()
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(PROCESSES), fork.SimpleQueue()
    processes = [fork.Process(target=_storm, args=(contender, barrier, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return _failure(counts) or sum(counts)


def _storm(contender: Contender, barrier, results) -> None:
    server.pin(server.ALL_CORES)
    try:
        ask = contender.build([Rate(LIMIT, DAY)])
        ask("someone-else")  # connected, and the script known
        barrier.wait(30)
        results.put(sum(bool(ask("alice")[0]) for _ in range(EACH)))
    except Exception as error:  # noqa: BLE001 - told to the parent
        results.put(Failed.by(error))
        barrier.abort()


# The boundary

WINDOW = 2  # seconds
BOUND = Rate(20, WINDOW)
CLOCK = 0.002  # whole milliseconds on both ends


class Attack(NamedTuple):
    """From a moment of the clock's window on: a request, a pause, then as many requests as possible."""

    phase: float  # of a window
    pause: float  # in windows, after one request; 0: no such request


# Half-way, for those who weigh the last window; just before the clock's windows change; and, for windows that begin
# with the first request, just before such a one ends.
ATTACKS = (Attack(0.5, 0), Attack(0.9, 0), Attack(0.05, 0.93))


def _sleep_until(phase: float) -> None:
    """A moment of the clock's window."""
    time.sleep((phase - time.time() / WINDOW) % 1 * WINDOW)


def _built(contender: Contender, rate: Rate) -> Ask | Failed:
    try:
        ask = contender.build([rate])
        ask("connected")
    except Exception as error:  # noqa: BLE001 - shown
        return Failed.by(error)
    return ask


def _worst_windows(asks: dict[str, Ask | Failed], attacks: Sequence[Attack]) -> dict[str, Cell]:
    worst: dict[str, float] = dict.fromkeys(asks, 0.0)
    for i, attack in enumerate(attacks):
        progress(f"accuracy: attack {i + 1} of {len(attacks)}")
        server.client().flushdb()
        for name, admitted in _attacked(attack, asks, f"victim{i}").items():
            worst[name] = max(worst[name], _most_in_a_window(admitted) / BOUND.limit)
    return {name: ask if isinstance(ask, Failed) else figure(worst[name]) for name, ask in asks.items()}


Admitted = list[tuple[float, float]]  # between when and when


def _attacked(attack: Attack, asks: dict[str, Ask | Failed], identity: str) -> dict[str, Admitted]:
    """All at the same time, in turn, on the clock that they share."""
    able = {name: ask for name, ask in asks.items() if not isinstance(ask, Failed)}
    admitted: dict[str, Admitted] = {name: [] for name in able}

    def everyone_once() -> None:
        for name, ask in able.items():
            before = time.time()
            if ask(identity)[0]:
                admitted[name].append((before, time.time()))

    _sleep_until(attack.phase)
    if attack.pause:
        everyone_once()
        time.sleep(attack.pause * WINDOW)
    end = time.time() + 1.25 * WINDOW
    while time.time() < end:
        everyone_once()
    return admitted


def _most_in_a_window(admitted: Admitted) -> int:
    """Only what was surely within one: from before the first was asked until after the last was answered."""
    most, first = 0, 0
    for last, (_, after) in enumerate(admitted):
        while after - admitted[first][0] >= WINDOW - CLOCK:
            first += 1
        most = max(most, last - first + 1)
    return most


# The wait

FEW = Rate(3, WINDOW)
EARLY = 0.03  # seconds


def _waits(asks: dict[str, Ask | Failed], trials: int) -> dict[str, Cell]:
    """Everyone in a thread of their own; they sleep most of the time."""
    progress("accuracy: waiting as told")
    with ThreadPoolExecutor(len(asks)) as pool:
        futures = {name: pool.submit(_judged, ask, trials) for name, ask in asks.items()}
        return {name: future.result() for name, future in futures.items()}


def _judged(ask: Ask | Failed, trials: int) -> Cell:
    if isinstance(ask, Failed):
        return ask
    try:
        return _verdict(_wait(ask, trial / trials) for trial in range(trials))
    except Exception as error:  # noqa: BLE001 - shown
        return Failed.by(error)


def _verdict(judgements: Iterable[set[str]]) -> str:
    found = set().union(*judgements)
    return " and ".join(sorted(found)) or "exact"


def _wait(ask: Ask, phase: float) -> set[str]:
    """What is wrong with the wait that is told: two identities, one that asks too early, and one that asks in time."""
    early, late = (f"{who}-{phase:.2f}" for who in ("early", "late"))
    _sleep_until(phase)
    for identity in (early, late):
        ask(identity)
    time.sleep(0.15)
    told = [_told(ask, identity) for identity in (early, late)]
    if None in told:
        return {"none"}
    (earliest, _), (_, latest) = told
    return _too_early(ask, early, earliest) | _in_time(ask, late, latest)


def _told(ask: Ask, identity: str) -> tuple[float, float] | None:
    """Between when and when the wait that a refusal tells is over."""
    for _ in range(10 * FEW.limit):
        before = time.time()
        allowed, wait, *_ = ask(identity)
        if not allowed:
            return None if wait is None else (before + wait, time.time() + wait)
    raise RuntimeError(f"{10 * FEW.limit} were admitted at a limit of {FEW.limit}")


def _too_early(ask: Ask, identity: str, earliest: float) -> set[str]:
    time.sleep(max(0, earliest - EARLY - time.time()))
    allowed = ask(identity)[0]
    return {"too long"} if allowed and time.time() < earliest else set()


def _in_time(ask: Ask, identity: str, latest: float) -> set[str]:
    time.sleep(max(0, latest + CLOCK - time.time()))
    return set() if ask(identity)[0] else {"too short"}
