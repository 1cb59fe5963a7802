"""What a decision costs in instructions, counted by callgrind: exact to a percent or two, whatever else runs."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from . import server
from .counted import ALGORITHMS, DECISIONS, OURS, PEERS, PLENTY, SOMEONE
from .counted import IDENTITIES as COUNTED_IDENTITIES
from .environment import ROOT
from .measure import Effort, Spread, progress
from .report import Cell, Findings, Goal, Table

PROGRAM = Path(__file__).with_name("counted.py")
# So many checks of each of so many identities; twice as many identities in the longer phase. Enough of them for some
# cycles of Lua's garbage collector, of which one more or less would show.
CHECKS, IDENTITIES = 10, 80
MISSING = "valgrind is not installed; on Debian: apt-get install valgrind"
against: Path | None = None  # another checkout, given by --against

Counts = dict[str, float]


def prepare(tree: Path | None) -> None:
    """Take the checkout to compare with, and stop at once when valgrind is missing."""
    global against
    against = tree.resolve() if tree else None
    if shutil.which("valgrind") is None:
        raise SystemExit(MISSING)


def instructions(effort: Effort) -> Findings:
    """Instructions per decision, client and server, counted by callgrind"""
    if shutil.which("valgrind") is None:
        raise RuntimeError(MISSING)
    trees = {"here": ROOT, **({"against": against} if against else {})}
    with server.pinned(server.ALL_CORES):
        clients = {name: count_client(tree, with_peers=tree is ROOT) for name, tree in trees.items()}
        servers = {name: count_server(tree) for name, tree in trees.items()}
    columns = ("", *trees, *(["here ÷ against"] if against else []))
    note = f"here: {ROOT}{f'; against: {against}' if against else ''}"
    return Findings(
        [
            Table("Client: instructions per decision", columns, rows((*OURS, *PEERS), clients), note),
            Table("Server: instructions per EVALSHA", columns, rows(servers["here"], servers), note),
        ],
        [*client_goals(clients["here"]), *server_goals(servers)],
    )


def rows(cases: Sequence[str] | Mapping[str, float], counts: Mapping[str, Counts]) -> list[list[Cell]]:
    made = []
    for case in cases:
        found = [each.get(case) for each in counts.values()]
        ratio = [f"{found[0] / found[1]:.3f}" if found[0] and found[1] else ""] if len(found) == 2 else []
        made.append([case, *(f"{each:,.0f}" if each else "" for each in found), *ratio])
    return made


def client_goals(here: Counts) -> list[Goal]:
    one = max(here[case] for case in OURS[: len(COUNTED_IDENTITIES) + 1])
    goals = [
        goal("client instructions, one policy, the costliest identity", 45_000, one),
        goal("client instructions, three policies", 60_000, here["three policies"]),
    ]
    than_peers = [
        goal(f"{peer} ÷ one policy, the costliest identity", 3, here[peer] / one, at_most=False) for peer in PEERS[:3]
    ]
    return goals + than_peers


def server_goals(servers: Mapping[str, Counts]) -> list[Goal]:
    if "against" not in servers:
        return []
    return [
        goal(f"server instructions, {case}, here ÷ against", 1.1 if "allowed" in case else 1.2, count / before)
        for case, count in servers["here"].items()
        for before in [servers["against"][case]]
    ]


def goal(measure: str, bound: float, measured: float, at_most: bool = True) -> Goal:
    return Goal(measure, bound, at_most, Spread(measured, measured, measured))


def count_client(tree: Path, with_peers: bool) -> Counts:
    """Run the decisions of a checkout under callgrind, beside a server that is not."""
    progress(f"instructions: client of {tree}")
    cases = (*OURS, *(PEERS if with_peers else ()))
    redis.Redis.from_url(server.url()).flushdb()
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(PROGRAM), "client", server.url(), *(["peers"] if with_peers else [])]
        run([*callgrind(folder, "getloadavg"), *program], tree)
        dumps = [read(path) for path in dump_files(folder)]
    # Of each case: what came before, the shorter phase, the longer phase.
    phases = [(dumps[i + 1], dumps[i + 2]) for i in range(0, 3 * len(cases), 3)]
    return {case: (longer - shorter) / DECISIONS for case, (shorter, longer) in zip(cases, phases, strict=True)}


def count_server(tree: Path) -> Counts:
    """Send the EVALSHA of a checkout's decisions to a server under callgrind; INFO makes it dump its counts."""
    progress(f"instructions: server with the scripts of {tree}")
    counts: Counts = {}
    with tempfile.TemporaryDirectory() as folder, counted_server(folder) as url:
        client = redis.Redis.from_url(url, socket_timeout=60)
        commands = json.loads(run([sys.executable, str(PROGRAM), "words", url], tree))
        for algorithm in ALGORITHMS:
            for name, limit, before in (("allowed", PLENTY, 1), ("refused", 5, 5)):
                replay = Replay(client, *commands[f"{algorithm} {limit}"])
                shorter, longer = (count_phase(client, replay, before, n, folder) for n in (IDENTITIES, 2 * IDENTITIES))
                counts[f"{algorithm}, {name}"] = (longer - shorter) / (IDENTITIES * CHECKS)
    return counts


def count_phase(client: redis.Redis, replay: Replay, before: int, identities: int, folder: str) -> int:
    client.flushdb()
    replay(identities, before)
    client.info("cpu")
    earlier = len(dump_files(folder))
    replay(identities, CHECKS)
    client.info("cpu")
    return sum(read(dump) for dump in dump_files(folder)[earlier:])  # INFO asks for more than one usage


class Replay:
    """The EVALSHA of a decision, sent again for other identities."""

    def __init__(self, client: redis.Redis, first: list[str], second: list[str]) -> None:
        self.client, self.words = client, first
        # What differs between two decisions about one identity tells them apart on the server.
        self.unique = [i for i, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
        self.numbers = itertools.count()

    def __call__(self, identities: int, times: int) -> None:
        for _ in range(times):
            for number in range(identities):
                words = [word.replace(SOMEONE, f"someone-{number:04}") for word in self.words]
                for i in self.unique:
                    words[i] = f"{next(self.numbers):0{len(words[i])}x}"
                self.client.execute_command(*words)


@contextmanager
def counted_server(folder: str) -> Iterator[str]:
    from example_project import redis_server

    port = server.free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--hz", "1")
    command = [*callgrind(folder, "getrusage"), redis_server.binary(), *options, "--dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        wait_for(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            redis.Redis.from_url(url, retry=None).ping()
        except redis.ConnectionError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the server did not start under valgrind")


def callgrind(folder: str, marker: str) -> list[str]:
    """Count each thread by itself, and dump whenever libc's `marker` is called."""
    options = ("--separate-threads=yes", f"--callgrind-out-file={folder}/out", f"--dump-before={marker}")
    return ["valgrind", "--quiet", "--tool=callgrind", *options]


def dump_files(folder: str) -> list[Path]:
    """The dumps of the main thread, in order."""
    dumps = (path for path in Path(folder).iterdir() if re.fullmatch(r"out\.\d+-01", path.name))
    return sorted(dumps, key=lambda path: int(path.name[4:-3]))


def read(dump: Path) -> int:
    return int(re.findall(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)[-1])


def run(command: Sequence[str], tree: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-4:])}: {done.stderr[-2000:]}")
    return done.stdout
