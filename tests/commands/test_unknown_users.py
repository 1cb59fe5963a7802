"""A name that no user has: which users operators may have meant."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from rlaas_django import check
from rlaas_django.models import OperatorAction, Override
from rlaas_django.operators.identities import is_unknown_user, nearest_users

from tests.support.commands import rlaas

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def users():
    return [User.objects.create_user(name) for name in ("alice", "Bob", "carol@example.com", "42")]


def test_an_identity_is_unknown_where_no_user_has_its_id(users):
    assert not is_unknown_user(str(users[0].pk))
    assert is_unknown_user("999999")
    assert is_unknown_user("alice")  # encoded, it would be a primary key


@pytest.mark.parametrize(
    "identity",
    [
        "ip=203.0.113.9",
        "net=203.0.113.0%2F24",
        "token=0123",
        "post=alice",
        "global",
        "login=999999@203.0.113.9",
        "blake2=0123",
    ],
)
def test_what_is_not_a_user_is_not_an_unknown_one(identity):
    assert not is_unknown_user(identity)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("alcie", "alice"),
        ("blice", "alice"),
        ("alicee", "alice"),
        ("alic", "alice"),
        ("bob", "Bob"),
        ("carol@exmple.com", "carol@example.com"),
    ],
)
def test_a_misspelled_name_is_near_the_right_one(text, name):
    assert nearest_users(text) == [name]


@pytest.mark.parametrize("text", ["", "x", "nobody", "%", "a" * 60_000])
def test_a_name_that_is_like_none_is_near_none(text):
    assert nearest_users(text) == []


# Commands


SET = [("block",), ("exempt",), ("limit", "--factor", "2")]


@pytest.mark.parametrize("words", SET, ids=lambda words: words[0])
def test_an_override_needs_a_user_of_this_name(words):
    result = rlaas(words[0], "alcie", *words[1:], "--reason", "r")
    assert result.code == 1
    assert "There is no user 'alcie'; the nearest: alice." in result.err
    assert "--anyway" in result.err
    assert not Override.objects.exists()
    assert not OperatorAction.objects.exists()
    assert rlaas(words[0], "alice", *words[1:], "--reason", "r").code == 0


@pytest.mark.parametrize("words", SET, ids=lambda words: words[0])
def test_a_key_of_one_s_own_is_taken_anyway(words):
    assert rlaas(words[0], "partner 7", *words[1:], "--reason", "r", "--anyway").code == 0
    assert Override.objects.get().identity == "partner%207"
    assert rlaas("show", "partner 7").code == 0
    assert rlaas("end", "partner 7").code == 0


@pytest.mark.parametrize("identity", ["203.0.113.9", "203.0.113.0/24", "2001:db8::1", "token=0123", "ip=203.0.113.9"])
def test_an_address_a_network_and_an_encoded_identity_need_no_user(identity):
    assert rlaas("block", identity, "--reason", "r").code == 0


def test_a_user_is_named_by_id_too(users):
    assert rlaas("block", str(users[0].pk), "--reason", "r").code == 0
    assert Override.objects.get().identity == str(users[0].pk)


@pytest.mark.parametrize("command", ["show", "end", "reset"])
def test_a_misspelled_name_is_an_error_where_there_is_nothing_of_it(command):
    result = rlaas(command, "alcie")
    assert (result.code, result.out) == (1, "")
    assert "There is no user 'alcie'; the nearest: alice." in result.err


def test_what_is_there_is_shown_and_reset_though_no_user_has_the_name():
    check("partner")
    assert rlaas("show", "partner").code == 0
    assert rlaas("reset", "partner").out == "reset: partner under default.\n"


def test_the_search_for_a_name_is_safe_to_print():
    result = rlaas("block", "ali\x1b[31mce", "--reason", "r")
    assert result.code == 1
    assert "\x1b" not in result.err
