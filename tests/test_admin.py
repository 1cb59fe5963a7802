"""The panel, without a browser: what it shows, what it does, and whom it lets."""

from __future__ import annotations

import contextlib
import csv
import html
import time

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory, override_settings
from django.urls import reverse

from rlaas_django import Policy, background, check, panel, peek, rate_limit, stats
from rlaas_django.identity import Id, identify
from rlaas_django.models import Override
from rlaas_django.policy import ALGORITHMS
from tests import urls  # noqa: F401  (its view is known to the panel as soon as it is imported)

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.urls")]

PAGES = ("changelist", "users", "refusals", "shadow", "overrides")
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
    stats._notes.clear()


@pytest.fixture
def alice():
    return User.objects.create_user("alice", "alice@example.com", "password")


@pytest.fixture
def viewer(client):
    """Staff who may look and not touch."""
    user = User.objects.create_user("viewer", password="password", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_ratelimit"))
    browser = Client()
    browser.force_login(user)
    return browser


def act(browser, **data):
    return browser.post(url("act"), {"confirmed": "on", **data})


def ask_as(user, times: int) -> list[int]:
    browser = Client()
    browser.force_login(user)
    return [browser.get("/page/").status_code for _ in range(times)]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_with_and_without_traffic(admin_client, alice, name):
    assert admin_client.get(url(name)).status_code == 200
    ask_as(alice, 5)
    background.run(20)
    assert admin_client.get(url(name)).status_code == 200


@pytest.mark.parametrize("name", [*PAGES, "identity", "refusals_csv"])
def test_only_staff_who_may_look_see_anything(name, alice):
    assert Client().get(url(name)).status_code == 302
    browser = Client()
    browser.force_login(alice)
    assert browser.get(url(name)).status_code == 302
    alice.is_staff = True
    alice.save()
    assert browser.get(url(name)).status_code == 403


def test_the_admin_index_leads_to_the_panel(admin_client):
    assert url("changelist") in admin_client.get("/admin/").content.decode()


def test_the_counts_shown_are_peeks_for_every_algorithm(admin_client, alice, configure):
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
    who = identify(odd, Policy("default", "5/m"))
    for page in (url("users", tab="active"), url("identity", id=who), url("users", q=who)):
        body = admin_client.get(page).content.decode()
        assert "<script>alert" not in body
        assert "\x1b" not in body
        assert html.escape(who) in body or who in body
    assert act(admin_client, identity=who, action="reset").status_code == 302
    assert peek(odd).current_count == 0


@pytest.mark.parametrize("text", ["alice", "ALICE", "alice@example", "example.com", "{pk}"])
def test_a_user_is_found_by_name_mail_or_id(admin_client, alice, text):
    ask_as(alice, 2)
    rows = admin_client.get(url("users", q=text.format(pk=alice.pk))).context["rows"]
    assert (str(alice.pk), "page", 2) in [(r.who.id, r.outcome.policy.name, r.outcome.current_count) for r in rows]
    assert next(row.who.user for row in rows if row.who.id == str(alice.pk)) == alice


@pytest.mark.parametrize("digits", ["9" * 25, "9" * 5000, "001", "+1", " 1", "1_0", "-1"])
def test_digits_that_are_no_id_are_nobodys(admin_client, admin_user, digits):
    check(digits)
    who = identify(digits, Policy("default", "5/m"))
    for page in (url("users", tab="active"), url("identity", id=who), url("users", q=digits)):
        response = admin_client.get(page)
        assert response.status_code == 200
        assert not [row for row in response.context["rows"] if row.who.id == who and row.who.user]


@pytest.mark.parametrize("query", [{"since": "9" * 400}, {"cursor": "9" * 5000, "tab": "active"}])
def test_long_numbers_in_a_query_are_left_out(admin_client, query):
    assert admin_client.get(url("users" if "tab" in query else "refusals", **query)).status_code == 200


def test_a_policy_whose_rate_only_a_request_can_tell_is_shown_once_it_refused(admin_client, alice):
    @rate_limit(lambda request: "1/h", key="user", group="plan")
    def view(request):
        raise AssertionError

    with contextlib.suppress(AssertionError):
        view(request_of(alice))
    assert view(request_of(alice)).status_code == 429
    background.run(20)
    (row,) = admin_client.get(url("users")).context["rows"]
    assert (row.who.user, row.outcome.policy, row.outcome.current_count, row.outcome.limit) == (alice, "plan", 1, 1)


def request_of(user):
    request = RequestFactory().get("/")
    request.user = user
    return request


@pytest.mark.parametrize("text", ["2001:db8::1", "[2001:db8::1]:80", "2001:db8::2"])
def test_an_address_is_found_as_it_is_counted(admin_client, text):
    check({"ip": "2001:db8::1"}, Policy("default", "5/m"))
    rows = admin_client.get(url("users", q=text)).context["rows"]
    assert ("ip=2001%3Adb8%3A%3A%2F64", 1) in [(row.who.id, row.outcome.current_count) for row in rows]


def test_a_search_is_one_look_at_redis_over_all_policies(admin_client, alice, configure, client):
    configure(POLICIES={f"p{i}": {"rate": "5/m"} for i in range(20)})
    admin_client.get(url("users", q="alice"))
    client.config_resetstat()
    admin_client.get(url("users", q="alice"))
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


def test_no_query_per_row(admin_client, django_assert_max_num_queries):
    users = User.objects.bulk_create([User(username=f"user{i}") for i in range(60)])
    for user in users:
        check(user.pk)
    with django_assert_max_num_queries(6):
        rows = admin_client.get(url("users", tab="active")).context["rows"]
    assert len(rows) >= 50
    assert all(row.who.user for row in rows)


def test_all_active_goes_page_by_page_and_misses_nobody(admin_client, monkeypatch):
    monkeypatch.setattr(panel, "SCAN_COUNT", 20)
    monkeypatch.setattr(panel, "SCANS_PER_PAGE", 2)
    for i in range(300):
        check(f"user-{i}")
    seen, cursor, pages = set(), "0", 0
    while True:
        page = admin_client.get(url("users", tab="active", cursor=cursor)).context
        seen |= {row.who.id for row in page["rows"]}
        cursor, pages = str(page["cursor"]), pages + 1
        if cursor == "0":
            break
    assert seen == {f"user-{i}" for i in range(300)}
    assert pages > 2


def test_the_filter_shows_one_policy(admin_client, configure):
    configure(POLICIES={"a": {"rate": "5/m"}, "b": {"rate": "5/m"}})
    check("alice", ["a", "b", "default"])
    for name in ("a", "b", "default"):
        rows = admin_client.get(url("users", tab="active", policy=name)).context["rows"]
        assert [row.outcome.policy.name for row in rows] == [name]


@pytest.mark.parametrize("sort", ["identity", "policy", "count", "used", "reset", "refused", "nonsense"])
def test_rows_can_be_sorted(admin_client, sort):
    for i, name in enumerate(("b", "a", "c")):
        for _ in range(i + 1):
            check(name)
    rows = admin_client.get(url("users", tab="active", sort=sort)).context["rows"]
    if sort == "count":
        assert [row.who.name for row in rows] == ["c", "a", "b"]
    if sort == "identity":
        assert [row.who.name for row in rows] == ["a", "b", "c"]


def test_who_was_refused_is_on_the_watch_list_with_the_reason_on_their_page(admin_client, alice):
    assert ask_as(alice, 5) == [200, 200, 200, 429, 429]
    background.run(20)
    (row,) = admin_client.get(url("users")).context["rows"]
    assert (row.who.user, row.outcome.policy, row.refused_today, row.percent) == (alice, "page", 2, 100)
    page = admin_client.get(url("identity", id=str(alice.pk)))
    (refusal, sentence), _ = page.context["refusals"]
    assert refusal.path == "/page/"
    assert "3 of 3" in sentence
    assert "GET /page/" in sentence
    assert html.escape(sentence) in page.content.decode()


class TestActions:
    def test_a_reset_lets_the_next_request_pass(self, admin_client, alice):
        assert ask_as(alice, 4)[-1] == 429
        act(admin_client, identity=str(alice.pk), action="reset", policy="page")
        assert ask_as(alice, 1) == [200]

    def test_units_are_given_back(self, admin_client, alice):
        assert ask_as(alice, 4)[-1] == 429
        act(admin_client, identity=str(alice.pk), action="give_back", policy="page", amount="2")
        assert ask_as(alice, 3) == [200, 200, 429]

    def test_block_exempt_and_limit_hold_for_the_next_request(self, admin_client, alice):
        who = str(alice.pk)
        for action, amount, expected in (
            ("block", "", [429]),
            ("exempt", "", [200] * 6),
            ("limit", "1", [200, 429]),
        ):
            act(admin_client, identity=who, action=action, amount=amount, hours="1", reason="because")
            assert ask_as(alice, len(expected)) == expected
        assert Override.objects.active().count() == 1
        assert Override.objects.count() == 3

    def test_nothing_happens_before_it_is_confirmed(self, admin_client, alice):
        ask_as(alice, 4)
        page = admin_client.post(url("act"), {"identity": str(alice.pk), "action": "reset"})
        assert page.status_code == 200
        assert 'name="confirmed"' in page.content.decode()
        assert ask_as(alice, 1) == [429]

    def test_what_is_done_is_in_the_admins_log(self, admin_client, admin_user):
        check("alice")
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        entry = LogEntry.objects.get()
        assert (entry.user, entry.object_id) == (admin_user, "alice")
        assert "spam" in entry.change_message

    def test_an_override_can_be_ended_once(self, admin_client):
        act(admin_client, identity="alice", action="block", hours="24", reason="spam")
        override = Override.objects.get()
        for _ in range(2):
            assert admin_client.post(url("end"), {"override": override.pk}).status_code == 302
        assert check("alice").allowed
        assert admin_client.post(url("end"), {"override": "nonsense"}).status_code == 302

    @pytest.mark.parametrize(
        "data",
        [
            {"action": "limit", "reason": "x"},
            {"action": "limit", "reason": "x", "amount": "0"},
            {"action": "limit", "reason": "x", "amount": "99999999999999999"},
            {"action": "block"},
            {"action": "nonsense", "reason": "x"},
            {"action": "reset", "policy": "nonsense"},
            {"action": "give_back"},
            {"action": "block", "reason": "x", "hours": "-1"},
        ],
    )
    def test_a_mistake_is_told_and_nothing_done(self, admin_client, data):
        check("alice")
        response = act(admin_client, identity="alice", **data)
        assert response.status_code == 200
        assert response.context["form"].errors
        assert check("alice").current_count == 1
        assert not Override.objects.exists()

    @pytest.mark.parametrize("name", ["act", "end"])
    def test_who_may_only_look_cannot_act(self, viewer, name):
        assert viewer.get(url("users")).status_code == 200
        assert viewer.post(url(name), {"identity": "alice", "action": "reset", "confirmed": "on"}).status_code == 403
        assert 'name="action"' not in viewer.get(url("identity", id="alice")).content.decode()

    @pytest.mark.parametrize("name", ["act", "end"])
    def test_acting_takes_a_post_with_a_token(self, admin_client, admin_user, name):
        assert admin_client.get(url(name)).status_code == 405
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(admin_user)
        assert strict.post(url(name), {"identity": "alice", "action": "reset", "confirmed": "on"}).status_code == 403


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _refused(self, alice):
        @rate_limit("1/m", key="ip", group="formula")
        def view(request):
            raise AssertionError

        ask_as(alice, 5)
        background.run(20)

    def test_they_are_listed_and_filtered(self, admin_client, alice):
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

    def test_they_can_be_taken_along_as_csv(self, admin_client, alice):
        response = admin_client.get(url("refusals_csv", policy="page"))
        lines = list(csv.reader(b"".join(response.streaming_content).decode().splitlines()))
        assert lines[0][:4] == ["time", "policy", "identity", "method"]
        assert [line[1:5] for line in lines[1:]] == [["page", str(alice.pk), "GET", "/page/"]] * 2


def test_a_spreadsheet_gets_no_formula():
    from rlaas_django.admin import _cell

    assert [_cell(text) for text in ("=1+1", "+1", "-1", "@x", "\tx", "/a")] == [
        "'=1+1",
        "'+1",
        "'-1",
        "'@x",
        "'\tx",
        "/a",
    ]


def test_shadow_policies_tell_what_they_would_refuse(admin_client, alice, settings, configure):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "rlaas_django.middleware.RateLimitMiddleware"]
    configure(
        POLICIES={"trial": {"rate": "1/h", "shadow": True}},
        MIDDLEWARE=[{"path": "/page", "policies": ["trial"]}, {"path": "/", "exempt": True}],
    )
    ask_as(alice, 3)
    background.run(20)
    (summary,) = admin_client.get(url("shadow")).context["summaries"]
    assert (summary["day_allowed"], summary["day_shadowed"]) == (1, 2)
    assert round(summary["share"]) == 67
    assert [(who.user, number) for who, number in summary["identities"]] == [(alice, 2)]


@pytest.mark.parametrize("name", [*PAGES, "identity", "refusals_csv"])
def test_without_redis_every_page_says_so_within_a_second(admin_client, name):
    with override_settings(CACHES=GONE):
        started = time.monotonic()
        response = admin_client.get(url(name, id="alice") if name == "identity" else url(name))
        assert time.monotonic() - started < 1
    if name != "overrides":
        assert response.status_code == 503
        assert "Redis" in response.content.decode()


def test_without_redis_an_action_is_not_said_to_be_done(admin_client):
    with override_settings(CACHES=GONE):
        response = act(admin_client, identity="alice", action="block", hours="1", reason="spam")
    assert response.status_code == 503
    assert not LogEntry.objects.exists()
    assert not Override.objects.exists()


def test_the_overview_tells_of_server_policies_and_the_refused(admin_client, alice):
    ask_as(alice, 5)
    background.run(20)
    context = admin_client.get(url("changelist")).context
    summary = next(each for each in context["summaries"] if each["policy"] == "page")
    assert (summary["hour_allowed"], summary["hour_refused"]) == (3, 2)
    assert "<svg" in summary["hour_chart"]
    assert [(who.user, name, number) for who, name, number in context["top"]] == [(alice, "page", 2)]
    assert context["server"].latency_ms < 1000
    assert any(loaded for _, loaded in context["server"].scripts)


def test_a_users_identity_leads_to_the_same_counter(alice):
    check(alice.pk)
    assert panel.identity_rows(Id(str(alice.pk)))[0].outcome.current_count == 1
