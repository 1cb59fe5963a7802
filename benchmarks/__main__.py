"""`python -m benchmarks`: measure all, and write RESULTS.md; with names, those, and print them."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from . import environment

HERE = Path(__file__).parent
LEFT_OUT = ("panel", "notes", "instructions")  # of a quick run: nothing to compare with, or too slow


def main() -> None:
    if sys.argv[1:2] == ["soak"]:  # in the environment of the tests
        from . import soak

        soak.main(sys.argv[2:])
    chosen = arguments()
    environment.enter()
    run(chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="what to measure, see --list; none: all of it")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes, under two minutes")
    parser.add_argument(
        "--to",
        type=Path,
        help="write RESULTS.md and charts there, from the project's folder; a full run writes to benchmarks/",
    )
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="another checkout, for `instructions` to count beside this one"
    )
    parser.add_argument("--list", action="store_true", help="tell what there is, and measure nothing")
    return parser.parse_args()


def run(chosen: argparse.Namespace) -> None:
    from . import server

    facts = environment.machine()
    server.pin(server.ONE_CORE)
    server.start()
    parts = known_parts()
    if "instructions" in chosen.names:
        from . import instructions

        instructions.prepare(chosen.against)
    if unknown := set(chosen.names) - set(parts):
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if chosen.list:
        print("\n".join(f"{name:<14}{part.__doc__}" for name, part in parts.items()))
        return
    facts |= {"Server": server.description(), "Packages": environment.versions()}
    if failed := environment.failures():
        facts["Could not be installed"] = "; ".join(f"{name}: {error}" for name, error in failed.items())
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    from . import ours

    with ours.local_refusals(on=False):  # refusals are asked of Redis, but where it says otherwise
        measure(chosen, parts, facts)


def known_parts() -> dict[str, Callable]:
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    import django

    django.setup()
    from . import (
        accuracy,
        commands,
        cpu,
        decision,
        drf,
        growth,
        in_flight,
        instructions,
        login,
        memory,
        panel,
        profile,
        refusal,
        service,
        views,
    )

    return {
        "decision": decision.decision,
        "profile": profile.profile,
        "refusal": refusal.refusal,
        "async": in_flight.in_flight,
        "commands": commands.commands,
        "views": views.views,
        "service": service.service,
        "drf": drf.drf,
        "login": login.login,
        "memory": memory.memory,
        "accuracy": accuracy.accuracy,
        "growth": growth.growth,
        "cpu": cpu.cpu,
        "instructions": instructions.instructions,
        "panel": panel.panel,
        "notes": panel.notes,
    }


def measure(chosen: argparse.Namespace, parts: dict[str, Callable], facts: dict[str, str]) -> None:
    from . import report
    from .measure import Effort

    began = time.monotonic()
    found = {}
    for name in chosen.names or [name for name in parts if not (chosen.quick and name in LEFT_OUT)]:
        print(f"{name}: {parts[name].__doc__}\n", flush=True)
        part_began = time.monotonic()
        findings = attempt(parts[name], Effort(chosen.quick))
        found[name] = parts[name].__doc__, findings
        print("\n".join(map(report.text, findings.tables)))
        print(f"({time.monotonic() - part_began:.0f} s)\n", flush=True)
    goals = [goal for _, findings in found.values() for goal in findings.goals]
    if goals:
        print(report.text(report.goals_table(goals)))
    facts["Load after"] = environment.load()
    facts["Took"] = f"{time.monotonic() - began:.0f} s{', quick' if chosen.quick else ''}"
    if folder := chosen.to or (HERE if not chosen.names and not chosen.quick else None):
        write(folder, report.document(facts, found), [chart for _, each in found.values() for chart in each.charts])


def attempt(part: Callable, effort: object):
    """One that fails must not take the others along."""
    from .contender import Failed
    from .report import Findings, Table

    try:
        return part(effort)
    except Exception as error:  # noqa: BLE001 - shown
        traceback.print_exc()
        return Findings([Table("Failed", ("", "error"), [["all of it", Failed.by(error)]])])


def write(folder: Path, text: str, charts: list) -> None:
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    (folder / "RESULTS.md").write_text(text)
    for chart in charts:
        (folder / "charts" / f"{chart.name}.svg").write_text(chart.svg())
    print(f"Written: {folder / 'RESULTS.md'} and {len(charts)} charts")


if __name__ == "__main__":
    main()
