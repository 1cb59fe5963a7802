"""Set up: the Lua scripts on the servers, and tokens of the HTTP service."""

from __future__ import annotations

import hashlib
import json
import secrets
from argparse import Namespace
from typing import Any

from .. import backend, conf
from ..backend.scripts import SCRIPTS
from ..core.callers import VERBS, parse_tokens
from .output import Output, Styled
from .subcommands import Subcommand, argument

LOADED = Styled("loaded", "SUCCESS")
NOT_LOADED = Styled("not loaded", "WARNING")


class Scripts(Subcommand):
    """The Lua scripts, and on which servers they are loaded."""

    help = "List the Lua scripts: version, SHA-1, and on which servers they are loaded."
    example = "manage.py rlaas scripts --load"

    arguments = (
        argument(
            "--load",
            action="store_true",
            help="Load them first; otherwise the first decision does.",
        ),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Print the scripts, with a column per server."""
        commands: list[tuple[str, ...]] = []
        if options.load:
            registered = backend.registered_scripts(conf.config().cache)
            commands = [
                ("SCRIPT", "LOAD", script.script) for script in registered.values()
            ]

        hashes = [script.sha for script in SCRIPTS]
        commands.append(("SCRIPT", "EXISTS", *hashes))

        loaded: dict[str, Any] = {}
        for server in backend.servers():
            replies = backend.run_commands(commands, server)
            loaded[server.name.removeprefix("Redis at ")] = replies[-1]

        rows = [
            {
                "name": script.name,
                "version": script.version,
                "sha1": script.sha,
                "loaded": {name: bool(flags[i]) for name, flags in loaded.items()},
            }
            for i, script in enumerate(SCRIPTS)
        ]
        if output.as_json:
            output.json(rows)
        else:
            columns = ("script", "version", "SHA-1", *loaded)
            output.table(columns, map(self.cells, rows))

    def cells(self, row: dict[str, Any]) -> tuple[object, ...]:
        """Return a row as the table has it."""
        flags = row["loaded"].values()
        states = [LOADED if flag else NOT_LOADED for flag in flags]
        return (row["name"], row["version"], row["sha1"], *states)


class Token(Subcommand):
    """Make a token for a caller of the HTTP service."""

    help = (
        "Make a token for a caller of the HTTP service: it is printed once, and the "
        "settings keep its digest."
    )
    example = "manage.py rlaas token new billing --verbs check refund --policies search"

    arguments = (
        argument("action", choices=["new"]),
        argument(
            "name",
            help="The caller. One that is in the settings gets a further token, "
            "for rotation.",
        ),
        argument(
            "--verbs",
            nargs="+",
            metavar="verb",
            help=f"What it may do: {', '.join(VERBS)}.",
        ),
        argument(
            "--policies",
            nargs="+",
            metavar="policy",
            help="The policies it may use; otherwise every one.",
        ),
        argument(
            "--limit",
            metavar="policy",
            help="The policy that limits the caller itself.",
        ),
    )

    def run(self, options: Namespace, output: Output) -> None:
        """Print a new token, and the entry for the settings."""
        token = f"rlaas_{secrets.token_urlsafe(32)}"
        digest = hashlib.sha256(token.encode()).hexdigest()

        service = (conf.raw() or {}).get("SERVICE", {})
        entry = {"verbs": ["check"], **service.get("TOKENS", {}).get(options.name, {})}

        for name in ("verbs", "policies", "limit"):
            if getattr(options, name):
                entry[name] = getattr(options, name)

        entry["digests"] = [*entry.get("digests", ()), digest]
        # Raises what is wrong with it.
        list(parse_tokens({options.name: entry}, conf.config().policies))

        if output.as_json:
            output.json(
                {"name": options.name, "token": token, "digest": digest, "entry": entry}
            )
            return
        output.line("The token, which is not shown again:")
        output.line()
        output.line("  ", Styled(token, "SUCCESS"))
        output.line()
        output.line("Its entry for RATE_LIMITER['SERVICE']['TOKENS']:")
        output.line()
        output.line(f"  {json.dumps(options.name)}: {json.dumps(entry)},")
