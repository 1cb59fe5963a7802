"""The HTTP service under gunicorn and uvicorn, over connections that are kept: a check, and a batch of checks."""

from __future__ import annotations

import json
from typing import NamedTuple

from . import server
from .load import load
from .measure import Effort, Ratios, rounds, spread
from .report import Findings, Goal, Table
from .site.settings import TOKEN
from .views import ASGI, WSGI, Web, serving

BATCH = 1_000
# Keep-alive needs gunicorn's threads: its sync worker closes each connection.
WEBS = (
    Web("gunicorn, one worker, keep-alive", "sync", (*WSGI, "--worker-class", "gthread", "--threads", "4"), 4),
    Web("uvicorn, one worker, keep-alive", "async", ASGI, 8),
)
AUTHORIZED = f"Authorization: Bearer {TOKEN}\r\n"


class Ask(NamedTuple):
    """A request to the service."""

    name: str
    path: str
    headers: str = AUTHORIZED
    body: str = ""


SUBJECT = {"userId": "alice", "policy": "service"}
CHECKS = (
    Ask("GET check, text", "/rlaas/check?userId=alice&policy=service"),
    Ask("GET check, JSON", "/rlaas/check?userId=alice&policy=service", f"{AUTHORIZED}Accept: application/json\r\n"),
    Ask("POST check, JSON", "/rlaas/check", body=json.dumps(SUBJECT)),
    Ask("POST usage, JSON", "/rlaas/usage", body=json.dumps(SUBJECT)),
)
ONE_BATCH = Ask("POST check/batch", "/rlaas/check/batch", body=json.dumps({"checks": [SUBJECT] * BATCH}))


def service(effort: Effort) -> Findings:
    """Checks over HTTP per second, as a share of a bare JSON view; and 1,000 in a batch, through 1,000 by themselves"""
    findings, rows = Findings(), []
    for web in WEBS:
        shares, batch, busy = _measure(web, effort(15, 4), effort(300, 120))
        rows += [[web.name, ask.name, spread(share)] for ask, share in shares.items()]
        rows.append([web.name, f"{BATCH:,} in a batch, time ÷ one after another", spread(batch)])
        rows.append([web.name, f"{BATCH:,} in a batch, time ÷ {web.lines} at a time", spread(busy)])
        kind = web.name.partition(",")[0]
        lowest = min((spread(share) for share in shares.values()), key=lambda each: getattr(each, "median", 0))
        findings.goals += [
            Goal(f"service: a check over HTTP, requests/s ÷ a bare JSON view, {kind}", 0.6, False, lowest),
            Goal(f"service: {BATCH:,} checks in a batch, time ÷ one after another, {kind}", 0.05, True, spread(batch)),
        ]
    columns = ("server", "request", "requests/s ÷ bare JSON view")
    findings.tables.append(Table("The HTTP service", columns, rows, "Every check is allowed, and decided by Redis."))
    return findings


def _measure(web: Web, number: int, requests: int) -> tuple[dict[Ask, Ratios], Ratios, Ratios]:
    shares: dict[Ask, Ratios] = {ask: [] for ask in CHECKS}
    batch: Ratios = []
    busy: Ratios = []
    bare_path = f"/{web.kind}/json"
    with serving(web, "1", bare_path) as port, server.pinned(server.OTHER_CORES):
        for _ in rounds(number, f"service: {web.name}"):
            for ask, so_far in shares.items():
                bare = load(port, bare_path, requests, web.lines, 200)
                so_far.append(bare / _load(port, web, ask, requests, web.lines))
            one = _load(port, web, ONE_BATCH, 1, 1) / BATCH
            batch.append(one / (_load(port, web, CHECKS[2], requests, 1) / requests))
            busy.append(one / (_load(port, web, CHECKS[2], requests, web.lines) / requests))
    return shares, batch, busy


def _load(port: int, web: Web, ask: Ask, requests: int, lines: int) -> float:
    server.client().flushdb()
    path = f"/{web.kind}{ask.path}"
    load(port, path, 2, 1, 200, headers=ask.headers, body=ask.body if ask is not ONE_BATCH else '{"checks": []}')
    return load(port, path, requests, lines, 200, headers=ask.headers, body=ask.body)
