"""manage.py rlaas: commands for operators."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import backend
from ...core.policy import PolicyError, nearest
from ...core.text import printable
from ._rlaas import SUBCOMMANDS
from ._rlaas.output import Output
from ._rlaas.parser import SubcommandParser, add_common_arguments

INTERRUPTED = 130  # the exit code of a shell after Ctrl-C


class Command(BaseCommand):
    """Dispatch to a subcommand."""

    help = "Operate rate limits, diagnose them, and find the right limit before enforcing it."
    requires_system_checks = ()  # `doctor` says what is wrong, and the others must run meanwhile

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the subcommands."""
        commands = parser.add_subparsers(
            dest="command",
            required=True,
            metavar="command",
            parser_class=SubcommandParser,
        )
        for name, subcommand in SUBCOMMANDS.items():
            added = commands.add_parser(
                name,
                help=subcommand.HELP,
                description=subcommand.HELP,
                epilog=f"Example:\n  {subcommand.EXAMPLE}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            subcommand.add_arguments(added)
            add_common_arguments(added)

    def run_from_argv(self, argv: list[str]) -> None:
        """Name the nearest subcommand on a typo."""
        name = argv[2] if len(argv) > 2 else ""
        if name and not name.startswith("-") and name not in SUBCOMMANDS:
            self.stderr.write(
                f"There is no subcommand {printable(name)!r}{nearest(name, SUBCOMMANDS)}"
            )
            self.stderr.write(f"The subcommands are {', '.join(SUBCOMMANDS)}.")
            sys.exit(2)
        super().run_from_argv(argv)

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the subcommand, and exit with its code."""
        colours = self.stdout.isatty() or options["force_color"]
        output = Output(
            self.stdout,
            self.stderr,
            self.style if colours else None,
            as_json=options["json"],
        )
        try:
            code = SUBCOMMANDS[options["command"]].run(
                argparse.Namespace(**options), output
            )
        except backend.UnavailableError as error:
            raise CommandError(
                f"Redis is unavailable: {printable(str(error))}"
            ) from error
        except (ImproperlyConfigured, PolicyError) as error:
            raise CommandError(printable(str(error))) from error
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:  # `rlaas top | head -1`
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # for Python's own flush at exit
            code = 1
        if code:
            sys.exit(code)
