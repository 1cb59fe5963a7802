"""The report as one HTML page that needs nothing else. Its charts are SVG, with a table beside each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import log
from typing import Any

from django.template import Context, Engine

from ..core.text import printable
from ..management.commands._rlaas.output import duration, percent, plural
from .candidates import Candidate
from .execution import Replay
from .report import policy_entry
from .timeline import Timeline
from .usage import Histogram

WIDTH, HEIGHT = 1000, 200  # of a chart's coordinates; the page stretches it
BOUNDS = (
    1,
    2,
    3,
    5,
    7,
)  # where bars of the distribution begin; and ten times that, a hundred times ...
TICKS = 5  # on the axis of time


def page(found: dict[str, Any], replays: Sequence[Replay]) -> str:
    """Return the page of a report."""
    candidates = [
        (candidate, replay.timeline)
        for replay in replays
        for candidate in replay.candidates
    ]
    sections = [
        _section(policy, *each)
        for policy, each in zip(found["policies"], candidates, strict=True)
        if each[0].runs
    ]
    context = {
        "sections": [
            {**each, "id": number, "data_id": f"data-{number}"}
            for number, each in enumerate(sections)
        ],
        "from": _time(found["from"]),
        "until": _time(found["until"]),
        "requests": f"{found['replayed']:,}",
        "unreadable": plural(found["unreadable"], "line")
        if found["unreadable"]
        else "",
        "samples": [
            {**sample, "text": printable(sample["text"])}
            for sample in found["unreadable_samples"]
        ],
        "share": percent(found["wanted_share"]),
    }
    return (
        Engine(app_dirs=True)
        .get_template("rlaas_django/replay.html")
        .render(Context(context))
    )


def _section(
    policy: dict[str, Any], candidate: Candidate, timeline: Timeline
) -> dict[str, Any]:
    runs, suggestion = policy["algorithms"], policy["suggestion"]
    highest = max(run["refused_share"] for run in runs) or 1
    chosen = next(
        run for run in candidate.runs if run.policy.algo == suggestion["algo"]
    )
    worst = max(runs, key=lambda run: run["refused"])
    return {
        "policy": printable(policy["policy"]),
        "window": duration(policy["window"]),
        "requests": f"{policy['requests']:,}",
        "identities": ("about " if policy["identities_are_approximate"] else "")
        + f"{policy['identities']:,}",
        "runs": [
            {
                "algorithm": run["algorithm"],
                "name": _short(run["algorithm"]),
                "width": f"{100 * run['refused_share'] / highest:.1f}",
                "share": percent(run["refused_share"]),
                "cells": [
                    f"{run['refused']:,}",
                    f"{run['identities_refused']:,}",
                    duration(run["longest_wait"]),
                    f"{run['most_admitted_in_a_window']:,}",
                    f"{run['limit_for_share']:,}",
                ],
                "peaks": [f"{number:,}" for number in run["peak_usage"].values()],
            }
            for run in runs
        ],
        "timeline": _timeline(candidate, timeline),
        "distribution": _distribution(candidate, chosen.measure),
        "entry": policy_entry(policy),
        "worst_algorithm": worst["algorithm"],
        "worst_name": _short(worst["algorithm"]),
        "worst": [
            {
                "identity": printable(each["identity"]),
                "refused": f"{each['refused']:,}",
                "width": f"{100 * each['refused'] / worst['worst'][0]['refused']:.1f}",
            }
            for each in worst["worst"]
        ],
    }


def _timeline(candidate: Candidate, timeline: Timeline) -> dict[str, Any]:
    """Return the requests and the refusals over time: bars, a line per algorithm, and a table."""
    steps = list(timeline.steps())
    highest, width = max(counts[0] for _, counts in steps), WIDTH / len(steps)
    columns = [1 + run.number for run in candidate.runs]

    def line(column: int) -> str:
        points = (
            f"{i * width:.1f},{_y(counts[column] / highest)}"
            for i, (_, counts) in enumerate(steps)
        )
        ends = (
            f"{(i + 1) * width:.1f},{_y(counts[column] / highest)}"
            for i, (_, counts) in enumerate(steps)
        )
        return " ".join(
            point for pair in zip(points, ends, strict=True) for point in pair
        )

    shown = (
        [steps[i * (len(steps) - 1) // (TICKS - 1)][0] for i in range(TICKS)]
        if len(steps) >= TICKS
        else []
    )
    return {
        "bars": " ".join(
            f"M{i * width:.1f} {HEIGHT}V{_y(counts[0] / highest)}H{(i + 1) * width:.1f}V{HEIGHT}z"
            for i, (_, counts) in enumerate(steps)
        ),
        "lines": [(run.policy.algo, line(1 + run.number)) for run in candidate.runs],
        "top": f"{highest:,}",
        "step": duration(timeline.width / 1000),
        "ticks": [_clock(start, timeline.width) for start in shown],
        "rows": [
            (
                _clock(start, timeline.width),
                f"{counts[0]:,}",
                *(f"{counts[column]:,}" for column in columns),
            )
            for start, counts in steps
        ],
    }


def _distribution(candidate: Candidate, measure: int) -> dict[str, Any]:
    """Return how many identities have which peak: bars on a logarithmic scale, a table, and the data of the line."""
    peaks, demand, limit = (
        candidate.peaks[measure],
        candidate.demand[measure],
        candidate.certain_limit,
    )
    bounds = _bounds(max(max(peaks.counts, default=1), limit))
    top = bounds[-1]
    rows = [
        (low, high - 1, peaks.above(low - 1) - peaks.above(high - 1))
        for low, high in pairwise(bounds)
    ]
    highest = max(number for _, _, number in rows) or 1
    return {
        "bars": " ".join(
            f"M{_x(low, top)} {HEIGHT}V{_y(log(1 + number) / log(1 + highest))}H{_x(high + 1, top)}V{HEIGHT}z"
            for low, high, number in rows
            if number
        ),
        "top": f"{highest:,}",
        "ticks": [
            (f"{10**power:,}", f"{_x(10**power, top) / WIDTH:.2%}")
            for power in range(len(str(top - 1)))
        ],
        "rows": [
            (
                f"{low:,}" if low == high else f"{low:,} to {high:,}",
                f"{number:,}",
                percent(peaks.above(high) / peaks.total),
            )
            for low, high, number in rows
        ],
        "limit": limit,
        "left": f"{_x(limit + 1, top) / WIDTH:.2%}",
        "over": _over(peaks, limit, "identities"),
        "refused": _over(demand, limit, "requests"),
        "data": {
            "limit": limit,
            "top": top,
            "peaks": sorted(peaks.counts.items()),
            "demand": sorted(demand.counts.items()),
        },
    }


def _over(histogram: Histogram, limit: int, what: str) -> str:
    above = histogram.above(limit)
    return f"{above:,} {what} ({percent(above / max(1, histogram.total))})"


def _bounds(highest: int) -> list[int]:
    """Return where the bars begin, and where the last one ends, beyond the highest number."""
    bounds, power = [1], 1
    while bounds[-1] <= highest:
        bounds += [power * bound for bound in BOUNDS if power * bound > bounds[-1]]
        power *= 10
    return bounds[: next(i for i, bound in enumerate(bounds) if bound > highest) + 1]


def _short(algorithm: str) -> str:
    return algorithm.removesuffix("-algo")


def _x(number: int, top: int) -> float:
    return round(WIDTH * log(number) / log(top), 1)


def _y(share: float) -> float:
    return round(HEIGHT * (1 - share), 1)


def _clock(ms: int, width: int) -> str:
    form = (
        "%Y-%m-%d"
        if width >= 86_400_000
        else "%d %b %H:%M"
        if width >= 60_000
        else "%H:%M:%S"
    )
    return datetime.fromtimestamp(ms / 1000, UTC).strftime(form)


def _time(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
