"""The panel at the widths that people have, with the names that views have and many policies: by geometry."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.admin_fixtures import PANEL, _open_page, _site, _users, crowd, past, send  # noqa: F401
from tests.browser.layout import WIDTHS, misplaced
from tests.browser.test_admin import PAGES, _tomorrow, identity_of
from tests.support.internals import set_override

LONG = "example_project.views.sliding_window_compact"
WORDS = ("export_monthly_statement_as_pdf", "password_reset_confirm", "OrderDetailView.post", "webhook")


@pytest.fixture
def busy(settings, users):
    """Return the paths of all pages of a site with 200 policies, long names, and many clients."""
    settings.RATE_LIMITER["POLICIES"] |= {
        f"shop{i // 4}.checkout.views.{WORDS[i % 4]}": {"rate": "1000/d", "label": WORDS[i % 4]} for i in range(200)
    }
    carol = users["carol"]
    past({"checkout": (40_000, 0.02), "search": (300, 0.004), "login": (25, 0.08), "trial": (120, 0.05)})
    crowd(60)
    for path in ("/checkout/", "/long/"):
        send(carol, path, 8)
    send(None, "/long/", 8, address="2001:db8:1234:5678:9abc:def0:1234:5678")
    long = "a reason that is long, and has_a_word_that_is_much_longer_than_others_are.and-cannot-be-broken" * 2
    set_override(str(carol.pk), LONG, "limit", _tomorrow(), by="a.very.long.username@example.com", reason=long, limit=7)
    set_override("ip=2001%3Adb8%3A1234%3A5678%3A%3A", "", "block", _tomorrow(), by=users["operator"], reason="spam")
    return [
        *(PANEL + path for path in PAGES.values()),
        *(f"{PANEL}?span={span}" for span in ("day", "week")),
        *(f"{PANEL}policy/?policy={name}" for name in (LONG, "trial")),
        f"{PANEL}clients/?q=carol",
        f"{PANEL}identity/?id=ip%3D2001%253Adb8%253A1234%253A5678%253A%253A",
        identity_of(carol),
    ]


@pytest.mark.parametrize("locale", ["en-GB", "de-DE"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_beyond_its_container_or_over_something_else(open_page, users, busy, width, locale):
    page = open_page(users["operator"], "/admin/", viewport={"width": width, "height": 900}, locale=locale)
    wrong = {}
    for path in busy:
        assert page.goto(path).status == 200
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        if found := misplaced(page):
            wrong[path] = found
    assert wrong == {}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", ["/checkout/", "/long/"], ids=["short", "long"])
def test_the_page_of_a_user_has_room_for_the_usage(open_page, users, width, path):
    send(users["carol"], path, 8)
    page = open_page(
        users["operator"], f"/admin/auth/user/{users['carol'].pk}/change/", viewport={"width": width, "height": 900}
    )
    link = page.locator(".rlaas-user-usage").get_by_role("link", name="rate limits")
    assert link.bounding_box()["height"] < 25
    assert page.locator(".rlaas-user-usage").bounding_box()["width"] > 250
    cells = page.locator(".rlaas-user-usage td").all()
    assert all(cell.bounding_box()["height"] < 90 for cell in cells)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_actions_on_a_client_stay_within_reach(open_page, users, width):
    send(users["carol"], times=8)
    page = open_page(users["operator"], identity_of(users["carol"]), viewport={"width": width, "height": 900})
    form = page.get_by_role("heading", name="Actions")
    link = page.get_by_role("link", name="Actions")
    if link.is_visible():
        expect(link).to_be_in_viewport()
        link.click()
    expect(form).to_be_in_viewport()
