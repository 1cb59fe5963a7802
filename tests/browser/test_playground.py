"""The playground as a visitor sees it: every decision comes from the scripts in Redis."""

from __future__ import annotations

import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import LOOKS
from tests.browser.demo import ROOT
from tests.browser.recorded_runs import record, recorded, verdicts

FIXED, SLIDING, BUCKET = "fixed-window-algo", "sliding-window-algo", "token-bucket-algo"


@pytest.fixture
def playground(visit):
    """The playground, after its first run is drawn."""

    def open_playground(look: str = "light", run: str = "", **options) -> Page:
        page = visit(look, **options)
        page.goto(f"/playground/{run}")
        expect(page.locator(".message")).not_to_be_empty()
        return page

    return open_playground


def figure(page: Page, algo: str, name: str):
    return page.locator(f'.lane[data-algo="{algo}"] [data-figure="{name}"]')


def test_the_fixed_window_admits_twice_its_limit_around_a_boundary(playground):
    page = playground()
    expect(figure(page, FIXED, "most")).to_have_text("10")
    expect(figure(page, SLIDING, "most")).to_have_text("5")
    expect(page.locator(f'.lane[data-algo="{FIXED}"] .band')).to_have_count(1)
    expect(page.locator(f'.lane[data-algo="{SLIDING}"] .band')).to_have_count(0)


def test_a_waiting_client_is_admitted_at_the_end_of_its_wait(playground):
    page = playground()
    page.locator("[name=pattern]").select_option("retrying")
    lane = page.locator(f'.lane[data-algo="{SLIDING}"]')
    expect(lane.locator("circle.again").first).to_be_visible()
    page.locator(".table summary").click()
    rows = page.locator("tbody tr", has_text="Sliding window").all_inner_texts()
    assert any("admitted (sent again)" in row for row in rows)


def test_one_can_step_through_time(playground):
    page = playground()
    page.locator("[name=time]").fill("0")
    expect(figure(page, FIXED, "admitted")).to_have_text("0")
    for _ in range(10):
        page.locator("[data-action=forward]").click()
    expect(page.locator("output")).to_have_text("10.0 s")
    expect(figure(page, FIXED, "admitted")).to_have_text("5")
    page.locator("[data-action=back]").click()
    expect(page.locator("output")).to_have_text("9.0 s")
    expect(figure(page, FIXED, "admitted")).to_have_text("0")


def test_the_keyboard_sends_and_steps(playground):
    page = playground()
    page.locator("[name=pattern]").select_option("own")
    page.locator("h1").click()
    for _ in range(6):
        page.keyboard.press("s")
    expect(figure(page, SLIDING, "admitted")).to_have_text("5")
    expect(figure(page, SLIDING, "refused")).to_have_text("1")
    expect(figure(page, SLIDING, "wait")).to_have_text("10.00 s")
    expect(figure(page, BUCKET, "admitted")).to_have_text("6")
    page.keyboard.press("ArrowRight")
    expect(figure(page, SLIDING, "wait")).to_have_text("9.00 s")


def test_it_plays(playground):
    page = playground()
    page.locator("[data-action=restart]").click()
    page.locator("[name=speed]").select_option("5")
    page.locator("[data-action=play]").click()
    expect(page.locator("[data-action=play]")).to_have_text("Pause")
    expect(page.locator("[data-action=play]")).to_have_text("Play", timeout=15_000)
    expect(figure(page, FIXED, "admitted")).to_have_text("11")


def test_settings_change_from_the_present_on(playground):
    page = playground()
    page.locator("[name=pattern]").select_option("own")
    page.locator("[data-action=send]").click()
    page.locator("[data-action=forward]").click()
    page.locator("[name=limit]").fill("1")
    page.locator("[name=limit]").press("Tab")
    page.locator("[data-action=send]").click()
    expect(figure(page, SLIDING, "refused")).to_have_text("1")
    expect(figure(page, SLIDING, "count")).to_have_text("1 / 1")


def test_a_link_brings_a_run_back(playground):
    page = playground()
    page.locator("[name=pattern]").select_option("own")
    page.locator("[data-action=forward]").click()
    page.locator("[data-action=send]").click()
    expect(figure(page, SLIDING, "admitted")).to_have_text("1")
    again = playground(run=page.evaluate("location.hash"))
    expect(figure(again, SLIDING, "admitted")).to_have_text("1")
    expect(again.locator("output")).to_have_text("1.0 s")


@pytest.mark.parametrize("run", ["#p=own&s=x&t=y&r=%3Cscript%3E", "#p=__proto__&s=0.0.0.0.0", "#s=0.5.10.8.1_1.2"])
def test_a_broken_link_shows_a_message_or_the_usual_run(playground, run):
    page = playground(run=run)
    expect(page.locator(".lane")).to_have_count(5)


@pytest.mark.parametrize("width", [390, 768, 1024, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(playground, screenshots, width, scheme):
    page = playground(scheme if scheme in LOOKS else "light")
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("[name=pattern]").select_option("retrying")
    page.locator(".table summary").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    beyond = page.evaluate("""() => Array.from(document.querySelectorAll(".lane *, .transport > *, .controls > *"))
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).length""")
    assert beyond == 0
    page.screenshot(path=screenshots / f"playground-{width}-{scheme}.png", full_page=True)


def test_the_runs_in_the_documentation_are_those_of_the_scripts(playground):
    """If this fails after a change of the playground: python -m tests.browser.recorded_runs"""
    assert verdicts(record(playground())) == verdicts(recorded())


def test_the_documentation_shows_recorded_runs(chromium, tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True)
    page = chromium.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "playground.html").as_uri())
    expect(figure(page, FIXED, "most")).to_have_text("10")
    page.locator("[name=pattern]").select_option("retrying")
    expect(page.locator(f'.lane[data-algo="{SLIDING}"] circle.again').first).to_be_visible()
    page.close()
    assert errors == []
