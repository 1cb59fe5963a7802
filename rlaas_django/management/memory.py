"""manage.py rlaas memory: what the counters of each policy take in Redis."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from .. import backend, conf
from ..core.keys import COUNTER_PREFIX, parse_counter_key
from ..operators import usage
from .output import Output, Progress, plural, size
from .subcommands import Subcommand, parse_count

SAMPLE = 10_000  # keys
IDENTITIES = 1_000_000


class Counters:
    """The sampled counters of one policy."""

    def __init__(self) -> None:
        self.keys = 0
        self.bytes = 0
        self.largest = 0
        self.identities: set[str] = set()

    @property
    def bytes_per_identity(self) -> int:
        return round(self.bytes / len(self.identities))


def measure(keys: Sequence[str], counters: dict[str, Counters]) -> None:
    """Add keys to the counters of their policies; others are left out."""
    sizes = backend.run_commands([("MEMORY", "USAGE", key) for key in keys])
    for key, number in zip(keys, sizes, strict=True):
        pair = parse_counter_key(key)
        if pair is None or not number:  # it is not a counter, or it has expired
            continue
        policy, identity = pair
        sampled = counters.setdefault(policy, Counters())
        sampled.keys += 1
        sampled.bytes += number
        sampled.largest = max(sampled.largest, number)
        sampled.identities.add(identity)


class Memory(Subcommand):
    """What the counters take now, and what more identities would take."""

    help = "Measure the memory of each policy's counters, in a sample of the keys."
    example = "manage.py rlaas memory --identities 1000000"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--identities",
            type=parse_count,
            default=IDENTITIES,
            metavar="NUMBER",
            help="Estimate for so many identities under each policy; 1,000,000.",
        )
        parser.add_argument(
            "--sample",
            type=parse_count,
            default=SAMPLE,
            metavar="KEYS",
            help="How many keys to measure at most; 10,000.",
        )

    def run(self, options: Namespace, output: Output) -> None:
        progress = Progress("keys", quiet=options.verbosity == 0)
        counters: dict[str, Counters] = {}
        measured = 0
        try:
            for keys in _pages(options.sample):
                measure(keys, counters)
                measured += len(keys)
                progress.show(measured, measured / options.sample)
        finally:
            progress.clear()

        rows = [
            _row(name, counters[name], options.identities) for name in sorted(counters)
        ]
        if output.as_json:
            output.json(
                {
                    "sampled": measured,
                    "identities": options.identities,
                    "policies": rows,
                }
            )
        elif rows:
            self.show(rows, measured, options.identities, output)
        else:
            output.line("There are no counters in Redis.")

    def show(
        self, rows: list[dict[str, Any]], measured: int, identities: int, output: Output
    ) -> None:
        output.table(
            (
                "policy",
                "algorithm",
                ">keys",
                ">largest key",
                ">per identity",
                f">{identities:,} identities",
            ),
            [
                (
                    row["policy"],
                    row["algorithm"],
                    f"{row['keys']:,}",
                    size(row["largest"]),
                    size(row["bytes_per_identity"]),
                    size(row["estimate"]),
                )
                for row in rows
            ],
        )
        output.line()
        output.line(
            f"Measured {plural(measured, 'key')} by MEMORY USAGE, "
            "with the usage that identities have now."
        )


def _pages(most: int) -> Iterator[list[str]]:
    """Yield pages of counters' keys, until there are so many."""
    left = most
    for page in backend.scan(f"{COUNTER_PREFIX}*"):
        keys = list(islice(page, left))
        yield keys
        left -= len(keys)
        if not left:
            return


def _row(name: str, counters: Counters, identities: int) -> dict[str, Any]:
    policy = usage.policies().get(name)
    algorithm = ""  # of a policy that this site does not have any more
    if policy is not None:
        algorithm = policy.algo or conf.config().algo
    return {
        "policy": name,
        "algorithm": algorithm,
        "keys": counters.keys,
        "largest": counters.largest,
        "bytes_per_identity": counters.bytes_per_identity,
        "estimate": counters.bytes_per_identity * identities,
    }
