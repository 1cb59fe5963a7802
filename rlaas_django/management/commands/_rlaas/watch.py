"""manage.py rlaas watch: `top`, live."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from datetime import datetime

from django.utils import timezone

from .... import backend
from ....operators import usage
from ....stats import reader, schema
from . import top
from .arguments import policies_named
from .output import Output, Styled, local

HELP = "Watch who is near a limit, like top; Ctrl-C ends it. Piped, it prints a line per interval."
EXAMPLE = "manage.py rlaas watch --interval 2"
CLEAR = "\x1b[H\x1b[2J"  # the screen of a terminal


def add_arguments(parser: ArgumentParser) -> None:
    """Add how often, and what `top` takes."""
    top.add_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, help="Seconds between two looks; 1."
    )
    parser.add_argument("--times", type=int, help="Stop after so many looks.")


def run(options: Namespace, output: Output) -> None:
    """Look again and again."""
    policies_named(options.policy)
    looks = 0
    while options.times is None or looks < options.times:
        if looks:
            time.sleep(max(0.1, options.interval))
        looks += 1
        try:
            rows = usage.watch_list(options.policy or None)[: max(1, options.number)]
            minute = reader.minutes([schema.SITE], hours=1)[schema.SITE][-1]
        except backend.UnavailableError as error:  # go on: it may be available again
            output.line(Styled(f"Redis is unavailable: {error}", "ERROR"))
            continue
        _print(output, local(timezone.now()), minute, rows)


def _print(
    output: Output, now: datetime, minute: reader.Counts, rows: list[usage.Row]
) -> None:
    if output.as_json:
        figures = {
            "at": now.isoformat(),
            "requests": minute.total,
            "refused": minute.refused,
        }
        output.json({**figures, "top": [top.as_json(row) for row in rows]}, indent=None)
        return
    summary = f"{now:%H:%M:%S}  this minute: {minute.total} requests, {minute.refused} refused"
    if not output.is_terminal:
        highest = [
            f"; {row.identity.argument} {row.percent} % of {row.outcome.policy}"
            for row in rows[:3]
        ]
        output.line(summary, *highest)
        return
    output.stdout.write(CLEAR, ending="")
    output.line(Styled(summary, "MIGRATE_HEADING"))
    if rows:
        top.print_rows(rows, output)
    else:
        output.line("No identity is near a limit.")
