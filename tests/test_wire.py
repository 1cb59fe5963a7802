"""Redis' protocol: what is read without hiredis is what hiredis reads, and decisions are the same."""

from __future__ import annotations

import random

import hiredis
import pytest
from redis.exceptions import MovedError, NoScriptError, ResponseError

from rlaas_django import Policy, acheck, check, wire
from rlaas_django.policy import ALGORITHMS
from tests.test_backend import own, start, use  # noqa: F401


def replies(rng: random.Random, depth: int = 0) -> bytes:
    kind = rng.choice(["status", "number", "text", "nothing", "no list", *["list"] * (depth < 3)])
    text = bytes(rng.choices(b"\r\n$*:+-ab\x00\xff", k=rng.choice([0, 1, 5, 40])))
    return {
        "status": b"+OK\r\n",
        "number": b":%d\r\n" % rng.randint(-(2**53), 2**53),
        "text": b"$%d\r\n%b\r\n" % (len(text), text),
        "nothing": b"$-1\r\n",
        "no list": b"*-1\r\n",
        "list": b"",
    }[kind] or b"".join([b"*%d\r\n" % (n := rng.randint(0, 4)), *(replies(rng, depth + 1) for _ in range(n))])


@pytest.mark.parametrize("seed", range(20))
def test_replies_in_pieces_are_read_as_hiredis_reads_them(seed):
    rng = random.Random(seed)
    stream = b"".join(replies(rng) for _ in range(40))
    ours, theirs = wire.Reader(), hiredis.Reader()
    read: list[list[object]] = [[], []]
    while stream:
        size = rng.choice([1, 2, 3, 7, 100])
        piece, stream = stream[:size], stream[size:]
        for reader, so_far in zip((ours, theirs), read, strict=True):
            reader.feed(piece)
            while (reply := reader.gets()) is not False:
                so_far.append(reply)
        assert read[0] == read[1]
    assert len(read[0]) == 40


@pytest.mark.parametrize("with_hiredis", [True, False])
def test_an_error_is_given_by_its_kind(monkeypatch, with_hiredis):
    if not with_hiredis:
        monkeypatch.setattr(wire, "hiredis", None)
    reader = wire.reader()
    reader.feed(b"-NOSCRIPT none\r\n-MOVED 3999 127.0.0.1:6381\r\n-ERR it is \xff\r\n:1\r\n")
    given = [reader.gets() for _ in range(4)]
    assert [type(each) for each in given] == [NoScriptError, MovedError, ResponseError, int]
    assert given[1].slot_id == 3999


@pytest.mark.parametrize("nonsense", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"*1\r\n!\r\n", b"\r\n"])
def test_what_is_no_reply_raises(nonsense):
    reader = wire.Reader()
    reader.feed(nonsense)
    with pytest.raises(ValueError):  # noqa: PT011
        reader.gets()


@pytest.mark.parametrize("algo", ALGORITHMS)
async def test_decisions_without_hiredis_are_the_same(own, monkeypatch, algo):  # noqa: F811
    monkeypatch.setattr(wire, "hiredis", None)
    policies = [Policy("few", "3/h", algo=algo), Policy("many", "100000/h", algo=algo)]
    for ask in (check, acheck):
        decisions = [ask(ask.__name__, policies) for _ in range(4)]
        told = [each if ask is check else await each for each in decisions]
        assert [(each.allowed, each.remaining, each.degraded) for each in told] == [
            *((True, n, False) for n in (2, 1, 0)),
            (False, 0, False),
        ]
