"""manage.py rlaas: commands for operators.

The subcommands are in the modules of `rlaas_django.management`, by family.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import backend, conf
from ...core.policy import PolicyError, nearest
from ...core.text import printable
from .. import doctor, inspect, overrides, replay, scripts
from ..base import Output, Subcommand

INTERRUPTED = 130  # the exit code of a shell after Ctrl-C
SUBCOMMANDS: dict[str, Subcommand] = {
    "status": inspect.status,
    "policies": inspect.policies,
    "show": inspect.show,
    "refusals": inspect.refusals,
    "top": inspect.top,
    "watch": inspect.watch,
    "reset": overrides.reset,
    "block": overrides.block,
    "exempt": overrides.exempt,
    "limit": overrides.limit,
    "end": overrides.end,
    "overrides": overrides.overrides,
    "history": overrides.history,
    "scripts": scripts.scripts,
    "doctor": doctor.doctor,
    "memory": scripts.memory,
    "replay": replay.replay,
    "token": scripts.token,
    "restore": overrides.restore,
}
# Those that need no Redis.
LOCAL_SUBCOMMANDS = ("doctor", "token")


class SubcommandParser(CommandParser):
    """A parser that names the nearest option on a typo."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and exit on an argument that is not known."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())
            word = unknown[0].partition("=")[0]
            self.error(f"there is no argument {word!r}{nearest(word, options)}")
        return known, unknown


class Command(BaseCommand):
    """Dispatch to a subcommand."""

    help = (
        "Operate rate limits, diagnose them, and find the right limit before "
        "enforcing it."
    )
    # `doctor` says what is wrong, and the others must run meanwhile.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the subcommands."""
        parsers = parser.add_subparsers(
            dest="command",
            required=True,
            metavar="command",
            parser_class=SubcommandParser,
        )
        for name, subcommand in SUBCOMMANDS.items():
            subparser = parsers.add_parser(
                name,
                help=subcommand.help,
                description=subcommand.help,
                epilog=f"Example:\n  {subcommand.example}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            for add_argument in subcommand.arguments:
                add_argument(subparser)
            add_common_arguments(subparser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Name the nearest subcommand on a typo."""
        name = argv[2] if len(argv) > 2 else "--help"
        if not name.startswith("-") and name not in SUBCOMMANDS:
            hint = nearest(name, SUBCOMMANDS)
            self.stderr.write(
                f"There is no subcommand {printable(name)!r}{hint}\n"
                f"The subcommands are {', '.join(SUBCOMMANDS)}."
            )
            sys.exit(2)
        super().run_from_argv(argv)

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the subcommand, and exit with its code."""
        subcommand = SUBCOMMANDS[options["command"]]
        output = Output(self, as_json=options["json"])
        try:
            _require_redis(options)
            code = subcommand.run(argparse.Namespace(**options), output)
        except backend.UnavailableError as error:
            raise CommandError(
                f"Redis is unavailable: {printable(str(error))}"
            ) from error
        except (ImproperlyConfigured, PolicyError) as error:
            raise CommandError(printable(str(error))) from error
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:  # `rlaas top | head -1`
            # Python flushes standard output once more at the exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1

        if code:
            sys.exit(code)


def _require_redis(options: dict[str, Any]) -> None:
    """Raise CommandError where a subcommand needs Redis and the cache is not on it."""
    if options["command"] in LOCAL_SUBCOMMANDS:
        return
    alias = options.get("cache") or conf.config().cache  # the option of `replay`
    if backend.counts_in_process(alias):
        raise CommandError(f"This needs Redis. {backend.not_on_redis(alias)}")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json, and Django's own options: people type `rlaas status --no-color`.

    They have no defaults, which would replace what was given before the subcommand.
    """
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for option in ("--traceback", "--no-color", "--force-color"):
        parser.add_argument(option, action="store_true", **hidden)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, **hidden)
    parser.add_argument("-v", "--verbosity", type=int, choices=range(4), **hidden)
