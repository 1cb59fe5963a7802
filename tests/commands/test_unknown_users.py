"""A name that no user has: which users operators may have meant."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from rlaas_django.operators.identities import is_unknown_user, nearest_users

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
