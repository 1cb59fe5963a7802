"""Set up: scripts on the servers, the memory of counters, tokens of the service."""

from __future__ import annotations

import hashlib
import json
import secrets
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from django.template.defaultfilters import filesizeformat, pluralize

from .. import backend, conf
from ..backend.scripts import SCRIPTS
from ..core.callers import VERBS, parse_tokens
from ..core.keys import COUNTER_PREFIX, parse_counter_key
from ..operators import usage
from .base import Output, Styled, argument, subcommand

LOADED = Styled("loaded", "SUCCESS")
NOT_LOADED = Styled("not loaded", "WARNING")


@subcommand(
    argument(
        "--load",
        action="store_true",
        help="Load them first; otherwise the first decision does.",
    ),
    example="manage.py rlaas scripts --load",
)
def scripts(options: Namespace, output: Output) -> None:
    """List the Lua scripts: version, SHA-1, and on which servers they are loaded."""
    commands: list[tuple[str, ...]] = []
    if options.load:
        commands = [("SCRIPT", "LOAD", script.text) for script in SCRIPTS]

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
        output.table(columns, map(_script_cells, rows))


def _script_cells(row: dict[str, Any]) -> tuple[object, ...]:
    flags = row["loaded"].values()
    states = [LOADED if flag else NOT_LOADED for flag in flags]
    return (row["name"], row["version"], row["sha1"], *states)


@subcommand(
    argument(
        "--identities",
        type=int,
        default=1_000_000,
        metavar="NUMBER",
        help="Estimate for so many identities under each policy; 1,000,000.",
    ),
    argument(
        "--sample",
        type=int,
        default=10_000,
        metavar="KEYS",
        help="How many keys to measure at most; 10,000.",
    ),
    example="manage.py rlaas memory --identities 1000000",
)
def memory(options: Namespace, output: Output) -> None:
    """Measure the memory of each policy's counters, in a sample of the keys."""
    sample = dict(_measure(max(1, options.sample)))
    counters: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for key, size in sample.items():
        pair = parse_counter_key(key)
        if pair is not None and size:  # it has not expired
            name, identity = pair
            counters[name].append((identity, size))

    rows = [
        _memory_row(name, counters[name], options.identities)
        for name in sorted(counters)
    ]
    if output.as_json:
        output.json({"sampled": len(sample), "policies": rows})
    elif rows:
        output.table(
            (
                "policy",
                "algorithm",
                ">keys",
                ">largest key",
                ">per identity",
                f">{options.identities:,} identities",
            ),
            map(_memory_cells, rows),
        )
        output.line()
        output.line(
            f"Measured {len(sample):,} key{pluralize(sample)} by MEMORY USAGE, "
            "with the usage that identities have now."
        )
    else:
        output.line("There are no counters in Redis.")


def _measure(most: int) -> Iterator[tuple[str, int]]:
    """Yield at most so many keys of counters, each with its bytes."""
    for page in backend.scan(f"{COUNTER_PREFIX}*"):
        keys = page[:most]
        sizes = backend.run_commands([("MEMORY", "USAGE", key) for key in keys])
        yield from zip(keys, sizes, strict=True)

        most -= len(keys)
        if not most:
            return


def _memory_row(
    name: str, counters: list[tuple[str, int]], identities: int
) -> dict[str, Any]:
    """Return a row, of the identity and the bytes of each counter of a policy."""
    policy = usage.policies().get(name)
    algorithm = ""  # of a policy that this site does not have any more
    if policy is not None:
        algorithm = policy.algo or conf.config().algo

    sizes = [size for _, size in counters]
    # An identity may have counters of several windows.
    measured = {identity for identity, _ in counters}
    mean = round(sum(sizes) / len(measured))
    return {
        "policy": name,
        "algorithm": algorithm,
        "keys": len(sizes),
        "largest": max(sizes),
        "bytes_per_identity": mean,
        "estimate": mean * identities,
    }


def _memory_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["policy"],
        row["algorithm"],
        f"{row['keys']:,}",
        filesizeformat(row["largest"]),
        filesizeformat(row["bytes_per_identity"]),
        filesizeformat(row["estimate"]),
    )


@subcommand(
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
    example="manage.py rlaas token new billing --verbs check refund --policies search",
)
def token(options: Namespace, output: Output) -> None:
    """Make a token for a caller of the HTTP service.

    It is printed once, and the settings keep its digest.
    """
    secret = f"rlaas_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()

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
            {"name": options.name, "token": secret, "digest": digest, "entry": entry}
        )
        return
    output.line("The token, which is not shown again:")
    output.line()
    output.line("  ", Styled(secret, "SUCCESS"))
    output.line()
    output.line("Its entry for RATE_LIMITER['SERVICE']['TOKENS']:")
    output.line()
    output.line(f"  {json.dumps(options.name)}: {json.dumps(entry)},")
