"""Two spellings that MariaDB takes for the same user are one name to us, under each of the usual collations."""

from __future__ import annotations

import itertools
import random
import string
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.backends import BaseBackend
from rlaas_django import rate_limit
from rlaas_django.auth import LoginRateLimitMixin

from tests.support.http import call, ok
from tests.support.internals import fold
from tests.support.mariadb import MariaDB, literal

pytestmark = pytest.mark.slow

COLLATIONS = ["utf8mb4_general_ci", "utf8mb4_unicode_ci", "utf8mb4_unicode_520_ci", "utf8mb4_uca1400_ai_ci"]
SURROGATES = range(0xD800, 0xE000)
LETTERS = [*string.ascii_lowercase, *string.digits]
LIGATURES = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
# ß is s under one collation and ss under the others, of which no text can be both; the other one is new.
BOTH = {"\u00df", "\u1e9e", "\U00010780"}


def is_compared(code: int) -> bool:
    """Return whether to compare a character: all of the BMP, and what is assigned above."""
    return code not in SURROGATES and (code < 0x10000 or unicodedata.category(chr(code)) not in ("Cn", "Co"))


CHARACTERS = [chr(code) for code in range(1, 0x110000) if is_compared(code)]


@pytest.fixture(scope="module")
def mariadb():
    with MariaDB() as mariadb:
        mariadb.rows("CREATE DATABASE test; CREATE TABLE test.characters (text VARCHAR(4)) CHARACTER SET utf8mb4")
        for start in range(0, len(CHARACTERS), 10_000):
            values = ", ".join(f"({literal(character)})" for character in CHARACTERS[start : start + 10_000])
            mariadb.rows(f"INSERT INTO test.characters VALUES {values}")
        yield mariadb


@pytest.fixture(params=COLLATIONS)
def collation(request, mariadb) -> str:
    known = mariadb.rows("SHOW COLLATION")
    if request.param.removeprefix("utf8mb4_") not in {row[0].removeprefix("utf8mb4_") for row in known}:
        pytest.skip(f"this MariaDB does not have {request.param}")
    return request.param


@pytest.fixture
def equal_to(mariadb, collation):
    """`equal_to(texts)`: for each text, the characters that are the same."""
    characters = defaultdict(list)
    query = f"SELECT HEX(text), HEX(WEIGHT_STRING(text COLLATE {collation})) FROM test.characters"
    for encoded, weight in mariadb.rows(query):
        characters[weight].append(bytes.fromhex(encoded).decode())

    def equal(texts: Iterable[str]) -> dict[str, list[str]]:
        weights = ", ".join(f"HEX(WEIGHT_STRING({literal(text)} COLLATE {collation}))" for text in texts)
        (row,) = mariadb.rows(f"SELECT {weights}")
        return {text: characters[weight] for text, weight in zip(texts, row, strict=True)}

    return equal


@pytest.mark.parametrize("place", [0, 2, 5])
def test_what_the_database_ignores_is_ignored(mariadb, collation, place):
    before, after = literal("alice"[:place]), literal("alice"[place:])
    query = f"CONCAT({before}, text, {after}) = {literal('alice')} COLLATE {collation}"
    ignored = mariadb.rows(f"SELECT HEX(text) FROM test.characters WHERE {query}")
    spellings = [f"{'alice'[:place]}{bytes.fromhex(row[0]).decode()}{'alice'[place:]}" for row in ignored]
    assert [spelling for spelling in spellings if fold(spelling) != "alice"] == []
    assert len(spellings) > 400 or "general" in collation


def test_what_the_database_takes_for_a_letter_or_a_digit_is_that_letter_or_digit(equal_to):
    for letter, characters in equal_to(LETTERS).items():
        assert letter in characters
        assert [character for character in characters if fold(character) != letter] == []


def test_what_the_database_takes_for_two_letters_is_those(equal_to):
    for pair, characters in equal_to(LIGATURES).items():
        assert [character for character in characters if fold(character) != pair and character not in BOTH] == []


@pytest.fixture
def spellings(equal_to) -> set[str]:
    """A hundred names that the database takes for `alice`."""
    chosen = random.Random(26)
    characters = equal_to(["", *"alice"])
    ignored = characters[""] or [""]
    names = set()
    while len(names) < 100:
        names.add("".join(chosen.choice(characters[letter]) + chosen.choice(ignored) for letter in "alice"))
    return names


def test_100_spellings_of_a_name_are_one_identity(mariadb, collation, spellings, rf):
    comparisons = ", ".join(f"{literal(spelling)} = {literal('alice')} COLLATE {collation}" for spelling in spellings)
    assert set(*mariadb.rows(f"SELECT {comparisons}")) == {"1"}
    assert {identity_of(spelling, rf) for spelling in spellings} == {"post=alice"}


def identity_of(name: str, rf) -> str:
    request = rf.post("/", {"username": name})
    call(rate_limit("9999/m", key="post:username", group="g")(ok), request)
    return request.rate_limit.outcomes[0].identity


def test_100_spellings_are_five_comparisons_of_the_password(mariadb, collation, spellings, settings, monkeypatch):
    """The database decides who is one user; each guess is under another name."""

    class Compare(BaseBackend):
        def authenticate(self, request, username, password):
            if find(username):
                compared.append(username)

    class Limited(LoginRateLimitMixin, Compare):
        def get_user_id(self, credentials):
            return "1" if find(credentials["username"]) else None

    def find(name):
        return mariadb.rows(f"SELECT {literal(name)} = {literal('alice')} COLLATE {collation}") == [["1"]]

    compared: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "Limited", Limited, raising=False)
    settings.AUTHENTICATION_BACKENDS = [f"{__name__}.Limited"]
    for number, name in enumerate(sorted(spellings)):
        assert authenticate(username=name, password=f"guess {number}") is None
    assert len(compared) == 5
