"""manage.py rlaas: commands for operators."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rlaas_django import backend
from rlaas_django.models import Override


class Command(BaseCommand):
    """Dispatch to a subcommand."""

    help = "Manage rate limits."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the subcommands."""
        commands = parser.add_subparsers(dest="command", required=True, metavar="command")
        commands.add_parser("restore", help="Write the active overrides to Redis again.")

    def handle(self, *_: Any, **__: Any) -> None:
        """Restore the overrides, the only subcommand so far."""
        try:
            number = Override.restore()
        except backend.UnavailableError as error:
            raise CommandError(f"Redis is unavailable: {error}") from error
        self.stdout.write(f"Restored the overrides of {number} identities.")
