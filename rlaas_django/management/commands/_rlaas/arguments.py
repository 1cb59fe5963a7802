"""Arguments that several subcommands take: an identity, a policy, a duration, a reason."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from datetime import timedelta

from ....core.keys import EncodedIdentity
from ....core.policy import Policy, PolicyError, nearest
from ....operators import usage
from ....operators.identities import resolve

_DURATION = re.compile(r"(\d{1,6})(m|min|h|d|w)")
_UNITS = {"m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


def add_identity(parser: ArgumentParser) -> None:
    """Add who it is about."""
    parser.add_argument(
        "identity",
        help="A username or user ID, an IP address, a network (203.0.113.0/24), or an encoded identity.",
    )


def add_policy(parser: ArgumentParser, help_text: str) -> None:
    parser.add_argument("--policy", default="", help=help_text)


def add_reason(parser: ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--reason", default="", required=required, help="Why; it is in the history."
    )


def identity_of(text: str) -> EncodedIdentity:
    """Return the encoded identity that text names; PolicyError when it names none."""
    try:
        return resolve(text)
    except ValueError as error:
        raise PolicyError(str(error)) from error


def policies_named(name: str) -> dict[str, Policy]:
    """Return the policy with this name, or every policy for an empty one; PolicyError for one that does not exist."""
    every = usage.policies()
    if not name:
        return every
    if name not in every:
        raise PolicyError(f"There is no policy {name!r}{nearest(name, every)}")
    return {name: every[name]}


def duration(text: str) -> timedelta:
    """Parse `30m`, `12h`, `7d` or `2w`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ArgumentTypeError(
            f"{text!r} is not a duration; write 30m, 12h, 7d or 2w."
        )
    parsed = timedelta(**{_UNITS[found[2]]: int(found[1])})
    if not timedelta() < parsed <= LONGEST:
        raise ArgumentTypeError(f"{text!r} is not between a minute and ten years.")
    return parsed
