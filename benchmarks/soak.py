"""`python -m benchmarks soak`: decide for minutes on a server that fails in every way, and check what came of it.

Processes with threads and processes with tasks decide on a real server, half of them through a proxy, while faults of
random kinds come and go. At the end:

- nothing was over-admitted: a model of each algorithm replays what Redis allowed, from one restart to the next;
- no exception was raised;
- no decision took longer than TIMEOUT + 50 ms, but for what the machine stalled meanwhile: as a thread in each process
  measures by short sleeps, or as the kernel says how long the deciding thread waited for a core;
- the memory of each process is flat after the first minute.

It prints tables, and exits with 1 where one of these does not hold. The environment is that of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import struct
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

TIMEOUT = 0.1  # seconds, RATE_LIMITER['TIMEOUT']
SLACK = 0.05
PROCESSES = ("threads, direct", "threads, proxy", "tasks, direct", "tasks, proxy")
THREADS = 4
TASKS = 8
PAUSE = 0.03  # seconds between two decisions of a thread or task, on average
IDENTITIES = 12
WARM_UP = 60.0  # seconds after which memory has to be flat; of a short soak a third
MAX_GROWTH = 4.0  # MB
NAP = 0.005  # seconds that the watchdog sleeps
LIMIT, WINDOW, BURST = 20, 2, 30

KINDS = {
    "log": "sliding-window-algo",
    "compact": "sliding-window-compact-algo",
    "fixed": "fixed-window-algo",
    "bucket": "token-bucket-algo",
}
NAMES = tuple(KINDS)
TOGETHER = [[name] for name in NAMES] + [["log", "fixed"], ["compact", "bucket"]]
ADMITTED = struct.Struct("<BHBq")  # policy, identity, cost, ms by the clock of Redis

context = multiprocessing.get_context("spawn")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="of the faults; by default another one each time")
    chosen = parser.parse_args(arguments)
    seed = random.randrange(1_000_000) if chosen.seed is None else chosen.seed

    print(f"Soak of {chosen.minutes:g} minutes, --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rlaas-soak-") as folder:
        problems = Soak(Path(folder), 60 * chosen.minutes, seed).run()
    print("\n".join(problems) or "No violation.")
    sys.exit(bool(problems))


# The processes that decide


@dataclass
class Report:
    """What a process did."""

    name: str
    decisions: int = 0
    degraded: int = 0
    refused: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)
    slow: int = 0
    stalled: int = 0  # of the slow ones, those that stalls of the machine explain
    worst: float = 0.0  # seconds, without stalls
    unexplained: list[str] = field(default_factory=list)  # of the slow ones, some
    by_ms: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds since the start, MB

    def percentile(self, share: float) -> int:
        """Return the ms within which this share of the decisions was made."""
        wanted, seen = share * self.decisions, 0
        for ms in sorted(self.by_ms):
            seen += self.by_ms[ms]
            if seen >= wanted:
                return ms
        return 0


class RunDelay:
    """How long this thread has waited for a core, by the kernel."""

    def __init__(self) -> None:
        self.file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def seconds(self) -> float:
        return int(os.pread(self.file, 100, 0).split()[1]) / 1e9


class Slow(NamedTuple):
    """A decision beyond TIMEOUT + SLACK."""

    began: float
    ended: float
    delay: float  # seconds that its thread waited for a core
    degraded: bool
    at: float  # seconds since the epoch, as in the list of faults


class Watchdog(threading.Thread):
    """Measures when the machine did not run this process, and judges slow decisions by that."""

    def __init__(self, report: Report) -> None:
        super().__init__(daemon=True)
        self.report = report
        self.slow: deque[Slow] = deque()
        self.stalls: deque[tuple[float, float]] = deque()
        self.stopped = False
        self.started = time.monotonic()
        self.next_measurement = 0.0

    def run(self) -> None:
        while not self.stopped:
            expected = time.monotonic() + NAP
            time.sleep(NAP)
            now = time.monotonic()
            if now > expected + NAP / 5:
                self.stalls.append((expected, now))
            while self.stalls and self.stalls[0][1] < now - 60:
                self.stalls.popleft()
            while self.slow and self.slow[0].ended < now - 1:
                self.judge(self.slow.popleft())
            self.measure_memory(now - self.started)

    def judge(self, slow: Slow) -> None:
        stalls = [min(slow.ended, end) - max(slow.began, start) for start, end in self.stalls]
        stalled = max(slow.delay, sum(stall for stall in stalls if stall > 0))
        own = slow.ended - slow.began - stalled
        report = self.report
        report.slow += 1
        report.worst = max(report.worst, own)
        if own <= TIMEOUT + SLACK:
            report.stalled += 1
        elif len(report.unexplained) < 20:
            way = "without Redis" if slow.degraded else "by Redis"
            report.unexplained.append(f"{1000 * own:.0f} ms, {1000 * stalled:.0f} ms stalled, {way}, at {slow.at:.1f}")

    def measure_memory(self, seconds: float) -> None:
        if seconds >= self.next_measurement:
            self.next_measurement = seconds + 5
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.report.memory.append((seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    def stop(self) -> None:
        time.sleep(1.1)  # for the stalls after the last decisions
        self.stopped = True
        self.join()
        while self.slow:
            self.judge(self.slow.popleft())


class Worker:
    """Decides in threads or tasks of one process, and writes down what Redis allowed."""

    def __init__(self, name: str, path: Path, seed: int) -> None:
        from rlaas_django import Policy

        self.report = Report(name)
        self.watchdog = Watchdog(self.report)
        self.ends = 0.0
        self.random = random.Random(seed)
        self.admitted = path.open("ab")
        policies = {
            name: Policy(name, (LIMIT, WINDOW), algo=algo, burst=BURST if name == "bucket" else None)
            for name, algo in KINDS.items()
        }
        self.sets = [[policies[name] for name in names] for names in TOGETHER]

    def decide_in_threads(self) -> None:
        threads = [threading.Thread(target=self.decide) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def decide(self) -> None:
        from rlaas_django import check

        delay = RunDelay()
        for identity, policies, cost in self.requests():
            began, delayed = time.monotonic(), delay.seconds()
            try:
                decision = check(f"user-{identity}", policies, cost=cost)
                self.note(decision, identity, cost, began, delay.seconds() - delayed)
            except Exception as error:  # noqa: BLE001  (which is what is looked for)
                self.report.exceptions[repr(error)] += 1
            time.sleep(self.random.expovariate(1 / PAUSE))

    async def decide_in_tasks(self) -> None:
        await asyncio.gather(*[self.adecide() for _ in range(TASKS)])

    async def adecide(self) -> None:
        from rlaas_django import acheck

        delay = RunDelay()
        for identity, policies, cost in self.requests():
            began, delayed = time.monotonic(), delay.seconds()
            try:
                decision = await acheck(f"user-{identity}", policies, cost=cost)
                self.note(decision, identity, cost, began, delay.seconds() - delayed)
            except Exception as error:  # noqa: BLE001
                self.report.exceptions[repr(error)] += 1
            await asyncio.sleep(self.random.expovariate(1 / PAUSE))

    def requests(self) -> Iterator[tuple[int, list[Any], int]]:
        while time.monotonic() < self.ends:
            yield self.random.randrange(IDENTITIES), self.random.choice(self.sets), self.random.choice([1, 1, 1, 2, 5])

    def note(self, decision: Any, identity: int, cost: int, began: float, delay: float) -> None:
        ended = time.monotonic()
        report = self.report
        report.decisions += 1
        report.by_ms[round(1000 * (ended - began))] += 1
        if ended - began > TIMEOUT + SLACK:
            self.watchdog.slow.append(Slow(began, ended, delay, decision.degraded, time.time()))
        if decision.degraded:
            report.degraded += 1
        elif not decision.allowed:
            report.refused += 1
        else:
            at = decision.reply[1][0]
            for outcome in decision.outcomes:
                self.admitted.write(ADMITTED.pack(NAMES.index(outcome.policy.name), identity, cost, at))


def work(name: str, url: str, path: Path, seconds: float, seed: int, ready: Any, reports: Any) -> None:
    """Decide in this process, once all are ready, and report."""
    import django
    from django.conf import settings

    settings.configure(
        SECRET_KEY="soak",
        USE_TZ=True,
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rlaas_django"],
        CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}},
        RATE_LIMITER={"TIMEOUT": TIMEOUT, "LOG_LINES_PER_SECOND": 0},
        LOGGING_CONFIG=None,
    )
    django.setup()
    worker = Worker(name, path, seed)
    ready.wait()
    worker.ends = time.monotonic() + seconds
    worker.watchdog.start()
    if "tasks" in name:
        asyncio.run(worker.decide_in_tasks())
    else:
        worker.decide_in_threads()
    worker.watchdog.stop()
    worker.admitted.close()
    reports.put(worker.report)


# Faults


class RemoteProxy:
    """A proxy in a process of its own, so that it takes no time from the processes that decide."""

    def __init__(self, url: str) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve_proxy, args=(url, other), daemon=True)
        self.process.start()
        self.url = self.pipe.recv()

    def do(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))
        self.pipe.recv()


def serve_proxy(url: str, pipe: Any) -> None:
    from tests.support.faults import Proxy

    with Proxy(url) as proxy, suppress(EOFError):
        pipe.send(proxy.url)
        while True:
            name, arguments = pipe.recv()
            getattr(proxy, name)(*arguments)
            pipe.send(None)


class Faults:
    """What goes wrong: each method is one kind of fault, from its beginning to its end."""

    def __init__(self, node: Any, proxy: RemoteProxy, rng: random.Random) -> None:
        self.node, self.proxy, self.random = node, proxy, rng
        self.restarts: list[float] = []  # ms since the epoch, when all counts were lost
        self.counts: Counter[str] = Counter()
        self.kinds: list[Callable[[], None]] = [
            self.hang,
            self.hang_briefly,
            self.kill_and_restart,
            self.full_stop,
            self.close_clients,
            self.pause_clients,
            self.flush_scripts,
            self.slow_proxy,
            self.lossy_proxy,
            self.cut_proxy,
            self.refusing_proxy,
        ]

    def one(self) -> None:
        kind = self.random.choice(self.kinds)
        name = kind.__name__.replace("_", " ")
        self.counts[name] += 1
        began = time.time()
        kind()
        print(f"{began:.1f} to {time.time():.1f}: {name}", flush=True)

    def last(self, least: float, most: float) -> None:
        time.sleep(self.random.uniform(least, most))

    def hang(self) -> None:
        self.node.hang()
        self.last(0.1, 2)
        self.node.resume()

    def hang_briefly(self) -> None:
        for _ in range(5):
            self.node.hang()
            self.last(0.03, 0.15)
            self.node.resume()
            self.last(0.05, 0.3)

    def kill_and_restart(self) -> None:
        self.stop_for(0, 0.5)

    def full_stop(self) -> None:
        self.stop_for(3, 6)

    def stop_for(self, least: float, most: float) -> None:
        self.node.kill()
        self.restarts.append(1000 * time.time())
        self.last(least, most)
        self.node.launch()

    def close_clients(self) -> None:
        for _ in range(5):
            self.node.client().client_kill_filter(_type="normal", skipme=True)
            self.last(0.01, 0.3)

    def pause_clients(self) -> None:
        ms = self.random.choice([30, 80, 200, 600])
        self.node.client().client_pause(ms)
        time.sleep(ms / 1000 + 0.2)

    def flush_scripts(self) -> None:
        for _ in range(5):
            self.node.client().script_flush()
            self.last(0.01, 0.3)

    def slow_proxy(self) -> None:
        for _ in range(3):
            self.proxy.do("delay", self.random.choice([0.02, 0.04, 0.07, 0.095, 0.15]))
            self.proxy.do("cut")  # so that the steps of new connections are slow, too
            self.last(0.3, 1)
        self.proxy.do("pass_all")

    def lossy_proxy(self) -> None:
        self.proxy.do("drop", 0.2, self.random.randrange(1000))
        self.last(0.5, 2)
        self.proxy.do("pass_all")
        self.proxy.do("cut")

    def cut_proxy(self) -> None:
        for _ in range(5):
            self.proxy.do("cut")
            self.last(0.01, 0.3)

    def refusing_proxy(self) -> None:
        self.proxy.do("refuse")
        self.proxy.do("cut")
        self.last(0.1, 1.5)
        self.proxy.do("accept")


# What was admitted


class Admission(NamedTuple):
    at: int  # ms
    cost: int


def over_admitted(paths: list[Path], restarts: list[float]) -> dict[str, int]:
    """Return by policy how many units were admitted beyond its limit, and how many admissions were looked at."""
    series: dict[tuple[str, int, int], list[Admission]] = {}
    for path in paths:
        for policy, identity, cost, at in ADMITTED.iter_unpack(path.read_bytes()):
            key = NAMES[policy], identity, bisect(restarts, at)
            series.setdefault(key, []).append(Admission(at, cost))

    excess = dict.fromkeys(NAMES, 0)
    models = {"log": excess_of_log, "compact": excess_of_log, "fixed": excess_of_windows, "bucket": excess_of_bucket}
    for (name, _, _), admissions in series.items():
        excess[name] += models[name](sorted(admissions))
    return excess


def excess_of_windows(admissions: list[Admission]) -> int:
    units: Counter[int] = Counter()
    for at, cost in admissions:
        units[at // (1000 * WINDOW)] += cost
    return sum(max(0, number - LIMIT) for number in units.values())


def excess_of_log(admissions: list[Admission]) -> int:
    window: deque[Admission] = deque()
    units = worst = 0
    for admission in admissions:
        window.append(admission)
        units += admission.cost
        while window[0].at <= admission.at - 1000 * WINDOW:
            units -= window.popleft().cost
        worst = max(worst, units - LIMIT)
    return worst


def excess_of_bucket(admissions: list[Admission]) -> int:
    used, before, worst = Fraction(0), 0, Fraction(0)
    for at, cost in admissions:
        used = max(Fraction(0), used - Fraction((at - before) * LIMIT, 1000 * WINDOW)) + cost
        before = at
        worst = max(worst, used - BURST)
    return -(-worst.numerator // worst.denominator)


# All together


class Soak:
    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.folder, self.seconds, self.seed = folder, seconds, seed

    def run(self) -> list[str]:
        """Return what went wrong."""
        from tests.support.deployments import Node

        with Node() as node:
            node.launch()
            proxy = RemoteProxy(node.url)
            faults = Faults(node, proxy, random.Random(self.seed))
            ready, reports = context.Barrier(1 + len(PROCESSES)), context.Queue()
            workers = list(self.workers(node.url, proxy.url, ready, reports))
            for worker in workers:
                worker.start()
            ready.wait(60)
            self.inject(faults)
            found = [reports.get(timeout=self.seconds + 60) for _ in workers]
            for worker in workers:
                worker.join()
            proxy.process.terminate()
        return self.judge(sorted(found, key=lambda report: report.name), faults)

    def workers(self, url: str, proxy_url: str, *shared: Any) -> Iterator[Any]:
        for number, name in enumerate(PROCESSES):
            target = proxy_url if "proxy" in name else url
            arguments = (name, target, self.folder / str(number), self.seconds, self.seed + number, *shared)
            yield context.Process(target=work, args=arguments, daemon=True)

    def inject(self, faults: Faults) -> None:
        ends = time.monotonic() + self.seconds - 5  # at the end all is well again
        time.sleep(1)
        while time.monotonic() < ends:
            faults.one()
            faults.last(0.5, 5)

    def judge(self, reports: list[Report], faults: Faults) -> list[str]:
        excess = over_admitted(sorted(self.folder.iterdir()), faults.restarts)
        print("\nFaults: " + ", ".join(f"{kind} {number}" for kind, number in sorted(faults.counts.items())))
        head = ("", "decisions", "without Redis", "refused", "p50 ms", "p99 ms", "slow", "explained", "worst ms", "MB")
        print("  ".join(f"{title:>{width(title)}}" for title in head))

        problems = [f"{name}: {units} units over-admitted" for name, units in excess.items() if units]
        for report in reports:
            first, last = self.memory(report)
            row = (report.name, report.decisions, report.degraded, report.refused, report.percentile(0.5))
            row += (report.percentile(0.99), report.slow, report.stalled, round(1000 * report.worst))
            row += (f"{first:.1f} to {last:.1f}",)
            print("  ".join(f"{cell:>{width(title)}}" for title, cell in zip(head, row, strict=True)))
            problems += [f"{report.name}: {number} x {error}" for error, number in report.exceptions.items()]
            if report.slow > report.stalled:
                problems.append(f"{report.name}: {report.slow - report.stalled} decisions beyond TIMEOUT + 50 ms")
                problems += [f"  {line}" for line in report.unexplained]
            if last - first > MAX_GROWTH:
                problems.append(f"{report.name}: memory grew from {first:.1f} to {last:.1f} MB")
            if report.decisions == report.degraded:
                problems.append(f"{report.name}: nothing was decided by Redis")
        print(f"Over-admitted units: {excess}; exceptions: {sum(sum(r.exceptions.values()) for r in reports)}")
        return problems

    def memory(self, report: Report) -> tuple[float, float]:
        """Return the MB after the warm-up, and at the end."""
        after = [mb for at, mb in report.memory if at >= min(WARM_UP, self.seconds / 3)]
        part = max(1, len(after) // 5)
        return median(after[:part]), median(after[-part:])


def width(title: str) -> int:
    return max(len(title), {"": 16, "decisions": 9, "MB": 14}.get(title, 6))
