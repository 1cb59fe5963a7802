"""Redis' protocol: what is read without hiredis is what hiredis reads, and decisions are the same."""

from __future__ import annotations

import random

import pytest
from redis.exceptions import MovedError, NoScriptError, ResponseError

from rlaas_django import Policy, acheck, backend, check, reset, server, wire
from rlaas_django.lines import OrdinaryLine
from rlaas_django.policy import ALGORITHMS
from tests.test_backend import own, start, use  # noqa: F401


def reply(rng: random.Random, depth: int = 0) -> tuple[bytes, object]:
    """One as it is sent, and what it says."""
    kind = rng.choice(["status", "number", "text", "nothing", "no list", *["list"] * (depth < 3)])
    if kind == "list":
        parts = [reply(rng, depth + 1) for _ in range(rng.randint(0, 4))]
        return b"*%d\r\n" % len(parts) + b"".join(sent for sent, _ in parts), [said for _, said in parts]
    number = rng.randint(-(2**53), 2**53)
    text = bytes(rng.choices(b"\r\n$*:+-ab\x00\xff", k=rng.choice([0, 1, 5, 40])))
    return {
        "status": (b"+OK\r\n", b"OK"),
        "number": (b":%d\r\n" % number, number),
        "text": (b"$%d\r\n%b\r\n" % (len(text), text), text),
        "nothing": (b"$-1\r\n", None),
        "no list": (b"*-1\r\n", None),
    }[kind]


@pytest.mark.parametrize("make", [wire.Reader, wire.reader], ids=["ours", "hiredis', where it is installed"])
@pytest.mark.parametrize("seed", range(20))
def test_replies_in_pieces_are_read_as_they_were_meant(seed, make):
    rng, reader, read = random.Random(seed), make(), []
    every = [reply(rng) for _ in range(40)]
    stream = b"".join(sent for sent, _ in every)
    while stream:
        size = rng.choice([1, 2, 3, 7, 100])
        piece, stream = stream[:size], stream[size:]
        reader.feed(piece)
        while (found := reader.gets()) is not False:
            read.append(found)
    assert read == [said for _, said in every]
    assert not reader.has_data()


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
def test_decisions_by_redis_pys_own_ways_are_the_same(own, monkeypatch, algo):  # noqa: F811
    """Should it give its hook another name."""
    monkeypatch.setattr(server, "gives_its_socket", lambda kind: False)
    policies = [Policy("few", "3/h", algo=algo), Policy("many", "100000/h", algo=algo)]
    told = [check("alice", policies) for _ in range(4)]
    assert [(each.allowed, each.degraded) for each in told] == [(True, False)] * 3 + [(False, False)]
    assert type(backend.site().master._quick.idle[0]) is OrdinaryLine
    assert reset("alice", policies) == 2


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
