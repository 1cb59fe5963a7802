"""The admin panel without a browser: pages, actions and permissions."""

from __future__ import annotations

import contextlib
import csv
import html
import time
from datetime import datetime
from html.parser import HTMLParser

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import reverse
from rlaas_django import Policy, check, peek, rate_limit
from rlaas_django.admin import RateLimitsOfUser
from rlaas_django.models import OperatorAction, Override
from rlaas_django.operators import usage as panel
from rlaas_django.runtime import background
from rlaas_django.stats import recorder

from tests import urls  # noqa: F401  (its view is known to the panel as soon as it is imported)
from tests.support.internals import ALGORITHMS, identify

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.urls")]

PAGES = ("changelist", "clients", "refusals", "shadow", "overrides", "add_override", "history")
ODD = ['a"b', "<script>alert(1)</script>", "a/b", "😀", "x" * 8000, "a\n\x1b[31mb", "100%", "a&b='c'", "{a}:b"]
GONE = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}


def url(name: str, **query: str) -> str:
    return reverse(f"admin:rlaas_django_ratelimit_{name}", query=query or None)


@pytest.fixture(autouse=True)
def _middleware(settings):
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    recorder.reset()


@pytest.fixture
def alice():
    return User.objects.create_user("alice", "alice@example.com", "password")


@pytest.fixture
def viewer(client):
    """Staff with the permission to view, but not to change."""
    user = User.objects.create_user("viewer", password="password", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_ratelimit"))
    browser = Client()
    browser.force_login(user)
    return browser


class HiddenFields(HTMLParser):
    """The hidden fields of a page, as a browser sends them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        field = dict(attrs)
        if tag == "input" and field.get("type") == "hidden":
            self.values[field["name"]] = field.get("value", "")


def act(browser, **data):
    return browser.post(url("act"), {"confirmed": "on", **data})


def request_as(user, times: int) -> list[int]:
    browser = Client()
    browser.force_login(user)
    return [browser.get("/page/").status_code for _ in range(times)]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_with_and_without_traffic(admin_client, alice, name):
    assert admin_client.get(url(name)).status_code == 200
    request_as(alice, 5)
    background.run(20)
    assert admin_client.get(url(name)).status_code == 200


@pytest.mark.parametrize("name", [*PAGES, "identity", "refusals_csv"])
def test_pages_need_the_permission_to_view(name, alice):
    assert Client().get(url(name)).status_code == 302
    browser = Client()
    browser.force_login(alice)
    assert browser.get(url(name)).status_code == 302
    alice.is_staff = True
    alice.save()
    assert browser.get(url(name)).status_code == 403


def test_the_admin_index_links_to_the_panel(admin_client):
    assert url("changelist") in admin_client.get("/admin/").content.decode()


def test_counts_equal_peek_for_every_algorithm(admin_client, alice, configure):
    configure(POLICIES={algo: {"rate": "7/h", "algo": algo} for algo in ALGORITHMS})
    for i, algo in enumerate(ALGORITHMS):
        for _ in range(i + 1):
            check(alice.pk, algo)
    rows = admin_client.get(url("identity", id=str(alice.pk))).context["rows"]
    shown = {row.outcome.policy.name: row.outcome.current_count for row in rows}
    for algo in ALGORITHMS:
        assert shown[algo] == peek(alice.pk, algo).current_count > 0


@pytest.mark.parametrize("odd", ODD)
def test_odd_identities_are_shown_escaped_and_can_be_reset(admin_client, odd):
    for _ in range(4):
        check(odd)
    encoded = identify(odd, Policy("default", "5/m"))
    for page in (url("clients", tab="active"), url("identity", id=encoded), url("clients", q=encoded)):
        body = admin_client.get(page).content.decode()
        assert "<script>alert" not in body
        assert "\x1b" not in body
        assert html.escape(encoded) in body or encoded in body
    assert act(admin_client, identity=encoded, action="reset").status_code == 302
    assert peek(odd).current_count == 0


def test_names_and_addresses_of_users_need_the_permission_to_view_users(viewer, alice):
    User.objects.filter(pk=alice.pk).update(first_name="Alicia", last_name="Keys")
    request_as(alice, 5)
    background.run(20)
    page = viewer.get(url("identity", id=str(alice.pk))).content.decode()
    assert "Alicia" not in page
    assert "alice@example.com" not in page
    found = [viewer.get(url("clients", q=text)).context["rows"] for text in ("alice@example", "alice")]
    assert [bool(rows) for rows in found] == [False, True]
    assert viewer.get(url("refusals", identity="alice@example.com")).context["found"] == 0
    User.objects.get(username="viewer").user_permissions.add(Permission.objects.get(codename="view_user"))
    page = viewer.get(url("identity", id=str(alice.pk))).content.decode()
    assert "Alicia Keys" in page
    assert "alice@example.com" in page
    assert viewer.get(url("clients", q="alice@example")).context["rows"]
    assert viewer.get(url("refusals", identity="alice@example.com")).context["found"] == 2


def test_policies_without_usage_are_apart(admin_client, alice, configure):
    configure(POLICIES={"used": {"rate": "5/h"}, **{f"unused-{i}": {"rate": "5/h"} for i in range(200)}})
    check(alice.pk, "used")
    context = admin_client.get(url("identity", id=str(alice.pk))).context
    assert [row.outcome.policy.name for row in context["rows"]] == ["used"]
    assert len(context["unused"]) >= 200


@pytest.mark.django_db(transaction=True)
def test_the_row_of_a_blocked_identity_says_so(admin_client, alice):
    request_as(alice, 3)
    act(admin_client, identity=str(alice.pk), action="block", hours="1", reason="spam")
    request_as(alice, 1)
    background.run(20)
    for page in (url("clients"), url("clients", tab="active"), url("identity", id=str(alice.pk))):
        body = admin_client.get(page).content.decode()
        assert '<span class="rlaas-badge rlaas-badge-block">blocked</span>' in body
        assert "100 %" not in body


@pytest.mark.parametrize("text", ["alice", "ALICE", "alice@example", "example.com", "{pk}"])
def test_search_finds_a_user_by_name_email_or_id(admin_client, alice, text):
    request_as(alice, 2)
    rows = admin_client.get(url("clients", q=text.format(pk=alice.pk))).context["rows"]
    assert (str(alice.pk), "page", 2) in [
        (r.identity.encoded, r.outcome.policy.name, r.outcome.current_count) for r in rows
    ]
    assert next(row.identity.user for row in rows if row.identity.encoded == str(alice.pk)) == alice


@pytest.mark.parametrize(
    "text", ["a" * 50_001, "%" * 30_000, "ip=" + "a" * 50_000, "1" * 50_001], ids=lambda text: text[:4]
)
@pytest.mark.parametrize(("page", "field"), [("clients", "q"), ("refusals", "identity"), ("refusals", "path")])
def test_a_long_search_text_finds_nothing(admin_client, alice, page, field, text):
    request_as(alice, 2)
    response = admin_client.get(url(page, **{field: text}))
    assert response.status_code == 200
    assert not response.context.get("rows")


def test_an_identity_is_found_by_its_long_text(admin_client):
    check("x" * 1000)
    (row,) = admin_client.get(url("clients", q="x" * 1000)).context["rows"]
    assert row.identity.encoded == identify("x" * 1000, Policy("default", "5/m"))


@pytest.mark.parametrize("digits", ["9" * 25, "9" * 5000, "001", "+1", " 1", "1_0", "-1"])
def test_digits_that_are_no_primary_key_match_no_user(admin_client, admin_user, digits):
    check(digits)
    encoded = identify(digits, Policy("default", "5/m"))
    for page in (url("clients", tab="active"), url("identity", id=encoded), url("clients", q=digits)):
        response = admin_client.get(page)
        assert response.status_code == 200
        assert not [row for row in response.context["rows"] if row.identity.encoded == encoded and row.identity.user]


@pytest.mark.parametrize("query", [{"since": "9" * 400}, {"cursor": "9" * 5000, "tab": "active"}])
def test_long_numbers_in_a_query_are_ignored(admin_client, query):
    assert admin_client.get(url("clients" if "tab" in query else "refusals", **query)).status_code == 200


def test_a_policy_with_a_rate_function_is_shown_after_its_first_decision(admin_client, alice):
    @rate_limit(rate=lambda request: "1/h", key="user", group="plan")
    def view(request):
        raise AssertionError

    with contextlib.suppress(AssertionError):
        view(request_of(alice))
    assert view(request_of(alice)).status_code == 429
    background.run(20)
    (row,) = admin_client.get(url("clients")).context["rows"]
    assert (row.identity.user, row.outcome.policy.name, row.outcome.current_count, row.outcome.limit) == (
        alice,
        "plan",
        1,
        1,
    )


def request_of(user):
    request = RequestFactory().get("/")
    request.user = user
    return request


@pytest.mark.parametrize("text", ["2001:db8::1", "[2001:db8::1]:80", "2001:db8::2"])
def test_search_finds_an_ipv6_address_by_its_network(admin_client, text):
    check({"ip": "2001:db8::1"}, Policy("default", "5/m"))
    rows = admin_client.get(url("clients", q=text)).context["rows"]
    assert ("ip=2001%3Adb8%3A%3A%2F64", 1) in [(row.identity.encoded, row.outcome.current_count) for row in rows]


def test_a_search_takes_one_script_call_for_all_policies(admin_client, alice, configure, client):
    configure(POLICIES={f"p{i}": {"rate": "5/m"} for i in range(20)})
    admin_client.get(url("clients", q="alice"))
    client.config_resetstat()
    admin_client.get(url("clients", q="alice"))
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


def test_the_number_of_queries_is_constant(admin_client, django_assert_max_num_queries):
    users = User.objects.bulk_create([User(username=f"user{i}") for i in range(60)])
    for user in users:
        check(user.pk)
    with django_assert_max_num_queries(6):
        rows = admin_client.get(url("clients", tab="active")).context["rows"]
    assert len(rows) >= 50
    assert all(row.identity.user for row in rows)


def test_the_pages_of_all_active_show_every_identity(admin_client, monkeypatch):
    monkeypatch.setattr(panel, "SCAN_COUNT", 20)
    monkeypatch.setattr(panel, "SCANS_PER_PAGE", 2)
    for i in range(300):
        check(f"user-{i}")
    seen, cursor, pages = set(), "0", 0
    while True:
        page = admin_client.get(url("clients", tab="active", cursor=cursor)).context
        seen |= {row.identity.encoded for row in page["rows"]}
        cursor, pages = str(page["cursor"]), pages + 1
        if cursor == "0":
            break
    assert seen == {f"user-{i}" for i in range(300)}
    assert pages > 2


def test_users_are_filtered_by_policy(admin_client, configure):
    configure(POLICIES={"a": {"rate": "5/m"}, "b": {"rate": "5/m"}})
    check("alice", ["a", "b", "default"])
    for name in ("a", "b", "default"):
        rows = admin_client.get(url("clients", tab="active", policy=name)).context["rows"]
        assert [row.outcome.policy.name for row in rows] == [name]


@pytest.mark.parametrize("sort", ["identity", "policy", "count", "used", "reset", "refused", "nonsense"])
def test_rows_can_be_sorted(admin_client, sort):
    for i, name in enumerate(("b", "a", "c")):
        for _ in range(i + 1):
            check(name)
    rows = admin_client.get(url("clients", tab="active", sort=sort)).context["rows"]
    if sort == "count":
        assert [row.identity.name for row in rows] == ["c", "a", "b"]
    if sort == "identity":
        assert [row.identity.name for row in rows] == ["a", "b", "c"]


def test_a_refused_user_is_on_the_watch_list_and_the_refusal_is_explained(admin_client, alice):
    assert request_as(alice, 5) == [200, 200, 200, 429, 429]
    background.run(20)
    (row,) = admin_client.get(url("clients")).context["rows"]
    assert (row.identity.user, row.outcome.policy.name, row.refused_today, row.percent) == (alice, "page", 2, 100)
    page = admin_client.get(url("identity", id=str(alice.pk)))
    ((group, explanation),) = page.context["refusals"]
    assert (group.request, group.number) == ("GET /page/", 2)
    assert "3 of 3" in explanation
    assert "GET /page/" in explanation
    assert html.escape(explanation) in page.content.decode()


@pytest.mark.parametrize(
    ("policy", "cost", "words"),
    [
        (Policy("dear", "3/h"), 5, "0 of 3 in 1\u00a0h, refused at"),
        (Policy("dear", "3/h"), 5, "code: the cost exceeds the limit"),
        (Policy("tried", "3/h", shadow=True), 3, "3 of 3 in 1\u00a0h, over the limit at"),
    ],
)
def test_a_cost_above_the_limit_and_a_shadow_policy_are_explained(admin_client, policy, cost, words):
    check("bob", policy, cost=cost)
    check("bob", policy, cost=cost)
    background.run(20)
    explanations = [text for _, text in admin_client.get(url("identity", id="bob")).context["refusals"]]
    assert any(words in text for text in explanations), explanations


def test_other_text_than_an_identity_is_searched_for_and_log_entries_link_to_it(admin_client):
    assert admin_client.get(url("identity", id="no identity")).url == url("clients", q="no identity")
    change = reverse("admin:rlaas_django_ratelimit_change", args=["ip_3D203.0.113.9"])
    assert admin_client.get(change).url == url("identity", id="ip=203.0.113.9")


class TestUserPages:
    """RateLimitsOfUser, on the page of a user."""

    @pytest.fixture
    def users(self):
        class Users(RateLimitsOfUser, admin.ModelAdmin):
            pass

        return Users(User, admin.site)

    def test_the_usage_has_a_fieldset_for_those_who_may_view_it(self, users, admin_user, alice):
        request = RequestFactory().get("/")
        for request.user, titles in ((admin_user, [None, "Rate limits"]), (alice, [None])):
            fieldsets = users.get_fieldsets(request, alice)
            assert [title for title, _ in fieldsets] == titles
            assert "rate_limits" not in fieldsets[0][1]["fields"]
            assert users.get_fieldsets(request) == fieldsets[:1]

    def test_it_shows_the_usage_also_while_redis_is_unavailable(self, users, alice):
        check(alice.pk)
        assert "<span>default <" in users.rate_limits(alice)
        assert "rlaas_django/panel.css" in str(users.media)
        with override_settings(CACHES=GONE):
            assert "Redis is unavailable" in users.rate_limits(alice)


class TestActions:
    def test_reset_allows_the_next_request(self, admin_client, alice):
        assert request_as(alice, 4)[-1] == 429
        act(admin_client, identity=str(alice.pk), action="reset", policy="page")
        assert request_as(alice, 1) == [200]

    def test_refund_allows_as_many_requests_again(self, admin_client, alice):
        assert request_as(alice, 4)[-1] == 429
        act(admin_client, identity=str(alice.pk), action="refund", policy="page", amount="2")
        assert request_as(alice, 3) == [200, 200, 429]

    @pytest.mark.django_db(transaction=True)
    def test_block_exempt_and_custom_limit_apply_to_the_next_request(self, admin_client, alice):
        for action, amounts, expected in (
            ("block", {}, [429]),
            ("exempt", {}, [200] * 6),
            ("limit", {"factor": "0.5"}, [200, 429]),
            ("limit", {"factor": "1.5"}, [200] * 3 + [429]),
            ("limit", {"amount": "6", "policy": "page"}, [200] * 2 + [429]),
        ):
            act(admin_client, identity=str(alice.pk), action=action, **amounts, hours="1", reason="because")
            assert request_as(alice, len(expected)) == expected, (action, amounts)
        assert Override.objects.active().count() == 2
        assert Override.objects.count() == 5

    def test_an_action_needs_confirmation(self, admin_client, alice):
        request_as(alice, 4)
        page = admin_client.post(url("act"), {"identity": str(alice.pk), "action": "reset"})
        assert page.status_code == 200
        assert 'name="confirmed"' in page.content.decode()
        assert request_as(alice, 1) == [429]

    @pytest.mark.parametrize(
        ("identity", "data"),
        [
            ("alice", {"action": "limit", "factor": "0.5", "hours": "168"}),
            ("alice", {"action": "limit", "amount": "1200", "policy": "page", "hours": "1"}),
            ("ip=203.0.113.9", {"action": "block", "every_client": "on"}),
        ],
    )
    def test_what_is_confirmed_is_what_was_entered(self, admin_client, identity, data):
        page = admin_client.post(url("act"), {"identity": identity, "reason": "“spam” & more", **data})
        fields = HiddenFields(page.content.decode()).values
        assert admin_client.post(url("act"), fields).status_code == 302
        override = Override.objects.get()
        assert (override.identity, override.policy) == (identity, data.get("policy", ""))
        assert (override.amount_text, override.every_client) == (
            data.get("amount") or data.get("factor", ""),
            "every_client" in data,
        )
        hours = (override.until - override.created_at).total_seconds() / 3600
        assert round(hours) == int(data.get("hours", 24))
        assert override.reason == "“spam” & more"

    def test_the_end_is_confirmed_on_a_site_that_groups_thousands(self, admin_client, settings):
        settings.USE_THOUSAND_SEPARATOR = True
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        Override.objects.update(id=12_345)
        page = admin_client.get(url("overrides")).content.decode()
        assert HiddenFields(page).values["override"] == "12345"
        page = admin_client.post(url("end"), {"override": "12345", "ask": "1"}).content.decode()
        admin_client.post(url("end"), HiddenFields(page).values)
        assert not Override.objects.active().exists()

    def test_actions_are_written_to_the_admin_log(self, admin_client, admin_user):
        check("alice")
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        entry = LogEntry.objects.get()
        assert (entry.user, entry.object_id) == (admin_user, "alice")
        assert entry.object_repr.startswith("Blocked alice under all policies until ")
        assert entry.change_message == f"{entry.object_repr}: spam"
        action = OperatorAction.objects.get()
        assert (action.by, action.via, action.identity) == (admin_user.get_username(), "admin", "alice")

    def test_the_confirmation_says_what_the_override_does_to_others(self, admin_client):
        act(admin_client, identity="ip=203.0.113.9", action="block", hours="1", reason="spam")
        act(admin_client, identity="ip=203.0.113.9", action="exempt", hours="1", policy="page", reason="partner")
        data = {"identity": "ip=203.0.113.9", "action": "limit", "factor": "2", "hours": "1", "reason": "x"}
        page = admin_client.post(url("act"), data)
        assert page.context["consequences"] == [
            "This ends the override “blocked” of 203.0.113.9 under all policies.",
            "Where both apply, the override “exempt” of 203.0.113.9 under page stays in force: it is narrower.",
            "It applies where a policy counts addresses. Logged-in users, whom most policies count by user, are not "
            "affected; choose “logged-in users, too” to include them.",
        ]
        assert "stays in force" in page.content.decode()
        page = admin_client.post(url("act"), {**data, "every_client": "on", "policy": "default"})
        assert page.context["consequences"] == [
            "Where both apply, the override “blocked” of 203.0.113.9 under all policies stays in force: a custom limit "
            "never lifts a block.",
            "It applies to every request from there, also of logged-in users.",
        ]

    @pytest.mark.django_db(transaction=True)
    def test_a_network_is_found_and_blocked(self, admin_client):
        (label,) = admin_client.get(url("clients", q="203.0.113.77/24")).context["unused"][:1]
        assert (label.encoded, label.name, label.kind_name) == ("net=203.0.113.0%2F24", "203.0.113.0/24", "network")
        assert admin_client.get(url("identity", id=label.encoded)).status_code == 200
        act(admin_client, identity=label.encoded, action="block", hours="1", reason="scan", every_client="on")
        assert not check({"user": "42", "ip": "203.0.113.9"}).allowed
        assert admin_client.get(url("overrides")).context["overrides"][0][1].name == "203.0.113.0/24"
        check({"ip": "203.0.113.9"})
        background.run(20)
        page = admin_client.get(url("identity", id="ip=203.0.113.9")).context
        assert "Blocked (scan)" in page["refusals"][0][1]
        assert {row.override.identity for row in page["rows"] if row.override} == {"net=203.0.113.0%2F24"}

    @pytest.mark.django_db(transaction=True)
    def test_an_override_without_its_log_entry_is_rolled_back(self, admin_client, monkeypatch):
        monkeypatch.setattr("django.contrib.admin.ModelAdmin.log_change", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        assert not Override.objects.exists()
        assert check("alice").allowed

    def test_the_end_of_an_override_can_be_confirmed_first(self, admin_client):
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        page = admin_client.post(url("end"), {"override": Override.objects.get().pk, "ask": "on"})
        assert "The policy applies again from the next request." in page.content.decode()
        assert Override.objects.active().count() == 1

    @pytest.mark.django_db(transaction=True)
    def test_an_override_can_be_ended_once(self, admin_client):
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        override = Override.objects.get()
        for _ in range(2):
            assert admin_client.post(url("end"), {"override": override.pk}).status_code == 302
        assert check("alice").allowed
        for key in ("nonsense", "", "1" * 30, "1" * 5000, "-1", "²"):
            assert admin_client.post(url("end"), {"override": key}).status_code == 302

    @pytest.mark.parametrize(
        "data",
        [
            {"action": "limit", "reason": "x"},
            {"action": "limit", "reason": "x", "amount": "5"},  # for all policies
            {"action": "limit", "reason": "x", "policy": "page", "amount": "0"},
            {"action": "limit", "reason": "x", "policy": "page", "amount": "99999999999999999"},
            {"action": "limit", "reason": "x", "factor": "0"},
            {"action": "limit", "reason": "x", "factor": "1.0001"},
            {"action": "block", "reason": "x", "every_client": "on"},  # of a user
            {"action": "block"},
            {"action": "nonsense", "reason": "x"},
            {"action": "reset", "policy": "nonsense"},
            {"action": "refund"},
            {"action": "block", "reason": "x", "hours": "-1"},
        ],
    )
    def test_an_invalid_form_shows_errors_and_changes_nothing(self, admin_client, data):
        check("alice")
        response = act(admin_client, identity="alice", **data)
        assert response.status_code == 200
        assert response.context["form"].errors
        assert check("alice").current_count == 1
        assert not Override.objects.exists()

    @pytest.mark.parametrize("name", ["act", "end"])
    def test_actions_need_the_permission_to_change(self, viewer, name):
        assert viewer.get(url("clients")).status_code == 200
        assert viewer.post(url(name), {"identity": "alice", "action": "reset", "confirmed": "on"}).status_code == 403
        assert 'name="action"' not in viewer.get(url("identity", id="alice")).content.decode()

    @pytest.mark.parametrize("name", ["act", "end"])
    def test_actions_need_a_post_with_a_csrf_token(self, admin_client, admin_user, name):
        assert admin_client.get(url(name)).status_code == 405
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(admin_user)
        assert strict.post(url(name), {"identity": "alice", "action": "reset", "confirmed": "on"}).status_code == 403


class TestHistory:
    def test_it_says_who_did_what_when_and_why(self, admin_client, admin_user, viewer, alice):
        request_as(alice, 3)
        identity = str(alice.pk)
        act(admin_client, identity=identity, action="block", hours="24", reason="<b>spam</b>")
        act(admin_client, identity=identity, action="reset", policy="page", reason="a mistake")
        act(admin_client, identity=identity, action="refund", policy="page", amount="2")
        for page in (url("history"), url("identity", id=identity)):
            body = viewer.get(page).content.decode()
            assert "Blocked alice under all policies until" in body
            assert "&lt;b&gt;spam&lt;/b&gt;" in body
            assert "Reset the usage of alice under page" in body
            assert "a mistake" in body
            assert "Refunded 0 units to alice under page" in body
            assert admin_user.username in body
            assert "in the admin" in body

    def test_the_page_of_an_identity_has_its_own_history_only(self, admin_client, alice):
        act(admin_client, identity="bob", action="block", hours="24", reason="spam")
        assert admin_client.get(url("identity", id=str(alice.pk))).context["history"] == []
        assert len(admin_client.get(url("identity", id="bob")).context["history"]) == 1


class TestAddingOverrides:
    @pytest.mark.parametrize(
        ("text", "encoded"),
        [
            ("203.0.113.0/24", "net=203.0.113.0%2F24"),
            ("2001:db8::/48", "net=2001%3Adb8%3A%3A%2F48"),
            ("203.0.113.9", "ip=203.0.113.9"),
            ("2001:db8::1", "ip=2001%3Adb8%3A%3A%2F64"),
        ],
    )
    def test_addresses_and_networks_are_found_before_their_first_request(self, admin_client, text, encoded):
        page = admin_client.get(url("add_override", q=text))
        assert page.context["found"][0].encoded == encoded
        assert url("identity", id=encoded, action="block") in html.unescape(page.content.decode())
        form = admin_client.get(url("identity", id=encoded, action="block")).context["form"]
        assert form["action"].value() == "block"

    def test_users_are_found_by_name(self, admin_client, alice):
        found = admin_client.get(url("add_override", q="ALI")).context["found"]
        assert [label.user for label in found] == [alice, None]

    @pytest.mark.parametrize("action", ["", "nonsense", "exempt"])
    def test_a_network_has_no_usage_to_reset(self, admin_client, action):
        page = admin_client.get(url("identity", id="net=203.0.113.0%2F24", action=action))
        body = page.content.decode()
        assert page.context["form"]["action"].value() == ("exempt" if action == "exempt" else "block")
        assert 'value="block"' in body
        assert 'value="reset"' not in body

    def test_only_who_may_change_sees_the_button(self, admin_client, viewer):
        link = url("add_override")
        assert link in admin_client.get(url("overrides")).content.decode()
        assert link not in viewer.get(url("overrides")).content.decode()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("whose", ["user", "ip=127.0.0.1", "net=127.0.0.0%2F8"])
def test_refusals_by_a_block_say_blocked(admin_client, alice, whose):
    """Of the user, of every client of an address, and of every client of a network."""
    data = {"identity": str(alice.pk)} if whose == "user" else {"identity": whose, "every_client": "on"}
    assert act(admin_client, action="block", hours="1", reason="spam", **data).status_code == 302
    assert request_as(alice, 2) == [429, 429]
    background.run(20)
    body = admin_client.get(url("refusals")).content.decode()
    assert 'rlaas-badge-block" title="spam">blocked<' in body
    assert "0 / 3" not in body
    assert "Blocked (spam), refused at" in admin_client.get(url("identity", id=str(alice.pk))).content.decode()


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _refused(self, alice):
        request_as(alice, 5)
        background.run(20)

    def test_the_log_is_filtered(self, admin_client, alice):
        for query, number in (
            ({}, 2),
            ({"policy": "page"}, 2),
            ({"policy": "default"}, 0),
            ({"identity": str(alice.pk)}, 2),
            ({"path": "/pa"}, 2),
            ({"path": "/other"}, 0),
            ({"since": "5"}, 2),
            ({"since": "x"}, 2),
        ):
            assert admin_client.get(url("refusals", **query)).context["found"] == number

    def test_refusals_are_grouped_with_address_and_class_of_user_agent(self, admin_client, alice):
        browser = Client(REMOTE_ADDR="198.51.100.7", HTTP_USER_AGENT="curl/8.5.0")
        browser.force_login(alice)
        assert [browser.get("/page/").status_code for _ in range(3)] == [429] * 3
        background.run(20)
        page = admin_client.get(url("refusals"))
        shown = [(group.number, group.latest.address, str(group.agent)) for group, _ in page.context["groups"]]
        assert shown == [(3, "198.51.100.7", "program"), (2, "127.0.0.1", "no user agent")]
        assert page.context["found"] == 5
        for text in ("3 times since", "198.51.100.7", "program"):
            assert text in page.content.decode()

    def test_csv_export_is_filtered_too(self, admin_client, alice):
        response = admin_client.get(url("refusals_csv", policy="page"))
        lines = list(csv.reader(response.content.decode().splitlines()))
        assert lines[0][:4] == ["time", "policy", "identity", "method"]
        assert [line[1:5] for line in lines[1:]] == [["page", str(alice.pk), "GET", "/page/"]] * 2
        times = [datetime.fromisoformat(line[0]) for line in lines[1:]]
        assert all(each.tzinfo and not each.microsecond for each in times)
        assert all(line[lines[0].index("retry_after")].isdecimal() for line in lines[1:])


@pytest.mark.parametrize("path", ["=1+1", "+1", "-1", "@x", "\tx"])
def test_csv_cells_are_no_formulas_for_a_spreadsheet(admin_client, configure, path):
    configure(POLICIES={"csv": {"rate": "1/h", "key": "ip"}})

    @rate_limit("csv")
    def view(request):
        return HttpResponse()

    for _ in range(2):
        request = RequestFactory().get("/")
        request.path = path
        view(request)
    background.run(20)
    response = admin_client.get(url("refusals_csv", policy="csv"))
    lines = list(csv.reader(response.content.decode().splitlines()))
    assert lines[1][4] == f"'{path}"


def test_the_shadow_page_shows_what_would_be_refused(admin_client, alice, settings, configure):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "rlaas_django.middleware.RateLimitMiddleware"]
    configure(
        POLICIES={"trial": {"rate": "1/h", "shadow": True}},
        MIDDLEWARE=[{"path": "/page", "policies": ["trial"]}, {"path": "/", "exempt": True}],
    )
    request_as(alice, 3)
    background.run(20)
    ((row, _, identities),) = admin_client.get(url("shadow")).context["rows"]
    assert (row.policy.name, row.counts.allowed, row.counts.over, identities) == ("trial", 1, 2, 1)
    assert round(row.share) == 67
    context = admin_client.get(url("policy", policy="trial")).context
    assert context["identities"] == []
    assert [(label.user, number) for label, number in context["over"]] == [(alice, 2)]


@pytest.mark.parametrize("name", [*PAGES, "identity", "refusals_csv"])
def test_every_page_responds_within_a_second_while_redis_is_unavailable(admin_client, name):
    with override_settings(CACHES=GONE):
        started = time.monotonic()
        response = admin_client.get(url(name, id="alice") if name == "identity" else url(name))
        assert time.monotonic() - started < 1
    if name not in ("overrides", "add_override", "history"):  # they need the database only
        assert response.status_code == 503
        assert "Redis" in response.content.decode()


@pytest.mark.parametrize(("action", "amount"), [("reset", ""), ("refund", "1")])
def test_a_reset_or_refund_fails_while_redis_is_unavailable(admin_client, action, amount):
    with override_settings(CACHES=GONE):
        response = act(admin_client, identity="alice", action=action, amount=amount, policy="page")
    assert response.status_code == 503
    assert not LogEntry.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_an_override_is_kept_while_redis_is_unavailable(admin_client):
    limited = rate_limit(rate=lambda request: "5/m", key="ip")(
        lambda request: HttpResponse()
    )  # its rates are read from Redis
    limited(RequestFactory().get("/"))
    with override_settings(CACHES=GONE):
        response = act(admin_client, identity="alice", action="block", hours="1", reason="spam")
    assert response.status_code == 302
    assert LogEntry.objects.count() == 1
    assert Override.objects.active().count() == 1


@pytest.mark.django_db(transaction=True)
def test_an_override_that_redis_does_not_have_is_said_to_be_saved_only(admin_client):
    not_in_force = "Saved, but Redis is unavailable: not in force yet; it will be once Redis is back."
    with override_settings(CACHES=GONE):
        response = act(admin_client, identity="alice", action="block", hours="1", reason="spam")
        assert [str(message) for message in get_messages(response.wsgi_request)][1:] == [not_in_force]
        override = Override.objects.get()
        response = admin_client.post(url("end"), {"override": override.pk})
        assert str([*get_messages(response.wsgi_request)][-1]) == not_in_force
    Override.restore()
    response = act(admin_client, identity="alice", action="block", hours="1", reason="spam")
    assert str([*get_messages(response.wsgi_request)][-1]).startswith("Blocked alice")


@pytest.mark.parametrize("span", ["hour", "day", "week", "", "nonsense"])
def test_the_overview_shows_the_site_what_was_refused_most_the_policies_and_the_server(admin_client, alice, span):
    request_as(alice, 5)
    background.run(20)
    context = admin_client.get(url("changelist", span=span)).context
    assert "<svg" in context["chart"]
    assert (context["total"].total, context["total"].refused) == (5, 2)
    assert (context["hour"].total, context["hour"].refused) == (5, 2)
    assert [(label.user, number) for label, number in context["identities"]] == [(alice, 2)]
    assert context["paths"] == [("/page/", 2)]
    row, sparkline = next(each for each in context["rows"] if each[0].policy.name == "page")
    assert (row.counts.allowed, row.counts.refused, row.share) == (3, 2, 40)
    assert "<svg" in sparkline
    assert context["server"].latency_ms < 1000


def test_policies_are_in_a_stable_order_sorted_and_filtered(admin_client, alice, configure):
    configure(POLICIES={f"p{i:03}": {"rate": f"{i}/h"} for i in range(1, 200)})
    request_as(alice, 5)
    background.run(20)

    def names(**query):
        return [row.policy.name for row, _ in admin_client.get(url("changelist", **query)).context["rows"]]

    assert names()[0] == "page"
    assert names()[1:] == sorted(names()[1:])
    assert len(names()) >= 200
    assert names(sort="policy") == sorted(names())
    assert names(sort="-refused")[-1] == "page"
    assert names(sort="rate", q="P00")[:2] == ["p001", "p002"]
    assert names(sort="nonsense") == names()
    assert names(q="P19") == [f"p19{i}" for i in range(10)]
    assert names(q="<script>") == []


def test_a_policy_has_a_page_with_its_numbers(admin_client, alice):
    request_as(alice, 5)
    background.run(20)
    context = admin_client.get(url("policy", policy="page")).context
    assert {label: (counts.allowed, counts.refused) for label, counts in context["counts"]} == dict.fromkeys(
        ["this minute", "last hour", "last day", "last week"], (3, 2)
    ) or context["counts"][1][1].refused == 2  # a minute may have ended meanwhile
    assert [(label.user, number) for label, number in context["identities"]] == [(alice, 2)]
    assert admin_client.get(url("policy", policy="<nonsense>")).status_code == 404


def test_a_primary_key_is_the_identity_of_a_user(alice):
    check(alice.pk)
    assert panel.identity_rows(str(alice.pk))[0].outcome.current_count == 1
