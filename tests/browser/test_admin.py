"""The panel as an operator uses it, in a real Chromium under a strict content security policy."""

from __future__ import annotations

import re
import time

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client, RequestFactory, override_settings
from playwright.sync_api import expect

from rlaas_django import Policy, backend, check, peek, stats
from rlaas_django.admin import RateLimitsOfUser
from rlaas_django.identity import identify
from rlaas_django.models import Override
from tests.browser.admin_fixtures import CSP, PANEL, _open_page, _people, _site, ask, crowd, past  # noqa: F401
from tests.browser.conftest import LOOKS
from tests.browser.test_demo import CONTRAST

PAGES = {
    "overview": "",
    "users": "users/",
    "active": "users/?tab=active",
    "refusals": "refusals/",
    "shadow": "shadow/",
    "overrides": "overrides/",
}
GONE = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
ODD = ['a"b', "<script>alert(1)</script>", "a/b", "😀", "x" * 8000, "a\n\x1b[31mb", "100%", "a&b='c'", "{a}:b"]


def row(page, name, policy="checkout"):
    return page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True)).filter(has_text=policy)


def identity_of(user) -> str:
    return f"{PANEL}identity/?id={user.pk}"


def act(page, action, **fields):
    """Fill in the form of an identity's page, and confirm."""
    page.get_by_role("radio", name=action).check()
    for label, value in fields.items():
        if label in ("Policy", "For"):
            page.get_by_label(label, exact=True).select_option(value)
        else:
            page.get_by_role("textbox" if label == "Reason" else "spinbutton", name=label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Yes, do it").click()
    page.locator(".messagelist .success").wait_for()


class TestTheStoryOfAnOperator:
    def test_from_logging_in_to_a_request_that_passes_again(self, open_page, people):
        carol = people["carol"]
        page = open_page(None, "/admin/")
        page.fill("#id_username", "operator")
        page.fill("#id_password", "password")
        page.click("input[type=submit]")
        page.locator("#content").get_by_role("link", name="Rate limits").last.click()
        expect(page).to_have_title(re.compile("^Rate limits"))
        expect(page.get_by_text("No request has been counted")).to_be_visible()

        # A user's count rises as requests are made.
        page.get_by_role("navigation", name="Rate limits").get_by_role("link", name="Users").click()
        expect(page.get_by_text("Nobody is near a limit")).to_be_visible()
        page.get_by_role("navigation", name="Which users").get_by_role("link", name="All active").click()
        for count in (1, 2, 3):
            assert ask(carol) == [200]
            expect(row(page, "carol").locator(".rlaas-count")).to_have_text(f"{count} / 5")
        assert ask(carol, times=4) == [200, 200, 429, 429]

        # Find her by e-mail, and read why.
        page.get_by_label("User name, id, e-mail or address").fill("carol@example.com")
        page.keyboard.press("Enter")
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("5 / 5")
        expect(row(page, "carol").locator("td").last).to_have_text("2")
        row(page, "carol").get_by_role("link", name="carol", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        sentence = r"checkout 5 of 5 in 1 h, refused at \d\d:\d\d:\d\d on GET /checkout/, free again in 59 min \d+ s"
        expect(page.locator(".rlaas-sentences li").first).to_have_text(re.compile(sentence))

        # Reset, and the next request passes.
        act(page, "Reset")
        assert ask(carol) == [200]
        expect(page.locator("tbody tr", has_text="checkout").locator("[data-count]").first).to_have_text("1 / 5")
        assert LogEntry.objects.get().change_message == "Reset under every policy."

    def test_block_exempt_and_another_limit_hold_for_the_next_request(self, open_page, people):
        carol = people["carol"]
        page = open_page(people["operator"], identity_of(carol))
        for action, fields, expected, badge in (
            ("Block", {"For": "1 hour", "Reason": "scraping"}, [429], "blocked"),
            ("Exempt", {"For": "1 day", "Reason": "a test"}, [200] * 7, "exempt"),
            ("Set another limit", {"New_limit": "2", "Reason": "slower"}, [200, 200, 429], "another limit: 2"),
        ):
            act(page, action, **fields)
            assert ask(carol, times=len(expected)) == expected
            expect(page.locator(".rlaas-force .rlaas-badge")).to_have_text([badge])
        expect(page.locator(".rlaas-history li")).to_have_count(2)
        expect(page.locator(".rlaas-sentences")).to_contain_text("Blocked (scraping), refused at")

        # They are on a page of their own, and can be ended there.
        page.goto(f"{PANEL}overrides/")
        active = page.get_by_role("table", name="Overrides in force")
        expect(active.locator("tbody tr")).to_have_count(1)
        expect(active).to_contain_text("slower")
        active.get_by_role("button", name="End").click()
        page.get_by_role("button", name="Yes, do it").click()
        expect(page.get_by_text("No exceptions")).to_be_visible()
        expect(page.get_by_role("table", name="Ended overrides").locator("tbody tr")).to_have_count(3)
        assert ask(carol) == [200]
        assert not Override.objects.active().exists()

    def test_only_the_fields_that_an_action_needs_are_asked_for_and_mistakes_are_told(self, open_page, people):
        page = open_page(people["operator"], identity_of(people["carol"]))
        expect(page.get_by_role("textbox", name="Reason")).to_have_count(0)
        page.get_by_role("radio", name="Give back").check()
        expect(page.get_by_role("spinbutton", name="Units")).to_be_visible()
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".errorlist")).to_have_text("Say how many.")
        page.get_by_role("radio", name="Block").check()
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".errorlist")).to_have_text("Say why, for whoever looks at this next.")
        page.get_by_role("textbox", name="Reason").fill("scraping")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("Refuse every request of carol under every policy for 1 day?")).to_be_visible()
        page.get_by_role("link", name="No, go back").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        assert not Override.objects.exists()

    def test_units_are_given_back_under_one_policy(self, open_page, people):
        assert ask(people["carol"], times=6)[-1] == 429
        page = open_page(people["operator"], identity_of(people["carol"]))
        act(page, "Give back", Units="2", Policy="checkout")
        expect(page.locator(".messagelist")).to_have_text("Gave back 2 under checkout.")
        assert ask(people["carol"], times=3) == [200, 200, 429]

    def test_what_was_done_leads_back_from_the_admins_own_log(self, open_page, people):
        page = open_page(people["operator"], identity_of(people["carol"]))
        act(page, "Reset")
        page.goto("/admin/")
        page.locator("#recent-actions-module").get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")


class TestWhoMayOnlyLook:
    def test_finds_no_button_and_a_forged_post_is_refused(self, open_page, people, site):
        Override.set(str(people["carol"].pk), "", "block", _tomorrow(), by="somebody", reason="because")
        page = open_page(people["looks"], identity_of(people["carol"]))
        expect(page.locator(".rlaas-force")).to_contain_text("because")
        for path in (identity_of(people["carol"]), f"{PANEL}overrides/"):
            page.goto(path)
            expect(page.locator("#content form")).to_have_count(0)
        override = Override.objects.get()
        for name, data in (
            ("act", {"identity": str(people["carol"].pk), "action": "reset", "confirmed": "1"}),
            ("end", {"override": str(override.pk)}),
        ):
            answer = page.evaluate(
                """async ([url, data]) => {
                  const token = document.querySelector("[name=csrfmiddlewaretoken]").value;
                  const body = new URLSearchParams({...data, csrfmiddlewaretoken: token});
                  return (await fetch(url, {method: "POST", body})).status;
                }""",
                [f"{PANEL}{name}/", data],
            )
            assert answer == 403
        assert Override.objects.active().count() == 1
        assert not LogEntry.objects.exists()

    def test_without_the_token_nobody_acts(self, open_page, people):
        page = open_page(people["operator"], identity_of(people["carol"]))
        data = {"identity": str(people["carol"].pk), "action": "block", "reason": "x", "confirmed": "1"}
        for name in ("act", "end"):
            assert page.request.post(f"{PANEL}{name}/", form=data).status == 403
        assert not Override.objects.exists()

    def test_staff_without_the_permission_see_no_link_and_no_page(self, open_page, people):
        other = User.objects.create_user("other", password="password", is_staff=True)
        page = open_page(other, "/admin/")
        expect(page.get_by_role("link", name="Rate limits")).to_have_count(0)
        assert page.goto(PANEL).status == 403


class TestLive:
    def test_what_is_open_and_focused_stays_so(self, open_page, people):
        ask(people["carol"])
        page = open_page(people["operator"])
        card = page.get_by_role("article", name="checkout")
        card.get_by_text("As a table").click()
        link = card.get_by_role("link", name="Refusals")
        link.focus()
        ask(people["carol"], times=3)
        expect(card.locator("[data-count]").nth(1)).to_have_text("4")  # of the hour: a minute may end meanwhile
        expect(card.locator("details")).to_have_attribute("open", "")
        expect(link).to_be_focused()

    def test_a_row_that_moves_takes_its_focus_along(self, open_page, people):
        dave = User.objects.create_user("dave")
        ask(people["carol"], times=2)
        ask(dave, times=1)
        page = open_page(people["operator"], f"{PANEL}users/?tab=active&sort=count")
        names = page.locator("tbody .rlaas-who")
        expect(names).to_have_text(["carol", "dave"])
        names.last.focus()
        ask(dave, times=2)
        expect(names).to_have_text(["dave", "carol"])
        expect(names.first).to_be_focused()

    def test_it_can_be_paused_by_keyboard_and_that_is_remembered(self, open_page, people):
        page = open_page(people["operator"], f"{PANEL}users/?tab=active")
        pause = page.get_by_role("button", name="Pause")
        expect(page.get_by_role("status")).to_have_text("Live")
        pause.focus()
        page.keyboard.press("Space")
        expect(pause).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("status")).to_have_text("Paused")
        ask(people["carol"])
        page.wait_for_timeout(3_000)
        expect(row(page, "carol")).to_have_count(0)
        page.reload()
        expect(pause).to_have_attribute("aria-pressed", "true")
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("1 / 5")
        pause.click()
        ask(people["carol"])
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("2 / 5")

    def test_a_message_is_not_taken_away_by_the_refresh_of_another_tab(self, open_page, people):
        page = open_page(people["operator"], identity_of(people["carol"]))
        page.context.new_page().goto(PANEL)
        for _ in range(3):
            act(page, "Reset")

    def test_nothing_is_asked_while_nobody_looks(self, open_page, people):
        page = open_page(people["operator"], f"{PANEL}users/?tab=active")
        look = """(hidden) => {
          Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(look, True)
        page.wait_for_timeout(500)  # for an answer that is on its way
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(3_000)
        assert asked == []
        ask(people["carol"])
        page.evaluate(look, False)
        expect(row(page, "carol").locator(".rlaas-count")).to_have_text("1 / 5", timeout=1_000)

    def test_who_was_logged_out_is_told(self, open_page, people):
        page = open_page(people["operator"])
        page.context.clear_cookies()
        expect(page.get_by_role("status")).to_have_text("No longer refreshed: reload the page")
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)

    def test_a_site_that_fails_is_asked_again_less_often(self, open_page, people):
        page = open_page(people["operator"])
        page.route("**/ratelimit/", lambda route: route.abort())
        expect(page.get_by_role("status")).to_have_text("Cannot refresh, will try again")
        page.unroute_all()
        expect(page.get_by_role("status")).to_have_text("Live", timeout=10_000)

    def test_without_a_script_the_pages_work_and_show_no_dead_button(self, open_page, people):
        ask(people["carol"], times=7)
        page = open_page(people["operator"], f"{PANEL}users/", java_script_enabled=False)
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        row(page, "carol").get_by_role("link", name="carol", exact=True).click()
        act(page, "Reset")
        assert ask(people["carol"]) == [200]


class TestWithoutRedis:
    @pytest.mark.parametrize("name", [*PAGES, "identity"])
    def test_every_page_says_so_within_a_second(self, open_page, people, name):
        path = identity_of(people["carol"]) if name == "identity" else PANEL + PAGES[name]
        page = open_page(people["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            started = time.monotonic()
            answer = page.goto(path, wait_until="commit")
            answer.finished()
            assert time.monotonic() - started < 1
            expect(page.get_by_role("alert")).to_contain_text("Redis cannot be reached")
        assert answer.status == (200 if name == "overrides" else 503)

    def test_an_open_page_keeps_what_it_had_and_recovers(self, open_page, people):
        ask(people["carol"], times=6)
        page = open_page(people["operator"], f"{PANEL}users/")
        with override_settings(CACHES=GONE):
            expect(page.get_by_role("status")).to_have_text("Redis cannot be reached; older figures")
            expect(row(page, "carol").locator(".rlaas-count")).to_have_text("5 / 5")
        expect(page.get_by_role("status")).to_have_text("Live")

    def test_a_page_that_could_not_be_made_appears_when_redis_is_back(self, open_page, people):
        page = open_page(people["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            page.goto(f"{PANEL}users/")
            expect(page.get_by_role("link", name="Try again")).to_be_visible()
        expect(page.get_by_text("Nobody is near a limit")).to_be_visible()

    def test_an_action_is_said_not_to_be_done(self, open_page, people):
        page = open_page(people["operator"], identity_of(people["carol"]))
        page.get_by_role("button", name="Continue").click()
        with override_settings(CACHES=GONE):
            page.get_by_role("button", name="Yes, do it").click()
            expect(page.get_by_role("alert")).to_contain_text("What you asked for was not done.")


class TestFinding:
    @pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
    def test_odd_identities_are_shown_as_they_are_and_can_be_reset(self, open_page, people, odd):
        check(odd)
        page = open_page(people["operator"], f"{PANEL}users/?tab=active")
        shown = page.locator("tbody .rlaas-who")
        expect(shown).to_have_count(1)
        if len(odd) < 100:
            expect(shown).to_have_text(odd.replace("\n", r"\n").replace("\x1b", r"\x1b"))
        shown.click()
        expect(page.locator("[data-count]").first).to_have_text("1 / 5")
        assert page.locator("[name=identity]").input_value() == identify(odd, Policy("default", "5/m"))
        act(page, "Reset")
        assert peek(odd).current_count == 0

    def test_an_address_can_be_blocked_before_it_has_asked(self, open_page, people):
        page = open_page(people["operator"], f"{PANEL}users/?q=203.0.113.77")
        expect(page.get_by_text("Nothing is counted for “203.0.113.77” now")).to_be_visible()
        page.locator(".rlaas-idle li", has_text="address").get_by_role("link").click()
        act(page, "Block", Reason="known to scrape")
        assert ask(None, "/login/", address="203.0.113.77") == [429]
        assert ask(None, "/login/", address="203.0.113.78") == [200]

    def test_rows_are_sorted_by_a_click_and_back_by_another(self, open_page, people):
        for number, name in enumerate(("bob", "ada", "eve"), start=1):
            ask(User.objects.create_user(name), times=number)
        page = open_page(people["operator"], f"{PANEL}users/?tab=active")
        names = page.locator("tbody .rlaas-who")
        for column, expected in (("Count", ["eve", "ada", "bob"]), ("Identity", ["ada", "bob", "eve"])):
            head = page.get_by_role("columnheader", name=column)
            head.get_by_role("link").click()
            expect(names).to_have_text(expected)
            before = head.get_attribute("aria-sort")
            head.get_by_role("link").click()
            expect(names).to_have_text(expected[::-1])
            assert {before, head.get_attribute("aria-sort")} == {"ascending", "descending"}

    def test_all_active_goes_on_page_by_page(self, open_page, people):
        for i in range(400):
            check(f"user-{i}")
        page = open_page(people["operator"], f"{PANEL}users/?tab=active")
        seen, pages = set(), 1
        while True:
            seen |= set(page.locator("tbody .rlaas-who").all_inner_texts())
            following = page.get_by_role("link", name="Next page")
            if not following.count():
                break
            following.click()
            page.wait_for_load_state()
            pages += 1
        assert pages > 2
        assert seen == {f"user-{i}" for i in range(400)}

    def test_refusals_are_filtered_and_exported_as_filtered(self, open_page, people):
        ask(people["carol"], times=7)
        ask(None, "/login/", times=8)
        page = open_page(people["operator"], f"{PANEL}refusals/")
        expect(page.locator("#content tbody tr")).to_have_count(5)
        page.get_by_label("Identity").fill("carol@example.com")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#content tbody tr")).to_have_count(2)
        with page.expect_download() as download:
            page.get_by_role("link", name="Export as CSV").click()
        assert len(download.value.path().read_text().splitlines()) == 3
        page.get_by_label("Path").fill("/nowhere/")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("No refusal fits")).to_be_visible()

    def test_the_overview_leads_to_a_policy_and_to_who_was_refused(self, open_page, people):
        ask(people["carol"], times=7)
        page = open_page(people["operator"])
        card = page.get_by_role("article", name="checkout")
        expect(card.locator("tr", has_text="refused").locator("td").first).to_have_text("2")
        expect(page.get_by_role("table", name="Most refused today").locator("tbody tr")).to_have_count(1)
        card.get_by_role("link", name="Users").click()
        expect(page.get_by_label("Policy")).to_have_value("checkout")
        expect(row(page, "carol")).to_have_count(1)

    def test_shadow_policies_tell_what_they_would_refuse_and_how_to_enforce_them(self, open_page, people):
        assert ask(people["carol"], "/search/", times=5) == [200] * 5
        page = open_page(people["operator"], f"{PANEL}shadow/")
        card = page.get_by_role("article", name="trial")
        expect(card.locator(".rlaas-facts dd")).to_have_text(["2", "40.0 %", "1"])
        expect(card).to_contain_text("To enforce it, remove shadow=True from the policy.")


class TestAUsersOwnPage:
    def test_shows_their_counts_and_leads_to_the_panel(self, open_page, people):
        ask(people["carol"], times=3)
        page = open_page(people["operator"], f"/admin/auth/user/{people['carol'].pk}/change/")
        section = page.locator(".rlaas-of-user")
        expect(section.locator("tbody tr")).to_have_text(re.compile(r"checkout\s*3 / 5"))
        section.get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("carol")
        page.locator(".rlaas-head").get_by_role("link").click()
        expect(page).to_have_url(re.compile(f"/auth/user/{people['carol'].pk}/change/"))

    def test_can_still_be_saved_and_added(self, open_page, people):
        page = open_page(people["operator"], f"/admin/auth/user/{people['carol'].pk}/change/")
        page.fill("#id_first_name", "Caroline")
        page.get_by_role("button", name="Save", exact=True).click()
        page.locator(".messagelist .success").wait_for()
        assert User.objects.get(username="carol").first_name == "Caroline"
        assert page.goto("/admin/auth/user/add/").status == 200

    def test_shows_nothing_to_those_who_may_not_see_the_panel(self, open_page, people):
        people["looks"].user_permissions.remove(people["looks"].user_permissions.get(codename="view_ratelimit"))
        page = open_page(people["looks"], f"/admin/auth/user/{people['carol'].pk}/change/")
        expect(page.locator("#id_username, .field-username")).not_to_have_count(0)
        expect(page.locator(".rlaas-of-user")).to_have_count(0)

    def test_opens_without_redis(self, open_page, people):
        page = open_page(people["operator"], "/admin/")
        with override_settings(CACHES=GONE):
            assert page.goto(f"/admin/auth/user/{people['carol'].pk}/change/").status == 200
            expect(page.locator(".rlaas-of-user")).to_contain_text("Redis cannot be reached")

    def test_takes_one_line_for_any_user_model_also_without_fieldsets(self, people):
        class Plain(RateLimitsOfUser, admin.ModelAdmin):
            fields = None

        plain = Plain(User, admin.AdminSite())
        request = RequestFactory().get("/")
        request.user = people["operator"]
        fieldsets = plain.get_fieldsets(request, people["carol"])
        assert [title for title, _ in fieldsets] == [None, "Rate limits"]
        assert "rate_limits" not in fieldsets[0][1]["fields"]
        assert plain.get_fieldsets(request) == fieldsets[:1]


class TestLooks:
    def test_a_violation_of_the_policy_would_be_seen(self, chromium, people, site):
        browser = Client()
        browser.force_login(people["operator"])
        assert browser.get(PANEL).headers["Content-Security-Policy"] == CSP
        page = chromium.new_page(base_url=site)
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.goto("/admin/login/")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">x</p>')")
        page.wait_for_function("true")
        page.context.close()
        assert any("Content Security Policy" in text for text in said)

    def test_the_admins_own_switch_turns_it_dark(self, open_page, people):
        ask(people["carol"], times=7)
        page = open_page(people["operator"], reduced_motion="reduce")  # no colour is measured on its way
        card = page.get_by_role("article", name="checkout")
        shades = [card.evaluate("(card) => getComputedStyle(card).backgroundColor")]
        page.get_by_role("button", name="Toggle theme").click()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        shades.append(card.evaluate("(card) => getComputedStyle(card).backgroundColor"))
        assert len(set(shades)) == 2
        contrast, text = page.evaluate(CONTRAST.replace("body *", "#content *"))
        assert contrast >= 4.5, text

    def test_nothing_moves_for_who_wants_no_motion(self, open_page, people):
        moving = "() => getComputedStyle(document.querySelector('.rlaas-dot')).animationName"
        assert open_page(people["operator"]).evaluate(moving) == "rlaas-pulse"
        assert open_page(people["operator"], reduced_motion="reduce").evaluate(moving) == "none"

    def test_what_was_decided_without_redis_and_left_out_under_attack_is_told(self, open_page, people, screenshots):
        now = int(time.time())
        key = stats.stats_key("checkout", now // stats.DAY)
        minute = now % stats.DAY // 60
        told = ("HSET", key, f"{minute}:{stats.DEGRADED}", 12, f"{minute}:{stats.UNLOGGED}", 3456)
        backend.execute([told, ("EXPIRE", key, 60)])
        page = open_page(people["operator"])
        expect(page.get_by_role("alert")).to_contain_text("12 requests were decided without Redis")
        page.screenshot(path=screenshots / "admin" / "degraded-light.png")
        page.goto(f"{PANEL}refusals/")
        expect(page.locator(".rlaas-banner")).to_contain_text("3,456 more refusals of the last day were counted")

    def test_in_german(self, open_page, people):
        ask(people["carol"], times=7)
        page = open_page(people["operator"], locale="de-DE")
        expect(page.get_by_role("navigation", name="Ratenbegrenzung")).to_contain_text("Übersicht")
        page.goto(identity_of(people["carol"]))
        expect(page.locator(".rlaas-sentences li").first).to_contain_text("abgewiesen um")
        page.get_by_role("button", name="Weiter").click()
        expect(page.get_by_role("button", name="Ja, ausführen")).to_be_visible()

    def test_tables_and_fields_have_names(self, open_page, people):
        crowd(20)
        Override.set(str(people["carol"].pk), "", "block", _tomorrow(), by="somebody", reason="because")
        page = open_page(people["operator"])
        for path in [*PAGES.values(), f"identity/?id={people['carol'].pk}"]:
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
    def test_every_page_fits_and_can_be_read(self, open_page, people, screenshots, look, many):
        """And has its picture taken, to be looked at."""
        directory = screenshots / "admin"
        directory.mkdir(exist_ok=True)
        carol = people["carol"]
        pages = dict(PAGES)
        if many:
            past({"checkout": (40, 0.02), "search": (300, 0.004), "login": (25, 0.08), "trial": (120, 0.05)})
            users = crowd()
            ask(carol, "/checkout/", 8)
            ask(carol, "/search/", 6)
            operator = people["operator"]
            Override.set(str(carol.pk), "search", "limit", _tomorrow(), by=operator, reason="slow client", limit=20)
            Override.set(str(carol.pk), "search", "limit", _tomorrow(), by=operator, reason="slower client", limit=10)
            Override.set(str(users[3].pk), "", "exempt", _tomorrow(), by=operator, reason="load test, ticket 4711")
            Override.set("ip=198.51.100.20", "", "block", _tomorrow(), by=operator, reason="scraping the price list")
            pages["search"] = "users/?q=carol%40example"
            pages["identity"] = f"identity/?id={carol.pk}"
        else:
            pages["identity"] = "identity/?id=ip%3D203.0.113.9"
            pages["nobody"] = "users/?q=nobody"
        page = open_page(people["operator"], look=look)
        for name, path in pages.items():
            page.goto(PANEL + path)
            page.screenshot(path=directory / f"{name}-{'many' if many else 'none'}-{look}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            contrast, text = page.evaluate(CONTRAST.replace("body *", ".rlaas-head *, .rlaas-tabs *, .rlaas-columns *"))
            assert contrast >= 4.5, f"{name}: {text}"

    @pytest.mark.parametrize("look", LOOKS)
    def test_the_rest_fits_too(self, open_page, people, screenshots, look):
        directory = screenshots / "admin"
        directory.mkdir(exist_ok=True)
        carol = people["carol"]
        ask(carol, times=4)
        page = open_page(people["operator"], identity_of(carol), look=look)
        page.get_by_role("radio", name="Set another limit").check()
        page.screenshot(path=directory / f"act-{look}.png", full_page=True)
        page.get_by_role("spinbutton", name="New limit").fill("2")
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
            page.screenshot(path=directory / f"unreachable-{look}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def _tomorrow():
    from datetime import timedelta

    from django.utils import timezone

    return timezone.now() + timedelta(days=1)
