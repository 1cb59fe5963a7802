"""A real Chromium before the demo as a real process. `make browser` runs these tests; `make test` leaves them out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.demo import ROOT, Demo, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

collect_ignore_glob = [] if os.environ.get("RLAAS_BROWSER") else ["test_*.py"]

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "narrow": {"color_scheme": "light", "viewport": {"width": 400, "height": 800}},
}


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Iterator[Demo]:
    with running(tmp_path_factory.mktemp("demo")) as demo:
        yield demo


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "There is no chromium on PATH; `make browser` installs it."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    directory = ROOT / ".demo" / "screenshots"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture
def visit(chromium, demo) -> Iterator[Any]:
    """Open the start page with a look; nothing may be complained of on the way."""
    contexts, complaints = [], []

    def visit(look: str = "light", **options: Any) -> Page:
        context = chromium.new_context(base_url=demo.url, **LOOKS[look], **options)
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: _is_complaint(message) and complaints.append(message.text))
        page.goto("/")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def _is_complaint(message: Any) -> bool:
    """Errors and violations of the content security policy; but a refusal is what the demo is about."""
    expected = "Failed to load resource" in message.text and "429" in message.text
    return message.type in ("error", "warning") and not expected


@pytest.fixture
def page(visit) -> Page:
    return visit()


def unused(page: Page, name: str) -> Locator:
    """The panel of a view, shown, and with nothing used: the tests share an address."""
    panel = page.locator(f'[data-panel="{name}"]')
    if panel.is_hidden():
        page.locator(f'.choice label:has([value="{name}"])').click()
    press(panel, ".press")  # the site learns which policies there are to be reset
    panel.locator(".reset").click()
    panel.locator(".word", has_text="Reset.").wait_for()
    return panel


def press(panel: Locator, button: str) -> None:
    """Press, and wait for the answers."""
    with panel.page.expect_response(lambda response: "/try/" in response.url):
        panel.locator(button).click()
    panel.locator('[role=status][aria-busy="false"]').wait_for()
