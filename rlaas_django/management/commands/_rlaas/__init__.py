"""The subcommands of `manage.py rlaas`, one module each; to add one, write the module and name it in SUBCOMMANDS.

A subcommand's module has

  HELP                     what it does, in a sentence
  EXAMPLE                  a command line, for --help
  add_arguments(parser)    adds its options; --json and Django's own are there already
  run(options, output)     does it, prints by `output`, and returns the exit code; None is 0
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Protocol

from .... import replay
from . import (
    block,
    doctor,
    end,
    exempt,
    history,
    limit,
    overrides,
    plan,
    policies,
    reset,
    restore,
    scripts,
    show,
    status,
    token,
    top,
    watch,
)
from .output import Output


class Subcommand(Protocol):
    """A module of this package."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: ArgumentParser) -> None: ...
    def run(self, options: Namespace, output: Output) -> int | None: ...


SUBCOMMANDS: dict[str, Subcommand] = {
    "status": status,
    "policies": policies,
    "show": show,
    "top": top,
    "watch": watch,
    "reset": reset,
    "block": block,
    "exempt": exempt,
    "limit": limit,
    "end": end,
    "overrides": overrides,
    "history": history,
    "scripts": scripts,
    "doctor": doctor,
    "plan": plan,
    "replay": replay,
    "token": token,
    "restore": restore,
}
