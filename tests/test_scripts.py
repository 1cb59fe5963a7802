"""The Lua as it is assembled: versions that tell every change, and nothing that some server or fakeredis lacks.

`python -m tests.test_scripts` writes tests/lua_versions.json anew after a version was raised.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import lupa.lua51
import pytest
from rlaas_django.policy import ALGORITHMS, FIXED_WINDOW, TOKEN_BUCKET
from rlaas_django.scripts import CHECK, FILES, REFUND, RESET, Script

from rlaas_django import scripts

LUA = Path(scripts.__file__).with_name("lua")
LOCK = Path(__file__).with_name("lua_versions.json")
SETS = [frozenset(chosen) for size in range(1, 6) for chosen in combinations(ALGORITHMS, size)]
ALONE = [value for value in vars(scripts).values() if isinstance(value, Script)]  # those without algorithms
EVERY = [*CHECK.values(), *REFUND.values(), *ALONE]

# What both Redis 6.2 and fakeredis give a script; os, struct, bit and cmsgpack are missing in one or the other.
GLOBALS = {"ARGV", "KEYS", "redis", "string", "math", "table"}
GLOBALS |= {"ipairs", "pairs", "next", "select", "tonumber", "tostring", "type", "unpack"}
# Fields of those that are missing in one or the other, or (random) give the same numbers each time on Redis 6.2.
FORBIDDEN = [r"math\.random", r"redis\.(replicate_commands|set_repl|sha1hex|breakpoint|debug)", r"string\.dump"]


def lua_files() -> dict[str, dict[str, int | str]]:
    """The version and the digest of each file."""
    return {
        path.name: {
            "version": scripts.version(path.read_text("utf-8")),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(LUA.glob("*.lua"))
    }


def stale(locked: dict, found: dict) -> list[str]:
    """The files that changed while their version did not."""
    both = locked.keys() & found.keys()
    return sorted(
        name
        for name in both
        if locked[name]["sha256"] != found[name]["sha256"] and locked[name]["version"] >= found[name]["version"]
    )


def test_a_lua_file_that_changed_has_a_new_version():
    locked, found = json.loads(LOCK.read_text("utf-8")), lua_files()
    changed = sorted(name for name in locked | found if locked.get(name) != found.get(name))
    assert not changed, (
        f"{', '.join(changed)} changed: bump 'Version' in the file's header and run `python -m tests.test_scripts`"
    )


def test_the_lock_is_not_renewed_for_a_change_without_a_new_version():
    was = {"a.lua": {"version": 2, "sha256": "x"}}
    assert stale(was, {"a.lua": {"version": 2, "sha256": "y"}}) == ["a.lua"]
    assert stale(was, {"a.lua": {"version": 1, "sha256": "y"}}) == ["a.lua"]
    assert stale(was, {"a.lua": {"version": 3, "sha256": "y"}}) == []
    assert stale(was, was) == stale({}, was) == stale(was, {}) == []


def test_there_is_a_script_for_each_set_of_algorithms():
    assert len(SETS) == 31
    assert set(CHECK) == set(REFUND) == set(SETS)


def test_each_script_has_the_sha_of_its_text():
    for script in EVERY:
        assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()
    assert len({script.sha for script in EVERY}) == len(EVERY)


def test_a_script_holds_just_the_algorithms_asked_for():
    for chosen in SETS:
        for script, own in ((CHECK[chosen], ("state", "check", "wait", "charge")), (REFUND[chosen], ("refund",))):
            text = unindented(script.text)
            for algo in ALGORITHMS:
                for name in own:
                    assert (unindented(scripts.section(algo, name)) in text) == (algo in chosen)
            told_apart = set(re.findall(r'if algorithm == "(.+)" then$', script.text, re.MULTILINE))
            assert told_apart == (chosen if len(chosen) > 1 else set())
    assert RESET in ALONE
    assert not [script.name for script in ALONE if "algorithm ==" in script.text]


def unindented(text: str) -> str:
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


def test_each_section_is_named_where_it_goes_and_nothing_else_is():
    named = {
        path.stem: set(re.findall(r"^ *--> (.+)$", path.read_text("utf-8"), re.MULTILINE)) for path in LUA.iterdir()
    }
    for stem in FILES.values():
        own = set(scripts.sections(scripts.source(stem)))
        assert named[stem] < own <= named["check"] | named["refund"] | named[stem]
        assert own >= {"check", "wait", "charge", "refund"}
    assert not [script.version for script in EVERY if re.search(r"^ *--[>#]", script.text, re.MULTILINE)]


@pytest.mark.parametrize("us", [0, 7, 999, 1_000, 12_345, 99_999, 100_000, 999_999])
def test_the_time_is_in_whole_ms_however_short_the_us_are(us):
    lua = lupa.lua51.LuaRuntime()
    lua.globals().ARGV = lua.table("")
    lua.globals().redis = lua.table(call=lambda _: lua.table("1700000000", str(us)))
    told = lua.execute(f"{scripts.source('prelude')} return at, string.format('%.0f', now)")
    assert told == (str(1_700_000_000_000 + us // 1000),) * 2


def test_a_version_names_the_files_and_their_versions():
    of = {Path(name).stem: f"{Path(name).stem}@{file['version']}" for name, file in lua_files().items()}
    both = CHECK[frozenset([TOKEN_BUCKET, FIXED_WINDOW])]
    assert (both.name, both.version.split()) == (
        "check",
        [of["prelude"], of["check"], of["fixed_window"], of["token_bucket"]],
    )
    assert REFUND[frozenset([TOKEN_BUCKET])].version.split() == [of["prelude"], of["refund"], of["token_bucket"]]
    for script in ALONE:
        assert script.version.split() == [of["prelude"], of[script.name]]


def test_every_lua_file_is_in_a_script():
    stems = {part.partition("@")[0] for script in EVERY for part in script.version.split()}
    assert {f"{stem}.lua" for stem in stems} == set(lua_files())


@pytest.mark.parametrize("text", ["-- no version", "--[[\n  Version  x\n]]", "--[[\n  Version 1\n]]"])
def test_a_file_without_a_version_is_refused(text):
    with pytest.raises(ValueError, match="Version  N"):
        scripts.version(text)


def test_the_server_takes_every_script_and_knows_it_by_our_sha(server):
    for script in EVERY:
        assert as_text(server.script_load(script.text)) == script.sha
    assert all(server.script_exists(*(script.sha for script in EVERY)))


def as_text(reply: str | bytes) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply


@pytest.mark.parametrize("script", [CHECK[SETS[-1]], REFUND[SETS[-1]], *ALONE], ids=lambda script: script.name)
def test_no_script_sets_a_global_or_reads_one_that_some_server_lacks(script: Script):
    """Found in the bytecode: a server tells only of those it comes upon."""
    read, written = used_globals(script.text)
    assert written == set()
    assert read <= GLOBALS


@pytest.mark.parametrize(
    "text", ["x = 1", "local function f() return { function() x = 2 end } end", "function x() end"]
)
def test_a_global_is_found_wherever_it_is_set(text):
    assert used_globals(text) == (set(), {"x"})


def test_a_global_is_found_wherever_it_is_read():
    assert used_globals("x = x") == ({"x"}, {"x"})
    text = "local x, bit = 1, 2\nreturn function(os) return os, bit, struct.pack('>I4', x) end"
    assert used_globals(text) == ({"struct"}, set())


@pytest.mark.parametrize("name", sorted(lua_files()))
def test_no_lua_file_uses_what_some_server_lacks(name):
    assert used_fields((LUA / name).read_text("utf-8")) == []


def test_what_a_comment_says_is_not_used():
    assert used_fields("--[[ math.random\n redis.sha1hex ]]\nlocal x = 1 -- string.dump") == []
    assert used_fields("local x = math.random() -- why") == ["math.random"]


def used_fields(text: str) -> list[str]:
    code = re.sub(r"--\[\[.*?\]\]|--[^\n]*", "", text, flags=re.DOTALL)
    return [found[0] for pattern in FORBIDDEN for found in re.finditer(rf"\b{pattern}\b", code)]


def used_globals(text: str) -> tuple[set[str], set[str]]:
    """The globals that a Lua text reads, and those it sets, anywhere in it."""
    lua = lupa.lua51.LuaRuntime(encoding=None)
    dump = lua.eval("function(text) return string.dump(assert(loadstring(text))) end")(text.encode())
    names: dict[int, set[str]] = {Bytecode.GETGLOBAL: set(), Bytecode.SETGLOBAL: set()}
    for operation, name in Bytecode(dump).globals():
        names[operation].add(name)
    return names[Bytecode.GETGLOBAL], names[Bytecode.SETGLOBAL]


class Bytecode:
    """As much of Lua 5.1's binary form as tells which globals a program uses (lundump.c, lopcodes.h)."""

    GETGLOBAL, SETGLOBAL = 5, 7
    STRING = 4
    HEADER = b"\x1bLua\x51\x00\x01\x04\x08\x04\x08\x00"  # 5.1 as 64-bit machines have it

    def __init__(self, dump: bytes) -> None:
        assert dump.startswith(self.HEADER)
        self.rest = dump[len(self.HEADER) :]

    def take(self, form: str) -> tuple:
        size = struct.calcsize(f"<{form}")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return struct.unpack(f"<{form}", taken)

    def number(self) -> int:
        return self.take("i")[0]

    def string(self) -> str:
        (size,) = self.take("Q")
        return self.take(f"{size}s")[0].rstrip(b"\0").decode("latin-1")

    def constant(self) -> str | None:
        (kind,) = self.take("B")
        if kind == self.STRING:
            return self.string()
        self.take({0: "", 1: "B", 3: "d"}[kind])  # nil, boolean, number
        return None

    def globals(self) -> Iterator[tuple[int, str]]:
        """The operations on globals in a function and in those within it, with the names."""
        self.string()  # the source
        self.take("iiBBBB")  # lines, upvalues, parameters, variadic, stack
        code = self.take(f"{self.number()}I")
        constants = [self.constant() for _ in range(self.number())]
        for instruction in code:
            if instruction & 0x3F in (self.GETGLOBAL, self.SETGLOBAL):
                yield instruction & 0x3F, str(constants[instruction >> 14])
        for _ in range(self.number()):
            yield from self.globals()
        self.take(f"{self.number()}i")  # what is left is for debuggers: lines, locals, upvalues
        for _ in range(self.number()):
            self.string()
            self.take("ii")
        for _ in range(self.number()):
            self.string()


def renew_lock() -> None:
    locked, found = json.loads(LOCK.read_text("utf-8")) if LOCK.exists() else {}, lua_files()
    if unchanged := stale(locked, found):
        sys.exit(f"Not written: bump 'Version' in the header of {', '.join(unchanged)} first.")
    LOCK.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    print(f"{LOCK.name}: {len(found)} files")


if __name__ == "__main__":
    renew_lock()
