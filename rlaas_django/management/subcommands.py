"""What subcommands have in common: their base, and arguments that several take."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from ..core.keys import EncodedIdentity
from ..core.policy import Policy, PolicyError, nearest
from ..operators import usage
from ..operators.identities import resolve
from .output import Output

UNITS = {"m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


class Argument(NamedTuple):
    """What `ArgumentParser.add_argument` takes."""

    names: tuple[str, ...]
    options: dict[str, Any]


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument of a subcommand."""
    return Argument(names, options)


class Subcommand:
    """A subcommand of `manage.py rlaas`.

    Each has --json and Django's own options besides its arguments.
    """

    help: str  # what it does, in a sentence
    example: str  # a command line, for --help
    arguments: Sequence[Argument] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add its arguments to a parser."""
        for names, options in self.arguments:
            parser.add_argument(*names, **options)

    def run(self, options: Namespace, output: Output) -> int | None:
        """Run it, print the results, and return the exit code; None is 0."""
        raise NotImplementedError


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


def identity_of(text: str) -> EncodedIdentity:
    """Return the identity that text names; PolicyError when it names none."""
    try:
        return resolve(text)
    except ValueError as error:
        raise PolicyError(str(error)) from error


def policies_named(name: str | None) -> dict[str, Policy]:
    """Return the policy with this name, or all policies where it is empty."""
    policies = usage.policies()
    if not name:
        return policies
    if name not in policies:
        raise PolicyError(f"There is no policy {name!r}{nearest(name, policies)}")
    return {name: policies[name]}


def parse_duration(text: str) -> timedelta:
    """Parse `30m`, `12h`, `7d` or `2w`."""
    match = re.fullmatch(r"(\d{1,6})(m|min|h|d|w)", text)
    if match is None:
        raise ArgumentTypeError(
            f"{text!r} is not a duration; write 30m, 12h, 7d or 2w."
        )
    duration = timedelta(**{UNITS[match[2]]: int(match[1])})
    if not timedelta() < duration <= LONGEST:
        raise ArgumentTypeError(f"{text!r} is not between a minute and ten years.")
    return duration
