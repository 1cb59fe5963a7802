"""The parser of a subcommand: Django's own options after the subcommand too, and the nearest option on a typo."""

from __future__ import annotations

import argparse
import re
from typing import Any

from django.core.management.base import CommandParser

from ....core.policy import nearest


class SubcommandParser(CommandParser):
    """A parser that names the nearest option on a typo."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and exit on an argument that is not known."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            known = re.findall(r"--[\w-]+", self.format_usage())
            word = rest[0].partition("=")[0]
            self.error(f"there is no argument {word!r}{nearest(word, known)}")
        return found, rest


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json, and Django's own options: `rlaas status --no-color` is what people type.

    Without defaults, which would replace what was given before the subcommand.
    """
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for option in ("--traceback", "--no-color", "--force-color"):
        parser.add_argument(option, action="store_true", **hidden)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, **hidden)
    parser.add_argument("-v", "--verbosity", type=int, choices=range(4), **hidden)
