"""Run `manage.py rlaas` inside the test's process, and read what it printed."""

from __future__ import annotations

import io
import json
from typing import Any, NamedTuple

from tests.internals import RlaasCommand


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def rlaas(*arguments: str, terminal: bool = False) -> Result:
    """Run a subcommand as the shell does."""
    out, err = (Terminal(), Terminal()) if terminal else (io.StringIO(), io.StringIO())
    command = RlaasCommand(stdout=out, stderr=err)
    code = 0
    try:
        command.run_from_argv(["manage.py", "rlaas", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
