"""Refusals told again from memory: as exact as Redis' own, for a second at most."""

from __future__ import annotations

import asyncio
import time

import pytest
from django.http import HttpResponse

from rlaas_django import Policy, acheck, arefund, areset, check, overrides, peek, rate_limit, refund, refusals, reset
from rlaas_django.identity import Id
from rlaas_django.testing import frozen_clock
from tests.http import EVERY_WAY, Site
from tests.test_backend import ask, commands_seen, own, start, use  # noqa: F401

POLICY = Policy("p", "2/h")


@pytest.fixture
def now(monkeypatch):
    """This process' clock, to be moved on."""
    moved = [0.0]
    real = time.monotonic
    for module in (time, refusals):
        monkeypatch.setattr(module, "monotonic", lambda: real() + moved[0])

    def move(seconds: float) -> None:
        moved[0] += seconds

    return move


def use_up(ask, policy=POLICY, who="alice"):  # noqa: F811
    """The first refusal."""
    for _ in range(10):
        decision = ask(who, policy)
        if not decision.allowed:
            return decision
    raise AssertionError


def test_a_refusal_is_told_again_without_asking(own, ask):  # noqa: F811
    first = use_up(ask)
    with commands_seen(own.url) as seen:
        again = [ask("alice", POLICY) for _ in range(20)]
    assert seen == []
    for decision in again:
        assert not decision.allowed
        assert not decision.degraded
        assert (decision.limit, decision.remaining, decision.current_count) == (2, 0, 2)
        assert decision.policy == POLICY
        assert 0 < first.retry_after - decision.retry_after < 5
        assert decision.reset_after < first.reset_after
        assert len(decision.outcomes) == 1


def test_its_wait_gets_shorter_as_time_goes_by(ask, now):  # noqa: F811
    first = use_up(ask)
    now(0.5)
    again = ask("alice", POLICY)
    assert first.retry_after - again.retry_after == pytest.approx(0.5, abs=0.2)
    assert first.reset_after - again.reset_after == pytest.approx(0.5, abs=0.2)
    assert again == again
    assert "retry_after" in repr(again)


def test_after_a_second_redis_is_asked_again(own, ask, now):  # noqa: F811
    use_up(ask)
    now(1.0)
    with commands_seen(own.url) as seen:
        assert not ask("alice", POLICY).allowed
    assert seen == ["EVALSHA"]


def test_when_the_wait_is_over_redis_is_asked(ask):  # noqa: F811
    """On the real clock: who waits as long as he is told, to the millisecond, is admitted."""
    policy = Policy("short", (1, 1))
    assert use_up(ask, policy).retry_after <= 1
    time.sleep(0.3)
    again = ask("alice", policy)
    assert 0 < again.retry_after < 0.75
    time.sleep(again.retry_after)
    assert ask("alice", policy).allowed


def test_each_question_has_its_own(ask):  # noqa: F811
    other = Policy("other", "2/h")
    use_up(ask)
    assert ask("bob", POLICY).allowed
    assert ask("alice", other).allowed
    assert ask("alice", [POLICY, other]).policy == "p"
    assert ask({"user": "alice"}, POLICY).allowed is False


def test_another_definition_of_a_policy_is_another_question(ask):  # noqa: F811
    """Its name is its counter; but a limit that was raised holds at once."""
    use_up(ask)
    assert ask("alice", Policy("p", "3/h")).allowed


def test_a_cost_of_its_own_is_another_question(ask):  # noqa: F811
    policy = Policy("p", "5/h")
    ask("alice", policy, cost=4)
    assert not ask("alice", policy, cost=2).allowed
    assert ask("alice", policy).allowed


def test_a_policy_of_the_settings_is_known_by_its_name(configure, ask):  # noqa: F811
    configure(POLICIES={"named": {"rate": "2/h"}})
    use_up(ask, "named")
    assert refusals.known
    configure(POLICIES={"named": {"rate": "3/h"}})
    assert ask("alice", "named").allowed


@pytest.mark.parametrize("end", ["reset", "areset", "refund", "arefund", "override"])
def test_what_ends_a_refusal_in_this_process_is_seen_at_once(end):
    charged = check("alice", POLICY)
    use_up(check)
    assert refusals.known
    match end:
        case "reset":
            reset("alice", POLICY)
        case "areset":
            asyncio.run(areset("alice", POLICY))
        case "refund":
            refund(charged)
        case "arefund":
            asyncio.run(arefund(charged))
        case "override":
            until = int(time.time() * 1000) + 60_000
            overrides.publish(Id("alice"), [overrides.Override("alice", "p", overrides.EXEMPT, until)])
    assert check("alice", POLICY).allowed


@pytest.mark.parametrize(
    "policies",
    [
        Policy("shadow", "2/h", shadow=True),
        [POLICY, Policy("shadow", "100/h", shadow=True)],
    ],
    ids=["alone", "beside another"],
)
def test_shadows_are_always_asked(own, ask, policies):  # noqa: F811
    for _ in range(3):
        ask("alice", policies)
    with commands_seen(own.url) as seen:
        ask("alice", policies)
    assert seen == ["EVALSHA"]


def test_a_cost_that_never_fits_is_not_kept(ask):  # noqa: F811
    assert not ask("alice", POLICY, cost=3).allowed
    assert not refusals.known


def test_it_can_be_turned_off(own, ask, configure):  # noqa: F811
    configure(LOCAL_REFUSALS=False)
    use_up(ask)
    with commands_seen(own.url) as seen:
        ask("alice", POLICY)
    assert seen == ["EVALSHA"]


def test_the_frozen_clock_is_redis_own_business(ask):  # noqa: F811
    with frozen_clock() as clock:
        use_up(ask)
        clock.tick(3_600_000)
        assert ask("alice", POLICY).allowed
    use_up(ask, Policy("q", "2/h"))
    with frozen_clock() as clock:
        clock.tick(3_600_000)
        assert ask("alice", Policy("q", "2/h")).allowed


def test_a_look_is_always_asked(own):  # noqa: F811
    use_up(check)
    with commands_seen(own.url) as seen:
        peek("alice", POLICY)
    assert seen == ["EVALSHA"]


def test_they_are_bounded(monkeypatch):
    monkeypatch.setattr(refusals, "MOST", 50)
    policy = Policy("p", "1/h")
    for n in range(120):
        use_up(check, policy, f"user-{n}")
        assert len(refusals.known) <= 50


@pytest.mark.parametrize("way", EVERY_WAY)
class TestViews:
    @pytest.fixture
    def site(self, way, settings):
        return Site(way, settings)

    def test_refused_requests_do_not_reach_redis(self, own, site):  # noqa: F811
        site.serve(rate_limit("2/h", key="ip")(site.view(lambda request: HttpResponse("ok"))))
        assert site.statuses(3) == [200, 200, 429]
        with commands_seen(own.url) as seen:
            assert site.statuses(10) == [429] * 10
            assert site.get(address="198.51.100.7").status_code == 200
        assert seen.count("EVALSHA") < 10  # the other address', and statistics

    @pytest.mark.parametrize("options", [{"charge_when": lambda r: r.status_code == 401}, {"charge_on_error": False}])
    def test_units_that_may_come_back_are_asked_for(self, own, site, options):  # noqa: F811
        """Another process may give one back any moment."""
        site.serve(rate_limit("1/h", key="ip", group="back", **options)(site.view(lambda r: HttpResponse(status=401))))
        assert site.statuses(3) == [401, 429, 429]
        assert not refusals.known


async def test_async_refusals_are_shared_with_sync_ones():
    for _ in range(2):
        await acheck("alice", POLICY)
    assert not (await acheck("alice", POLICY)).allowed
    assert len(refusals.known) == 1
    assert not (await acheck("alice", POLICY)).allowed
