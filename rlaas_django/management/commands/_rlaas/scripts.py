"""manage.py rlaas scripts: the Lua scripts, and on which servers they are loaded."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from .... import backend, conf
from ....backend.scripts import SCRIPTS
from .output import Output, Styled

HELP = "List the Lua scripts: version, SHA-1, and on which servers they are loaded."
EXAMPLE = "manage.py rlaas scripts --load"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--load",
        action="store_true",
        help="Load them first; otherwise the first decision does.",
    )


def run(options: Namespace, output: Output) -> None:
    """Print the table."""
    servers = backend.servers()
    if options.load:
        for server in servers:
            registered = backend.registered_scripts(conf.config().cache)
            backend.run_commands(
                [("SCRIPT", "LOAD", script.script) for script in registered.values()],
                server,
            )
    found = rows(servers)
    if output.as_json:
        output.json(found)
        return
    names = [server.name.removeprefix("Redis at ") for server in servers]
    shown = {True: Styled("loaded", "SUCCESS"), False: Styled("not loaded", "WARNING")}
    output.table(
        ("script", "version", "SHA-1", *names),
        [
            (
                row["name"],
                row["version"],
                row["sha1"],
                *(shown[row["loaded"][name]] for name in names),
            )
            for row in found
        ],
    )


def rows(servers: list[backend.Server]) -> list[dict[str, Any]]:
    """Return the scripts, and whether each server has them."""
    exists = ("SCRIPT", "EXISTS", *(script.sha for script in SCRIPTS))
    loaded = {
        server.name.removeprefix("Redis at "): backend.run_commands([exists], server)[0]
        for server in servers
    }
    return [
        {
            "name": script.name,
            "version": script.version,
            "sha1": script.sha,
            "loaded": {name: bool(flags[i]) for name, flags in loaded.items()},
        }
        for i, script in enumerate(SCRIPTS)
    ]
