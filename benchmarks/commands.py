"""How often a decision goes to the server, and what it makes it do."""

from __future__ import annotations

from collections import Counter
from functools import partial

from . import server
from .contender import Contender, Failed
from .contenders import field
from .measure import Crowd, Effort, crowd, tiers
from .report import Cell, Findings, Table

ASKED = 2  # of a limit of 5 three are left, and MONITOR wants to see one


def commands(effort: Effort) -> Findings:
    """Round trips, and commands, for one decision with the figures for headers"""
    columns = (
        "one decision",
        "round trips, allowed",
        "refused",
        "3 policies, allowed",
        "sent, when allowed",
        "commands run in scripts",
    )
    note = "Round trips are reads that the server counted (INFO `total_reads_processed`); the commands are MONITOR's."
    return Findings([Table("Round trips and commands", columns, [_row(each) for each in field(effort)], note)])


def _row(contender: Contender) -> list[Cell]:
    allowed, refused, three = (
        crowd(contender, tiers(5, policies), refused) for policies, refused in ((1, False), (1, True), (3, False))
    )
    for each in (allowed, refused, three):
        if isinstance(each, Failed):
            return [contender.name, *[each] * 3, "", ""]
    trips = [f"{_reads(each):g}" for each in (allowed, refused, three)]
    sent = server.watch(partial(allowed.ask, *allowed.take(1)))
    within = sum(each.in_script for each in sent)
    names = Counter(each.name for each in sent if not each.in_script)
    listed = ", ".join(name if number == 1 else f"{number} {name}" for name, number in names.items())
    return [contender.name, *trips, listed, str(within)]


def _reads(crowd: Crowd) -> float:
    crowd.renew()
    client = server.client()
    before = client.info("stats")
    for identity in crowd.take(ASKED):
        crowd.ask(identity)
    after = client.info("stats")
    reads = after["total_reads_processed"] - before["total_reads_processed"] - 1  # less the second INFO
    return reads / ASKED
