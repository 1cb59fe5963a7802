"""manage.py rlaas replay: what a limit would have refused, had it been there when a log was written."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from django.core.management.base import CommandError

from .. import conf
from ..core.algorithms import ALGORITHMS
from ..core.keys import key_kind
from ..core.policy import Policy, PolicyError, Rate
from ..management.commands._rlaas.interrupts import one_interrupt
from ..management.commands._rlaas.output import Output, plural
from ..management.commands._rlaas.progress import Progress
from ..stats.policies import all_policies
from .execution import Replay
from .filters import add_filters, make_filter
from .html import page
from .log_lines import FIELDS, LineParser
from .policies import FORM, parse_algorithm, parse_policy
from .report import report, show
from .shadow import ShadowLog
from .sources import STDIN, Log

HELP = "Replay access logs through the scripts, and find the limit to set."
EXAMPLE = 'manage.py rlaas replay access.log --policy "100/m by ip" --policy "20/10s by user, token bucket, burst 40"'


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "logs",
        nargs="*",
        default=[STDIN],
        metavar="LOG",
        help="Files, also .gz; - is standard input.",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"A limit to try: {FORM}.",
    )
    for_which = "for policies that name none (default: all)"
    parser.add_argument(
        "--algo", action="append", default=[], help=f"An algorithm to try, {for_which}."
    )
    share = "The share of requests that may be refused (default: 0.1%%)."
    parser.add_argument("--share", type=parse_share, default=0.001, help=share)
    parser.add_argument(
        "--shadow",
        action="store_true",
        help="Replay what was recorded about shadow policies.",
    )
    add_filters(parser)
    fields = f"Say in which field JSON lines have {', '.join(FIELDS)}, or a key such as header:X-Api-Key."
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        type=parse_field,
        metavar="NAME=FIELD",
        help=fields,
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="Write a page with charts, too."
    )
    parser.add_argument(
        "--cache",
        help="The cache whose Redis runs the scripts (default: RATE_LIMITER['CACHE']).",
    )


def run(options: Namespace, output: Output) -> int:
    """Replay the logs, and print the report."""
    progress = Progress("lines", quiet=options.verbosity == 0)
    algorithms = [parse_algorithm(text) for text in options.algo] or [*ALGORITHMS]
    cache = options.cache or conf.config().cache
    replays: list[tuple[Replay, Log | ShadowLog]] = []
    with one_interrupt() as interrupts, ExitStack() as stack:
        stack.callback(progress.clear)
        for log, policies in (
            _shadow_logs(options) if options.shadow else [_log(options)]
        ):
            stack.enter_context(log)
            replay = stack.enter_context(Replay(policies, algorithms, cache))
            replay.run(log.batches(), partial(_show_progress, progress, log))
            replays.append((replay, log))
        found = report(replays, options.share)
        interrupts.ignore()
    if left_behind := sum(replay.left_behind for replay, _ in replays):
        output.warn(
            f"{plural(left_behind, 'key')} could not be deleted, and will expire."
        )
    if output.as_json:
        output.json(found)
    else:
        show(found, output, progress.seconds)
    if not found["replayed"]:
        return 1
    if options.html:
        options.html.write_text(page(found, [replay for replay, _ in replays]), "utf-8")
    return 0


def _log(options: Namespace) -> tuple[Log, list[tuple[str, Policy]]]:
    """Return the log that was named, with the policies to try."""
    if not options.policy:
        raise CommandError(f"Name a limit to try by --policy: {FORM}.")
    fields = dict(options.field)
    policies = [
        (text, parse_policy(text, conf.config().policies)) for text in options.policy
    ]
    for text, policy in policies:
        if key_kind(policy.key) == "key" and policy.key not in fields:
            raise PolicyError(
                f"{text!r}: its key is a function of the request, which a log does not tell."
            )
    try:
        return Log(options.logs, LineParser(fields), make_filter(options)), policies
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error


def _shadow_logs(
    options: Namespace,
) -> list[tuple[ShadowLog, list[tuple[str, Policy]]]]:
    """Return what was recorded about each shadow policy, with that policy."""
    if options.policy or options.logs != [STDIN]:
        raise CommandError(
            "--shadow takes neither a log nor a --policy: it replays the record of each shadow policy."
        )
    shadows = {
        name: each
        for name, each in all_policies().items()
        if each.shadow and isinstance(each.rate, Rate)
    }
    if not shadows:
        raise CommandError(
            "There is no shadow policy; set \"shadow\": True in an entry of RATE_LIMITER['POLICIES']."
        )
    algo = None if options.algo else conf.config().algo
    policies = {
        name: replace(each, algo=None if options.algo else each.algo or algo)
        for name, each in shadows.items()
    }
    return [
        (ShadowLog(policy, make_filter(options)), [(name, policy)])
        for name, policy in policies.items()
    ]


def _show_progress(progress: Progress, log: Log | ShadowLog) -> None:
    progress.show(log.lines, log.share_read)


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
