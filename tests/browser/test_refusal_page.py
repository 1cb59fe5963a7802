"""The built-in page of a refusal in a real Chromium, under a strict content security policy."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.admin_fixtures import _open_page, _site, _users, send  # noqa: F401
from tests.browser.conftest import LOOKS
from tests.browser.test_demo import CONTRAST


@pytest.fixture
def refused(open_page):
    """Open the page of a limit of 5 per minute that is used up, on a clock that stands still."""

    def refused(**options):
        assert send(None, "/login/", times=6, address="127.0.0.1")[-1] == 429
        page = open_page(None, "/admin/login/", **options)
        if options.get("java_script_enabled", True):
            page.clock.install()
            page.clock.pause_at("2100-01-01")
        assert page.goto("/login/").status == 429
        return page

    return refused


def test_it_counts_down_and_then_offers_to_continue(refused):
    page = refused()
    clock, status = page.get_by_role("timer"), page.get_by_role("status")
    expect(page.get_by_role("heading")).to_have_text("Too many requests")
    expect(page.get_by_role("banner")).to_have_text(re.compile("^localhost"))
    expect(clock).to_have_text(re.compile(r"^(1:00|0:[3-5]\d)$"))
    shown = re.compile(r"^Requests are allowed again from \d\d:\d\d:\d\d [A-Z]+\.$")
    expect(status).to_have_text(shown, use_inner_text=True)
    minutes, seconds = map(int, clock.inner_text().split(":"))
    page.clock.run_for(10_000)
    expect(clock).to_have_text(f"0:{60 * minutes + seconds - 10:02}")
    page.clock.run_for(60_000)
    expect(clock).to_have_text("0:00")
    expect(status).to_have_text("You can continue now.")
    expect(page.get_by_role("link", name="Try again")).to_have_attribute("href", "/login/")


def test_without_javascript_it_shows_the_time(refused):
    page = refused(java_script_enabled=False)
    expect(page.get_by_role("timer")).to_be_hidden()
    text = r"Try again in \d+ seconds?\. Requests are allowed again from \d\d:\d\d:\d\d [A-Z]+\."
    expect(page.get_by_role("status")).to_have_text(re.compile(text))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_it_fits_and_has_contrast(refused, screenshots, look, scripts):
    page = refused(look=look, java_script_enabled=scripts)
    page.screenshot(path=screenshots / f"429-{look}-{'scripts' if scripts else 'plain'}.png")
    if scripts:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        contrast, text = page.evaluate(CONTRAST)
        assert contrast >= 4.5, text
