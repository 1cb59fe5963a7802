"""What subcommands have in common: their base, their arguments, what they print."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from inspect import getdoc
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand
from django.template.defaultfilters import date
from django.templatetags.tz import localtime

from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, nearest
from ..core.text import printable
from ..operators import usage
from ..operators.identities import (
    describe_one,
    is_unknown_user,
    nearest_users,
    resolve,
)

HEADING = "MIGRATE_HEADING"
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# Adds an argument to the parser of a subcommand, or a group of them.
Argument = Callable[[ArgumentParser], object]


class Styled(NamedTuple):
    """Text in one of the styles of Django's commands: SUCCESS, WARNING, ERROR."""

    text: object
    style: str


class Output:
    """The output of one subcommand; `as_json` says whether --json was given.

    Nothing reaches the terminal unescaped.
    """

    def __init__(self, command: BaseCommand, *, as_json: bool) -> None:
        self.stdout = command.stdout
        self.stderr = command.stderr
        self.as_json = as_json
        self._style = command.style
        self._encoding = getattr(self.stdout, "encoding", None) or "utf-8"

    def line(self, *parts: object) -> None:
        """Print a line of texts, some of them `Styled`."""
        self.stdout.write("".join(self._shown(part) for part in parts))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; a column whose name begins with > is aligned to the right."""
        heading = [Styled(name.lstrip(">"), HEADING) for name in columns]
        table: list[Sequence[object]] = [heading, *rows]

        forms = []
        for name, column in zip(columns, zip(*table, strict=True), strict=True):
            width = max(len(self._text(cell)) for cell in column)
            alignment = ">" if name.startswith(">") else "<"
            forms.append(f"{alignment}{width}")

        for row in table:
            cells = map(self._shown, row, forms)
            self.stdout.write("  ".join(cells).rstrip())

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print a value as JSON; without indent on one line, as one of many."""
        text = json.dumps(value, indent=indent, default=str)
        # The one control character that json leaves as it is.
        self.stdout.write(text.replace("\x7f", "\\u007f"))

    def _text(self, part: object) -> str:
        """Return a text without its style, safe to print."""
        if isinstance(part, Styled):
            part = part.text

        # Durations have no-break spaces, which a terminal of another encoding lacks.
        text = printable(str(part).replace("\u00a0", " "))
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, part: object, form: str = "") -> str:
        """Return a text as it is printed, in its style."""
        text = format(self._text(part), form)
        if isinstance(part, Styled):
            text = getattr(self._style, part.style)(text)
        return text


# Prints the results, and returns the exit code; None is 0.
Run = Callable[[Namespace, Output], int | None]


class Subcommand(NamedTuple):
    """A subcommand of `manage.py rlaas`.

    Each has --json and Django's own options besides its arguments.
    """

    run: Run
    help: str
    example: str  # a command line, for --help
    arguments: Sequence[Argument]


def subcommand(*arguments: Argument, example: str) -> Callable[[Run], Subcommand]:
    """Make a subcommand of a function, whose docstring is its help."""

    def decorate(run: Run) -> Subcommand:
        return Subcommand(run, getdoc(run) or "", example, arguments)

    return decorate


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument as `ArgumentParser.add_argument` takes it."""
    return lambda parser: parser.add_argument(*names, **options)


IDENTITY = argument(
    "identity",
    help="A username or user ID, an IP address, a network (203.0.113.0/24), "
    "or an encoded identity.",
)
POLICY = argument(
    "--policy",
    default="",
    help="Under this policy only; otherwise under every one.",
)
REASON = argument("--reason", default="", help="Why; it is in the history.")
NUMBER = argument("--number", type=int, default=20, help="How many; 20.")


def identity_of(text: str) -> EncodedIdentity:
    """Return the identity that text names; PolicyError when it names none."""
    try:
        return resolve(text)
    except ValueError as error:
        raise PolicyError(str(error)) from error


def require_user(text: str, identity: EncodedIdentity, hint: str = "") -> None:
    """Raise PolicyError with the nearest names for a user who does not exist."""
    if is_unknown_user(identity):
        names = ", ".join(nearest_users(text)) or "none"
        raise PolicyError(f"There is no user {text!r}; the nearest: {names}.{hint}")


def named(identity: str) -> str:
    """Return an encoded identity in the words in which operators type it."""
    return describe_one(identity).argument


def find_policy(name: str) -> Policy | None:
    """Return the policy of `--policy`; None where it is not given."""
    if not name:
        return None

    policies = usage.policies()
    if name not in policies:
        raise PolicyError(f"There is no policy {name!r}{nearest(name, policies)}")
    return policies[name]


def parse_duration(text: str) -> timedelta:
    """Parse `30m`, `12h`, `7d` or `2w`."""
    match = re.fullmatch(r"([1-9]\d{0,3})([mhdw])", text)
    if match is None:
        raise ArgumentTypeError(
            f"{text!r} is not a duration; write 30m, 12h, 7d or 2w."
        )
    number, unit = match.groups()
    return timedelta(**{UNITS[unit]: int(number)})


def minute(at: datetime | None) -> str:
    """Return a time as `2026-11-18 15:40` in the current time zone; '' for None."""
    return date(localtime(at), "Y-m-d H:i")


def percent(share: float) -> str:
    """Return a share as `12.3 %`, with three digits that matter."""
    digits = ".3g" if share < 0.0999 else ".1f"
    return f"{100 * share:{digits}} %"
