"""What was refused, on the command line: `show`, `refusals`, `top`, and the walk of an operator."""

from __future__ import annotations

import json
import re
import time

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpResponse
from django.test import RequestFactory
from rlaas_django import Policy, check, rate_limit

from tests.support.commands import rlaas
from tests.support.internals import EncodedIdentity, flush_statistics

COLUMNS = ["Time", "Identity", "Policy", "Used", "Limit", "Result", "Request", "Address", "Wait"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_views")]


@pytest.fixture(autouse=True)
def policies(configure):
    configure(POLICIES={"search": {"rate": "3/m"}, "checkout": {"rate": "2/h"}})


@pytest.fixture
def alice():
    return User.objects.create_user("alice", pk=4711)


def send(user=None, path="/search/", address="203.0.113.9", policy="search", times=1, **options) -> None:
    """Request a limited view so often, and write the statistics."""

    @rate_limit(policy, **options)
    def view(_request):
        return HttpResponse()

    for _ in range(times):
        made = RequestFactory().get(path, REMOTE_ADDR=address)
        made.user = user or AnonymousUser()
        view(made)
    flush_statistics()


@pytest.fixture
def pass_windows(client):
    """Let the windows of all counters pass; the statistics of today stay."""

    def delete_counters():
        for key in client.scan_iter("rlaas:rate_limit:*"):
            client.delete(key)

    return delete_counters


# show


def test_show_has_what_was_refused_today_though_nothing_is_used_now(alice, pass_windows):
    send(alice, times=58)
    pass_windows()
    shown = rlaas("show", "alice").out
    assert "No current usage." not in shown
    assert re.search(r"^search +3/m +0 +3 +0 % +55 +0$", shown, re.MULTILINE)
    found = rlaas("show", "alice", "--json").json
    assert [(each["policy"], each["used"], each["refusedToday"]) for each in found["policies"]] == [("search", 0, 55)]


def test_show_lists_the_last_ten_refusals_with_time_policy_path_address_and_wait(alice):
    send(alice, "/a/", times=9)
    send(alice, "/b/", times=4)
    lines = rlaas("show", "alice").out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("Time"))
    listed = lines[heading + 1 :]
    assert lines[heading].split() == COLUMNS
    assert len(listed) == 10
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  alice +search +3 +3  refused +GET /b/ +203\.0\.113\.9 +\d+ (s|min)", listed[0]
    )
    assert [line.split()[-4] for line in listed] == 4 * ["/b/"] + 6 * ["/a/"]


def test_show_has_the_refusals_as_json(alice):
    send(alice, times=4)
    (refusal,) = rlaas("show", "alice", "--json").json["refusals"]
    assert refusal["policy"] == "search"
    assert (refusal["identity"], refusal["method"], refusal["path"]) == ("4711", "GET", "/search/")
    assert (refusal["address"], refusal["count"], refusal["limit"]) == ("203.0.113.9", 3, 3)
    assert 0 < refusal["retryAfter"] <= 60
    assert refusal["over"] is False


def test_a_cost_that_never_fits_is_valid_json():
    assert not check("203.0.113.9", Policy("big", "3/m", key="ip"), cost=4).allowed
    flush_statistics()
    printed = rlaas("refusals", "--json").out
    (refusal,) = json.loads(printed, parse_constant=pytest.fail)
    assert refusal["retryAfter"] is None
    assert "never" in rlaas("refusals").out


def test_show_of_an_address_has_the_refusals_of_its_users(alice):
    send(alice, times=4)
    (refusal,) = rlaas("show", "203.0.113.9", "--json").json["refusals"]
    assert refusal["identity"] == "4711"
    assert rlaas("show", "203.0.113.90", "--json").json["refusals"] == []


def test_show_has_nobody_else_s_refusals(alice):
    other = User.objects.create_user("bob", pk=471)
    send(alice, times=4)
    send(other, times=5)
    assert {each["identity"] for each in rlaas("show", "bob", "--json").json["refusals"]} == {"471"}
    assert len(rlaas("show", "bob", "--json").json["refusals"]) == 2


def test_show_has_the_refusals_of_logins(alice):
    for _ in range(2):
        check(EncodedIdentity("login=4711@203.0.113.9"), Policy("login-name", "1/m"))
    flush_statistics()
    assert [each["policy"] for each in rlaas("show", "alice", "--json").json["refusals"]] == ["login-name"]


def test_show_has_the_block_of_every_client_of_the_address(alice):
    rlaas("block", "203.0.113.0/24", "--every-client", "--reason", "scraping")
    send(alice)
    assert "203.0.113.0/24: blocked under every policy until " in rlaas("show", "alice").out
    assert [each["reason"] for each in rlaas("show", "alice", "--json").json["overrides"]] == ["scraping"]


def test_show_leaves_out_a_block_of_the_visitors_of_the_address(alice):
    send(alice, times=4)
    rlaas("block", "203.0.113.0/24", "--reason", "scraping")
    assert rlaas("show", "alice", "--json").json["overrides"] == []


# refusals


@pytest.fixture
def some_refusals(alice):
    send(alice, times=5)
    send(alice, "/checkout/", "198.51.100.7", "checkout", times=3)
    send(None, "/search/?q=a", "198.51.100.7", times=4)


@pytest.mark.parametrize(
    ("filters", "number"),
    [
        ((), 4),
        (("--policy", "search"), 3),
        (("alice",), 3),
        (("4711",), 3),
        (("198.51.100.7",), 2),
        (("198.51.100.",), 2),
        (("bob",), 0),
        (("--path", "/checkout"), 1),
        (("alice", "--policy", "search", "--path", "/search"), 2),
        (("--since", "1h"), 4),
        (("--number", "2"), 2),
    ],
)
def test_refusals_are_filtered_by_policy_identity_path_and_time(some_refusals, filters, number):
    assert len(rlaas("refusals", *filters, "--json").json) == number
    assert len(rlaas("refusals", *filters).out.splitlines()) == 1 + number


def test_refusals_before_a_time_are_left_out(some_refusals, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert rlaas("refusals", "--since", "1h", "--json").json == []
    assert len(rlaas("refusals", "--since", "3h", "--json").json) == 4


def test_the_latest_refusal_is_the_first(some_refusals):
    listed = rlaas("refusals", "--json").json
    assert listed[0]["identity"] == "ip=198.51.100.7"
    assert [each["at"] for each in listed] == sorted((each["at"] for each in listed), reverse=True)


def test_a_check_in_code_is_listed_by_its_source():
    for _ in range(2):
        check("alice", Policy("job", "1/h"), source="nightly import")
    flush_statistics()
    assert "nightly import" in rlaas("refusals").out


def test_refusals_name_an_unknown_policy():
    result = rlaas("refusals", "--policy", "serch")
    assert result.code == 1
    assert "did you mean 'search'?" in result.err


def test_nothing_that_a_client_chose_reaches_the_terminal(alice):
    send(alice, "/\x1b[31m\u202e/", times=4)
    for command in (("refusals",), ("show", "alice")):
        printed = rlaas(*command).out
        assert "31m" in printed
        assert "\x1b" not in printed
        assert "\u202e" not in printed


# Over the limit, but not refused


@pytest.fixture(params=["block=False", "shadow"])
def over(request, alice, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # `watch` has this minute only
    options = {"block": False} if request.param == "block=False" else {"shadow": True}
    send(alice, policy="3/m", times=4, group="soft", **options)


def test_what_is_over_the_limit_is_not_said_to_be_refused(over):
    (listed,) = rlaas("refusals").out.splitlines()[1:]
    assert "over the limit" in listed
    assert "refused" not in listed
    for command in (("show", "alice"), ("top",)):
        heading, *rows = [
            line for line in rlaas(*command).out.splitlines() if "Refused today" in line or "soft" in line
        ]
        assert heading.endswith("Refused today  Over today")
        assert rows[0].split()[-2:] == ["0", "1"]
        assert not any("efused" in row for row in rows)
    watched = rlaas("watch", "--times", "1").out
    assert "4 requests, 0 refused, 1 over the limit but allowed" in watched
    assert json.loads(rlaas("watch", "--times", "1", "--json").out)["over"] == 1
    assert rlaas("refusals", "--json").json[0]["over"] is True


# top


def test_top_lists_nobody_at_0_percent(alice, pass_windows):
    send(alice, times=4)
    assert "alice" in rlaas("top").out
    pass_windows()
    assert rlaas("top").out == "No identity is near a limit.\n"


# A user says: I get 429


def test_a_user_who_gets_429_is_helped_in_two_commands(alice):
    send(alice, "/api/search/", times=58)

    why = rlaas("show", "alice").out
    assert re.search(r"^search +3/m +3 +3 +100 % +\S.* +55 +0$", why, re.MULTILINE)
    assert "GET /api/search/" in why
    assert "203.0.113.9" in why

    assert rlaas("reset", "alice").out == "reset: alice under search.\n"
    assert check("4711", "search").allowed


def test_a_user_who_is_blocked_is_helped_in_two_commands(alice):
    rlaas("block", "203.0.113.0/24", "--every-client", "--reason", "scraping")
    send(alice, "/api/search/")

    why = rlaas("show", "alice").out
    assert re.search(r"^203\.0\.113\.0/24: blocked under every policy until \S+ \S+: scraping$", why, re.MULTILINE)

    assert rlaas("end", "203.0.113.0/24").code == 0
    assert check({"user": "4711", "ip": "203.0.113.9"}, "search").allowed


def test_a_user_who_is_not_known_by_name_is_found_by_the_path(alice):
    send(alice, "/checkout/", policy="checkout", times=3)
    (found,) = rlaas("refusals", "--path", "/checkout/", "--since", "1h").out.splitlines()[1:]
    assert "  alice  " in found
    assert rlaas("reset", "alice").out == "reset: alice under checkout.\n"
