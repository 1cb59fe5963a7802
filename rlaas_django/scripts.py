"""The Lua scripts: one file per algorithm, assembled with a driver into what Redis runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations

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
# An algorithm's file is the body of a function of these; check.lua tells what it gives.
PARAMETERS = "step, p, now, cost, touch, unique, charged_at"


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


def assemble(driver: str, algorithms: Iterable[str] = ()) -> Script:
    """One script of the prelude, these algorithms, and a driver."""
    stems = [FILES[algo] for algo in algorithms]
    parts = [_SOURCES["prelude"]]
    for algo, stem in zip(algorithms, stems, strict=True):
        parts.append(f'algorithms["{algo}"] = function({PARAMETERS})\n{_SOURCES[stem]}end\n')
    parts.append(_SOURCES[driver])
    text = "\n".join(parts)
    versions = " ".join(f"{stem}@{version(_SOURCES[stem])}" for stem in ("prelude", driver, *stems))
    return Script(driver, versions, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_SOURCES = {stem: source(stem) for stem in ("prelude", "check", "refund", "reset", "override", "note", *FILES.values())}
_SETS = [chosen for size in range(1, len(FILES) + 1) for chosen in combinations(FILES, size)]

CHECK = {frozenset(chosen): assemble("check", chosen) for chosen in _SETS}
REFUND = {frozenset(chosen): assemble("refund", chosen) for chosen in _SETS}
RESET = assemble("reset")
OVERRIDE = assemble("override")
NOTE = assemble("note")
