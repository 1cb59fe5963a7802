"""The Lua scripts: the files of the algorithms joined with the driver, with their SHA-1 and version.

An algorithm's file is valid Lua that returns its functions. It becomes the body of `load_algorithm(name)`, which the
driver calls; in the script with all algorithms that function makes only the functions of the algorithm asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from ..core import policy

FILES = {
    policy.FIXED_WINDOW: "fixed_window",
    policy.SLIDING_WINDOW: "sliding_window",
    policy.SLIDING_WINDOW_COMPACT: "sliding_window_compact",
    policy.SLIDING_WINDOW_COUNTER: "sliding_window_counter",
    policy.TOKEN_BUCKET: "token_bucket",
}


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it is sent to Redis; `version` names its files and their versions."""

    name: str
    version: str
    text: str
    sha: str


def for_algorithms(algorithms: Iterable[str]) -> Script:
    """Return the script that runs these algorithms: the one of a single algorithm, or the one with all of them."""
    used = set(algorithms)
    return BY_ALGORITHM[used.pop()] if len(used) == 1 else ALL_ALGORITHMS


def source(stem: str) -> str:
    """Return the text of a Lua file."""
    return files("rlaas_django").joinpath("lua", f"{stem}.lua").read_text("utf-8")


def version(text: str) -> int:
    """Return the version in a file's opening comment."""
    found = re.search(r"^  Version  (\d+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(
            "A Lua file has no line '  Version  N' in its opening comment."
        )
    return int(found[1])


def join(name: str, algorithms: Iterable[str]) -> Script:
    """Join the files of some algorithms, as the cases of `load_algorithm`, with the driver."""
    sources = {algorithm: source(FILES[algorithm]) for algorithm in algorithms}
    if len(sources) == 1:
        body = "".join(sources.values())
    else:
        cases = [
            f'if name == "{algorithm}" then\n{text}'
            for algorithm, text in sources.items()
        ]
        body = f"{'else'.join(cases)}end\n"
    text = f"local function load_algorithm(name)\n{body}end\n\n{source('driver')}"
    return script(name, text, ("driver", *(FILES[algorithm] for algorithm in sources)))


def script(name: str, text: str, stems: Iterable[str]) -> Script:
    """Return a script made of files."""
    versions = " ".join(f"{stem}@{version(source(stem))}" for stem in stems)
    return Script(
        name,
        versions,
        text,
        hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(),
    )


BY_ALGORITHM = {
    algorithm: join(stem, (algorithm,)) for algorithm, stem in FILES.items()
}
ALL_ALGORITHMS = join("all", FILES)
OVERRIDE = script("override", source("override"), ("override",))
RECORD = script("record", source("record"), ("record",))
SCRIPTS = (*BY_ALGORITHM.values(), ALL_ALGORITHMS, OVERRIDE, RECORD)
