"""The demo as a visitor sees it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import LOOKS, press, unused

LIMITS = {
    "bare": 5,
    "inline": 3,
    "several": 5,
    "asynchronous": 4,
    "by_plan": 3,
    "export": 10,
    "fixed_window": 5,
    "sliding_window": 5,
    "sliding_window_compact": 5,
    "sliding_window_counter": 5,
    "token_bucket": 8,
    "report": 3,
}

# The least contrast of the texts on a page with what is behind them, as WCAG 2 computes it.
CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  const paint = canvas.getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    return Array.from(paint.getImageData(0, 0, 1, 1).data, (channel) => channel / 255);
  };
  const luminance = (color) => {
    const [r, g, b] = rgba(color).map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return rgba(color)[3] === 1 || !element.parentElement ? color : behind(element.parentElement);
  };
  const hasText = (element) => Array.from(element.childNodes).some((node) => node.nodeType === 3 && node.data.trim());
  const texts = Array.from(document.querySelectorAll("body *")).filter(hasText);
  return texts.filter((element) => element.checkVisibility()).map((element) => {
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), `${element.className}: ${element.textContent.trim()}`];
  }).sort(([a], [b]) => a - b)[0];
}"""


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", LIMITS)
def test_a_press_shows_decision_counter_and_headers(page, name):
    panel = unused(page, name)
    panel.locator(".press").click()
    expect(panel.locator(".word")).to_have_text("Allowed")
    expect(panel.locator(".status")).to_have_text("200 OK")
    used = 3 if name == "export" else 1
    meter = panel.locator(".meter").first
    expect(meter.locator(".count")).to_have_text(f"{used} / {LIMITS[name]}")
    expect(meter.locator("progress")).to_have_attribute("value", str(used))
    for header in ("RateLimit-Policy", "RateLimit", "X-RateLimit-Remaining"):
        expect(panel.locator("dt").get_by_text(header, exact=True)).to_be_visible()
    expect(panel.locator(".wait")).to_be_empty()


@pytest.mark.parametrize("name", LIMITS)
def test_pressing_on_is_refused_and_shows_the_wait(page, name):
    panel = unused(page, name)
    for _ in range(2):  # a fixed window may have ended in between
        press(panel, ".ten")
    expect(panel.locator(".word")).to_have_text("Refused")
    expect(panel.locator(".status")).to_have_text("429 Too Many Requests")
    expect(panel.locator(".sum")).to_have_text(re.compile(r"Of 10: \d+ allowed, \d+ refused\."))
    expect(panel.locator("dt").get_by_text("Retry-After")).to_be_visible()
    expect(panel.locator(".wait")).to_have_text(re.compile(r"Retry in \d+ s|Now there is room again\."))
    expect(panel.locator(".history li.refused").first).to_be_visible()


def test_the_wait_counts_down_to_an_allowed_request(page):
    panel = unused(page, "inline")
    press(panel, ".ten")
    for seconds in (9, 8, 7):
        expect(panel.locator(".wait")).to_have_text(f"Retry in {seconds} s")
    expect(panel.locator(".wait")).to_have_text("Now there is room again.", timeout=15_000)
    panel.locator(".press").click()
    expect(panel.locator(".word")).to_have_text("Allowed")


def test_a_counter_recovers_by_itself(page):
    """The page peeks while something is counted."""
    panel = unused(page, "inline")
    press(panel, ".press")
    expect(panel.locator(".count")).to_have_text("1 / 3")
    expect(panel.locator(".count")).to_have_text("0 / 3", timeout=15_000)


def test_several_policies_have_a_meter_each(page):
    panel = unused(page, "several")
    press(panel, ".ten")
    expect(panel.locator(".meter .policy")).to_have_text(["person", "token", "address"])
    expect(panel.locator(".said")).to_have_text(re.compile(r"^By the policy “(person|token)”\.$"))


def test_another_token_is_another_counter(page):
    panel = unused(page, "several")
    press(panel, ".press")
    panel.locator(".token").select_option("blue")
    press(panel, ".press")
    expect(panel.locator(".meter .count").nth(1)).to_have_text("1 / 8")
    expect(panel.locator(".meter .count").nth(2)).to_have_text("2 / 20")


def test_only_wrong_passwords_count(page):
    panel = unused(page, "log_in")
    panel.locator("[name=password]").fill("demo")
    press(panel, ".press")
    expect(panel.locator(".said")).to_have_text("Welcome: not charged.")
    expect(panel.locator(".count")).to_have_text("0 / 3")
    panel.locator("[name=password]").fill("guess")
    for count in (1, 2, 3):
        press(panel, ".press")
        expect(panel.locator(".said")).to_have_text("Wrong: charged.")
        expect(panel.locator(".status")).to_have_text("200 OK")
        expect(panel.locator(".count")).to_have_text(f"{count} / 3")
    press(panel, ".press")
    expect(panel.locator(".word")).to_have_text("Refused")
    expect(panel.locator(".wait")).to_have_text(re.compile(r"Retry in \d+ s"))
    panel.locator("[name=password]").fill("demo")
    press(panel, ".press")
    expect(panel.locator(".word")).to_have_text("Refused")


@pytest.mark.parametrize(
    ("name", "word"), [("shadow", "Allowed; would be refused"), ("feed", "Over the limit, but served")]
)
def test_a_gentle_limit_says_so(page, name, word):
    panel = unused(page, name)
    press(panel, ".ten")
    expect(panel.locator(".word")).to_have_text(word)
    expect(panel.locator(".status")).to_have_text("200 OK")
    expect(panel.locator(".sum")).to_have_text("Of 10: 3 allowed, 7 over the limit.")
    expect(panel.locator(".wait")).to_have_text(re.compile(r"Within the limit again in \d+ s"))


def test_another_user_has_a_fresh_counter(page):
    unused(page, "bare")
    press(page.locator('[data-panel="bare"]'), ".press")
    press(page.locator('[data-panel="bare"]'), ".press")
    page.get_by_role("button", name="bob").click()
    expect(page.get_by_role("button", name="bob")).to_have_attribute("aria-pressed", "true")
    press(page.locator('[data-panel="bare"]'), ".press")
    expect(page.locator('[data-panel="bare"] .count')).to_have_text("1 / 5")
    page.get_by_role("button", name="anonymous").click()
    expect(page.locator('[data-panel="bare"] .count')).to_have_text("2 / 5")


def test_a_plan_without_a_limit_shows_no_meter(page):
    page.get_by_role("button", name="carol").click()
    panel = page.locator('[data-panel="by_plan"]')
    press(panel, ".ten")
    expect(panel.locator(".word")).to_have_text("Allowed; there is no limit")
    expect(panel.locator(".meter")).to_have_count(0)


def test_a_reset_clears_a_card(page):
    panel = unused(page, "report")
    press(panel, ".ten")
    panel.locator(".reset").click()
    expect(panel.locator(".word")).to_have_text("Reset. The counters start anew.")
    expect(panel.locator(".count")).to_have_text("0 / 3")
    press(panel, ".press")
    expect(panel.locator(".word")).to_have_text("Allowed")


def test_the_code_is_the_code(page):
    code = page.locator('[data-panel="token_bucket"] code').text_content()
    assert code.startswith('@rate_limit("5/10s", algo="token-bucket-algo", burst=8)\ndef token_bucket(request):')


def test_a_form_that_is_not_filled_in_is_not_sent(page):
    panel = unused(page, "log_in")
    panel.locator("[name=password]").fill("")
    panel.locator(".ten").click()
    expect(panel.locator("[name=password]")).to_be_focused()
    expect(panel.locator(".word")).to_have_text("Reset. The counters start anew.")


def test_a_tab_that_starts_redis_again_may_be_closed(visit):
    """The server is ended by the kernel with the thread that started it, which may be that of a request."""
    tab = visit()
    panel = tab.locator('[data-panel="fail_open"]')
    panel.get_by_role("button", name="Stop Redis").click()
    expect(panel.locator(".word")).to_have_text("Redis was stopped. Press on.")
    panel.get_by_role("button", name="Start Redis").click()
    expect(panel.locator(".word")).to_have_text("Redis was started again, empty.")
    tab.context.close()

    page = visit()
    page.wait_for_timeout(2_500)  # the circuit breaker is closed again
    panel = page.locator('[data-panel="fail_open"]')
    press(panel, ".press")
    expect(panel.locator(".word")).to_have_text("Allowed")


@pytest.mark.parametrize("look", LOOKS)
def test_the_429_page_counts_down_and_leads_back(visit, screenshots, look):
    page = visit(look)
    page.locator("#second_visit").get_by_role("link", name="See the 429 page").click()
    expect(page.get_by_role("heading", name="Too many requests")).to_be_visible()
    expect(page.get_by_role("timer")).to_have_text(re.compile(r"0:[01]\d"))
    assert fits(page)
    page.screenshot(path=screenshots / f"429-{look}.png")
    page.get_by_text("You can continue now.").wait_for(timeout=25_000)
    page.get_by_role("link", name="Try again").click()
    expect(page.get_by_role("heading", name="Rate limits, live")).to_be_visible()


SCREENS = [(390, 844), (768, 1024), (1024, 768), (1280, 800), (1920, 1080)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_links_and_password_are_seen_without_scrolling(visit, screenshots, scheme, screen):
    width, height = screen
    page = visit(scheme)
    page.set_viewport_size({"width": width, "height": height})
    side = page.get_by_role("banner")
    for link in ("Playground", "429 page", "Admin"):
        expect(side.get_by_role("link", name=link)).to_be_in_viewport(ratio=1)
    for text in side.get_by_text("admin", exact=True).all():
        expect(text).to_be_in_viewport(ratio=1)
    assert fits(page)
    page.screenshot(path=screenshots / f"start-{width}-{scheme}.png")


def test_every_card_can_be_reached_from_the_side(page):
    """The list scrolls where the screen is low, and the links above it stay."""
    page.set_viewport_size({"width": 1280, "height": 800})
    last = page.get_by_role("navigation").get_by_role("link").last
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport(ratio=0.9)
    expect(page.get_by_role("banner").get_by_role("link", name="Admin")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("width", [width for width, _ in SCREENS])
def test_the_buttons_of_a_card_are_in_one_line(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    tops = page.locator('[data-panel="bare"] .buttons button').evaluate_all(
        "buttons => buttons.map((button) => button.getBoundingClientRect().top)"
    )
    assert len(set(tops)) == 1


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_fits_and_can_be_read(visit, screenshots, look):
    page = visit(look)
    assert fits(page)
    page.screenshot(path=screenshots / f"start-{look}.png")
    for panel in page.locator(".panel:has(form):visible").all():
        press(panel, ".ten")
    assert fits(page)
    contrast, text = page.evaluate(CONTRAST)
    assert contrast >= 4.5, text
    page.screenshot(path=screenshots / f"pressed-{look}.png", full_page=True)
    page.locator("#several").evaluate("card => card.scrollIntoView({behavior: 'instant'})")
    page.screenshot(path=screenshots / f"cards-{look}.png")


def test_the_keyboard_is_enough(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the cards")).to_be_focused()
    page.keyboard.press("Enter")
    button = page.locator('[data-panel="inline"] .press')
    for _ in range(20):
        page.keyboard.press("Tab")
        if button.evaluate("button => button === document.activeElement"):
            break
    expect(button).to_be_focused()
    assert button.evaluate("button => getComputedStyle(button).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator('[data-panel="inline"] .status')).to_have_text(re.compile("200 OK|429 Too Many Requests"))
    expect(button).to_be_focused()


def test_arrows_choose_an_algorithm(page):
    page.locator(".choice input").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator('[data-panel="sliding_window"]')).to_be_visible()
    expect(page.locator('[data-panel="fixed_window"]')).to_be_hidden()


def test_results_are_announced_once(page):
    """Ten presses are one message: the region is busy until the last."""
    panel = unused(page, "bare")
    panel.locator(".ten").click()
    region = panel.get_by_role("status")
    expect(region).to_have_attribute("aria-busy", "true")
    expect(region).to_have_attribute("aria-busy", "false")
    expect(region).to_contain_text("Try again in")


def test_motion_can_be_turned_off(visit):
    page = visit(reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    press(page.locator('[data-panel="bare"]'), ".ten")


def test_the_admin_keeps_to_the_content_policy(page):
    page.goto("/admin/")
    page.fill("#id_username", "admin")
    page.fill("#id_password", "admin")
    page.locator("[type=submit]").click()
    expect(page.locator("#user-tools")).to_be_visible()
