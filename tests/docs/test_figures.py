"""Figures about ourselves are measured by `make bench`, and quoted from benchmarks/RESULTS.md.

`UPDATE_DOCS=1 pytest <this file>` writes the quotes anew, after a run of the benchmarks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
OURS = "rlaas_django, "
LIMITS = (5, 100, 1_000, 10_000)
PEERS = ("django-ratelimit", "Django REST framework", "django-smart-ratelimit", "limits")
ZSET, COMPACT = "sliding-window-algo", "sliding-window-compact-algo"
COUNTER, BUCKET = "sliding-window-counter-algo", "token-bucket-algo"


def table(title: str) -> dict[str, list[str]]:
    """Return the rows of a table of the results, by their first cell."""
    text = RESULTS[RESULTS.index(f"### {title}\n") :]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


MEMORY = table("Bytes per user")
DECISIONS = table("One decision, as a multiple of `ping()`")
ACCURACY = table("Is it kept?")
ROUND_TRIPS = table("Round trips and commands")
GROWTH = table("So many policies, as a multiple of one")


def number(cell: str) -> float:
    return float(cell.split()[0].replace(",", ""))


def in_bytes(name: str, limit: int) -> int:
    """Return what a log or counter takes with its limit used up."""
    return int(number(MEMORY[name][LIMITS.index(limit)]))


def kilobytes(size: float) -> str:
    return f"{size / 1000:.0f} kB" if size >= 20_000 else f"{size / 1000:.1f} kB"


def rows_of(package: str, results: dict[str, list[str]]) -> list[list[str]]:
    """Return the rows of a package, one per algorithm; without those that leave figures out."""
    return [
        row
        for name, row in results.items()
        if name == package or (name.startswith(f"{package}, ") and not name.endswith("no figures"))
    ]


def spread(cells: Iterable[str]) -> str:
    """Return the least and the greatest of some figures."""
    least, *_, greatest = sorted({*cells}, key=number) * 2
    return least if least == greatest else f"{least} to {greatest}"


def allowed_decisions() -> str:
    """Return the time of an allowed decision, over all algorithms, as a multiple of a ping."""
    rows = rows_of("rlaas_django", DECISIONS)
    ratios = [number(row[column]) for row in rows for column in (0, 2)]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def peers_row(label: str, ours: str, cells: Iterable[str]) -> str:
    return f"| {label} | {ours} | {' | '.join(cells)} |"


def comparison() -> str:
    """Return the rows about accuracy, round trips and memory, beside other packages."""
    accuracy = {peer: rows_of(peer, ACCURACY) for peer in PEERS}
    trips = {peer: rows_of(peer, ROUND_TRIPS) for peer in PEERS}
    waits = [" or ".join(dict.fromkeys(row[2] for row in rows)) for rows in accuracy.values()]
    logs = {"django-smart-ratelimit": "django-smart-ratelimit, sliding window", "limits": "limits, moving window"}
    memory = [
        "\N{EN DASH}"
        if peer == "django-ratelimit"
        else kilobytes(in_bytes(logs.get(peer, peer), 1_000))  # it has no log
        for peer in PEERS
    ]
    admitted = [spread(row[0] for row in rows) for rows in accuracy.values()]
    most = [spread(row[1] for row in rows) for rows in accuracy.values()]
    one_and_three = [f"{spread(row[0] for row in rows)}, {spread(row[2] for row in rows)}" for rows in trips.values()]
    ours = [ACCURACY[OURS + algo] for algo in (ZSET, COMPACT)]
    own_trips = rows_of("rlaas_django", ROUND_TRIPS)
    return "\n".join(
        [
            peers_row("admitted by 16 processes at once, of 100", spread(row[0] for row in ours), admitted),
            peers_row("most admitted in any window ÷ limit", f"{spread(row[1] for row in ours)} (exact logs)", most),
            peers_row("the wait in `Retry-After`", " or ".join({row[2] for row in ours}), waits),
            peers_row(
                "round trips: one limit, three limits",
                f"{spread(row[0] for row in own_trips)}, {spread(row[2] for row in own_trips)}",
                one_and_three,
            ),
            peers_row("memory of an exact log of 1,000 requests", kilobytes(in_bytes(OURS + COMPACT, 1_000)), memory),
        ]
    )


def memory_row(label: str, algo: str) -> str:
    return f"| {label} | {' | '.join(f'{in_bytes(OURS + algo, limit):,}' for limit in LIMITS)} |"


def scale_row(label: str, *algos: str) -> str:
    """Return the memory of a user, and of ten million of them, at a limit of 1,000."""
    size = max(in_bytes(OURS + algo, 1_000) for algo in algos)
    total = size * 10_000_000 / 1e9
    return f"| {label} | {kilobytes(size)} | {f'{total / 1000:.1f} TB' if total > 1000 else f'{total:.0f} GB'} |"


def more_for_three_policies() -> str:
    rows = rows_of("rlaas_django", GROWTH)
    return spread(f"{number(row[1]):.1f}" for row in rows)


def greatest_excess(algo: str) -> str:
    """Return how many times the limit a window admitted at most."""
    return f"{math.ceil(number(ACCURACY[OURS + algo][1]) * 10) / 10:.1f}"


def gigabytes(algo: str) -> str:
    """Return the memory of a million users whose limit of 1,000 is used up."""
    size = in_bytes(OURS + algo, 1_000) / 1000
    return f"{size:.0f} GB" if size >= 20 else f"{size:.1f} GB"


MILLION = f"{gigabytes(ZSET)} with the ZSET, {gigabytes(COMPACT)} with the compact log"
LOGS = f"{kilobytes(in_bytes(OURS + COMPACT, 1_000))} at 1,000 per minute, where the ZSET takes "
LOGS += kilobytes(in_bytes(OURS + ZSET, 1_000))
BY_REDIS_PY = f"{number(DECISIONS[f'the script of {ZSET} by redis-py'][0]):.1f}"

# The page, a pattern whose group is the quote, and what the results say.
QUOTES = [
    ("README.md", r"1 to 2 B per request: (.*?) \|", LOGS),
    ("README.md", r"\n(\| admitted by 16 .*?\n\| memory of an exact log[^\n]*)", comparison()),
    ("README.md", r"`PING` through redis-py: ([\d.]+ to [\d.]+) times", allowed_decisions()),
    ("README.md", r"where approximations admit up to ([\d.]+) times", greatest_excess(COUNTER)),
    ("README.md", r"with bursts, up to ([\d.]+) times", greatest_excess(COUNTER)),
    ("docs/performance.md", r"`PING` through redis-py \(([\d.]+ to [\d.]+) times", allowed_decisions()),
    ("docs/performance.md", r"Three policies cost (.*?) times as much as one", more_for_three_policies()),
    ("docs/performance.md", r"The same script by redis-py's `evalsha\(\)` takes ([\d.]+) times", BY_REDIS_PY),
    ("docs/algorithms.md", r"measured, up to ([\d.]+)\s+times", greatest_excess(COUNTER)),
    ("docs/scale.md", r"\n(\| ZSET log \|.*?)\n", scale_row("ZSET log", ZSET)),
    ("docs/scale.md", r"\n(\| compact log \|.*?)\n", scale_row("compact log", COMPACT)),
    (
        "docs/scale.md",
        r"\n(\| sliding window counter, .*?)\n",
        scale_row("sliding window counter, token bucket", COUNTER, BUCKET),
    ),
    ("docs/sizing.md", r"\n(\| `sliding-window-algo` \(ZSET\) \|.*?)\n", memory_row(f"`{ZSET}` (ZSET)", ZSET)),
    ("docs/sizing.md", r"\n(\| `sliding-window-compact-algo` \|.*?)\n", memory_row(f"`{COMPACT}`", COMPACT)),
    ("docs/sizing.md", r"under `1000/m` are (.*?), and", MILLION),
    ("docs/internals/compact-log.md", r"\n(\| ZSET \|.*?)\n", memory_row("ZSET", ZSET)),
    ("docs/internals/compact-log.md", r"\n(\| compact log \|.*?)\n", memory_row("compact log", COMPACT)),
    (
        "docs/drf.md",
        r"\n(\| memory of 1,000 requests of a user \|.*?)\n",
        f"| memory of 1,000 requests of a user | {kilobytes(in_bytes('Django REST framework', 1_000))} "
        f"| {kilobytes(in_bytes(OURS + COMPACT, 1_000))} |",
    ),
]


@pytest.mark.parametrize(("page", "pattern", "measured"), QUOTES, ids=lambda text: text[:40])
def test_a_quoted_figure_is_the_measured_one(page, pattern, measured):
    path = ROOT / page
    text = path.read_text("utf-8")
    quote = re.search(pattern, text, re.DOTALL)
    assert quote, f"{page} no longer quotes this figure"
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(text[: quote.start(1)] + measured + text[quote.end(1) :], "utf-8")
        quote = re.search(pattern, path.read_text("utf-8"), re.DOTALL)
    assert quote[1] == measured


def test_what_is_said_of_the_compact_log_in_words_is_measured():
    """Of 1,000 requests it takes 1 to 2 bytes each, and less than a sixtieth of the ZSET."""
    size = in_bytes(OURS + COMPACT, 1_000)
    assert 1_000 <= size <= 2_000
    assert in_bytes(OURS + ZSET, 1_000) > 60 * size


def test_the_memory_of_counters_is_measured():
    """~60 and ~120 B per entry of a ZSET, ~100 B for the other algorithms."""
    assert 45 <= in_bytes(OURS + ZSET, 100) / 100 <= 75
    assert 100 <= in_bytes(OURS + ZSET, 1_000) / 1_000 <= 140
    assert all(70 <= in_bytes(OURS + algo, 1_000) <= 140 for algo in (COUNTER, BUCKET, "fixed-window-algo"))
