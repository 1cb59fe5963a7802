"""What operators do: one function per action, with its history in the same transaction."""

from __future__ import annotations

import getpass
from datetime import timedelta
from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone, translation
from rlaas_django import Policy, check
from rlaas_django.admin import pages
from rlaas_django.models import OperatorAction, Override
from rlaas_django.operators.actions import (
    ADMIN,
    Operator,
    effect_of,
    end_override,
    refund_units,
    reset_usage,
    set_override,
)

from tests.support.internals import EncodedIdentity, UnavailableError

pytestmark = pytest.mark.django_db(transaction=True)
BY = Operator("operator", ADMIN)
POLICY = Policy("p", "5/m")
ALICE = EncodedIdentity("alice")


def later(hours: int = 1):
    return timezone.now() + timedelta(hours=hours)


def new(identity="alice", kind="block", policy="", **fields) -> Override:
    return Override(identity=identity, kind=kind, policy=policy, until=later(), **fields)


def put(identity="alice", kind="block", policy="", **fields) -> OperatorAction:
    return set_override(BY, new(identity, kind, policy, reason="spam", **fields))


class TestHistory:
    def test_each_action_is_applied_and_written(self):
        put()
        assert not check("alice", POLICY).allowed
        end_override(BY, Override.objects.get(), reason="a mistake")
        check("alice", POLICY, cost=3)
        refund_units(BY, ALICE, [POLICY], 9, scope="p", reason="an outage")
        check("alice", POLICY)
        reset_usage(BY, ALICE, [POLICY])
        put("alice", "factor", factor=Decimal("1.5"))
        assert check("alice", POLICY).limit == 7
        found = [(each.action, each.amount, each.policy, each.reason) for each in OperatorAction.objects.all()]
        assert found == [
            ("factor", "1.5", "", "spam"),
            ("reset", "", "", ""),
            ("refund", "3", "p", "an outage"),
            ("end", "block", "", "a mistake"),
            ("block", "", "", "spam"),
        ]
        assert {(each.by, each.via, each.identity) for each in OperatorAction.objects.all()} == {
            ("operator", "admin", "alice")
        }

    @pytest.mark.parametrize(
        "act",
        [
            lambda: reset_usage(BY, ALICE, [POLICY]),
            lambda: refund_units(BY, ALICE, [POLICY], 1),
        ],
        ids=["reset", "refund"],
    )
    def test_what_failed_is_not_written(self, act, redis_unavailable):
        with pytest.raises(UnavailableError):
            act()
        assert not OperatorAction.objects.exists()

    def test_what_is_rolled_back_is_not_written(self):
        with transaction.atomic():
            put()
            transaction.set_rollback(True)
        assert not OperatorAction.objects.exists()
        assert check("alice", POLICY).allowed

    def test_a_reset_of_nothing_is_not_written(self):
        assert reset_usage(BY, ALICE, [POLICY]).pk is None
        assert not OperatorAction.objects.exists()
        check("alice", POLICY)
        assert reset_usage(BY, ALICE, [POLICY]).pk is not None

    def test_a_command_acts_as_the_user_of_the_operating_system(self):
        assert Operator.of_command() == (getpass.getuser(), "command")

    def test_the_words(self):
        put("ip=203.0.113.9", "block", "p")
        put("net=203.0.113.0%2F24", "exempt")
        put("alice", "limit", "p", limit=1200)
        put("alice", "factor", factor=Decimal("0.500"))
        end_override(BY, Override.objects.get(kind="exempt"))
        odd = EncodedIdentity("a%3Cb%3E")
        check(odd, POLICY)
        reset_usage(BY, odd, [POLICY], scope="p")
        refund_units(BY, ALICE, [POLICY], 2)
        with translation.override("en"):
            words = [words.partition(" until ")[0] for _, _, words in pages.entries()]
        assert words == [
            "Refunded 0 units to alice under all policies",
            "Reset the usage of a<b> under p",
            "Ended the override “exempt” of 203.0.113.0/24 under all policies",
            "Set the limits of alice under all policies to 0.5 times their value",
            "Set the limit of alice under p to 1200",
            "Exempted 203.0.113.0/24 from all policies",
            "Blocked 203.0.113.9 under p",
        ]

    def test_the_history_of_one_identity(self, django_assert_num_queries):
        put()
        put("bob", "exempt")
        with django_assert_num_queries(1):  # neither is the key of a user
            ((action, identity, _),) = pages.entries("bob")
        assert (identity.name, action.reason) == ("bob", "spam")


class TestValidation:
    @pytest.mark.parametrize(
        "fields",
        [
            {"kind": "limit", "limit": 5},  # for every policy
            {"kind": "limit", "policy": "p"},
            {"kind": "limit", "policy": "p", "limit": 0},
            {"kind": "factor"},
            {"kind": "factor", "factor": Decimal(0)},
            {"kind": "factor", "factor": Decimal("1.0005")},
            {"kind": "factor", "factor": Decimal(2), "limit": 5},
            {"kind": "block", "factor": Decimal(2)},
            {"kind": "block", "every_client": True},  # of a user
            {"kind": "nonsense"},
            {"identity": "get=42"},  # of every policy
        ],
        ids=str,
    )
    def test_an_override_that_cannot_be_is_refused(self, fields):
        with pytest.raises(ValidationError):
            put(**fields)
        assert not Override.objects.exists()
        assert not OperatorAction.objects.exists()


class TestEffect:
    """What a new override ends, replaces, and is outranked by."""

    @pytest.fixture(autouse=True)
    def _active(self):
        put("alice", "block")
        put("alice", "exempt", "p")
        put("net=203.0.0.0%2F16", "block")
        put("net=203.0.113.0%2F24", "exempt")
        put("ip=203.0.113.9", "limit", "p", limit=9)
        put("ip=2001%3Adb8%3A%3A%2F64", "block")

    @pytest.mark.parametrize(
        ("made", "ends", "replaces", "outranked_by"),
        [
            (new("alice", "exempt"), ["block alice"], [], ["exempt alice p"]),
            (new("alice", "exempt", "p"), ["exempt alice p"], ["block alice"], []),
            (new("alice", "block", "q"), [], ["block alice"], []),
            (new("alice", "limit", "q", limit=5), [], [], ["block alice"]),
            (new("bob", "block"), [], [], []),
            (
                new("ip=203.0.113.9", "block"),
                [],
                ["exempt net=203.0.113.0%2F24", "block net=203.0.0.0%2F16", "limit ip=203.0.113.9 p"],
                [],
            ),
            (
                new("net=203.0.113.0%2F25", "limit", "p", limit=5),
                [],
                ["exempt net=203.0.113.0%2F24", "block net=203.0.0.0%2F16"],
                ["limit ip=203.0.113.9 p"],
            ),
            (new("net=203.0.96.0%2F20", "limit", "p", limit=5), [], [], ["block net=203.0.0.0%2F16"]),
            (
                new("net=203.0.112.0%2F20", "block"),
                [],
                ["limit ip=203.0.113.9 p", "block net=203.0.0.0%2F16"],
                ["exempt net=203.0.113.0%2F24"],
            ),
            (new("net=2001%3Adb8%3A%3A%2F32", "exempt"), [], [], ["block ip=2001%3Adb8%3A%3A%2F64"]),
        ],
        ids=str,
    )
    def test_the_effect(self, made, ends, replaces, outranked_by):
        effect = effect_of(made)
        assert [named(each) for each in effect.ends] == ends
        assert sorted(named(each) for each in effect.replaces) == sorted(replaces)
        assert sorted(named(each) for each in effect.outranked_by) == sorted(outranked_by)


def named(override: Override) -> str:
    return f"{override.kind} {override.identity} {override.policy}".strip()
