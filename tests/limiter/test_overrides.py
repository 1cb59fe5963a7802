"""Overrides: block, exempt or limit one identity, from the next request on, until a time."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from io import StringIO
from typing import NamedTuple

import pytest
import redis
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import IntegrityError, transaction
from django.test import override_settings
from django.utils import timezone
from rlaas_django import Policy, acheck, check, peek, refund
from rlaas_django.core.algorithms import ALGORITHMS, TOKEN_BUCKET
from rlaas_django.limiter import overrides, refund_units
from rlaas_django.limiter.overrides import BLOCK, EVERY_POLICY, EXEMPT, FACTOR, LIMIT, in_force
from rlaas_django.models import Override, OverrideQuerySet
from rlaas_django.operators import actions
from rlaas_django.runtime import background

from tests.support.internals import set_override

HOUR = 3_600_000


def override(kind: str, policy: str = EVERY_POLICY, limit: int | None = None, ms: int = HOUR, now: int | None = None):
    until = (int(time.time() * 1000) if now is None else now) + ms
    overrides.publish("alice", [overrides.Override("alice", policy, kind, until, limit)])


def override_both(one_policy: str, every_policy: str, now: int) -> None:
    """Override policy p by the one kind, and all policies by the other; a custom limit is of one unit."""
    made = [("p", one_policy), (EVERY_POLICY, every_policy)]
    overrides.publish("alice", [overrides.Override("alice", name, kind, now + HOUR, 1) for name, kind in made])


async def test_a_blocked_identity_is_refused_until_the_end_and_not_charged(server, algo, clock):
    policy = Policy("p", "5/m", algo=algo)
    override(BLOCK, now=clock.ms)
    refused = check("alice", policy)
    assert (refused.allowed, refused.remaining, refused.retry_after) == (False, 0, 3600.0)
    assert refused.reset_after == 3600.0
    assert not (await acheck("alice", policy)).allowed
    assert check("bob", policy).allowed
    clock.tick(HOUR)
    assert check("alice", policy).current_count == 0


def test_the_wait_of_a_blocked_identity_is_its_counter_s_where_that_is_longer(server, algo, clock):
    policy = Policy("p", "1/d", algo=algo)
    check("alice", policy)
    wait = check("alice", policy).retry_after
    override(BLOCK, now=clock.ms)
    refused = check("alice", policy)
    assert (refused.retry_after, refused.reset_after) == (wait, wait)
    assert check("alice", policy, cost=2).retry_after == math.inf
    clock.tick(int(wait * 1000))
    assert check("alice", policy).allowed


def test_an_exempt_identity_is_allowed_and_not_counted(server, algo, clock):
    policy = Policy("p", "2/m", algo=algo)
    override(EXEMPT, now=clock.ms)
    decisions = [check("alice", policy) for _ in range(9)]
    assert all(decision.allowed for decision in decisions)
    assert peek("alice", policy).current_count == 0
    assert not refund(decisions[0])


def test_a_custom_limit_keeps_the_usage(server, algo, clock):
    policy = Policy("p", "2/m", algo=algo)
    check("alice", policy, cost=2)
    assert not check("alice", policy).allowed
    override(LIMIT, limit=4, now=clock.ms)
    raised = check("alice", policy)
    assert (raised.allowed, raised.limit, raised.current_count, raised.remaining) == (True, 4, 2, 1)
    override(LIMIT, limit=1, now=clock.ms)
    assert not check("alice", policy).allowed


def test_an_override_of_one_policy_takes_precedence(client, clock):
    until = clock.ms + HOUR
    overrides.publish(
        "alice",
        [
            overrides.Override("alice", EVERY_POLICY, BLOCK, until),
            overrides.Override("alice", "free", EXEMPT, until),
        ],
    )
    assert not check("alice", Policy("p", "5/m")).allowed
    assert check("alice", Policy("free", "5/m")).allowed


@pytest.mark.parametrize(
    ("one_policy", "every_policy", "allowed"),
    [
        (EXEMPT, BLOCK, 9),
        (BLOCK, EXEMPT, 0),
        (LIMIT, EXEMPT, 1),
        (LIMIT, BLOCK, 0),
        (FACTOR, BLOCK, 0),
        (BLOCK, LIMIT, 0),
        (EXEMPT, LIMIT, 9),
    ],
)
def test_one_policy_is_narrower_than_all_but_a_limit_never_lifts_a_block(
    server, one_policy, every_policy, allowed, clock
):
    override_both(one_policy, every_policy, clock.ms)
    assert sum(check("alice", Policy("p", "5/m")).allowed for _ in range(9)) == allowed
    applies = in_force([Kind(every_policy), Kind(one_policy)])
    assert {BLOCK: 0, EXEMPT: 9, LIMIT: 1, FACTOR: 1}[applies.kind] == allowed


class Kind(NamedTuple):
    kind: str


@pytest.mark.parametrize(
    ("limit", "factor", "expected"),
    [(5, 2000, 10), (5, 1500, 7), (5, 500, 2), (1, 500, 1), (3, 333, 1), (1_000, 1, 1), (7, 1001, 7), (999, 1001, 999)],
)
def test_a_factor_multiplies_the_limit_exactly_and_rounds_down_to_one_at_least(
    server, algo, limit, factor, expected, clock
):
    override(FACTOR, limit=factor, now=clock.ms)
    policy = Policy("p", (limit, 60), algo=algo)
    assert check("alice", policy, cost=0).limit == expected
    assert check("alice", policy, cost=expected).allowed
    assert not check("alice", policy).allowed
    assert check("bob", policy, cost=0).limit == limit


def test_a_factor_of_a_large_limit_stays_exact_and_within_bounds(server, clock):
    largest = 2**52 // 1000
    override(FACTOR, limit=1, now=clock.ms)
    assert check("alice", Policy("p", (largest, 1), algo=TOKEN_BUCKET), cost=0).limit == largest // 1000
    override(FACTOR, limit=1_000_000, now=clock.ms)
    assert check("alice", Policy("p", (largest, 1), algo=TOKEN_BUCKET), cost=0).limit == largest


def test_a_factor_applies_to_every_policy_of_a_request_by_its_own_limit(limiter, clock):
    override(FACTOR, limit=1500, now=clock.ms)
    policies = [Policy("a", "2/m"), Policy("b", "10/m", algo=TOKEN_BUCKET, burst=20), Policy("c", "4/h")]
    assert [outcome.limit for outcome in limiter.check("alice", policies).outcomes] == [3, 30, 6]


@pytest.mark.parametrize(("kind", "amount"), [(FACTOR, 500), (FACTOR, 2000), (LIMIT, 60), (LIMIT, 7)])
@pytest.mark.parametrize("back", [lambda policy, decision: refund(decision), lambda p, d: refund_units("alice", p, 1)])
def test_a_refund_to_a_bucket_with_a_burst_refills_by_the_rate_that_was_decided_with(server, back, kind, amount, clock):
    """Two buckets, one with a refund: it is as if the refunded unit had not been charged."""
    until = clock.ms + HOUR
    policy = Policy("p", "10/s", algo=TOKEN_BUCKET, burst=60)
    for name in ("alice", "bob"):
        overrides.publish(name, [overrides.Override(name, EVERY_POLICY, kind, until, amount)])
        check(name, policy, cost=6)
    decision = check("alice", policy)
    clock.tick(30)
    assert back(policy, decision)
    clock.tick(33)
    alice, bob = peek("alice", policy), peek("bob", policy)
    assert (alice.current_count, alice.remaining, alice.reset_after) == (
        bob.current_count,
        bob.remaining,
        bob.reset_after,
    )


def test_an_expired_override_hides_no_other(server, clock):
    overrides.publish(
        "alice",
        [
            overrides.Override("alice", "p", EXEMPT, clock.ms + 1_000),
            overrides.Override("alice", EVERY_POLICY, BLOCK, clock.ms + HOUR),
        ],
    )
    assert check("alice", Policy("p", "5/m")).allowed
    clock.tick(1_000)
    assert not check("alice", Policy("p", "5/m")).allowed


@pytest.mark.parametrize("back", [lambda policy, decision: refund(decision), lambda p, d: refund_units("alice", p, 1)])
def test_a_refund_to_a_bucket_with_a_custom_limit_is_bounded_by_its_usage(server, back, clock):
    policy = Policy("p", "600/m", algo=TOKEN_BUCKET)
    override(LIMIT, limit=10, now=clock.ms)
    check("alice", policy, cost=9)
    decision = check("alice", policy)
    clock.tick(500)
    assert back(policy, decision)
    assert peek("alice", policy).current_count == 9


def test_a_blocked_identity_blocks_the_whole_request(clock):
    overrides.publish("ip=203.0.113.9", [overrides.Override("ip=203.0.113.9", "a", BLOCK, clock.ms + HOUR)])
    policies = [Policy("u", "5/m", key="user"), Policy("a", "5/m", key="ip")]
    refused = check({"user": "alice", "ip": "203.0.113.9"}, policies)
    assert (refused.allowed, refused.policy.name) == (False, "a")
    assert peek("alice", policies[0]).current_count == 0


def test_the_key_expires_with_the_last_override_and_is_deleted_without(client):
    override(BLOCK)
    assert 3_500_000 < client.pttl("rlaas:override:alice") <= HOUR
    overrides.publish("alice", [])
    assert not client.exists("rlaas:override:alice")


@pytest.mark.parametrize("amount", [1, 3, 9])
def test_a_refund_is_bounded_by_the_usage(server, algo, amount, clock):
    policy = Policy("p", "9/m", algo=algo)
    for _ in range(5):
        check("alice", policy)
        clock.tick(10)
    counted = peek("alice", policy).current_count
    assert refund_units("alice", policy, amount) == min(amount, counted)
    assert peek("alice", policy).current_count == max(0, counted - amount)


def test_a_refund_takes_the_newest_units_first(server, clock):
    for algo in [*ALGORITHMS][1:3]:
        policy = Policy(algo, "3/m", algo=algo)
        for _ in range(3):
            check("alice", policy)
            clock.tick(10_000)
        refund_units("alice", policy, 2)
        assert peek("alice", policy).reset_after == 30.0
        clock.tick(60_000)


@pytest.mark.django_db(transaction=True)
class TestModel:
    def set(self, kind=BLOCK, policy="", **rest):
        until = timezone.now() + timedelta(hours=1)
        return set_override("alice", policy, kind, until, by="operator", reason="spam", **rest)

    def test_set_and_end_apply_to_the_next_check(self):
        made = self.set()
        assert not check("alice").allowed
        made.end(by="operator")
        assert check("alice").allowed
        made.refresh_from_db()
        assert (made.ended_by, made.created_by, made.reason) == ("operator", "operator", "spam")

    @pytest.mark.parametrize("identity", ["get=42", "post=a@example.com", "header=0123", "key=acme"])
    def test_the_value_of_a_parameter_is_overridden_under_one_policy_only(self, identity):
        """Under another policy, get=42 is the value of another parameter."""
        until = timezone.now() + timedelta(hours=1)
        with pytest.raises(ValidationError, match="Choose a policy"):
            set_override(identity, "", BLOCK, until, by="operator", reason="spam")
        assert set_override(identity, "search", BLOCK, until, by="operator", reason="spam").pk

    def test_what_is_rolled_back_never_reaches_redis(self, client):
        with transaction.atomic():
            self.set()
            assert not client.exists("rlaas:override:alice")
            transaction.set_rollback(True)
        assert not client.exists("rlaas:override:alice")
        made = self.set()
        with transaction.atomic():
            made.end(by="operator")
            transaction.set_rollback(True)
        assert not check("alice").allowed

    def test_a_record_stays_when_redis_is_unavailable(self):
        gone = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
        with override_settings(CACHES=gone):
            self.set()
        assert Override.objects.active().count() == 1

    def test_a_second_override_ends_the_first_and_keeps_it_as_history(self):
        self.set()
        self.set(EXEMPT)
        assert check("alice", cost=5).allowed
        assert check("alice", cost=5).allowed
        assert [each.kind for each in Override.objects.all()] == [EXEMPT, BLOCK]
        assert Override.objects.active().count() == 1

    def test_the_database_allows_one_active_override(self):
        self.set()
        with pytest.raises(IntegrityError):
            Override.objects.create(identity="alice", policy="", kind=BLOCK, until=timezone.now(), reason="again")

    def test_of_two_concurrent_overrides_the_second_wins(self, monkeypatch):
        """The row of the first is committed after the second has looked for an active override."""
        self.set()
        real, missed = OverrideQuerySet.end, [True]

        def end(overrides, by):
            return None if missed and missed.pop() else real(overrides, by)

        monkeypatch.setattr(OverrideQuerySet, "end", end)
        self.set(EXEMPT)
        assert [each.kind for each in Override.objects.active()] == [EXEMPT]

    def test_overrides_are_restored_after_redis_lost_them(self, client, monkeypatch):
        self.set(EXEMPT)
        self.set(LIMIT, policy="default", limit=2)
        client.flushdb()
        assert check("alice").limit == 5
        background.run(20)
        assert client.exists(overrides.MARKER)
        assert check("alice").limit == 2

    def compare(self, monkeypatch):
        monkeypatch.setattr(actions.state, "next_comparison", 0.0)
        background.run(20)

    def test_an_evicted_override_is_restored_though_the_marker_is_there(self, client, monkeypatch):
        self.set()
        Override.restore()
        client.delete("rlaas:override:alice")
        assert check("alice").allowed
        self.compare(monkeypatch)
        assert not check("alice").allowed

    def test_what_was_set_or_ended_while_redis_was_unavailable_is_published(self, client, monkeypatch):
        gone = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
        made = self.set()
        with override_settings(CACHES=gone):
            made.end(by="operator")
        assert not check("alice").allowed
        self.compare(monkeypatch)
        assert check("alice").allowed
        with override_settings(CACHES=gone):
            self.set()
            self.compare(monkeypatch)  # fails, and stays due
        assert actions.state.next_comparison == 0.0
        background.run(20)
        assert not check("alice").allowed

    def test_the_comparison_goes_on_where_it_stopped(self, client, monkeypatch):
        monkeypatch.setattr("rlaas_django.models.COMPARED", 2)
        until = timezone.now() + timedelta(hours=1)
        for name in "abcde":
            set_override(name, "", BLOCK, until, by="operator", reason="spam")
        client.delete(*[f"rlaas:override:{name}" for name in "abcde"])
        Override.restore()
        client.delete(*[f"rlaas:override:{name}" for name in "abcde"])
        self.compare(monkeypatch)
        assert client.exists("rlaas:override:b") > client.exists("rlaas:override:c")
        background.run(20)
        background.run(20)
        assert client.exists(*[f"rlaas:override:{name}" for name in "abcde"]) == 5
        assert actions.state.next_comparison > time.monotonic()

    def test_many_are_restored_by_few_queries_and_round_trips(self, client, monkeypatch, django_assert_max_num_queries):
        until = timezone.now() + timedelta(hours=1)
        Override.objects.bulk_create(
            Override(identity=f"user-{n}", kind=BLOCK, until=until, reason="spam") for n in range(1_200)
        )
        client.flushdb()
        client.script_flush()
        sent, send = [], redis.Connection.send_packed_command

        def counting(connection, *arguments, **options):
            sent.append(connection)
            return send(connection, *arguments, **options)

        monkeypatch.setattr(redis.Connection, "send_packed_command", counting)
        with django_assert_max_num_queries(3 * 4 + 3):  # per 500, and for the networks and the number of them
            assert Override.restore() == 1_200
        assert len(sent) <= 3 * 3 + 6  # the marker, the networks, the script, connecting
        assert not check("user-0").allowed
        assert not check("user-1199").allowed
        assert len(client.keys("rlaas:override:*")) == 1_200

    def test_the_command_restores_overrides(self, client):
        self.set()
        client.flushdb()
        output = StringIO()
        call_command("rlaas", "restore", stdout=output)
        assert "1 identities" in output.getvalue()
        assert not check("alice").allowed

    def test_the_command_fails_while_redis_is_unavailable(self):
        gone = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}
        with override_settings(CACHES=gone), pytest.raises(CommandError, match="Redis is unavailable"):
            call_command("rlaas", "restore")

    def test_an_expired_override_is_not_restored(self, client):
        made = self.set()
        Override.objects.filter(pk=made.pk).update(until=timezone.now() - timedelta(seconds=1))
        client.flushdb()
        Override.restore()
        assert check("alice").allowed

    def test_a_change_during_publishing_is_published_too(self, monkeypatch, client):
        """Of two concurrent operators, the slower one publishes what the database has, not what it read before."""
        real = overrides.publish_each
        others = [lambda: self.set(EXEMPT)]

        def publish_each(found):
            real(found)
            if others:
                others.pop()()
                real(found)  # the slower of the two writes last, with outdated overrides

        monkeypatch.setattr(overrides, "publish_each", publish_each)
        self.set()
        assert client.hget("rlaas:override:alice", "*").startswith(b"exempt:")
