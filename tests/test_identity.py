from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlaas_django import Policy, check
from rlaas_django.identity import encode, identify, redis_key
from rlaas_django.policy import ALGORITHMS


def key(identity, policy=None, algo="sliding-window-algo"):
    policy = policy or Policy("default", "5/m")
    return redis_key(policy, identify(identity, policy), algo, 60)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("alice", "alice"),
        ("alice@example.com", "alice@example.com"),
        ("a+b*c?[d]", "a+b*c?[d]"),
        ("alice:28333335", "alice%3A28333335"),
        ("a/b=c{d}%", "a%2Fb%3Dc%7Bd%7D%25"),
        ("a b\n\0", "a%20b%0A%00"),
        ("ä", "%C3%A4"),
        ("\ud800", "%ED%A0%80"),
        ("global", "%67lobal"),
        (42, "42"),
        (uuid.UUID(int=0), "00000000-0000-0000-0000-000000000000"),
        ("x" * 128, "x" * 128),
    ],
)
def test_an_identity_is_encoded(identity, expected):
    assert key(identity) == f"rlaas:rate_limit:{expected}"


def test_a_long_identity_is_hashed_and_nobody_can_be_called_the_hash():
    hashed = encode("x" * 129)
    assert hashed.startswith("blake2=")
    assert len(hashed) == len("blake2=") + 32
    assert encode(hashed) != hashed


@given(st.text(), st.text())
def test_two_identities_never_share_an_encoding_nor_leave_their_place(one, other):
    assert (encode(one) == encode(other)) == (one == other)
    assert len(encode(one)) <= 128
    assert encode(one).isascii()
    assert not set(":/{} \n\0") & set(encode(one))


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from(ALGORITHMS), st.sampled_from(ALGORITHMS))
def test_no_user_reaches_another_users_key_nor_a_policys(one, other, algo, other_algo):
    """Whatever the fixed window's index, which the script appends."""
    keys = {key(one, algo=algo), key(one, algo=algo) + ":28333335"}
    if one != other:
        assert keys.isdisjoint({key(other, algo=other_algo), key(other, algo=other_algo) + ":28333335"})
    assert keys.isdisjoint({key(other, Policy("search", "5/m"), other_algo)})


def test_user_search_is_not_policy_search():
    assert key("search", algo="fixed-window-algo") == "rlaas:rate_limit:search"
    assert key("alice", Policy("search", "5/m")) == "rlaas:rate_limit:search/alice"


def test_a_key_is_never_longer_than_300_bytes():
    policy = Policy("p" * 100, (1, 31_536_000), key="ip", algo="sliding-window-counter-algo")
    assert len(redis_key(policy, identify("x" * 8000, policy), policy.algo, 31_536_000)) < 300


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("user", "203.0.113.9"),
        ("user_or_ip", "203.0.113.9"),
        ("ip", "ip=203.0.113.9"),
        ("get:q", "get=203.0.113.9"),
        ("post:q", "post=203.0.113.9"),
        ("global", "global"),
        ("site.keys.tenant", "key=203.0.113.9"),
        (lambda request: "x", "key=203.0.113.9"),
    ],
)
def test_text_stands_for_the_kind_of_the_policys_key(kind, expected):
    assert identify("203.0.113.9", Policy("p", "5/m", key=kind)) == expected


@pytest.mark.parametrize("kind", ["token", "header:X-Api-Key"])
def test_a_credential_is_only_ever_a_keyed_digest(kind, settings):
    policy = Policy("p", "5/m", key=kind)
    first = identify("secret", policy)
    assert first.partition("=")[0] == kind.partition(":")[0]
    assert "secret" not in first
    assert identify("secret", policy) == first != identify("secret2", policy)
    settings.SECRET_KEY = "another"
    assert identify("secret", policy) != first


def test_a_mapping_gives_a_name_per_kind(client):
    policies = [Policy("a", "5/m", key="user"), Policy("b", "5/m", key="ip"), Policy("c", "5/m", key="get:q")]
    decision = check({"user": 42, "ip": "203.0.113.9", "get:q": "x"}, policies)
    assert [outcome.identity for outcome in decision.outcomes] == ["42", "ip=203.0.113.9", "get=x"]


@pytest.mark.parametrize("kind", ["user", "user_or_ip"])
def test_who_has_no_user_counts_by_address(kind):
    policy = Policy("p", "5/m", key=kind)
    assert identify({"user": None, "ip": "203.0.113.9"}, policy) == "ip=203.0.113.9"
    assert identify({"user": "42", "ip": "203.0.113.9"}, policy) == "42"


@pytest.mark.parametrize("identity", ["", None, {}, {"ip": ""}, {"user": ""}, True, 4.2, b"alice", ["alice"]])
def test_no_identity_is_an_error_and_never_a_shared_counter(identity, client):
    with pytest.raises((ValueError, TypeError)):
        check(identity)
    assert client.dbsize() == 0


def test_a_missing_kind_is_told_with_the_policy():
    with pytest.raises(ValueError, match="Policy 'p' counts by 'ip'"):
        check({"user": "42"}, Policy("p", "5/m", key="ip"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("203.0.113.9", "ip=203.0.113.9"),
        ("::ffff:203.0.113.9", "ip=203.0.113.9"),
        ("2001:db8::1", "ip=2001%3Adb8%3A%3A%2F64"),
        ("2001:DB8:0:0:ffff::1", "ip=2001%3Adb8%3A%3A%2F64"),
        ("2001:db8:0:1::1", "ip=2001%3Adb8%3A0%3A1%3A%3A%2F64"),
        ("fe80::1%eth0", "ip=fe80%3A%3A%2F64"),
        ("unix:", "ip=unix%3A"),
    ],
)
def test_addresses_fold(address, expected):
    assert identify(address, Policy("p", "5/m", key="ip")) == expected


def test_the_network_that_counts_as_one_address_can_be_set(configure):
    configure(IPV6_PREFIX=56)
    assert identify("2001:db8:0:ff::1", Policy("p", "5/m", key="ip")) == "ip=2001%3Adb8%3A%3A%2F56"
