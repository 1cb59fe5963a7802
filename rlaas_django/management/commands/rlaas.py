"""manage.py rlaas …: what an operator does from a terminal."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rlaas_django import backend
from rlaas_django.models import Override


class Command(BaseCommand):
    help = "Look after rate limits."

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="command", required=True, metavar="command")
        commands.add_parser("restore", help="Write the overrides that are in force to Redis again.")

    def handle(self, *_: Any, **__: Any) -> None:
        try:
            number = Override.restore()
        except backend.UnavailableError as error:
            raise CommandError(f"Redis cannot be reached: {error}") from error
        self.stdout.write(f"Overrides of {number} identities are in Redis.")
