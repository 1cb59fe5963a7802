"""The report of `manage.py rlaas replay --html` in a real Chromium."""

from __future__ import annotations

import json
import random

import pytest
from playwright.sync_api import expect

from tests.conftest import NOW
from tests.support.commands import rlaas

WIDTHS = (390, 768, 1280)


@pytest.fixture
def report(tmp_path):
    """Write a log of clients of many kinds, and return the path of its report."""
    chance, lines = random.Random(1), []
    for number in range(60):
        rate = chance.paretovariate(1)
        for _ in range(int(10 * rate) + 1):
            at = NOW + chance.randrange(600_000)
            lines.append({"time": at, "ip": f"2001:db8:{number:x}::1", "user": "<i>" * number, "path": "/"})
    log, page = tmp_path / "access.log", tmp_path / "report.html"
    lines.sort(key=lambda line: line["time"])
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "garbage <script>alert(1)</script>\n")
    options = "--policy", "10/m by ip", "--policy", "5/10s by user, token bucket, burst 20"
    assert rlaas("replay", str(log), *options, "--html", str(page)).code == 0
    return page


@pytest.fixture
def opened(chromium, report):
    contexts, complaints = [], []

    def opened(width: int = 1280, scheme: str = "light"):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto(report.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_window(opened, screenshots, width, scheme):
    page = opened(width, scheme)
    page.screenshot(path=screenshots / f"replay-{scheme}-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = """() => [...document.querySelectorAll(".card > *, .beside > *")].filter((each) => {
      const box = each.getBoundingClientRect(), card = each.closest(".card").getBoundingClientRect();
      return box.width && box.left < card.left - 1 || box.right > card.right + 1;
    }).length"""
    assert page.evaluate(outside) == 0


def test_the_limit_can_be_dragged_and_moved_by_keys(opened):
    page = opened()
    line, plot = page.get_by_role("slider").first, page.locator("[data-distribution]").first
    refused = page.locator("[data-refused]").first
    expect(line).to_have_attribute("aria-valuenow", "10")
    before = refused.inner_text()
    line.scroll_into_view_if_needed()
    box, whole = line.bounding_box(), plot.bounding_box()
    page.mouse.move(box["x"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(whole["x"] + whole["width"] - 1, box["y"] + 60, steps=4)
    page.mouse.up()
    assert int(line.get_attribute("aria-valuenow")) > 10
    assert refused.inner_text() != before
    expect(refused).to_have_text("0 requests (0 %)")
    value = int(line.get_attribute("aria-valuenow"))
    line.press("ArrowLeft")
    expect(line).to_have_attribute("aria-valuenow", str(value - 1))
