"""Charts of the panel, read by keyboard, touch and pointer; and the table of policies that is filtered while typing."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.admin_fixtures import PANEL, _open_page, _site, _users, past, send  # noqa: F401


@pytest.fixture
def busy(users):
    past({"checkout": (40, 0.02), "login": (25, 0.08)})
    send(users["carol"], times=7)


def test_a_chart_is_read_by_keyboard(open_page, users, busy):
    page = open_page(users["operator"])
    chart, readout = page.get_by_role("slider"), page.locator(".rlaas-readout")
    chart.focus()
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    expect(chart).to_have_attribute("aria-valuenow", "57")
    shown = re.compile(r"^\d\d:\d\d: \d+ allowed")
    expect(readout).to_have_text(shown)
    expect(chart).to_have_attribute("aria-valuetext", shown)
    send(users["carol"], times=1)
    page.wait_for_timeout(2_500)  # a refresh keeps the focus and the chosen bar
    expect(chart).to_be_focused()
    expect(chart).to_have_attribute("aria-valuenow", "57")
    expect(page.locator(".rlaas-chosen")).to_have_count(1)
    page.keyboard.press("Home")
    expect(chart).to_have_attribute("aria-valuenow", "0")
    page.keyboard.press("Escape")
    expect(page.locator(".rlaas-chosen")).to_have_count(0)


def test_a_chart_is_read_by_touch_and_by_pointer(open_page, users, busy):
    page = open_page(users["operator"], has_touch=True)
    chart, chosen = page.get_by_role("slider"), page.locator(".rlaas-chosen")
    box = chart.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(chosen).to_have_count(1)
    touched = chart.get_attribute("aria-valuenow")
    assert 28 <= int(touched) <= 31
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    expect(chart).to_have_attribute("aria-valuenow", "0")


@pytest.mark.parametrize(("span", "bars"), [("Last hour", 60), ("Last day", 96), ("Last week", 168)])
def test_the_time_span_of_a_chart_can_be_chosen(open_page, users, busy, span, bars):
    page = open_page(users["operator"])
    page.get_by_role("navigation", name="Time span").get_by_role("link", name=span).click()
    expect(page.locator(".rlaas-span")).to_have_count(bars)
    expect(page.get_by_role("slider")).to_have_attribute("aria-label", re.compile(span))
    expect(page.locator(".rlaas-y span").last).to_have_text("0")


def test_policies_are_filtered_while_typing_and_sorted_by_clicks(open_page, users, busy):
    page = open_page(users["operator"])
    names = page.get_by_role("table", name="Policies").locator("tbody th a")
    expect(names.first).to_have_text("login")  # which refused most
    page.get_by_role("columnheader", name="Policy", exact=True).get_by_role("link").click()
    expect(names.first).to_have_text("checkout")
    page.get_by_role("columnheader", name="Refused", exact=True).get_by_role("link").click()
    expect(names.first).to_have_text("login")
    page.get_by_label("Filter by name").press_sequentially("check")
    expect(names).to_have_text(["checkout"])
    expect(page).to_have_url(re.compile(r"sort=refused&q=check"))
    page.reload()
    expect(names).to_have_text(["checkout"])
    names.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("checkout")


def test_policies_are_filtered_while_live_refresh_is_paused(open_page, users, busy):
    page = open_page(users["operator"])
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("Filter by name").fill("logi")
    expect(page.get_by_role("table", name="Policies").locator("tbody th a")).to_have_text(["login"])
