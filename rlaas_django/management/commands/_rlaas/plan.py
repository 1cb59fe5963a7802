"""manage.py rlaas plan: what a limit for so many users takes, measured on this server."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from django.core.management.base import CommandError

from .... import backend, conf
from ....core.algorithms import (
    ALGORITHMS,
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
)
from ....core.policy import PolicyError, Rate
from ....replay.policies import parse_algorithm
from .interrupts import one_interrupt
from .measuring import Measured, Sample
from .output import Output, Styled, percent, size
from .progress import Progress

HELP = "Predict the memory and the load of a limit, measured on this server."
EXAMPLE = "manage.py rlaas plan --users 1000000 --rate 1000/m"

# Of a server's memory, and of the decisions that it makes when it does nothing else: the rest is for peaks, for
# copies while it saves, and for the connections of many processes.
MEMORY_SHARE, DECISION_SHARE = 0.75, 0.5
FULL = 0.9  # of maxmemory; a sample could drive out other keys
PREFERRED = (
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    FIXED_WINDOW,
)
REASONS = {name: algorithm.choose_when for name, algorithm in ALGORITHMS.items()}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--users",
        type=_number,
        required=True,
        help="How many identities are counted at a time.",
    )
    parser.add_argument(
        "--rate", type=_rate, required=True, help="The limit of each: 1000/m."
    )
    parser.add_argument(
        "--algo",
        action="append",
        default=[],
        help="An algorithm to measure (default: all).",
    )
    parser.add_argument(
        "--load", type=_number, help="The decisions per second that you expect at peak."
    )
    parser.add_argument(
        "--cache",
        help="The cache whose Redis is measured (default: RATE_LIMITER['CACHE']).",
    )


def run(options: Namespace, output: Output) -> None:
    """Measure, and print the prediction."""
    algorithms = [parse_algorithm(text) for text in options.algo] or ALGORITHMS
    progress, done = Progress("decisions", quiet=options.verbosity == 0), 0
    with (
        one_interrupt() as interrupts,
        Sample(options.rate, options.cache or conf.config().cache) as sample,
    ):
        memory = available_memory(sample.topology)

        def advance(calls: int) -> None:
            nonlocal done
            done += calls
            progress.show(done, done / (sample.calls * len(algorithms)))

        try:
            measured = [sample.measure(algo, advance) for algo in algorithms]
        finally:
            progress.clear()
        found = predict(measured, options, memory)
        interrupts.ignore()
    if output.as_json:
        output.json(found)
    else:
        show(found, output)


def available_memory(topology: backend.Topology) -> tuple[int, str]:
    """Return the memory of one server, and what bounds it: maxmemory, or else the machine."""
    topology.wait_until_known()
    infos = [backend.server_info(server) for server in topology.servers()]
    if not any(infos):
        raise CommandError(
            "The server does not tell its memory: INFO failed, or an ACL forbids it."
        )
    limits = [
        (int(info.get("maxmemory", 0)), int(info.get("used_memory", 0)))
        for info in infos
    ]
    if any(maximum and used > FULL * maximum for maximum, used in limits):
        raise CommandError(
            f"The server uses more than {percent(FULL)} of its maxmemory: there is no room for a sample."
        )
    if maxmemory := min(maximum for maximum, _ in limits):
        return maxmemory, "maxmemory"
    return int(
        infos[0].get("total_system_memory", 0)
    ), "of the machine; maxmemory is not set"


def predict(
    measured: list[Measured], options: Namespace, memory: tuple[int, str]
) -> dict[str, Any]:
    """Return what the users take under each algorithm, how many servers that are, and which one to choose."""
    rows = []
    for algo, each, decisions in measured:
        total, sustained = each * options.users, decisions * DECISION_SHARE
        rows.append(
            {
                "algorithm": algo,
                "bytes_per_identity": each,
                "bytes": total,
                "share_of_memory": total / memory[0] if memory[0] else None,
                "decisions_per_second": decisions,
                "servers_for_memory": math.ceil(total / (memory[0] * MEMORY_SHARE))
                if memory[0]
                else None,
                "servers_for_load": math.ceil(options.load / sustained)
                if options.load
                else None,
                "users_per_server_at_full_rate": int(
                    sustained * options.rate.window / options.rate.limit
                ),
            }
        )
    by_algorithm = {row["algorithm"]: row for row in rows}
    chosen = [by_algorithm[algo] for algo in PREFERRED if algo in by_algorithm]
    fitting = [row for row in chosen if row["servers_for_memory"] in (None, 1)]
    best = (fitting or sorted(chosen, key=lambda row: row["bytes"]))[0]
    return {
        "users": options.users,
        "rate": str(options.rate),
        "load": options.load,
        "memory": memory[0],
        "memory_is": memory[1],
        "algorithms": rows,
        "choose": best["algorithm"],
        "because": REASONS[best["algorithm"]],
        "servers": max(
            1, best["servers_for_memory"] or 1, best["servers_for_load"] or 1
        ),
    }


def show(found: dict[str, Any], output: Output) -> None:
    """Print the prediction."""
    output.line(
        f"{found['users']:,} users at {found['rate']}, each of whom uses the whole limit."
    )
    output.line()
    columns = (
        "algorithm",
        ">per identity",
        ">total",
        ">of the memory",
        ">decisions/s",
        ">servers",
    )
    output.table(columns, [_row(each, found["choose"]) for each in found["algorithms"]])
    output.line()
    memory = (
        f"{size(found['memory'])} ({found['memory_is']})"
        if found["memory"]
        else "not known"
    )
    output.line(
        f"The memory of a server is {memory}; up to {percent(MEMORY_SHARE)} of it is planned with."
    )
    best = next(
        row for row in found["algorithms"] if row["algorithm"] == found["choose"]
    )
    sustained = int(best["decisions_per_second"] * DECISION_SHARE)
    users = f"{best['users_per_server_at_full_rate']:,} users who send {found['rate']} at the same time"
    output.line(
        f"A server sustains about {sustained:,} decisions/s beside its connections: {users}."
    )
    output.line()
    output.line("Choose ", Styled(found["choose"], "SUCCESS"), f": {found['because']}.")
    if found["servers"] == 1:
        output.line("One server is enough.")
    else:
        needed = (
            "its memory"
            if best["servers_for_memory"] == found["servers"]
            else "its load"
        )
        output.line(
            f"One server is not enough for {needed}: a Redis Cluster of {found['servers']:,} primaries is."
        )


def _row(row: dict[str, Any], chosen: str) -> tuple[object, ...]:
    share, servers = (
        row["share_of_memory"],
        max(row["servers_for_memory"] or 1, row["servers_for_load"] or 1),
    )
    return (
        Styled(row["algorithm"], "SUCCESS")
        if row["algorithm"] == chosen
        else row["algorithm"],
        size(row["bytes_per_identity"]),
        size(row["bytes"]),
        ""
        if share is None
        else Styled(percent(share), "ERROR" if share > MEMORY_SHARE else "SUCCESS"),
        f"{row['decisions_per_second']:,}",
        f"{servers:,}",
    )


def _number(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdecimal() or not 1 <= int(digits) <= 10**12:
        raise ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(digits)


def _rate(text: str) -> Rate:
    try:
        return Rate.parse(text)
    except PolicyError as error:
        raise ArgumentTypeError(str(error)) from None
