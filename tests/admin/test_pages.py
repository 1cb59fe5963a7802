"""The pages of the panel with thousands of entries, and what they call things."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import connection
from django.db.models.signals import post_init
from django.http import HttpResponse
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from rlaas_django import Policy, check, rate_limit
from rlaas_django.models import OperatorAction, Override
from rlaas_django.runtime import background
from rlaas_django.stats import recorder

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.urls")]

LONG = "shop.checkout.views.OrderDetailView.post"
ALL_ADDRESSES = ("net=0.0.0.0%2F0", "net=%3A%3A%2F0")


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


def text_of(markup: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", markup).split())


def table(page: str, caption: str) -> list[list[str]]:
    """Return the text of the cells of each row of a table."""
    tables = re.findall("<table.*?</table>", page, re.DOTALL)
    found = next(part for part in tables if f">{caption}</caption>" in part)
    rows = re.findall("<tr.*?</tr>", found, re.DOTALL)[1:]
    return [[text_of(cell) for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", row, re.DOTALL)] for row in rows]


def annotated(times: int, user: object = None, **options: object) -> None:
    """Send requests to a view that is over its limit of one from the second on."""
    view = rate_limit("1/h", group="annotated", **options)(lambda request: HttpResponse())
    for _ in range(times):
        request = RequestFactory().get("/")
        request.user = user or AnonymousUser()
        view(request)
    background.run(20)


class TestManyOverrides:
    @pytest.fixture
    def add(self):
        """Return a function that creates overrides of users, addresses and networks."""

        def add(number: int) -> None:
            start = Override.objects.count()
            users = User.objects.bulk_create([User(username=f"user-{start + i}") for i in range(number)])
            until = timezone.now() + timedelta(days=1)
            rows = []
            for i, user in enumerate(users, start):
                octets = f"{i // 256}.{i % 256}"
                identity = (str(user.pk), f"ip=198.18.{octets}", f"net=10.{octets}.0%2F24")[i % 3]
                reason = f"ticket {i:05}"
                rows.append(Override(identity=identity, kind="block", until=until, reason=reason, created_by="bob"))
            Override.objects.bulk_create(rows)

        return add

    def cost(self, admin_client, **query) -> tuple[int, int]:
        """Return the number of queries, and of rows, and check the size."""
        with CaptureQueriesContext(connection) as queries:
            response = admin_client.get(url("overrides", **query))
        assert len(response.content) < 250_000
        return len(queries), len(response.context["overrides"])

    def test_a_page_of_them_costs_the_same_whatever_their_number(self, admin_client, add):
        add(150)
        few = self.cost(admin_client)
        add(4_850)
        assert self.cost(admin_client) == few
        assert few == (5, 100)  # session, operator, number, page, users

    def test_a_search_of_them_costs_the_same_whatever_their_number(self, admin_client, add):
        add(150)
        few, found = self.cost(admin_client, q="ticket 00012")
        add(4_850)
        assert self.cost(admin_client, q="ticket 00012") == (few, found) == (few, 1)

    def test_the_last_page_has_the_oldest(self, admin_client, add):
        add(150)
        for page in ("2", "9999"):
            shown = admin_client.get(url("overrides", page=page)).context["overrides"]
            assert len(shown) == 50
            assert shown[-1][0].reason == "ticket 00000"

    @pytest.mark.parametrize("page", ["nonsense", "-1", "9" * 5000, "1.5"])
    def test_a_page_that_is_none_is_another_one(self, admin_client, add, page):
        add(3)
        assert len(admin_client.get(url("overrides", page=page)).context["overrides"]) == 3

    def test_the_usage_of_an_address_reads_only_the_networks_that_it_is_in(self, admin_client, add):
        add(3_000)
        check({"ip": "10.0.2.9"}, Policy("p", "5/m", key="ip"))
        recorder.flush()
        read = []

        def note(instance, **_):
            read.append(instance)

        post_init.connect(note, sender=Override)
        page = admin_client.get(url("identity", id="ip=10.0.2.9"))
        post_init.disconnect(note, sender=Override)
        assert [override.identity for override, _ in page.context["active"]] == ["net=10.0.2.0%2F24"]
        assert {override.identity for override in read} == {"net=10.0.2.0%2F24"}

    def test_many_narrower_overrides_are_compared_with_a_new_one_in_one_pass(self, admin_client, add):
        add(2_000)
        data = {"identity": "net=10.0.0.0%2F8", "action": "block", "hours": "1", "reason": "scan"}
        started = time.process_time()
        page = admin_client.post(url("act"), data)
        assert time.process_time() - started < 3  # 0.3 s; with each other it was 10 s
        assert page.context["consequences"][5].endswith("more overrides are affected.")


class TestSearchOfOverrides:
    @pytest.fixture(autouse=True)
    def _overrides(self, alice):
        until = timezone.now() + timedelta(days=1)
        for identity, policy, reason in (
            (str(alice.pk), "page", "spam"),
            ("ip=198.51.100.7", "", "scraping 100% of it"),
            ("net=203.0.113.0%2F24", "", "a scan"),
            ("net=2001%3Adb8%3A%3A%2F32", "", "a scan by IPv6"),
        ):
            Override.objects.create(
                identity=identity, policy=policy, kind="block", until=until, reason=reason, created_by="operator"
            )

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("alice", ["alice"]),
            ("ALICE@example", ["alice"]),
            ("198.51.100.7", ["198.51.100.7"]),
            ("198.51", ["198.51.100.7"]),
            ("100%", ["198.51.100.7"]),
            ("203.0.113.9", ["203.0.113.0/24"]),
            ("203.0.113.0/24", ["203.0.113.0/24"]),
            ("2001:db8:1::1", ["2001:db8::/32"]),
            ("a scan", ["2001:db8::/32", "203.0.113.0/24"]),
            ("page", ["alice"]),
            ("operator", ["2001:db8::/32", "203.0.113.0/24", "198.51.100.7", "alice"]),
            ("<script>", []),
            ("x" * 60_000, []),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_by_client_policy_reason_or_operator(self, admin_client, text, names):
        shown = admin_client.get(url("overrides", q=text)).context["overrides"]
        assert [label.name for _, label in shown] == names

    def test_the_ended_ones_are_apart(self, admin_client):
        Override.objects.get(reason="spam").end(by="bob")
        Override.objects.filter(reason="a scan").update(until=timezone.now())
        shown = admin_client.get(url("overrides", tab="ended")).context["overrides"]
        assert [label.name for _, label in shown] == ["203.0.113.0/24", "alice"]
        assert len(admin_client.get(url("overrides")).context["overrides"]) == 2

    def test_an_identity_that_is_no_network_is_no_error(self, admin_client):
        until = timezone.now() + timedelta(days=1)
        for identity in ("net=nonsense", "net=1.2.3.4%2F999", "net=%2F-1"):
            Override.objects.create(identity=identity, kind="block", until=until, reason="odd")
        assert admin_client.get(url("overrides", q="203.0.113.9")).status_code == 200
        assert admin_client.get(url("identity", id="ip=203.0.113.9")).status_code == 200


class TestRefusalPages:
    def test_the_log_has_pages(self, admin_client):
        for i in range(60):
            policy = Policy("p", "1/h")
            check(f"user-{i}", policy)
            check(f"user-{i}", policy)
            recorder.flush()  # which lists a sample of many
        first, second = (admin_client.get(url("refusals", page=page)).context for page in "12")
        assert [len(context["groups"]) for context in (first, second)] == [50, 10]
        assert first["found"] == second["found"] == 60

    def test_what_was_not_refused_is_counted_apart(self, admin_client):
        annotated(4, block=False)
        page = text_of(admin_client.get(url("refusals")).content.decode())
        assert "0 refusals, 3 over the limit and not refused, in 1 group." in page
        assert "retry after" not in page


class TestClients:
    def test_an_identity_is_shown_once_with_its_policies_below_it(self, admin_client):
        for name, times in (("alice", 3), ("bob", 2)):
            for _ in range(times):
                check(name, [Policy("p", "9/h"), Policy("q", "5/h")])
            check(name, Policy("p", "9/h"))
        background.run(20)
        page = admin_client.get(url("clients", tab="active", sort="count")).content.decode()
        rows = table(page, "Usage by identity and policy")
        assert [row[0].split()[0] for row in rows] == ["alice", "q", "bob", "q"]

    def test_the_watch_list_has_pages(self, admin_client):
        for i in range(60):
            check(f"user-{i}", Policy("p", "1/h"))
        background.run(20)
        pages = [admin_client.get(url("clients", page=page)).content.decode() for page in "12"]
        assert [len(table(page, "Usage by identity and policy")) for page in pages] == [50, 10]


@pytest.mark.parametrize("options", [{"shadow": True}, {"block": False}], ids=str)
class TestOverTheLimit:
    """A shadow policy and block=False refuse nothing."""

    @pytest.fixture(autouse=True)
    def _requests(self, alice, options):
        annotated(4, alice, key="user", **options)

    @pytest.mark.parametrize("tab", ["", "active"])
    def test_clients_say_over_the_limit(self, admin_client, tab):
        page = admin_client.get(url("clients", tab=tab)).content.decode()
        (row,) = table(page, "Usage by identity and policy")
        assert row[-1] == "0 3 over the limit"

    def test_the_page_of_the_identity_says_over_the_limit(self, admin_client, alice):
        page = admin_client.get(url("identity", id=str(alice.pk)))
        (row,) = table(page.content.decode(), "Usage by policy")
        assert row[-1] == "0 3 over the limit"
        ((_, explanation),) = page.context["refusals"]
        assert "over the limit at" in explanation
        assert "refused at" not in explanation

    def test_the_page_of_the_policy_says_over_the_limit(self, admin_client, alice):
        context = admin_client.get(url("policy", policy="annotated")).context
        assert context["identities"] == []
        assert [(label.user, number) for label, number in context["over"]] == [(alice, 3)]


class TestOverview:
    def decide(self) -> None:
        """Make a decision of every kind about one policy."""
        wide, narrow = Policy("wide", "3/h"), Policy("narrow", "1/h")
        check("alice", [wide, narrow])
        check("alice", [wide, narrow])  # refused by the narrow one
        check("alice", wide, cost=9)
        view = rate_limit(wide, block=False)(lambda request: HttpResponse())
        for _ in range(4):
            view(RequestFactory().get("/"))
        background.run(20)

    def test_the_rows_add_up(self, admin_client):
        self.decide()
        page = admin_client.get(url("changelist")).content.decode()
        rows = {row[0]: row[2:] for row in table(page, "Policies")}
        assert rows["wide"] == ["7", "4", "1", "1", "1", "28.6 %"]
        for requests, *parts, _share in rows.values():
            assert int(requests) == sum(map(int, parts))

    def test_the_legend_has_what_the_rows_have(self, admin_client):
        self.decide()
        page = admin_client.get(url("changelist")).content.decode()
        legend = text_of(
            page[page.index('id="rlaas-policies"') : page.index('<caption class="visually-hidden">Policies')]
        )
        assert "refused by another policy" in legend
        assert "over the limit, not refused" in legend

    def test_the_policies_that_refused_most_come_first(self, admin_client):
        for name, times in (("a", 1), ("b", 3), ("c", 5)):
            for _ in range(times):
                check("alice", Policy(name, "1/h"))
        background.run(20)
        page = admin_client.get(url("changelist")).content.decode()
        assert [row[0] for row in table(page, "Policies")][:3] == ["c", "b", "a"]
        assert 'class="rlaas-col-refused" aria-sort="descending"' in page

    def test_the_share_says_of_what(self, admin_client):
        for name in ("changelist", "shadow"):
            check("alice", Policy("trial", "1/h", shadow=True))
            background.run(20)
            page = text_of(admin_client.get(url(name)).content.decode())
            assert ", of requests" in page
            assert "Share" not in page


def test_a_policy_of_a_view_has_one_name_everywhere(admin_client, alice):
    policy = Policy(LONG, "1/h", key="user", label="OrderDetailView-post")
    for _ in range(3):
        check(alice.pk, policy)
    Override.objects.create(
        identity=str(alice.pk), policy=LONG, kind="limit", limit=9, until=timezone.now() + timedelta(days=1), reason="x"
    )
    background.run(20)
    for page, query in (
        ("changelist", {}),
        ("policy", {"policy": LONG}),
        ("clients", {}),
        ("identity", {"id": str(alice.pk)}),
        ("refusals", {}),
        ("overrides", {}),
    ):
        body = admin_client.get(url(page, **query)).content.decode().replace("<wbr>", "")
        assert f">{LONG}<" in re.sub(r">\s+|\s+<", lambda found: found[0].strip(), body), page
        assert page == "policy" or "OrderDetailView-post" not in body


class TestUnknownUsers:
    @pytest.mark.parametrize(
        ("page", "query"),
        [
            ("clients", {"q": "alcie"}),
            ("add_override", {"q": "alcie"}),
            ("identity", {"id": "alcie"}),
        ],
        ids=lambda value: str(value),
    )
    def test_a_name_that_nobody_has_is_said_to_be_none_with_the_nearest(self, admin_client, alice, page, query):
        body = text_of(admin_client.get(url(page, **query)).content.decode())
        assert "There is no user of this name." in body
        assert "Did you mean: alice" in body

    @pytest.mark.parametrize("action", ["reset", "block"])
    def test_the_confirmation_of_an_action_says_so(self, admin_client, alice, action):
        data = {"identity": "alcie", "action": action, "reason": "spam"}
        body = text_of(admin_client.post(url("act"), data).content.decode())
        assert "There is no user of this name." in body

    def test_an_identity_of_ones_own_can_be_acted_on(self, admin_client):
        data = {"identity": "nightly-import", "action": "block", "reason": "spam", "confirmed": "1"}
        assert admin_client.post(url("act"), data).status_code == 302
        assert Override.objects.get().identity == "nightly-import"

    @pytest.mark.parametrize("text", ["alice", "alice@example", "203.0.113.9", "203.0.113.0/24", "token=ab12"])
    def test_others_are_not_said_to_be_none(self, admin_client, alice, text):
        for page in ("clients", "add_override"):
            assert "There is no user of this name." not in admin_client.get(url(page, q=text)).content.decode()

    def test_the_name_of_a_user_as_an_identity_of_its_own_is_not_the_user(self, admin_client, alice):
        body = text_of(admin_client.get(url("identity", id="alice")).content.decode())
        assert "There is no user of this name." not in body
        assert "This identity is not the user of this name: users are counted by their ID." in body
        assert "Did you mean: alice" in body

    def test_a_name_is_escaped(self, admin_client):
        User.objects.create_user("<i>alice</i>")
        body = admin_client.get(url("clients", q="<i>alcie<i>")).content.decode()
        assert "<i>al" not in body
        assert "&lt;i&gt;alice&lt;/i&gt;</a>" in body


@pytest.mark.parametrize("identity", ALL_ADDRESSES)
class TestEveryClient:
    """An override of all addresses needs a second confirmation."""

    def act(self, admin_client, identity, **data):
        data = {"action": "block", "reason": "maintenance", "confirmed": "1", **data}
        return admin_client.post(url("act"), {"identity": identity, **data})

    def test_the_server_refuses_it_without(self, admin_client, identity):
        response = self.act(admin_client, identity)
        assert response.status_code == 200
        assert "Confirm that you mean every client." in response.content.decode()
        assert not Override.objects.exists()
        assert not OperatorAction.objects.exists()

    @pytest.mark.parametrize("action", ["exempt", "limit"])
    def test_whatever_the_override(self, admin_client, identity, action):
        self.act(admin_client, identity, action=action, factor="2" if action == "limit" else "")
        assert not Override.objects.exists()

    def test_the_first_page_of_the_confirmation_asks_for_it(self, admin_client, identity):
        response = self.act(admin_client, identity, confirmed="")
        body = response.content.decode()
        assert '<input type="checkbox" name="everyone" required>' in body
        assert 'type="hidden" name="everyone"' not in body
        assert "Confirm that you mean every client." not in body

    def test_with_it_the_override_is_set(self, admin_client, identity):
        assert self.act(admin_client, identity, everyone="on").status_code == 302
        assert Override.objects.get().identity == identity

    def test_it_is_no_confirmation_by_itself(self, admin_client, identity):
        assert self.act(admin_client, identity, confirmed="", everyone="on").status_code == 200
        assert not Override.objects.exists()


def test_a_smaller_network_needs_no_second_confirmation(admin_client):
    data = {"identity": "net=10.0.0.0%2F8", "action": "block", "reason": "scan"}
    assert 'name="everyone"' not in admin_client.post(url("act"), data).content.decode()
    assert admin_client.post(url("act"), {**data, "confirmed": "1"}).status_code == 302


def test_an_error_about_an_identity_has_its_name(admin_client):
    data = {"identity": "get=a%2Fb", "action": "block", "reason": "scan"}
    page = admin_client.post(url("act"), data).content.decode()
    assert "under another one, a/b is the value" in page
