"""The Lua scripts.

They are the files of the algorithms, joined with the driver. An algorithm's file is
valid Lua that returns its functions. It becomes the body of `load_algorithm(name)`,
which the driver calls; in the script with all algorithms that function makes only the
functions of the algorithm that is wanted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..core.algorithms import ALGORITHMS


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it is sent to Redis.

    `version` names its files and their versions.
    """

    name: str
    version: str
    text: str
    sha: str


def for_algorithms(algorithms: Iterable[str]) -> Script:
    """Return the script of one algorithm.

    For several, return the script with all of them.
    """
    names = set(algorithms)
    if len(names) > 1:
        return _join(tuple(ALGORITHMS))
    return _join(tuple(names))


def source(stem: str) -> str:
    """Return the text of a Lua file."""
    return files("rlaas_django").joinpath("lua", f"{stem}.lua").read_text("utf-8")


def version(text: str) -> int:
    """Return the version in a file's opening comment."""
    match = re.search(r"^  Version  (\d+)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(
            "A Lua file has no line '  Version  N' in its opening comment."
        )
    return int(match[1])


@cache
def _join(names: tuple[str, ...]) -> Script:
    """Join the files of algorithms, as cases of `load_algorithm`, with the driver."""
    stems = [ALGORITHMS[name].lua for name in names]
    if len(names) == 1:
        name = stems[0]
        body = source(name)
    else:
        name = "all"
        cases = [
            f'if name == "{algorithm}" then\n{source(stem)}'
            for algorithm, stem in zip(names, stems, strict=True)
        ]
        body = f"{'else'.join(cases)}end\n"
    text = f"local function load_algorithm(name)\n{body}end\n\n{source('driver')}"
    return _script(name, text, ["driver", *stems])


def _script(name: str, text: str, stems: Iterable[str]) -> Script:
    versions = " ".join([f"{stem}@{version(source(stem))}" for stem in stems])
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, versions, text, sha)


OVERRIDE = _script("override", source("override"), ["override"])
RECORD = _script("record", source("record"), ["record"])
SCRIPTS = (
    *[for_algorithms([name]) for name in ALGORITHMS],
    for_algorithms(ALGORITHMS),
    OVERRIDE,
    RECORD,
)
