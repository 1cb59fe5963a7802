"""Receipts as text: what a check charged is refunded in any process, once."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from rlaas_django import Policy, check, peek, refund

from tests.support.internals import TOKEN_BUCKET, arefund_receipt, overrides, receipts, refund_receipt

TWO = [Policy("burst", "5/m", key="user"), Policy("site", "9/h", key="ip", algo="fixed-window-algo")]
ALICE = {"user": "alice", "ip": "203.0.113.9"}


def used(*policies, identity="alice"):
    return [peek(identity, policy).current_count for policy in policies]


def test_a_receipt_is_refunded_once(algo, clock, server, configure):
    configure(USE_ALGO=algo, MAX_REQUESTS=5)
    check("alice")
    text = receipts.write(check("alice", cost=2))
    assert used(None) == [3]
    assert refund_receipt(text)
    assert used(None) == [1]
    assert not refund_receipt(text)
    assert used(None) == [1]


async def test_a_receipt_is_refunded_once_async(algo, clock, configure):
    configure(USE_ALGO=algo, MAX_REQUESTS=5)
    check("alice")
    text = receipts.write(check("alice", cost=2))
    assert await arefund_receipt(text)
    assert not await arefund_receipt(text)
    assert used(None) == [1]


def test_a_receipt_covers_every_policy_of_the_check(clock):
    text = receipts.write(check(ALICE, TWO))
    assert receipts.read(text).policies == {"burst", "site"}
    assert refund_receipt(text)
    assert used(*TWO, identity=ALICE) == [0, 0]


def test_of_many_callers_at_once_one_is_refunded(algo, configure):
    configure(USE_ALGO=algo, MAX_REQUESTS=100, WINDOW_SIZE=3600)
    check("alice", cost=50)
    receipt = receipts.write(check("alice", cost=2))
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: refund_receipt(receipt), range(16)))
    assert sorted(done) == [False] * 15 + [True]
    assert used(None) == [50]


def test_the_marker_lasts_until_a_second_refund_would_find_nothing(client):
    policy = Policy("bucket", "2/m", algo=TOKEN_BUCKET, burst=20)
    receipt = receipts.write(check("alice", policy))
    refund_receipt(receipt)
    (marker,) = client.keys("rlaas:refunded:*")
    assert 599_000 < client.pttl(marker) <= 600_000  # the bucket is full after ten minutes


def test_what_charged_nothing_has_no_receipt(configure):
    configure(MAX_REQUESTS=1)
    assert receipts.write(check("alice", cost=0)) is None
    assert receipts.write(peek("alice")) is None
    check("alice")
    assert receipts.write(check("alice")) is None
    assert receipts.write(check("bob", cost=2)) is None


def test_an_exempt_identity_has_no_receipt(clock):
    overrides.publish("alice", [overrides.Override("alice", "*", overrides.EXEMPT, clock.ms + 60_000)])
    assert receipts.write(check("alice")) is None


@pytest.mark.usefixtures("redis_unavailable")
def test_what_a_process_counted_by_itself_has_no_receipt():
    decision = check("alice", Policy("login", "5/m", on_failure="local"))
    assert receipts.write(decision) is None
    assert refund(decision)


def test_a_refund_by_receipt_ends_a_cached_refusal(configure):
    configure(MAX_REQUESTS=1, WINDOW_SIZE=3600)
    receipt = receipts.write(check("alice"))
    assert not check("alice").allowed
    refund_receipt(receipt)
    assert check("alice").allowed


def test_a_receipt_outlives_a_change_of_the_algorithm(clock, configure):
    configure(USE_ALGO="fixed-window-algo")
    receipt = receipts.write(check("alice"))
    configure(USE_ALGO="token-bucket-algo")
    assert refund_receipt(receipt)
    configure(USE_ALGO="fixed-window-algo")
    assert used(None) == [0]


def test_only_our_own_text_is_a_receipt(settings):
    text = receipts.write(check("alice"))
    payload = base64.urlsafe_b64encode(json.dumps([[["rlaas:rate_limit:bob"], ["x", 1]]]).encode()).decode()
    for forged in ("", "x", text[:-1], f"x{text}", f"{payload}:{text.rpartition(':')[2]}", "a" * 100_000, "\ud800:x"):
        with pytest.raises(ValueError, match="not a receipt"):
            receipts.read(forged)
    settings.SECRET_KEY = "another"
    with pytest.raises(ValueError, match="not a receipt"):
        receipts.read(text)
    settings.SECRET_KEY_FALLBACKS = ["tests"]
    assert refund_receipt(text)
