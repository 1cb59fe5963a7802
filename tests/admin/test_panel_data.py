"""The data of the panel: every policy, the limits that were decided with, and the overview in few round trips."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from rlaas_django import Policy, check, rate_limit
from rlaas_django.operators import usage as panel
from rlaas_django.runtime.observers import ALLOWED, REFUSED
from rlaas_django.stats import policies, recorder, schema
from rlaas_django.stats.policies import definitions

from tests.support.internals import backend
from tests.support.observation import commands_sent

pytestmark = pytest.mark.django_db


def usage(policy: str) -> dict[str, str]:
    """Flush, and return the usage of each active identity under a policy, as the panel shows it."""
    recorder.flush()
    rows, _, _ = panel.active(0, policy)
    return {row.identity.text: f"{row.outcome.current_count} / {row.outcome.limit}" for row in rows}


class TestDecidedLimits:
    def test_each_identity_has_the_limit_that_it_was_decided_with(self):
        plans = {"203.0.113.1": "3/m", "203.0.113.2": "8/m", "203.0.113.3": "100/h"}

        @rate_limit(rate=lambda request: plans[request.META["REMOTE_ADDR"]], key="ip", group="plan")
        def view(request):
            return HttpResponse()

        for address in plans:
            for _ in range(6):
                view(RequestFactory().get("/", REMOTE_ADDR=address))
        assert usage("plan") == {"203.0.113.1": "3 / 3", "203.0.113.2": "6 / 8", "203.0.113.3": "6 / 100"}

    def test_the_latest_limit_counts(self):
        rates = ["3/m"]

        @rate_limit(rate=lambda request: rates[0], key="ip", group="plan")
        def view(request):
            return HttpResponse()

        view(RequestFactory().get("/"))
        assert usage("plan") == {"127.0.0.1": "1 / 3"}
        rates[0] = "8/m"
        view(RequestFactory().get("/"))
        assert usage("plan") == {"127.0.0.1": "2 / 8"}

    def test_limits_of_identities_near_them_are_written_first(self, monkeypatch, client):
        monkeypatch.setattr(policies, "MAX_LIMITS", 1)
        check("far", Policy("job", "100/m", key="user"))
        check("near", Policy("job", "1/m", key="user"))
        recorder.flush()
        assert client.keys("rlaas:limit:*") == [b"rlaas:limit:job/near"]

    def test_a_policy_made_in_code_is_known_with_the_limit_of_each_identity(self):
        check("alice", Policy("job", "3/m", key="user"))
        check("bob", Policy("job", "8/m", key="user"))
        assert usage("job") == {"alice": "1 / 3", "bob": "1 / 8"}

    def test_a_fixed_rate_is_read_from_the_code_and_not_written(self, client):
        view = rate_limit("9/m", key="ip", group="fixed")(lambda request: HttpResponse())
        view(RequestFactory().get("/"))
        assert usage("fixed") == {"127.0.0.1": "1 / 9"}
        assert not client.keys("rlaas:limit:*")

    def test_a_limit_is_kept_for_two_windows_and_written_once(self, client, own):
        check("alice", Policy("job", "3/h"))
        recorder.flush()
        assert 7_200 < backend.run_commands([("TTL", policies.limit_key("job", "alice"))])[0] <= 7_260
        check("alice", Policy("job", "3/h"))
        with commands_sent(own.url) as seen:
            recorder.flush()
        assert "SET" not in seen


class TestPolicies:
    def test_policies_of_another_process_are_known(self):
        check("alice", Policy("job", "5/m", key="ip", algo="token-bucket-algo", burst=9, label="Jobs"))
        check("alice", Policy("keyed", "5/m", key=lambda request: "x"))
        recorder.flush()
        found = policies.all_policies()
        assert (str(found["job"].rate), found["job"].burst, found["job"].label) == ("5/m", 9, "Jobs")
        assert panel.key_kind(found["keyed"].key) == "key"

    def test_a_rate_function_of_another_process_depends_on_the_request(self, monkeypatch):
        view = rate_limit(rate=lambda request: "5/m", key="ip", group="plan")(lambda request: HttpResponse())
        view(RequestFactory().get("/"))
        recorder.flush()
        monkeypatch.setattr(policies, "of_this_process", dict)
        assert not isinstance(policies.all_policies()["plan"].rate, policies.Rate)
        assert panel.PolicyRow(policies.all_policies()["plan"], []).rate == ""

    def test_the_number_of_policies_is_bounded(self, monkeypatch, client):
        monkeypatch.setattr(policies, "POLICIES", replace(policies.POLICIES, size=3))
        for i in range(5):
            check("alice", Policy(f"job-{i}", "5/m"))
        recorder.flush()
        assert client.hlen(policies.POLICIES.key("")) == 3
        definitions.reset()
        check("alice", Policy("job-0", "6/m"))
        recorder.flush()
        assert str(policies.all_policies()["job-0"].rate) == "6/m"

    def test_a_definition_of_another_version_is_left_out(self, client):
        client.hset(policies.POLICIES.key(""), mapping={"odd": '{"rate": "5/m", "new": 1}', "bad": "{"})
        client.expire(policies.POLICIES.key(""), 60)
        assert not {"odd", "bad"} & {*policies.all_policies()}

    def test_without_redis_those_of_this_process_are_known(self, redis_unavailable):
        assert [*policies.all_policies()] == [*policies.of_this_process()]


class TestOverview:
    @pytest.fixture
    def many(self, own):
        """200 policies with a week of decisions, on a server whose commands can be counted."""
        now = int(time.time()) // schema.MINUTE
        names = [f"policy-{i:03}" for i in range(200)]
        for name in names:
            tally = recorder.Tally()
            for hours in range(0, 168, 8):
                tally.counts[now - 60 * hours, ALLOWED] += 9
                tally.counts[now - 60 * hours, REFUSED] += 1
            backend.execute(backend.topology(), tally.call(name))
            definitions.note(Policy(name, "5/m"), "alice")
        definitions.write()
        return own

    @pytest.mark.parametrize(("span", "points", "decisions"), [("hour", 60, 10), ("day", 24, 30), ("week", 168, 210)])
    def test_200_policies_take_two_round_trips(self, many, span, points, decisions):
        started = time.monotonic()
        table = panel.policy_table(span)
        elapsed = time.monotonic() - started
        rows = [row for row in table if row.policy.name.startswith("policy-")]
        assert [row.policy.name for row in rows] == [f"policy-{i:03}" for i in range(200)]
        assert {len(row.series) for row in rows} == {points}
        assert {(row.counts.total, row.share) for row in rows} == {(decisions, 10.0)}
        assert elapsed < 5  # on a busy machine; 0.1 s otherwise
        with commands_sent(many.url) as seen:
            panel.policy_table(span)
        assert len(seen) <= 1 + 8 * len(table)

    @pytest.mark.parametrize(("span", "points"), [("hour", 60), ("day", 1440), ("week", 168)])
    def test_the_site_has_a_series_of_its_own(self, span, points):
        check("alice", Policy("p", "1/m"), cost=2)
        recorder.flush()
        series = panel.series(span)
        assert len(series) == points
        assert panel.total(series).refused == 1
