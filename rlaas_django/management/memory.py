"""manage.py rlaas memory: what the counters of each policy take in Redis."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from typing import Any

from .. import backend, conf
from ..core.keys import COUNTER_PREFIX, parse_counter_key
from ..operators import usage
from .output import Output, Progress, plural, size
from .subcommands import Subcommand, argument

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
        """The mean; an identity may have counters of several windows."""
        return round(self.bytes / len(self.identities))

    def add(self, identity: str, number: int) -> None:
        """Add a key of so many bytes."""
        self.keys += 1
        self.bytes += number
        self.largest = max(self.largest, number)
        self.identities.add(identity)


class Memory(Subcommand):
    """What the counters take now, and what more identities would take."""

    help = "Measure the memory of each policy's counters, in a sample of the keys."
    example = "manage.py rlaas memory --identities 1000000"

    arguments = (
        argument(
            "--identities",
            type=int,
            default=IDENTITIES,
            metavar="NUMBER",
            help="Estimate for so many identities under each policy; 1,000,000.",
        ),
        argument(
            "--sample",
            type=int,
            default=SAMPLE,
            metavar="KEYS",
            help="How many keys to measure at most; 10,000.",
        ),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Measure a sample, and print the table."""
        progress = Progress("keys", quiet=options.verbosity == 0)
        counters: dict[str, Counters] = defaultdict(Counters)
        sample = max(1, options.sample)
        measured = 0
        for page in backend.scan(f"{COUNTER_PREFIX}*"):
            keys = page[: sample - measured]
            sizes = backend.run_commands([("MEMORY", "USAGE", key) for key in keys])
            for key, number in zip(keys, sizes, strict=True):
                pair = parse_counter_key(key)
                if pair is not None and number:  # it has not expired
                    counters[pair[0]].add(pair[1], number)

            measured += len(keys)
            progress.show(measured, measured / sample)
            if measured == sample:
                break
        progress.clear()

        names = sorted(counters)
        rows = [_row(name, counters[name], options.identities) for name in names]
        if output.as_json:
            output.json({"sampled": measured, "policies": rows})
        elif rows:
            output.table(
                (
                    "policy",
                    "algorithm",
                    ">keys",
                    ">largest key",
                    ">per identity",
                    f">{options.identities:,} identities",
                ),
                map(_cells, rows),
            )
            output.line()
            output.line(
                f"Measured {plural(measured, 'key')} by MEMORY USAGE, "
                "with the usage that identities have now."
            )
        else:
            output.line("There are no counters in Redis.")


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


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["policy"],
        row["algorithm"],
        f"{row['keys']:,}",
        size(row["largest"]),
        size(row["bytes_per_identity"]),
        size(row["estimate"]),
    )
