"""Tests of the demo under its own settings, and an example of tests with rate limits.

They run as a part of `make test-all`, or alone:
python -m pytest --ds example_project.settings example_project/tests.py
"""

from __future__ import annotations

import shlex

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.utils.html import strip_tags

from example_project import people, traffic
from example_project import settings as demo_settings
from example_project.cards import PANELS
from rlaas_django.stats import reader
from rlaas_django.testing import embedded_redis, frozen_clock, reset

ALLOWED = {
    "bare": 5,
    "inline": 3,
    "several": 5,
    "asynchronous": 4,
    "by_plan": 3,
    "log_in": 3,
    "export": 3,
    "fixed_window": 5,
    "sliding_window": 5,
    "sliding_window_compact": 5,
    "sliding_window_counter": 5,
    "token_bucket": 8,
    "fail_open": 3,
    "fail_closed": 3,
    "count_locally": 3,
    "rest_framework": 5,
    "django_ninja": 4,
    "report": 3,
    "second_visit": 1,
}
NEVER_REFUSED = ("shadow", "feed")
NOT_PRESSED = ("service",)

each_refusing_view = pytest.mark.parametrize("name", ALLOWED)


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):  # noqa: ARG001
    with django_db_blocker.unblock():
        people.create()


@pytest.fixture(autouse=True)
def clock(db, settings):  # noqa: ARG001
    """An empty Redis and a clock that stands still, for each test."""
    settings.DEBUG = True
    settings.CACHES = {"default": embedded_redis()}
    with frozen_clock() as clock:
        yield clock


@pytest.fixture
def ask(client):
    """Ask a limited view; the log-in with a wrong password."""

    def ask(name, **headers):
        guess = {"username": "alice", "password": "wrong"}
        path = PANELS[name].url
        return (
            client.post(path, guess)
            if name == "log_in"
            else client.get(path, headers=headers)
        )

    return ask


@pytest.fixture
def act_as(client):
    def act_as(name):
        assert client.post("/act-as/", {"username": name}).status_code == 302

    return act_as


@each_refusing_view
def test_a_view_allows_what_its_rate_says(ask, name):
    statuses = [ask(name).status_code for _ in range(ALLOWED[name] + 2)]
    assert statuses[-2:] == [429, 429]
    assert 429 not in statuses[:-2]


@each_refusing_view
def test_who_waits_is_allowed_again(ask, clock, name):
    while (response := ask(name)).status_code != 429:
        pass
    clock.tick(int(response["Retry-After"]) * 1000)
    assert ask(name).status_code != 429


@each_refusing_view
def test_a_reset_forgets_what_was_used(ask, client, name):
    while ask(name).status_code != 429:
        pass
    assert client.post(f"/reset/{name}/").json()["keys"] > 0
    assert ask(name).status_code != 429


@pytest.mark.parametrize("name", NEVER_REFUSED)
def test_a_gentle_limit_answers_and_tells(ask, name):
    responses = [ask(name) for _ in range(4)]
    assert [response.status_code for response in responses] == [200] * 4
    assert [response.json()["figures"][0]["allowed"] for response in responses] == [
        True,
        True,
        True,
        False,
    ]


def test_every_view_has_a_test():
    assert {*ALLOWED, *NEVER_REFUSED, *NOT_PRESSED} == {*PANELS}


def test_three_policies_count_by_user_token_and_address(ask, act_as):
    for _ in range(5):
        ask("several", authorization="Bearer red")
    assert ask("several", authorization="Bearer red").json()["violated-policies"] == [
        "person"
    ]
    act_as("bob")
    for _ in range(3):
        ask("several", authorization="Bearer red")
    assert ask("several", authorization="Bearer red").json()["violated-policies"] == [
        "token"
    ]
    assert ask("several", authorization="Bearer blue").status_code == 200


def test_a_right_password_costs_nothing(ask, client):
    for _ in range(5):
        right = client.post(
            "/try/log_in/", {"username": "alice", "password": people.PASSWORD}
        )
        assert (right.status_code, right["X-RateLimit-Remaining"]) == (200, "3")
    assert [ask("log_in").status_code for _ in range(4)] == [200, 200, 200, 429]


def test_a_form_that_compares_no_password_costs_nothing(client):
    """As with Django's LoginView, which answers it with 200, like a wrong password."""
    empty = client.post("/try/log_in/", {"username": "alice", "password": ""})
    assert (empty.status_code, empty["X-RateLimit-Remaining"]) == (200, "3")


@pytest.mark.parametrize(
    ("name", "limit"), [("alice", "8"), ("bob", "3"), ("carol", None), ("", "3")]
)
def test_a_plan_decides(ask, act_as, name, limit):
    act_as(name)
    assert ask("by_plan").headers.get("X-RateLimit-Limit") == limit


def test_the_counters_are_those_of_who_looks(ask, act_as, client):
    def count():
        return client.get("/counters/").json()["bare"][0]["count"]

    act_as("alice")
    ask("bare")
    ask("bare")
    assert count() == 2
    act_as("bob")
    ask("bare")
    assert count() == 1
    act_as("alice")
    assert count() == 2


def test_another_program_checks_over_http(client):
    words = shlex.split(PANELS["service"].curl)
    headers = dict([words[2].split(": ", 1)])
    texts = [
        client.get(words[3].removeprefix("{host}"), headers=headers).content.decode()
        for _ in range(6)
    ]
    assert texts == ["User is allowed"] * 5 + [
        "User is not allowed...Try after 20 seconds."
    ]


@pytest.mark.usefixtures("real_server")
def test_the_panel_opens_with_a_day_of_traffic(client):
    traffic.generate([1, 2])
    written = reader.totals()
    assert sum(written.values()) > 3000
    assert written["example_project.views.log_in", "refused"] > 1000
    traffic.generate([1, 2])
    assert reader.totals() == written  # only where there is none
    client.login(username=people.ADMIN, password=people.ADMIN)
    assert client.get("/admin/rlaas_django/ratelimit/").status_code == 200


def test_the_page_quotes_what_runs(client):
    page = client.get("/").content.decode()
    assert (
        '<span class="decorator">@</span><span class="decorator">rate_limit</span>'
        in page
    )
    assert "RATE_LIMITER = {" in page
    for name in PANELS:
        assert name in page


def test_the_page_quotes_code_without_what_is_written_for_linters(client):
    for word in ("noqa", "type: ignore"):
        assert word not in client.get("/").content.decode()


def test_the_card_of_the_login_teaches_what_works_with_djangos_own_views(client):
    assert "charge_when=login_failed" in strip_tags(PANELS["log_in"].code)
    page = client.get("/").content.decode()
    assert "rlaas_django.auth.ModelBackend in AUTHENTICATION_BACKENDS" in page
    assert "401" not in page


@pytest.mark.parametrize("path", ["/", "/playground/", "/try/second_visit/"])
def test_nothing_is_inline_or_from_elsewhere(client, path):
    page = client.get(path, follow=True, headers={"Accept": "text/html"})
    assert page["Content-Security-Policy"] == "default-src 'self'"
    for word in (" style=", "<style", "onclick=", "//"):
        assert word not in page.content.decode()


def test_browsers_get_a_429_page_that_counts_down(client):
    page = client.get(
        "/try/second_visit/", follow=True, headers={"Accept": "text/html"}
    )
    assert page.status_code == 429
    assert 'data-wait="20"' in page.content.decode()


def test_the_link_of_the_429_page_leads_back_once_the_wait_is_over(client, clock):
    page = client.get(
        "/try/second_visit/", follow=True, headers={"Accept": "text/html"}
    )
    clock.tick(20_000)
    url = page.context["retry_url"]
    again = client.get(url, headers={"Referer": f"http://testserver{url}"})
    assert (again.status_code, again["Location"]) == (302, "/")


def test_one_can_act_as_the_people_only(client):
    assert client.post("/act-as/", {"username": people.ADMIN}).status_code == 404
    assert "_auth_user_id" not in client.session


def test_the_admin_can_log_in(client):
    assert client.login(username=people.ADMIN, password=people.ADMIN)
    assert client.get("/admin/").status_code == 200


def test_the_user_page_shows_rate_limits(client, ask, act_as):
    act_as("alice")
    ask("bare")
    client.login(username=people.ADMIN, password=people.ADMIN)
    alice = get_user_model().objects.get(username="alice")
    page = client.get(f"/admin/auth/user/{alice.pk}/change/").content.decode()
    assert "Rate limits" in page
    assert "/admin/rlaas_django/ratelimit/identity/" in page


@pytest.mark.parametrize(
    "path",
    ["/act-as/", "/reset/bare/", "/redis/stop/", "/try/log_in/", "/playground/decide/"],
)
def test_what_changes_something_wants_a_post_and_a_token(client, path):
    assert Client(enforce_csrf_checks=True).post(path).status_code == 403
    assert client.get(path).status_code == 405


@pytest.mark.parametrize(
    "path", ["/act-as/", "/reset/bare/", "/redis/stop/", "/redis/start/"]
)
def test_only_a_demo_has_it(client, settings, path):
    settings.DEBUG = False
    assert client.post(path).status_code == 404


# The playground


@pytest.fixture
def real_server(settings, clock):  # noqa: ARG001
    """The demo's own server: fakeredis does not measure memory."""
    # Or the background thread would write the statistics of earlier tests there.
    reset()
    settings.CACHES = demo_settings.CACHES


@pytest.fixture
def play(client, real_server):  # noqa: ARG001
    """Return what each algorithm decides about requests at these times (ms).

    The limit is 5 requests in 10 s.
    """

    def play(*times, step=(0, 5, 10, 8, 1), **more):
        run = {"steps": [step], "requests": times, **more}
        return client.post("/playground/decide/", run, content_type="application/json")

    return play


def test_a_burst_at_the_boundary_passes_the_fixed_window_twice(play):
    run = play(*range(9_500, 10_500, 100)).json()
    admitted = {
        algo: sum(each["allowed"] for each in requests)
        for algo, requests in run.items()
    }
    assert (admitted["fixed-window-algo"], admitted["sliding-window-algo"]) == (10, 5)
    assert admitted["sliding-window-compact-algo"] == 5
    assert run["sliding-window-algo"][5]["wait"] == 9_500
    assert all(requests[0]["memory"] > 0 for requests in run.values())


def test_a_waiting_client_is_admitted_when_its_wait_is_over(play):
    for requests in play(*range(0, 800, 100), retries=True).json().values():
        refused = [each for each in requests if not each["allowed"]]
        again = {each["at"]: each for each in requests if each["retry"]}
        assert len(requests) >= 8
        # Of several that wait for the same moment, the first is admitted.
        assert all(again[each["at"] + each["wait"]]["retry"] for each in refused)
        assert requests[-1]["allowed"]


@pytest.mark.usefixtures("real_server")
def test_settings_may_change_within_a_run(client):
    run = {
        "steps": [[0, 1, 10, 0, 1], [2_000, 3, 10, 0, 1]],
        "requests": [0, 1_000, 3_000, 4_000, 5_000],
    }
    found = client.post(
        "/playground/decide/", run, content_type="application/json"
    ).json()["sliding-window-algo"]
    assert [each["allowed"] for each in found] == [True, False, True, True, False]
    assert [each["limit"] for each in found] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "run",
    [
        b"",
        b"[]",
        b"null",
        b'{"steps": [], "requests": []}',
        b'{"steps": [[0, 0, 10, 0, 1]], "requests": [1]}',
        b'{"steps": [[0, 5, 10, 0, 1]], "requests": [-1]}',
        b'{"steps": [[0, 5, 10, 0, 1]], "requests": ["<script>"]}',
        b'{"steps": [[0, 5, 10, 0, 1]], "requests": [%s]}' % b",".join([b"1"] * 401),
        b'{"steps": [[0, 5, 10, 0]], "requests": [1]}',
    ],
)
def test_an_invalid_run_is_an_error_in_words(client, run):
    response = client.post("/playground/decide/", run, content_type="application/json")
    assert response.status_code == 400
    assert response.json()["error"]


def test_there_is_nothing_to_reset_by_another_name(client):
    assert client.post("/reset/nothing/").status_code == 404
