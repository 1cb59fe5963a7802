"""Which requests of a log are replayed: by path, method and status."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from ..core.rules import Rule, parse_methods
from .log_lines import Request


def add_filters(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--path",
        action="append",
        metavar="PATH",
        help="Only requests below a path, such as /api/.",
    )
    parser.add_argument(
        "--method", action="append", metavar="METHOD", help="Only requests of a method."
    )
    parser.add_argument(
        "--status",
        action="append",
        type=statuses,
        metavar="STATUS",
        help="Only one: 401, 4xx.",
    )


def statuses(text: str) -> range:
    """Return the status codes that `401` or `4xx` stands for."""
    if re.fullmatch(r"[1-5]xx", text):
        return range(100 * int(text[0]), 100 * int(text[0]) + 100)
    if re.fullmatch(r"[1-5]\d\d", text):
        return range(int(text), int(text) + 1)
    raise ArgumentTypeError(f"{text!r} is no status; write 401 or 4xx")


def make_filter(options: Namespace) -> Callable[[Request], bool]:
    """Return the function that says whether a request is replayed; paths match as those of middleware rules do."""
    methods = parse_methods(options.method) if options.method else None
    rules = [Rule(path, None, methods, ()) for path in options.path or [None]]
    wanted = {status for each in options.status or () for status in each}
    if not (methods or options.path or wanted):
        return lambda _: True

    def is_wanted(request: Request) -> bool:
        if wanted and request.status not in wanted:
            return False
        path = request.path.partition("?")[0]
        return any(rule.matches(path, request.method) for rule in rules)

    return is_wanted
