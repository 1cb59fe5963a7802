"""Independent checks as one call: each is decided, and charged, as by itself."""

from __future__ import annotations

import itertools

import pytest

from rlaas_django import Policy, peek
from tests.internals import Plan, acheck_each, check_each, check_plan, overrides, plan_checks, split
from tests.observation import commands_sent

names = itertools.count()


def policies(*rates: str, **options) -> list[Policy]:
    number = next(names)
    return [Policy(f"p{number}-{i}", rate, **options) for i, rate in enumerate(rates)]


def plans(several: list[Policy], who: str | list[str] = "alice") -> list[Plan]:
    identities = [who] * len(several) if isinstance(who, str) else who
    return [Plan(name, (policy,)) for name, policy in zip(identities, several, strict=True)]


def decide_each(several: list[Policy], who="alice"):
    return check_each([check_plan(*each) for each in plans(several, who)])


def figures(decisions) -> list[tuple]:
    return [(each.allowed, each.current_count, each.remaining, each.retry_after) for each in decisions]


def decide_joined(several: list[Policy], who="alice"):
    planned = plans(several, who)
    checks = plan_checks(planned)
    assert len(checks) == 1
    return split(check_each(checks), planned)


@pytest.mark.parametrize("who", ["alice", ["alice", "bob", "alice"]])
def test_each_is_decided_as_by_itself(server, algo, clock, who):
    ours, model = (policies("2/m", "5/h", "3/m", algo=algo) for _ in range(2))
    for tick in [0, 0, 0, 0, 20_000, 0, 50_000, 0, 0]:
        clock.tick(tick)
        assert figures(decide_joined(ours, who)) == figures(decide_each(model, who))


async def test_each_is_decided_as_by_itself_in_async(server, clock):
    ours, model = policies("2/m", "5/h"), policies("2/m", "5/h")
    for _ in range(4):
        decisions = split(await acheck_each(plan_checks(plans(ours))), plans(ours))
        assert figures(decisions) == figures(await acheck_each([check_plan(*each) for each in plans(model)]))


def test_a_refusal_by_one_keeps_no_other_from_a_charge(server, clock):
    small, large = policies("1/m", "9/m")
    for _ in range(4):
        decide_joined([small, large])
    assert [peek("alice", policy).current_count for policy in (small, large)] == [1, 4]


def test_shadow_policies_never_refuse(server, clock):
    several = [*policies("1/m", shadow=True), *policies("9/m")]
    assert [[each.allowed for each in decide_joined(several)] for _ in range(3)] == [[True, True]] * 3


def test_overrides_apply(server, clock):
    small, large = policies("1/m", "9/m")
    overrides.publish("alice", [overrides.Override("alice", large.name, overrides.BLOCK, clock.ms + 1_000)])
    assert [each.allowed for each in decide_joined([small, large])] == [True, False]


def test_without_redis_each_applies_its_on_failure(redis_unavailable):
    kinds = [("open", "1/m"), ("closed", "1/m"), ("local", "1/m")]
    several = [Policy(f"{kind}-{next(names)}", rate, on_failure=kind) for kind, rate in kinds]
    assert [each.allowed for each in decide_joined(several)] == [True, False, True]
    assert [each.allowed for each in decide_joined(several)] == [True, False, False]


def test_a_refusal_is_cached_once_all_refuse(own):
    small, large = policies("1/h", "3/h")
    for _ in range(4):
        decide_joined([small, large])
    with commands_sent(own.url) as sent:
        assert [each.allowed for each in decide_joined([small, large])] == [False, False]
    assert not sent
    assert peek("alice", large).current_count == 3


def test_plans_that_cannot_be_joined_are_checks_by_themselves(configure):
    one, other = policies("9/m", "9/m")
    usual = Plan("alice", (other,))
    for plan in (Plan("alice", (other,)), Plan("alice", (one,), 2), Plan("alice", (one, other))):
        assert len(plan_checks([plan, usual])) == 2
    assert len(plan_checks([Plan("alice", (one,)), usual])) == 1
    configure(ENABLED=False)
    assert len(plan_checks([Plan("alice", (one,)), usual])) == 2
