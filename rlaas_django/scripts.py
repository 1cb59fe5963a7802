"""The Lua scripts: one file per algorithm, assembled with a driver into what Redis runs.

An algorithm's file is made of sections, each opened by a line `--# name`. Where a line `--> name` stands in a driver,
that section of the algorithm's is put in; in an algorithm's file it is another section of the same file. So Redis runs
one piece of text from top to bottom: there, calling a function and making a table take as long as deciding does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations
from textwrap import indent

from . import policy

# Each algorithm's file, and what its key ends in where the state is not at the plain key. A state that means something
# else under another window has the window in its ending, so that changing the window needs no flush.
FILES = {
    policy.FIXED_WINDOW: "fixed_window",
    policy.SLIDING_WINDOW: "sliding_window",
    policy.SLIDING_WINDOW_COMPACT: "sliding_window_compact",
    policy.SLIDING_WINDOW_COUNTER: "sliding_window_counter",
    policy.TOKEN_BUCKET: "token_bucket",
}
ENDINGS = {
    policy.FIXED_WINDOW: "",  # the script adds the window's index, which only the server's clock tells
    policy.SLIDING_WINDOW: "",
    policy.SLIDING_WINDOW_COMPACT: ":log",
    policy.SLIDING_WINDOW_COUNTER: ":counter-{window}",
    policy.TOKEN_BUCKET: ":bucket-{window}",
}


@dataclass(frozen=True, slots=True)
class Script:
    """An assembled script; `version` names the files in it and their versions."""

    name: str
    version: str
    text: str
    sha: str


def source(stem: str) -> str:
    return files(__package__).joinpath("lua", f"{stem}.lua").read_text("utf-8")


def version(text: str) -> int:
    """The version in a file's opening comment."""
    found = re.search(r"^  Version  (\d+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("A Lua file has no line '  Version  N' in its opening comment.")
    return int(found[1])


def sections(text: str) -> dict[str, str]:
    """What an algorithm's file is made of, after its opening comment."""
    _, *parts = re.split(r"^--# (\w+)\n", text, flags=re.MULTILINE)
    return {name: f"{body.strip()}\n" for name, body in zip(parts[::2], parts[1::2], strict=True)}


def filled(text: str, put: Callable[[str], str]) -> str:
    """A text with what is put in where a line names a section, indented as that line is."""
    return re.sub(r"^( *)--> (\w+)\n", lambda found: indent(put(found[2]), found[1]), text, flags=re.MULTILINE)


def section(algo: str, name: str) -> str:
    """A section of an algorithm, with the others that it names."""
    return filled(_SECTIONS[algo][name], lambda inner: section(algo, inner))


def assemble(driver: str, algorithms: Collection[str] = ()) -> Script:
    """One script of the prelude and a driver, with these algorithms in it."""

    def put(name: str) -> str:
        bodies = {algo: section(algo, name) for algo in algorithms if name in _SECTIONS[algo]}
        if name == "state":  # is to last
            return "".join(bodies.values())
        if len(algorithms) == 1:
            return "".join(f"do\n{indent(body, '  ')}end\n" for body in bodies.values())
        cases = [f'if algorithm == "{algo}" then\n{indent(body, "  ")}' for algo, body in bodies.items()]
        return f"{'else'.join(cases)}end\n" if cases else ""

    stems = ("prelude", driver, *(FILES[algo] for algo in algorithms))
    text = f"{_SOURCES['prelude']}\n{filled(_SOURCES[driver], put)}"
    versions = " ".join(f"{stem}@{version(_SOURCES[stem])}" for stem in stems)
    return Script(driver, versions, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_SOURCES = {stem: source(stem) for stem in ("prelude", "check", "refund", "reset", "override", "note", *FILES.values())}
_SECTIONS = {algo: sections(_SOURCES[stem]) for algo, stem in FILES.items()}
_SETS = [chosen for size in range(1, len(FILES) + 1) for chosen in combinations(FILES, size)]

CHECK = {frozenset(chosen): assemble("check", chosen) for chosen in _SETS}
REFUND = {frozenset(chosen): assemble("refund", chosen) for chosen in _SETS}
RESET = assemble("reset")
OVERRIDE = assemble("override")
NOTE = assemble("note")
