"""The admin panel in a real Chromium, under a strict content security policy."""

from __future__ import annotations

import re
import time

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client, RequestFactory, override_settings
from playwright.sync_api import expect
from rlaas_django import Policy, backend, check, peek
from rlaas_django.admin import RateLimitsOfUser
from rlaas_django.models import Override
from rlaas_django.runtime.observers import DEGRADED
from rlaas_django.stats import recorder, schema

from tests.browser.admin_fixtures import CSP, PANEL, _open_page, _site, _users, crowd, past, send  # noqa: F401
from tests.browser.conftest import LOOKS
from tests.browser.test_demo import CONTRAST
from tests.support.internals import identify, set_override

PAGES = {
    "overview": "",
    "clients": "clients/",
    "active": "clients/?tab=active",
    "refusals": "refusals/",
    "shadow": "shadow/",
    "overrides": "overrides/",
    "add": "overrides/add/?q=203.0.113.0/24",
    "history": "history/",
}
GONE = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
ODD = ['a"b', "<script>alert(1)</script>", "a/b", "😀", "x" * 8000, "a\n\x1b[31mb", "100%", "a&b='c'", "{a}:b"]


def row(page, name, policy="checkout"):
    identity = page.locator("tbody", has=page.get_by_role("link", name=name, exact=True))
    return identity.locator("tr").filter(has_text=policy)


def identity_of(user) -> str:
    return f"{PANEL}identity/?id={user.pk}"


def act(page, action, **fields):
    """Fill in the form of actions, and confirm."""
    page.get_by_role("radio", name=action).check()
    for label, value in fields.items():
        if label in ("Policy", "Duration"):
            page.get_by_label(label, exact=True).select_option(value)
        else:
            page.get_by_role("textbox" if label == "Reason" else "spinbutton", name=label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Yes").click()
    page.locator(".messagelist .success").wait_for()


class TestOperator:
    def test_from_login_to_a_reset(self, open_page, users):
        carol = users["carol"]
        page = open_page(None, "/admin/")
        page.fill("#id_username", "operator")
        page.fill("#id_password", "password")
        page.click("input[type=submit]")
        page.locator("#content").get_by_role("link", name="Rate limits").last.click()
        expect(page).to_have_title(re.compile("^Rate limits"))
        expect(page.get_by_text("No requests in this time")).to_be_visible()

        # A user's count rises as requests are made.
        page.get_by_role("navigation", name="Rate limits").get_by_role("link", name="Clients").click()
        expect(page.get_by_text("No identity is near a limit")).to_be_visible()
        page.get_by_role("navigation", name="Lists of clients").get_by_role("link", name="All active").click()
        for count in (1, 2, 3):
            assert send(carol) == [200]
            expect(row(page, "carol").locator(".rlaas-count")).to_have_text(f"{count} / 5")
        assert send(carol, times=4) == [200, 200, 429, 429]

        # Find her by e-mail, and read the reason.
        page.get_by_label("Username, ID, e-mail or IP address").fill("carol@example.com")
        page.keyboard.press("Enter")
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("5 / 5")
        expect(row(page, "carol").locator("td").last).to_have_text("2")
        row(page, "carol").get_by_role("link", name="carol", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        reason = r"checkout 5 of 5 in 1\sh, refused at [\d:]+ [A-Z]+ on GET \S+, allowed again in 59\smin \d+\ss"
        expect(page.locator(".rlaas-refusal-list li").first).to_have_text(re.compile(reason))

        # Reset, and the next request is allowed.
        act(page, "Reset")
        assert send(carol) == [200]
        expect(page.locator("tbody tr", has_text="checkout").locator("[data-count]").first).to_have_text("1 / 5")
        assert LogEntry.objects.get().change_message == "Reset the usage of carol under all policies."

    def test_block_exempt_and_custom_limit_apply_to_the_next_request(self, open_page, users):
        carol = users["carol"]
        page = open_page(users["operator"], identity_of(carol))
        for action, fields, expected, badge in (
            ("Block", {"Duration": "1 hour", "Reason": "scraping"}, [429], "blocked"),
            ("Exempt", {"Duration": "1 day", "Reason": "a test"}, [200] * 7, "exempt"),
            ("Set a custom limit", {"Factor": "0.4", "Reason": "slower"}, [200, 200, 429], "limit times 0.4"),
        ):
            act(page, action, **fields)
            assert send(carol, times=len(expected)) == expected
            expect(page.locator(".rlaas-override-list .rlaas-badge")).to_have_text([badge])
        expect(page.locator(".rlaas-history li")).to_have_count(3)
        expect(page.locator(".rlaas-history li").last).to_contain_text("Blocked carol under all policies until")
        expect(page.locator(".rlaas-refusal-list")).to_contain_text("Blocked (scraping), refused at")

        # The page of overrides lists and ends them.
        page.goto(f"{PANEL}overrides/")
        active = page.get_by_role("table", name="Active overrides")
        expect(active.locator("tbody tr")).to_have_count(1)
        expect(active).to_contain_text("slower")
        active.get_by_role("button", name="End").click()
        page.get_by_role("button", name="Yes").click()
        expect(page.get_by_text("No active overrides")).to_be_visible()
        page.get_by_role("link", name="Ended").click()
        expect(page.get_by_role("table", name="Ended overrides").locator("tbody tr")).to_have_count(3)
        assert send(carol) == [200]
        assert not Override.objects.active().exists()

    def test_a_network_is_blocked_with_its_logged_in_users_and_the_history_says_so(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}overrides/")
        page.get_by_role("link", name="Add override").click()
        page.get_by_label("Username, ID, e-mail, IP address or network").fill("203.0.113.0/24")
        page.keyboard.press("Enter")
        page.locator(".rlaas-choices li", has_text="network").get_by_role("link").click()
        expect(page.get_by_role("radio", name="Block")).to_be_checked()
        expect(page.get_by_role("radio", name="Reset")).to_have_count(0)
        page.get_by_role("checkbox", name="Logged-in users, too").check()
        page.get_by_role("textbox", name="Reason").fill("scraping")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".rlaas-consequences")).to_contain_text("also of logged-in users")
        page.get_by_role("button", name="Yes").click()
        page.locator(".messagelist .success").wait_for()
        assert send(users["carol"], "/checkout/") == [429]
        assert send(users["carol"], "/checkout/", address="198.51.100.9") == [200]
        page.get_by_role("link", name="History").click()
        first = page.get_by_role("table", name="What operators did").locator("tbody tr").first
        for text in ("operator", "in the admin", "203.0.113.0/24", "Blocked", "scraping"):
            expect(first).to_contain_text(text)

    def test_the_form_shows_the_fields_of_the_action_and_its_errors(self, open_page, users):
        page = open_page(users["operator"], identity_of(users["carol"]))
        expect(page.get_by_role("combobox", name="Duration")).to_have_count(0)
        expect(page.get_by_role("spinbutton", name="Factor")).to_have_count(0)
        page.get_by_role("radio", name="Refund").check()
        expect(page.get_by_role("spinbutton", name="Units")).to_be_visible()
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".errorlist")).to_have_text("Enter a number.")
        page.get_by_role("radio", name="Block").check()
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".errorlist")).to_have_text("Enter a reason.")
        page.get_by_role("textbox", name="Reason").fill("scraping")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("Refuse all requests of carol under all policies for 1 day?")).to_be_visible()
        page.get_by_role("link", name="No, take me back").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        assert not Override.objects.exists()

    def test_refund_under_one_policy(self, open_page, users):
        assert send(users["carol"], times=6)[-1] == 429
        page = open_page(users["operator"], identity_of(users["carol"]))
        act(page, "Refund", Units="2", Policy="checkout")
        expect(page.locator(".messagelist")).to_have_text("Refunded 2 units to carol under checkout.")
        assert send(users["carol"], times=3) == [200, 200, 429]

    def test_the_admin_log_links_to_the_identity(self, open_page, users):
        page = open_page(users["operator"], identity_of(users["carol"]))
        act(page, "Reset")
        page.goto("/admin/")
        page.locator("#recent-actions-module").get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")

    def test_an_override_of_every_client_needs_a_second_confirmation(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}clients/?q=0.0.0.0/0")
        page.get_by_role("link", name="0.0.0.0/0").first.click()
        page.get_by_role("textbox", name="Reason").fill("maintenance")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".rlaas-banner-danger")).to_contain_text("the override is for every client")
        page.get_by_role("button", name="Yes").click()  # the browser asks to tick the box
        expect(page.get_by_role("heading", level=1)).to_have_text("Are you sure?")
        assert not Override.objects.exists()
        page.get_by_role("checkbox", name="Yes, every client of the site").check()
        page.get_by_role("button", name="Yes").click()
        page.locator(".messagelist .success").wait_for()
        assert Override.objects.get().identity == "net=0.0.0.0%2F0"

    def test_a_misspelled_name_is_found_by_the_nearest(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}clients/?q=caro1")
        expect(page.locator(".rlaas-banner")).to_contain_text("There is no user of this name.")
        page.locator(".rlaas-banner").get_by_role("link", name="carol").click()
        page.locator(".rlaas-matches").get_by_role("link", name="carol", exact=True).first.click()
        expect(page.locator(".rlaas-header")).to_contain_text("carol@example.com")


class TestManyEntries:
    def test_overrides_have_pages_that_stay_while_they_are_refreshed(self, open_page, users):
        until = _tomorrow()
        Override.objects.bulk_create(
            [
                Override(identity=f"ip=198.18.{i // 256}.{i % 256}", kind="block", until=until, reason=f"case {i:04}")
                for i in range(5_000)
            ]
        )
        page = open_page(users["operator"], f"{PANEL}overrides/")
        rows = page.get_by_role("table", name="Active overrides").locator("tbody tr")
        expect(rows).to_have_count(100)
        expect(page.locator(".rlaas-live > p").first).to_have_text("5,000 overrides, the newest first.")
        page.get_by_role("link", name="Next page").click()
        expect(page.get_by_role("navigation", name="Pages")).to_contain_text("Page 2 of 50")
        expect(rows.first).to_contain_text("case 4899")
        with page.expect_response(lambda response: "page=2" in response.url):
            pass
        expect(rows.first).to_contain_text("case 4899")
        page.get_by_role("searchbox").last.fill("case 0007")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("198.18.0.7")

    def test_refusals_and_clients_have_pages_of_a_bounded_height(self, open_page, users):
        for i in range(120):
            send(None, "/login/", 6, address=f"198.51.100.{i}")
        for name in ("clients", "refusals"):
            page = open_page(users["operator"], f"{PANEL}{name}/", viewport={"width": 390, "height": 900})
            assert page.evaluate("document.documentElement.scrollHeight") < 12_000
            page.get_by_role("link", name="Next page").click()
            expect(page.get_by_role("navigation", name="Pages")).to_contain_text("Page 2 of 3")

    def test_an_identity_stands_once_above_its_policies(self, open_page, users):
        send(users["carol"], "/checkout/", 2)
        send(users["carol"], "/search/", 2)
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        expect(page.get_by_role("link", name="carol", exact=True)).to_have_count(1)
        expect(row(page, "carol", "")).to_have_count(3)


class TestPermissions:
    def test_a_viewer_sees_no_form_and_a_forged_post_is_refused(self, open_page, users, site):
        set_override(str(users["carol"].pk), "", "block", _tomorrow(), by="somebody", reason="because")
        page = open_page(users["viewer"], identity_of(users["carol"]))
        expect(page.locator(".rlaas-override-list")).to_contain_text("because")
        for path in (identity_of(users["carol"]), f"{PANEL}overrides/"):
            page.goto(path)
            expect(page.locator("#content form[method=post]")).to_have_count(0)
        override = Override.objects.get()
        for name, data in (
            ("act", {"identity": str(users["carol"].pk), "action": "reset", "confirmed": "1"}),
            ("end", {"override": str(override.pk)}),
        ):
            status = page.evaluate(
                """async ([url, data]) => {
                  const token = document.querySelector("[name=csrfmiddlewaretoken]").value;
                  const body = new URLSearchParams({...data, csrfmiddlewaretoken: token});
                  return (await fetch(url, {method: "POST", body})).status;
                }""",
                [f"{PANEL}{name}/", data],
            )
            assert status == 403
        assert Override.objects.active().count() == 1
        assert not LogEntry.objects.exists()

    def test_actions_need_a_csrf_token(self, open_page, users):
        page = open_page(users["operator"], identity_of(users["carol"]))
        data = {"identity": str(users["carol"].pk), "action": "block", "reason": "x", "confirmed": "1"}
        for name in ("act", "end"):
            assert page.request.post(f"{PANEL}{name}/", form=data).status == 403
        assert not Override.objects.exists()

    def test_staff_without_permission_see_no_link_and_no_page(self, open_page, users):
        other = User.objects.create_user("other", password="password", is_staff=True)
        page = open_page(other, "/admin/")
        expect(page.get_by_role("link", name="Rate limits")).to_have_count(0)
        assert page.goto(PANEL).status == 403


class TestLiveRefresh:
    def test_open_details_and_focus_survive_a_refresh(self, open_page, users):
        send(users["carol"])
        page = open_page(users["operator"])
        page.get_by_text("Show as table").click()
        link = page.get_by_role("table", name="Policies").get_by_role("link", name="checkout", exact=True)
        link.focus()
        send(users["carol"], times=3)
        counts = page.get_by_role("table", name="Policies").locator("tr", has_text="checkout").locator("[data-count]")
        expect(counts.first).to_have_text("4")
        expect(page.locator("details", has_text="Show as table")).to_have_attribute("open", "")
        expect(link).to_be_focused()

    def test_focus_follows_a_row_that_moves(self, open_page, users):
        dave = User.objects.create_user("dave")
        send(users["carol"], times=2)
        send(dave, times=1)
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active&sort=count")
        names = page.locator("tbody .rlaas-identity")
        expect(names).to_have_text(["carol", "dave"])
        names.last.focus()
        send(dave, times=2)
        expect(names).to_have_text(["dave", "carol"])
        expect(names.first).to_be_focused()

    def test_pause_becomes_resume_by_keyboard_and_survives_a_reload(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        expect(page.get_by_role("status")).to_have_text("Live")
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Space")
        resume = page.get_by_role("button", name="Resume")
        expect(resume).to_be_focused()
        expect(page.get_by_role("status")).to_have_text("Paused")
        send(users["carol"])
        page.wait_for_timeout(3_000)
        expect(row(page, "carol")).to_have_count(0)
        page.reload()
        expect(page.get_by_role("status")).to_have_text("Paused")
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("1 / 5")
        resume.click()
        send(users["carol"])
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("2 / 5")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()

    def test_a_refresh_in_another_tab_consumes_no_message(self, open_page, users):
        page = open_page(users["operator"], identity_of(users["carol"]))
        page.context.new_page().goto(PANEL)
        for _ in range(3):
            act(page, "Reset")

    def test_a_hidden_tab_is_not_refreshed(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        look = """(hidden) => {
          Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(look, True)
        page.wait_for_timeout(500)  # for a response in flight
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.wait_for_timeout(3_000)
        assert requests == []
        send(users["carol"])
        page.evaluate(look, False)
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("1 / 5", timeout=1_000)

    def test_refresh_resumes_after_a_new_login(self, open_page, users):
        page = open_page(users["operator"])
        cookies = page.context.cookies()
        page.context.clear_cookies()
        expect(page.get_by_role("status")).to_have_text("Signed out: log in again to refresh")
        page.context.add_cookies(cookies)
        expect(page.get_by_role("status")).to_have_text("Live", timeout=15_000)

    @pytest.mark.parametrize("status", [0, 400, 403, 404, 429, 500, 502, 503])
    def test_refresh_backs_off_after_each_failure_and_recovers(self, open_page, users, status):
        page = open_page(users["operator"], "/admin/")
        page.clock.install()
        page.goto(PANEL)
        failed = []

        def fail(route):
            failed.append(route)
            route.abort() if status == 0 else route.fulfill(status=status, body="no")

        page.route("**/ratelimit/", fail)
        for _ in range(32):  # at 2, 6, 14 and 30 seconds
            page.clock.run_for(1_000)
            page.wait_for_timeout(20)
        assert 3 <= len(failed) <= 4
        expect(page.get_by_role("status")).to_have_text("Refresh failed, retrying")
        page.unroute_all()
        page.clock.run_for(60_000)
        expect(page.get_by_role("status")).to_have_text("Live")

    def test_refresh_waits_as_long_as_a_429_says(self, open_page, users):
        page = open_page(users["operator"], "/admin/")
        page.clock.install()
        page.goto(PANEL)
        failed = []

        def refuse(route):
            failed.append(route)
            route.fulfill(status=429, headers={"Retry-After": "40"})

        page.route("**/ratelimit/", refuse)
        for _ in range(40):
            page.clock.run_for(1_000)
            page.wait_for_timeout(20)
        assert len(failed) == 1

    def test_pages_work_without_javascript(self, open_page, users):
        send(users["carol"], times=7)
        page = open_page(users["operator"], f"{PANEL}clients/", java_script_enabled=False)
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        row(page, "carol").get_by_role("link", name="carol", exact=True).click()
        act(page, "Reset")
        assert send(users["carol"]) == [200]


class TestRedisUnavailable:
    @pytest.mark.parametrize("name", [*PAGES, "identity"])
    def test_every_page_responds_within_a_second(self, open_page, users, name):
        path = identity_of(users["carol"]) if name == "identity" else PANEL + PAGES[name]
        page = open_page(users["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            started = time.monotonic()
            response = page.goto(path, wait_until="commit")
            response.finished()
            assert time.monotonic() - started < 1
            if name not in ("add", "history"):  # of the database only
                expect(page.get_by_role("alert")).to_contain_text("Redis is unavailable")
        assert response.status == (200 if name in ("overrides", "add", "history") else 503)

    def test_an_open_page_keeps_its_data_and_recovers(self, open_page, users):
        send(users["carol"], times=6)
        page = open_page(users["operator"], f"{PANEL}clients/")
        with override_settings(CACHES=GONE):
            expect(page.get_by_role("status")).to_have_text("Redis is unavailable, showing old data")
            expect(row(page, "carol").locator(".rlaas-count")).to_have_text("5 / 5")
        expect(page.get_by_role("status")).to_have_text("Live")

    def test_the_page_loads_when_redis_is_available_again(self, open_page, users):
        page = open_page(users["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            page.goto(f"{PANEL}clients/")
            expect(page.get_by_role("link", name="Try again")).to_be_visible()
        expect(page.get_by_text("No identity is near a limit")).to_be_visible()

    def test_an_action_is_not_performed(self, open_page, users):
        page = open_page(users["operator"], identity_of(users["carol"]))
        page.get_by_role("button", name="Continue").click()
        with override_settings(CACHES=GONE):
            page.get_by_role("button", name="Yes").click()
            expect(page.get_by_role("alert")).to_contain_text("The action was not performed.")


class TestSearch:
    @pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
    def test_odd_identities_are_escaped_and_can_be_reset(self, open_page, users, odd):
        check(odd)
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        shown = page.locator("tbody .rlaas-identity")
        expect(shown).to_have_count(1)
        if len(odd) < 100:
            expect(shown).to_have_text(odd.replace("\n", r"\n").replace("\x1b", r"\x1b"))
        shown.click()
        expect(page.locator("[data-count]").first).to_have_text("1 / 5")
        assert page.locator("[name=identity]").input_value() == identify(odd, Policy("default", "5/m"))
        act(page, "Reset")
        assert peek(odd).current_count == 0

    def test_an_address_can_be_blocked_before_its_first_request(self, open_page, users):
        page = open_page(users["operator"], f"{PANEL}clients/?q=203.0.113.77")
        expect(page.get_by_text("No current usage for “203.0.113.77”")).to_be_visible()
        page.locator(".rlaas-matches li", has_text="IP address").get_by_role("link").click()
        act(page, "Block", Reason="known to scrape")
        assert send(None, "/login/", address="203.0.113.77") == [429]
        assert send(None, "/login/", address="203.0.113.78") == [200]

    def test_rows_are_sorted_by_clicks_on_the_header(self, open_page, users):
        for number, name in enumerate(("bob", "ada", "eve"), start=1):
            send(User.objects.create_user(name), times=number)
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        names = page.locator("tbody .rlaas-identity")
        for column, expected in (("Count", ["eve", "ada", "bob"]), ("Identity", ["ada", "bob", "eve"])):
            head = page.get_by_role("columnheader", name=column)
            head.get_by_role("link").click()
            expect(names).to_have_text(expected)
            before = head.get_attribute("aria-sort")
            head.get_by_role("link").click()
            expect(names).to_have_text(expected[::-1])
            assert {before, head.get_attribute("aria-sort")} == {"ascending", "descending"}

    def test_the_pages_of_all_active_show_every_identity(self, open_page, users):
        for i in range(400):
            check(f"user-{i}")
        page = open_page(users["operator"], f"{PANEL}clients/?tab=active")
        seen, pages = set(), 1
        while True:
            seen |= set(page.locator("tbody .rlaas-identity").all_inner_texts())
            following = page.get_by_role("link", name="Next page")
            if not following.count():
                break
            following.click()
            page.wait_for_load_state()
            pages += 1
        assert pages > 2
        assert seen == {f"user-{i}" for i in range(400)}

    def test_refusals_are_filtered_and_exported(self, open_page, users):
        send(users["carol"], times=7)
        send(None, "/login/", times=8)
        page = open_page(users["operator"], f"{PANEL}refusals/")
        expect(page.locator("#content tbody tr")).to_have_count(2)
        expect(page.locator("#content tbody")).to_contain_text("3 times since")
        page.get_by_label("Identity").fill("carol@example.com")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#content tbody tr")).to_have_count(1)
        with page.expect_download() as download:
            page.get_by_role("link", name="Export as CSV").click()
        assert len(download.value.path().read_text().splitlines()) == 3
        page.get_by_label("Path").fill("/nowhere/")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("No matching refusals")).to_be_visible()

    def test_from_the_overview_to_a_policy_and_to_its_clients(self, open_page, users):
        send(users["carol"], times=7)
        page = open_page(users["operator"])
        for name in ("identities", "paths"):
            table = page.get_by_role("table", name=f"Most refused {name} today")
            expect(table.locator("tbody tr")).to_have_count(1)
            expect(table.locator("td")).to_have_text("2")
        page.get_by_role("table", name="Policies").get_by_role("link", name="checkout", exact=True).click()
        hour = page.get_by_role("table", name="Requests under checkout").locator("tr", has_text="last hour")
        expect(hour.locator("td")).to_have_text(["5", "2", "0", "0", "0"])
        page.locator("#content").get_by_role("link", name="Clients").last.click()
        expect(page.get_by_label("Policy")).to_have_value("checkout")
        expect(row(page, "carol")).to_have_count(1)

    def test_the_shadow_page_shows_what_would_be_refused(self, open_page, users):
        assert send(users["carol"], "/search/", times=5) == [200] * 5
        page = open_page(users["operator"], f"{PANEL}shadow/")
        table = page.get_by_role("table", name="Shadow policies")
        expect(table.locator("tbody td")).to_have_text(["3/h", "5", "2", "40 %", "1"])
        expect(page.locator("#content")).to_contain_text("To enforce a policy, remove shadow=True from it.")
        table.get_by_role("link", name="trial").click()
        expect(page.get_by_role("table", name="Identities over the limit today")).to_contain_text("carol")


class TestUserChangePage:
    def test_it_shows_usage_and_links_to_the_panel(self, open_page, users):
        send(users["carol"], times=3)
        page = open_page(users["operator"], f"/admin/auth/user/{users['carol'].pk}/change/")
        section = page.locator(".rlaas-user-usage")
        expect(section.locator("tbody tr")).to_have_text(re.compile(r"checkout\s*5/h\s*3 / 5"))
        section.get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        page.locator(".rlaas-header").get_by_role("link").click()
        expect(page).to_have_url(re.compile(f"/auth/user/{users['carol'].pk}/change/"))

    def test_users_can_still_be_saved_and_added(self, open_page, users):
        page = open_page(users["operator"], f"/admin/auth/user/{users['carol'].pk}/change/")
        page.fill("#id_first_name", "Caroline")
        page.get_by_role("button", name="Save", exact=True).click()
        page.locator(".messagelist .success").wait_for()
        assert User.objects.get(username="carol").first_name == "Caroline"
        assert page.goto("/admin/auth/user/add/").status == 200

    def test_usage_needs_the_permission_to_view_the_panel(self, open_page, users):
        users["viewer"].user_permissions.remove(users["viewer"].user_permissions.get(codename="view_ratelimit"))
        page = open_page(users["viewer"], f"/admin/auth/user/{users['carol'].pk}/change/")
        expect(page.locator("#id_username, .field-username")).not_to_have_count(0)
        expect(page.locator(".rlaas-user-usage")).to_have_count(0)

    def test_it_opens_while_redis_is_unavailable(self, open_page, users):
        page = open_page(users["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            assert page.goto(f"/admin/auth/user/{users['carol'].pk}/change/").status == 200
            expect(page.locator(".rlaas-user-usage")).to_contain_text("Redis is unavailable")

    def test_the_mixin_works_without_fieldsets(self, users):
        class Plain(RateLimitsOfUser, admin.ModelAdmin):
            fields = None

        plain = Plain(User, admin.AdminSite())
        request = RequestFactory().get("/")
        request.user = users["operator"]
        fieldsets = plain.get_fieldsets(request, users["carol"])
        assert [title for title, _ in fieldsets] == [None, "Rate limits"]
        assert "rate_limits" not in fieldsets[0][1]["fields"]
        assert plain.get_fieldsets(request) == fieldsets[:1]


class TestAppearance:
    def test_a_csp_violation_would_fail_these_tests(self, chromium, users, site):
        browser = Client()
        browser.force_login(users["operator"])
        assert browser.get(PANEL).headers["Content-Security-Policy"] == CSP
        page = chromium.new_page(base_url=site)
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.goto("/admin/login/")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">x</p>')")
        page.wait_for_function("true")
        page.context.close()
        assert any("Content Security Policy" in text for text in said)

    def test_the_theme_toggle_of_the_admin_applies(self, open_page, users):
        send(users["carol"], times=7)
        page = open_page(users["operator"], reduced_motion="reduce")  # a transition would be measured halfway
        bar = page.locator(".rlaas-chart .rlaas-refused")
        shades = [bar.evaluate("(bar) => getComputedStyle(bar).fill")]
        page.get_by_role("button", name="Toggle theme").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        shades.append(bar.evaluate("(bar) => getComputedStyle(bar).fill"))
        assert len(set(shades)) == 2
        contrast, text = page.evaluate(CONTRAST.replace("body *", "#content *"))
        assert contrast >= 4.5, text

    def test_reduced_motion_disables_animations(self, open_page, users):
        moving = "() => getComputedStyle(document.querySelector('.rlaas-live-dot')).animationName"
        assert open_page(users["operator"]).evaluate(moving) == "rlaas-pulse"
        assert open_page(users["operator"], reduced_motion="reduce").evaluate(moving) == "none"

    def test_degraded_decisions_and_unlisted_refusals_are_shown(self, open_page, users, screenshots):
        tally, minute = recorder.Tally(), int(time.time()) // 60
        tally.counts.update({(minute, DEGRADED): 12, (minute, schema.UNLOGGED): 3456})
        backend.execute(backend.topology(), tally.call(schema.SITE))
        page = open_page(users["operator"])
        expect(page.get_by_role("alert")).to_contain_text("12 requests were decided without Redis")
        page.screenshot(path=screenshots / "admin" / "degraded-light.png")
        page.goto(f"{PANEL}refusals/")
        expect(page.locator(".rlaas-banner")).to_contain_text("3,456 more refusals in the last day were counted")

    def test_in_german(self, open_page, users):
        send(users["carol"], times=7)
        page = open_page(users["operator"], locale="de-DE")
        expect(page.get_by_role("navigation", name="Ratenbegrenzung")).to_contain_text("Übersicht")
        page.goto(identity_of(users["carol"]))
        expect(page.locator(".rlaas-refusal-list li").first).to_contain_text("abgewiesen um")
        page.get_by_role("button", name="Weiter").click()
        expect(page.get_by_role("button", name="Ja, ich bin sicher")).to_be_visible()

    def test_tables_and_fields_have_names(self, open_page, users):
        crowd(20)
        set_override(str(users["carol"].pk), "", "block", _tomorrow(), by="somebody", reason="because")
        page = open_page(users["operator"])
        for path in [*PAGES.values(), f"identity/?id={users['carol'].pk}", "policy/?policy=checkout"]:
            page.goto(PANEL + path)
            nameless = page.evaluate(
                """() => [
                  ...[...document.querySelectorAll("#content table")].filter((table) => !table.caption),
                  ...[...document.querySelectorAll("#content :is(input:not([type=hidden]), select)")]
                    .filter((field) => !field.labels.length),
                  ...[...document.querySelectorAll("#content :is(a, button)")].filter((each) => !each.innerText),
                  ...[...document.querySelectorAll("#content th")].filter((head) => !head.scope),
                  ...[...document.querySelectorAll("#content svg[role=img]")].filter((image) => !image.ariaLabel),
                  ...[...document.querySelectorAll("[id]")].filter((each) =>
                    document.querySelectorAll("#" + CSS.escape(each.id)).length > 1),
                ].map((each) => each.outerHTML.slice(0, 200))"""
            )
            assert nameless == []
            assert page.locator("[style], [onclick], #content style, #content script").count() == 0

    @pytest.mark.parametrize("look", LOOKS)
    @pytest.mark.parametrize("many", [False, True], ids=["none", "many"])
    def test_every_page_fits_and_has_contrast(self, open_page, users, screenshots, look, many):
        """Also take screenshots, for review."""
        directory = screenshots / "admin"
        directory.mkdir(exist_ok=True)
        carol = users["carol"]
        pages = dict(PAGES)
        if many:
            past({"checkout": (40, 0.02), "search": (300, 0.004), "login": (25, 0.08), "trial": (120, 0.05)})
            many_users = crowd()
            send(carol, "/checkout/", 8)
            send(carol, "/search/", 6)
            operator = users["operator"]
            set_override(str(carol.pk), "search", "limit", _tomorrow(), by=operator, reason="slow client", limit=20)
            set_override(str(carol.pk), "search", "limit", _tomorrow(), by=operator, reason="slower client", limit=10)
            set_override(str(many_users[3].pk), "", "exempt", _tomorrow(), by=operator, reason="load test, ticket 4711")
            set_override("ip=198.51.100.20", "", "block", _tomorrow(), by=operator, reason="scraping the price list")
            pages["search"] = "clients/?q=carol%40example"
            pages["identity"] = f"identity/?id={carol.pk}"
            pages["policy"] = "policy/?policy=checkout"
            pages["week"] = "?span=week"
        else:
            pages["identity"] = "identity/?id=ip%3D203.0.113.9"
            pages["nobody"] = "clients/?q=nobody"
        page = open_page(users["operator"], look=look)
        for name, path in pages.items():
            page.goto(PANEL + path)
            page.screenshot(path=directory / f"{name}-{'many' if many else 'none'}-{look}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            contrast, text = page.evaluate(
                CONTRAST.replace("body *", ".rlaas-header *, .rlaas-tabs *, .rlaas-columns *")
            )
            assert contrast >= 4.5, f"{name}: {text}"

    @pytest.mark.parametrize("look", LOOKS)
    def test_forms_and_error_pages_fit(self, open_page, users, screenshots, look):
        directory = screenshots / "admin"
        directory.mkdir(exist_ok=True)
        carol = users["carol"]
        send(carol, times=4)
        page = open_page(users["operator"], identity_of(carol), look=look)
        page.get_by_role("radio", name="Set a custom limit").check()
        page.screenshot(path=directory / f"act-{look}.png", full_page=True)
        page.get_by_role("spinbutton", name="Factor").fill("0.4")
        page.get_by_role("button", name="Continue").click()
        page.screenshot(path=directory / f"mistake-{look}.png", full_page=True)
        page.get_by_role("textbox", name="Reason").fill("slower")
        page.get_by_role("button", name="Continue").click()
        page.screenshot(path=directory / f"confirm-{look}.png", full_page=True)
        page.goto(f"/admin/auth/user/{carol.pk}/change/")
        page.screenshot(path=directory / f"user-{look}.png", full_page=True)
        page.goto("/admin/")
        page.screenshot(path=directory / f"index-{look}.png", full_page=True)
        with override_settings(CACHES=GONE):
            page.goto(PANEL)
            page.screenshot(path=directory / f"unavailable-{look}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def _tomorrow():
    from datetime import timedelta

    from django.utils import timezone

    return timezone.now() + timedelta(days=1)
