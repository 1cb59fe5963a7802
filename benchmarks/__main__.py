"""`python -m benchmarks`: measure all; with names, those; with --list, tell what there is."""

from __future__ import annotations

import argparse
import os
import time


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    import django

    django.setup()
    from . import cpu, panel

    known = {"cpu": cpu.cpu, "memory": cpu.memory, "panel": panel.panel, "notes": panel.notes}
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(known)}; none: all of them")
    parser.add_argument("--list", action="store_true", help="tell what there is, and measure nothing")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(known):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not chosen.list:
        print(f"On {cpu.server()}\n")
    for name in chosen.names or known:
        print(f"{name}: {known[name].__doc__}", flush=True)
        if not chosen.list:
            began = time.monotonic()
            print()
            known[name]()
            print(f"({time.monotonic() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
