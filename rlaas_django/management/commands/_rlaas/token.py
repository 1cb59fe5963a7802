"""manage.py rlaas token: make a token for a caller of the HTTP service."""

from __future__ import annotations

import hashlib
import json
import secrets
from argparse import ArgumentParser, Namespace
from typing import Any

from .... import conf
from ....core.callers import VERBS, parse_tokens
from .output import Output, Styled

HELP = "Make a token for a caller of the HTTP service: it is printed once, and the settings keep its digest."
EXAMPLE = "manage.py rlaas token new billing --verbs check refund --policies search"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the caller's name and what it may do."""
    parser.add_argument("action", choices=["new"])
    parser.add_argument(
        "name",
        help="The caller. One that is in the settings gets a further token, for rotation.",
    )
    parser.add_argument(
        "--verbs",
        nargs="+",
        metavar="verb",
        help=f"What it may do: {', '.join(VERBS)}.",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="policy",
        help="The policies it may use; otherwise every one.",
    )
    parser.add_argument(
        "--limit", metavar="policy", help="The policy that limits the caller itself."
    )


def run(options: Namespace, output: Output) -> None:
    """Make a token, and print it with the entry for the settings."""
    token = f"rlaas_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(token.encode()).hexdigest()
    given = {
        "verbs": options.verbs,
        "policies": options.policies,
        "limit": options.limit,
    }
    entry = {
        **_present(options.name),
        **{key: value for key, value in given.items() if value},
    }
    entry["digests"] = [*entry.get("digests", ()), digest]
    [
        *parse_tokens({options.name: entry}, conf.config().policies)
    ]  # raises what is wrong with it
    if output.as_json:
        output.json(
            {"name": options.name, "token": token, "digest": digest, "entry": entry}
        )
        return
    output.line("The token, which is not shown again:\n")
    output.line("  ", Styled(token, "SUCCESS"))
    output.line("\nIts entry for RATE_LIMITER['SERVICE']['TOKENS']:\n")
    output.line(f"  {json.dumps(options.name)}: {json.dumps(entry)},")


def _present(name: str) -> dict[str, Any]:
    """Return the caller's entry in the settings."""
    owned = [
        (digest, caller)
        for digest, caller in conf.config().service.digests
        if caller.name == name
    ]
    if not owned:
        return {"verbs": ["check"]}
    caller = owned[0][1]
    entry: dict[str, Any] = {
        "digests": [digest for digest, _ in owned],
        "verbs": sorted(caller.verbs),
    }
    if caller.policies is not None:
        entry["policies"] = sorted(caller.policies)
    return entry if caller.limit is None else {**entry, "limit": caller.limit}
