"""The Lua files and the scripts made of them: valid, versioned, and nothing in them that a server or fakeredis lacks.

`python -m tests.backend.test_scripts` rewrites tests/backend/lua_versions.json after a version was raised.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lupa.lua51
import pytest
from rlaas_django.backend import scripts
from rlaas_django.backend.scripts import OVERRIDE, RECORD, Script, for_algorithms
from rlaas_django.core.algorithms import ALGORITHMS, FIXED_WINDOW, SLIDING_WINDOW, TOKEN_BUCKET

LUA = Path(scripts.__file__).parent.with_name("lua")
LOCK = Path(__file__).with_name("lua_versions.json")
FILES = {name: algorithm.lua for name, algorithm in ALGORITHMS.items()}
BY_ALGORITHM = {name: for_algorithms([name]) for name in ALGORITHMS}
ALL_ALGORITHMS = for_algorithms(ALGORITHMS)
EVERY = [*BY_ALGORITHM.values(), ALL_ALGORITHMS, OVERRIDE, RECORD]
FUNCTIONS = ("check", "charge", "refund", "reset")

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
        f"{', '.join(changed)} changed: bump 'Version' in the file's header and run "
        "`python -m tests.backend.test_scripts`"
    )


def test_the_lock_is_not_renewed_for_a_change_without_a_new_version():
    was = {"a.lua": {"version": 2, "sha256": "x"}}
    assert stale(was, {"a.lua": {"version": 2, "sha256": "y"}}) == ["a.lua"]
    assert stale(was, {"a.lua": {"version": 1, "sha256": "y"}}) == ["a.lua"]
    assert stale(was, {"a.lua": {"version": 3, "sha256": "y"}}) == []
    assert stale(was, was) == stale({}, was) == stale(was, {}) == []


@pytest.mark.parametrize("path", sorted(LUA.glob("*.lua")), ids=lambda path: path.stem)
def test_every_file_is_valid_lua(path):
    if luac := shutil.which("luac5.1") or shutil.which("luac"):
        done = subprocess.run([luac, "-p", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        lupa.lua51.LuaRuntime().compile(path.read_text("utf-8"))


def test_there_is_a_script_per_algorithm_and_one_with_all():
    assert set(BY_ALGORITHM) == set(ALGORITHMS)
    for algo in ALGORITHMS:
        assert for_algorithms([algo]) is for_algorithms([algo, algo]) is BY_ALGORITHM[algo]
    assert for_algorithms([FIXED_WINDOW, TOKEN_BUCKET]) is for_algorithms(iter(ALGORITHMS)) is ALL_ALGORITHMS


def test_a_script_contains_the_driver_and_its_algorithms():
    for script in (*BY_ALGORITHM.values(), ALL_ALGORITHMS):
        assert script.text.endswith(scripts.source("driver"))
        for algo, stem in FILES.items():
            assert (scripts.source(stem) in script.text) == (script in (BY_ALGORITHM[algo], ALL_ALGORITHMS))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_script_with_all_loads_only_the_algorithm_asked_for(algo):
    """Functions are made anew on every call, so those that are not used must not be made."""
    lua = lupa.lua51.LuaRuntime()
    loader = ALL_ALGORITHMS.text.removesuffix(scripts.source("driver"))
    lines = lua.execute(f"""{loader}
        local functions, lines = {{ load_algorithm("{algo}") }}, {{}}
        for i = 1, 4 do
          lines[i] = debug.getinfo(functions[i], "S").linedefined
        end
        return lines""")
    text = ALL_ALGORITHMS.text.splitlines()
    first = text.index(f'{"" if algo == FIXED_WINDOW else "else"}if name == "{algo}" then')
    own = scripts.source(FILES[algo]).count("\n")
    assert len(lines) == 4
    assert all(first < line <= first + 1 + own for line in lines.values())


@pytest.mark.parametrize("stem", FILES.values())
def test_a_header_says_what_the_functions_take_and_return(stem):
    """A function may leave out its last parameters if it uses none of them. A charge gets what the check returns."""
    takes, returns = {}, {}
    text = scripts.source(stem)
    header, code = text.split("]]", 1)
    assert re.search(r"^  State    ", header, re.MULTILINE)
    for name in FUNCTIONS:
        found = re.search(rf"^  {name:<8} (.+?)\s+-> (.+)$", header, re.MULTILINE)
        assert found, name
        takes[name], returns[name] = found[1].split(", "), found[2].split(", ")
        parameters = re.search(rf"^local function {name}\((.*)\)$", code, re.MULTILINE)[1].split(", ")
        assert parameters == takes[name][: len(parameters)]
    assert takes["check"] == ["key", "now", "at", "limit", "window", "ttl", "cost", "capacity", "charging"]
    assert takes["charge"] == ["key", "now", "at", "limit", "window", "ttl", "cost", "unique", *returns["check"][3:]]
    assert takes["refund"] == ["key", "now", "at", "limit", "window", "ttl", "cost", "unique", "charged_at"]
    assert takes["reset"] == ["key", "now", "window"]
    assert returns["check"][:3] == ["count", "wait", "reset_after"]
    assert returns["charge"] in (["reset_after", "charged_at"], ["reset_after", "charged_at", "more_after"])
    assert text.endswith(f"\nreturn {', '.join(FUNCTIONS)}\n")


def test_each_script_has_the_sha_of_its_text():
    for script in EVERY:
        assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()
    assert len({script.sha for script in EVERY}) == len(EVERY)


@pytest.mark.parametrize("us", [0, 7, 999, 1_000, 12_345, 99_999, 100_000, 999_999])
def test_the_time_is_in_whole_ms_however_short_the_us_are(us):
    lua = lupa.lua51.LuaRuntime()
    commands = []

    def call(command, *words):
        commands.append((command, *words))
        return {"TIME": lua.table("1700000000", str(us)), "EXISTS": 0, "GET": False}.get(command)

    lua.globals().redis = lua.table(call=call)
    lua.globals().KEYS = lua.table("counter", "override")
    lua.globals().ARGV = lua.table(
        "", "check", "unique", "1", TOKEN_BUCKET, "5", "60000", "5", "120000", "0", "default"
    )
    reply = lua.execute(BY_ALGORITHM[TOKEN_BUCKET].text)
    ms = 1_700_000_000_000 + us // 1000
    assert reply[1] == ms
    assert commands[-1] == ("SET", "counter", f"60000:{ms}:{100 * ms + 1}", "PX", 72_000)
    assert [command for command, *_ in commands].count("TIME") == 1


def test_a_version_names_the_files_and_their_versions():
    of = {Path(name).stem: f"{Path(name).stem}@{file['version']}" for name, file in lua_files().items()}
    assert ALL_ALGORITHMS.version.split() == [of["driver"], *(of[stem] for stem in FILES.values())]
    for algo, stem in FILES.items():
        assert BY_ALGORITHM[algo].version.split() == [of["driver"], of[stem]]
    for script in (OVERRIDE, RECORD):
        assert script.version == of[script.name]


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


def test_a_check_of_cost_0_charges_nothing(server):
    for algo, script in BY_ALGORITHM.items():
        policy = (algo, 5, 60_000, 5, 120_000, 0, "p")
        reply = server.eval(script.text, 2, "counter", "override", 1_700_000_000_000, "check", "u", 0, *policy)
        assert reply[:4] + reply[5:] == [1_700_000_000_000, 1, 0, 5, 0, 5, -1]  # all but when more can be used
    assert server.keys("*") == []


def test_reset_and_refund_take_any_mix_of_algorithms(server):
    now, algorithms = 1_700_000_000_000, (SLIDING_WINDOW, FIXED_WINDOW, TOKEN_BUCKET, SLIDING_WINDOW)
    keys = [f"counter-{i}" for i in range(4)]
    words = [word for algo in algorithms for word in (algo, 5, 60_000, 5, 60_000, 0, "p")]
    reply = server.eval(ALL_ALGORITHMS.text, 5, *keys, "override", now, "check", "u", 2, *words)
    stamps = reply[7::7]
    assert stamps == [now, now, 100 * now + 2, now]
    words = [word for algo, at in zip(algorithms, stamps, strict=True) for word in (algo, 5, 60_000, 5, 60_000, at)]
    assert server.eval(ALL_ALGORITHMS.text, 3, *keys[:3], now, "refund", "u", 2, *words[:18]) == [2, 2, 2]
    assert server.eval(ALL_ALGORITHMS.text, 3, *keys[:3], now, "refund", "u", 2, *words[:18]) == [0, 0, 0]
    words = [word for algo in algorithms for word in (algo, 60_000)]
    assert server.eval(ALL_ALGORITHMS.text, 4, *keys, now, "reset", "", 0, *words) == 3  # an empty ZSET is gone
    assert server.keys("*") == []


def as_text(reply: str | bytes) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply


@pytest.mark.parametrize("script", EVERY, ids=lambda script: script.name)
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
