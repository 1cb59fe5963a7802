"""Record the runs of the playground that the documentation shows: python -m tests.browser.recorded_runs"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.browser.demo import ROOT, running

FILE = ROOT / "docs" / "_static" / "recorded.js"
PATTERNS = ("steady", "boundary", "attack", "retrying")
PREFIX = "window.RECORDED = "


def recorded() -> dict[str, Any]:
    """Return the runs in the documentation."""
    return json.loads(FILE.read_text().removeprefix(PREFIX).rstrip(";\n"))


def record(page: Any) -> dict[str, Any]:
    """Return the runs of all patterns on an open page of the playground."""
    return {name: page.evaluate("(name) => (begin(name, DEFAULTS), decisions())", name) for name in PATTERNS}


def verdicts(runs: dict[str, Any]) -> dict[str, Any]:
    """Return runs without the memory, which depends on the server."""
    return {
        name: {algo: [{**each, "memory": 0} for each in requests] for algo, requests in run.items()}
        for name, run in runs.items()
    }


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import FLAGS

    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as demo, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page()
        page.goto(f"{demo.url}/playground/")
        runs = record(page)
        browser.close()
    FILE.write_text(f"{PREFIX}{json.dumps(runs, separators=(',', ':'))};\n")
    print(f"Wrote {FILE.relative_to(ROOT)}: {FILE.stat().st_size:,} bytes.")


if __name__ == "__main__":
    main()
