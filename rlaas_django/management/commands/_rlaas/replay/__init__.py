"""manage.py rlaas replay: what a limit would have refused, had it been there when a log was written."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from django.core.management.base import CommandError

from ..... import conf
from .....core.policy import ALGORITHMS
from ..interrupts import one_interrupt
from ..output import Output
from ..progress import Progress
from .execution import Replay
from .filters import add_filters, make_filter
from .log_lines import FIELDS, LineParser
from .policies import FORM, parse_algorithm, parse_policy
from .report import report, show
from .sources import STDIN, Log

HELP = "Replay access logs through the scripts, and find the limit to set."
EXAMPLE = 'manage.py rlaas replay access.log --policy "100/m by ip" --policy "20/10s by user, token bucket, burst 40"'


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("logs", nargs="*", default=[STDIN], metavar="LOG", help="Files, also .gz; - is standard input.")
    parser.add_argument("--policy", action="append", default=[], metavar="TEXT", help=f"A limit to try: {FORM}.")
    for_which = "for policies that name none (default: all)"
    parser.add_argument("--algo", action="append", default=[], help=f"An algorithm to try, {for_which}.")
    share = "The share of requests that may be refused (default: 0.1%%)."
    parser.add_argument("--share", type=parse_share, default=0.001, help=share)
    add_filters(parser)
    fields = f"Say in which field JSON lines have {', '.join(FIELDS)}, or a key such as header:X-Api-Key."
    parser.add_argument("--field", action="append", default=[], type=parse_field, metavar="NAME=FIELD", help=fields)
    parser.add_argument("--cache", help="The cache whose Redis runs the scripts (default: RATE_LIMITER['CACHE']).")


def run(options: Namespace, output: Output) -> int:
    """Replay the logs, and print the report."""
    config = conf.config()
    if not options.policy:
        raise CommandError(f"Name a limit to try by --policy: {FORM}.")
    policies = [(text, parse_policy(text, config.policies)) for text in options.policy]
    algorithms = [parse_algorithm(text) for text in options.algo] or ALGORITHMS
    try:
        log = Log(options.logs, LineParser(dict(options.field)), make_filter(options))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    progress = Progress("lines", quiet=options.verbosity == 0)
    with one_interrupt() as interrupts, log, Replay(policies, algorithms, options.cache or config.cache) as replay:
        try:
            replay.run(log.batches(), lambda: progress.show(log.lines, log.share_read))
        finally:
            progress.clear()
        found = report(replay, log, options.share)
        interrupts.ignore()
    if replay.left_behind:
        output.warn(f"{replay.left_behind:,} keys could not be deleted; they expire by themselves.")
    if output.as_json:
        output.json(found)
    else:
        show(found, output, progress.seconds)
    return 0 if found["from"] else 1


def parse_share(text: str) -> float:
    """Return the share that `0.1%` or `0.001` stands for."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else -1
    if not 0 <= share <= 1:
        raise ArgumentTypeError(f"{text!r} is no share; write 0.1% or 0.001")
    return share


def parse_field(text: str) -> tuple[str, str]:
    """Return the name and the field of `ip=client.addr`."""
    name, _, field = text.partition("=")
    if not name or not field:
        raise ArgumentTypeError(f"{text!r} names no field; write ip=client.addr")
    return name, field
