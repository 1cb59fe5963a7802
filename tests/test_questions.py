"""What is sent: the usual question, in the least time, is the one that is packed word by word."""

from __future__ import annotations

import itertools
import random
import string

import pytest

from rlaas_django import Policy, check, questions
from rlaas_django.identity import Id
from rlaas_django.policy import ALGORITHMS, YEAR

LETTERS = string.ascii_letters + string.digits


def policies(number: int, **options):
    return tuple(Policy(f"p{n}", (5 + n, YEAR), algo=ALGORITHMS[n], **options) for n in range(number))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"key": "user"}, {"shadow": True}], ids=str)
def test_the_usual_question_is_what_packing_it_word_by_word_gives(number, options):
    rng, asked = random.Random(number), questions.policy_set(policies(number, **options))
    for length in (1, 2, 5, 9, 10, 99, 100, 128, *range(3, 60)):
        name = "".join(rng.choices(LETTERS, k=length))
        who, unique, packed = asked.usual(name)
        assert who == asked.identities(name) == (name,) * number
        assert packed == asked.pack(who, "", unique, 1, True)


def test_who_is_called_as_in_a_key_is_asked_for_under_every_policy():
    for key in ("user", "ip", "token", "global"):
        asked = questions.policy_set(policies(3, key=key))
        for identity in (Id("ip=2001:db8::/64"), Id("alice"), Id("global"), Id("token=" + 32 * "0")):
            who, unique, packed = asked.usual(identity)
            assert who == asked.identities(identity)
            assert packed == asked.pack(who, "", unique, 1, True)


@pytest.mark.parametrize(
    "identity",
    [
        "",
        "global",
        "a b",
        "a/b",
        "a:b",
        "josé",
        "²",
        "٣",
        "x" * 129,
        "a\r\nb",
        "\0",
        7,
        {"user": "alice"},
        Id("x" * 129),
    ],
    ids=repr,
)
def test_what_is_not_usual_takes_longer(identity):
    assert questions.policy_set(policies(1)).usual(identity) is None


def test_whom_a_plain_name_does_not_tell_is_not_asked_for_so():
    for key in ("ip", "token", "global", "header:X-Api-Key", lambda request: "x"):
        assert questions.policy_set(policies(2, key=key)).usual("alice") is None


def test_each_request_has_a_name_of_its_own():
    asked = questions.policy_set(policies(1))
    names = {asked.usual("alice")[1] for _ in range(1000)} | {questions.unique() for _ in range(1000)}
    assert len(names) == 2000


def test_a_process_does_not_run_out_of_names(monkeypatch):
    monkeypatch.setattr(questions, "_number", itertools.count(10**10 - 3))
    counts = [check("alice", policies(3)).current_count for _ in range(6)]
    assert counts == [0, 1, 2, 3, 4, 5]
