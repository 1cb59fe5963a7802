"""Requests per second of a view of one line, under gunicorn and uvicorn, as a share of those of the bare view."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from . import ours, server
from .chart import Bar, Chart
from .contender import OURS, PEER, Failed
from .load import load
from .measure import Effort, Ratios, Spread, ratios, rounds, spread
from .report import Cell, Findings, Goal, Table, best
from .site.settings import LOCAL_REFUSALS
from .site.views import BARE, ENTRIES, Entry

WSGI = ("gunicorn", "benchmarks.site.app:wsgi", "--workers", "1", "--log-level", "error")
ASGI = ("uvicorn", "benchmarks.site.app:asgi", "--no-access-log", "--log-level", "error", "--lifespan", "off")
REFUSED_BY_REDIS = "refused, asked of Redis"


class Web(NamedTuple):
    """A kind of server, and how it is asked."""

    name: str
    kind: str
    command: tuple[str, ...]
    lines: int  # requests at the server at any time


class Case(NamedTuple):
    entry: Entry
    outcome: str

    @property
    def status(self) -> int:
        return 200 if self.outcome == "allowed" else self.entry.status


WEBS = (
    Web("gunicorn, one sync worker", "sync", WSGI, 4),
    Web("uvicorn, one worker, async views", "async", ASGI, 8),
)
Shares = dict[Case, Ratios | Failed]


def views(effort: Effort) -> Findings:
    """Requests per second of a view of one line, limited, as a share of the same view bare"""
    findings = Findings()
    entries = [entry for entry in ENTRIES if not (effort.quick and entry.variant)]
    for web in WEBS:
        shares = _measure(web, entries, effort(12, 3), effort(250, 120))
        findings.tables.append(_table(web, shares))
        if web.kind == "sync":
            findings.goals += _goals(shares)
            findings.charts += [_chart(shares, "allowed"), _chart(shares, "refused")]
    return findings


def _cases(entries: list[Entry]) -> Iterator[Case]:
    for entry in entries:
        yield Case(entry, "allowed")
        if entry.status != 200:
            yield Case(entry, "refused")
        if entry.kind == OURS:
            yield Case(entry, REFUSED_BY_REDIS)


def _measure(web: Web, entries: list[Entry], number: int, requests: int) -> Shares:
    with ours.local_refusals(on=True) as there:
        pass
    shares: Shares = {case: [] for case in _cases(entries)}
    for case in shares:
        if case.entry.kind == OURS and case.outcome == "refused" and not there:
            shares[case] = Failed("there is no LOCAL_REFUSALS yet")
    with ExitStack() as stack:
        on = stack.enter_context(serving(web, "1" if there else "", _bare_path(web)))
        off = stack.enter_context(serving(web, "0", _bare_path(web))) if there else on
        stack.enter_context(server.pinned(server.OTHER_CORES))
        for _ in rounds(number, f"views: {web.name}"):
            for case, so_far in shares.items():
                if isinstance(so_far, list):
                    port = off if case.outcome == REFUSED_BY_REDIS else on
                    shares[case] = _with_another(so_far, web, port, case, requests)
    return shares


def _with_another(so_far: Ratios, web: Web, port: int, case: Case, requests: int) -> Ratios | Failed:
    """Another round: the bare view, and beside it the other; the share is the one's time through the other's."""
    path = f"/{case.entry.path(web.kind, case.outcome.partition(',')[0])}"
    server.client().flushdb()
    try:
        load(port, path, 2, 1, None)  # where it is to be refused, the first is allowed
        bare = load(port, _bare_path(web), requests, web.lines, 200)
        return [*so_far, bare / load(port, path, requests, web.lines, case.status)]
    except (OSError, RuntimeError) as error:
        return Failed.by(error)


def _bare_path(web: Web) -> str:
    return f"/{BARE.path(web.kind, 'allowed')}"


@contextmanager
def serving(web: Web, local_refusals: str, path: str) -> Iterator[int]:
    """A web server on the core of the Redis server, once it answers at this path; its port."""
    port = server.free_port()
    bind = ("--bind", f"127.0.0.1:{port}") if web.kind == "sync" else ("--port", str(port))
    environment = {**os.environ, LOCAL_REFUSALS: local_refusals}
    with tempfile.TemporaryFile() as log:  # refusals are logged, as they would be
        process = subprocess.Popen([sys.executable, "-m", *web.command, *bind], env=environment, stderr=log)
        try:
            _wait_for(process, port, path)
            yield port
        except ConnectionError as error:
            log.seek(0)
            raise RuntimeError(f"{web.name} did not start:\n{log.read().decode()}") from error
        finally:
            process.terminate()
            process.wait(20)


def _wait_for(process: subprocess.Popen, port: int, path: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            load(port, path, 1, 1, 200)
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _entries(shares: Shares) -> list[Entry]:
    return [case.entry for case in shares if case.outcome == "allowed"]


def _of_its_own(shares: Shares, entry: Entry) -> Cell:
    """For those with a framework around their views: as a share of a bare view in it."""
    bare = next(each for each in _entries(shares) if each.name == entry.bare)
    return "" if bare is BARE else ratios(shares[Case(entry, "allowed")], shares[Case(bare, "allowed")])


def _table(web: Web, shares: Shares) -> Table:
    rows: list[list[Cell]] = []
    outcomes = ("allowed", "refused", REFUSED_BY_REDIS)
    for entry in _entries(shares):
        name = entry.name if entry.adecorate or web.kind == "sync" else f"{entry.name} (sync view)"
        cells = [spread(shares[case]) if (case := Case(entry, outcome)) in shares else "" for outcome in outcomes]
        rows.append([name, *cells, _of_its_own(shares, entry)])
    columns = ("requests/s ÷ bare", *outcomes, "allowed ÷ its own framework's bare view")
    note = "Refused: as it comes, for rlaas_django with `LOCAL_REFUSALS`; the next column is without."
    return Table(web.name, columns, rows, note)


def _goals(shares: Shares) -> list[Goal]:
    mine = next(entry for entry in _entries(shares) if entry.kind == OURS)
    rivals = [entry for entry in _entries(shares) if entry.kind == PEER]
    return [
        Goal(
            f"WSGI requests/s, decorated ÷ bare view, {words}",
            bound,
            False,
            spread(shares[Case(mine, outcome)]),
            best({entry.name: spread(shares[Case(entry, outcome)]) for entry in rivals}, most=True),
        )
        for outcome, words, bound in (("allowed", "allowed", 0.65), ("refused", "refused, local refusals on", 0.92))
    ]


def _chart(shares: Shares, outcome: str) -> Chart:
    """Of one outcome; ours refused has two bars, with local refusals and without."""
    found = {
        case: spread(result)
        for case, result in shares.items()
        if case.outcome.startswith(outcome) and case.entry is not BARE
    }
    bars = [
        Bar(case.entry.name + case.outcome.removeprefix(outcome), case.entry.kind, share)
        for case, share in found.items()
        if isinstance(share, Spread)
    ]
    title = f"A view of one line under gunicorn, limited, {outcome}"
    caption = "Requests per second, as a share of those of the same view without a limit. More is better."
    return Chart(f"views-{outcome}", title, caption, bars, 1.0, "the bare view", True)
