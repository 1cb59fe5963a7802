"""Identities: how they are encoded in keys, and which one a request has under each kind of key."""

from __future__ import annotations

import base64
import ipaddress
import json
import tracemalloc
import uuid
from types import SimpleNamespace

import pytest
from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st
from rlaas_django import Policy, check, rate_limit
from rlaas_django.limiter import networks, overrides

from tests.support.http import assert_refusal, counters, ok
from tests.support.internals import ALGORITHMS, decode, encode, identify, redis_key, run_background_jobs

ADDRESS = "203.0.113.9"
JSON = "application/json"


# In a key


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


def test_a_long_identity_is_hashed_and_no_identity_encodes_to_a_hash():
    hashed = encode("x" * 129)
    assert hashed.startswith("blake2=")
    assert len(hashed) == len("blake2=") + 32
    assert encode(hashed) != hashed


@given(st.text(), st.text())
def test_two_identities_never_share_an_encoding_nor_have_a_separator_of_keys(one, other):
    assert (encode(one) == encode(other)) == (one == other)
    assert len(encode(one)) <= 128
    assert encode(one).isascii()
    assert not set(":/{} \n\0") & set(encode(one))


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from(ALGORITHMS), st.sampled_from(ALGORITHMS))
def test_no_user_has_another_user_s_key_nor_a_policy_s(one, other, algo, other_algo):
    """Not even with the index of the fixed window, which the script appends."""
    keys = {key(one, algo=algo), key(one, algo=algo) + ":28333335"}
    if one != other:
        assert keys.isdisjoint({key(other, algo=other_algo), key(other, algo=other_algo) + ":28333335"})
    assert keys.isdisjoint({key(other, Policy("search", "5/m"), other_algo)})


def test_a_user_named_search_is_not_the_policy_named_search():
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
def test_text_is_an_identity_of_the_kind_of_the_policy_s_key(kind, expected):
    assert identify("203.0.113.9", Policy("p", "5/m", key=kind)) == expected


@pytest.mark.parametrize("kind", ["token", "header:X-Api-Key"])
def test_a_credential_is_stored_as_a_keyed_digest(kind, settings):
    policy = Policy("p", "5/m", key=kind)
    first = identify("secret", policy)
    assert first.partition("=")[0] == kind.partition(":")[0]
    assert "secret" not in first
    assert identify("secret", policy) == first != identify("secret2", policy)
    settings.SECRET_KEY = "another"
    assert identify("secret", policy) != first


def test_a_mapping_has_an_identity_for_each_kind(client):
    policies = [Policy("a", "5/m", key="user"), Policy("b", "5/m", key="ip"), Policy("c", "5/m", key="get:q")]
    decision = check({"user": 42, "ip": "203.0.113.9", "get:q": "x"}, policies)
    assert [outcome.identity for outcome in decision.outcomes] == ["42", "ip=203.0.113.9", "get=x"]


@pytest.mark.parametrize("kind", ["user", "user_or_ip"])
def test_without_a_user_the_address_counts(kind):
    policy = Policy("p", "5/m", key=kind)
    assert identify({"user": None, "ip": "203.0.113.9"}, policy) == "ip=203.0.113.9"
    assert identify({"user": "42", "ip": "203.0.113.9"}, policy) == "42"


@pytest.mark.parametrize("identity", ["", None, {}, {"ip": ""}, {"user": ""}, True, 4.2, b"alice", ["alice"]])
def test_an_empty_identity_is_an_error_and_never_a_shared_counter(identity, client):
    with pytest.raises((ValueError, TypeError)):
        check(identity)
    assert client.dbsize() == 0


def test_the_error_for_a_missing_kind_names_the_policy():
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
def test_an_address_is_normalised(address, expected):
    assert identify(address, Policy("p", "5/m", key="ip")) == expected


@given(
    st.ip_addresses(v=4).map(str)
    | st.from_regex(r"(0{0,2}[0-9]{1,3}\.?){3,5}\n?", fullmatch=True)
    | st.lists(st.integers(0, 300), min_size=4, max_size=4).map(lambda parts: ".".join(map(str, parts)))
)
def test_an_ipv4_address_is_itself_and_no_other_text_is_one(text):
    try:
        counted = str(ipaddress.IPv4Address(text.strip()))
    except ValueError:
        counted = text
    assert decode(identify(text, Policy("p", "5/m", key="ip"))) == ("ip", counted)


@pytest.mark.parametrize(("prefix", "networks"), [(48, 1), (56, 1), (60, 2), (64, 20), (128, 20)])
def test_the_setting_ipv6_prefix_is_the_network_that_counts_as_one_address(configure, prefix, networks):
    configure(IPV6_PREFIX=prefix)
    policy = Policy("p", "5/m", key="ip")
    assert len({identify(f"2001:db8:0:{n:x}::1", policy) for n in range(20)}) == networks


def test_every_address_of_a_64_is_one_identity(scale):
    policy, count = Policy("p", "5/m", key="ip"), scale(1 << 16)
    first = int(ipaddress.ip_address("2001:db8:0:1::"))
    identities = {identify(str(ipaddress.ip_address(first + n * ((1 << 64) // count))), policy) for n in range(count)}
    assert identities == {"ip=2001%3Adb8%3A0%3A1%3A%3A%2F64"}


# Of a request


def identity_of(key, method="get", data=None, user=None, **options) -> str:
    """Return the identity that a request is counted by under this key."""
    request = getattr(RequestFactory(), method)("/", data, REMOTE_ADDR=ADDRESS, **options)
    if user is not None:
        request.user = SimpleNamespace(pk=user, is_authenticated=True)
    rate_limit("1000/m", key=key)(ok)(request)
    return request.rate_limit.outcomes[0].identity


def tenant(request):
    return request.headers.get("X-Tenant")


@pytest.mark.parametrize(
    ("key", "options", "identity"),
    [
        ("ip", {}, f"ip={ADDRESS}"),
        ("user", {"user": 41}, "41"),
        ("user_or_ip", {"user": 41}, "41"),
        ("get:q", {"data": {"q": "shoes"}}, "get=shoes"),
        ("post:name", {"method": "post", "data": {"name": "ann"}}, "post=ann"),
        ("post:name", {"method": "post", "data": '{"name": "ann"}', "content_type": JSON}, "post=ann"),
        ("post:name", {"method": "put", "data": '{"name": 42}', "content_type": JSON}, "post=42"),
        ("post:name", {"method": "post", "data": '{"name": "a"}', "content_type": "application/vnd.x+json"}, "post=a"),
        ("global", {}, "global"),
        (tenant, {"headers": {"X-Tenant": "acme"}}, "key=acme"),
        ("tests.http.test_identity.tenant", {"headers": {"X-Tenant": "acme"}}, "key=acme"),
    ],
)
def test_each_kind_of_key_reads_its_part_of_the_request(key, options, identity):
    assert identity_of(key, **options) == identity


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("token", {}),
        ("token", {"headers": {"Authorization": ""}}),
        ("token", {"headers": {"Authorization": "  "}}),
        ("header:X-Api-Key", {}),
        ("header:X-Api-Key", {"headers": {"X-Api-Key": ""}}),
        ("get:q", {}),
        ("get:q", {"data": {"q": ""}}),
        ("get:q", {"data": {"other": "x"}}),
        ("post:q", {}),
        ("post:q", {"method": "post", "data": {"other": "x"}}),
        ("post:q", {"method": "post", "data": "{}", "content_type": JSON}),
        ("post:q", {"method": "post", "data": '["q"]', "content_type": JSON}),
        ("post:q", {"method": "post", "data": '{"q": ["x"]}', "content_type": JSON}),
        ("post:q", {"method": "post", "data": '{"q": true}', "content_type": JSON}),
        ("post:q", {"method": "post", "data": '{"q": [1.5]}', "content_type": JSON}),
        ("post:q", {"method": "post", "data": '{"q": "x"', "content_type": JSON}),
        ("post:q", {"method": "post", "data": b'{"q": "\xff"}', "content_type": JSON}),
        ("post:q", {"method": "post", "data": "[" * 100_000, "content_type": JSON}),
        ("user", {}),
        ("user_or_ip", {}),
        (lambda request: None, {}),
        (lambda request: "", {}),
        ("tests.http.test_identity.tenant", {}),
    ],
)
def test_a_request_without_what_the_key_reads_counts_by_address(key, options):
    assert identity_of(key, **options) == f"ip={ADDRESS}"


@pytest.mark.parametrize(
    ("value", "identity"),
    [
        ("acme", "key=acme"),
        (42, "key=42"),
        (0, "key=0"),
        (uuid.UUID(int=7), "key=00000000-0000-0000-0000-000000000007"),
        ("a:b/c=d", "key=a%3Ab%2Fc%3Dd"),
        ("ip=203.0.113.9", "key=ip%3D203.0.113.9"),
    ],
)
def test_a_key_function_s_value_is_the_identity(value, identity):
    assert identity_of(lambda request: value) == identity


@pytest.mark.parametrize("value", [True, 4.2, b"acme", ["acme"], {}, object()], ids=lambda value: type(value).__name__)
def test_a_key_function_s_value_that_is_not_an_identity_is_logged_and_the_address_counts(configure, caplog, value):
    configure(LOG_LINES_PER_SECOND=1000)
    assert identity_of(lambda request: value) == f"ip={ADDRESS}"
    assert "is not an identity" in caplog.text


# Credentials


SECRET = "s3cr3t-t0ken-of-ann"


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("token", {"Authorization": f"Bearer {SECRET}"}),
        ("token", {"Authorization": f"Token {SECRET}"}),
        ("token", {"Authorization": SECRET}),
        ("header:X-Api-Key", {"X-Api-Key": SECRET}),
        ("header:x-api-key", {"X-Api-Key": SECRET}),
    ],
)
def test_a_credential_is_neither_stored_nor_sent_nor_logged_in_clear(site, configure, caplog, client, key, headers):
    configure(LOG_LINES_PER_SECOND=1000)
    caplog.set_level("DEBUG", logger="rlaas_django")
    site.serve(rate_limit("1/m", key=key, group="g")(site.view(ok)))
    responses = [site.get(headers=headers) for _ in range(2)]
    assert_refusal(responses[1], policies=["g"])
    run_background_jobs(20)
    stored = b"".join(client.dump(each) + each for each in client.keys())
    sent = json.dumps([dict(response.headers) for response in responses]) + str([r.content for r in responses])
    (counter,) = counters(client)
    assert SECRET.encode() not in stored
    assert SECRET not in sent + caplog.text
    assert len(counter.rpartition("=")[2]) == 32


def test_the_scheme_is_not_part_of_a_token():
    spellings = (f"Bearer {SECRET}", f"bearer   {SECRET} ", SECRET)
    assert len({identity_of("token", headers={"Authorization": each}) for each in spellings}) == 1


def by_token(authorization: str) -> str:
    return identity_of("token", headers={"Authorization": authorization})


def basic(credentials: bytes) -> str:
    return base64.b64encode(credentials).decode()


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0MiJ9.8-rn_5AyP1X8mX0pTnDpfuqBf8yV7xYpiGh8k5AqUZM"


@pytest.mark.parametrize("space", ["\t", "\t\t", " \t ", "\x0b", "\x0c"])
def test_white_space_between_scheme_and_token_gives_no_other_counter(space):
    """Django REST framework splits the header at any white space, so that all of these authenticate."""
    assert by_token(f"Token{space}{SECRET}{space}") == by_token(f"Token {SECRET}")


def test_padding_is_not_part_of_a_token():
    assert len({by_token(f"Bearer {SECRET}{'=' * n}") for n in range(4)}) == 1


@pytest.mark.parametrize(
    "spelling",
    [
        f"{JWT}=",
        f"{JWT}~~~~",
        f"{JWT[:-4]}~~~~{JWT[-4:]}",
        JWT.replace("-", "+").replace("_", "/"),
        f"{JWT[:-1]}N",  # the last two bits are not used
    ],
)
def test_a_jwt_has_one_counter_however_its_signature_is_spelled(spelling):
    """Python decodes base64 leniently, so that all of these have the same signature."""
    signature, same = (base64.urlsafe_b64decode(each.rpartition(".")[2] + "==") for each in (JWT, spelling))
    assert signature == same
    assert by_token(f"Bearer {spelling}") == by_token(f"Bearer {JWT}")


def test_two_jwts_have_two_counters():
    head, _, signature = JWT.rpartition(".")
    assert len({by_token(f"Bearer {each}") for each in (JWT, f"{head}.A{signature[1:]}", f"{head}A.{signature}")}) == 3


def test_the_user_of_basic_authentication_has_one_counter():
    spellings = ("Basic", "basic", "BASIC\t")
    passwords = (b"", b"secret", b"a:b", b"\xff")
    assert len({by_token(f"{each} {basic(b'ann:' + word)}") for each in spellings for word in passwords}) == 1
    assert by_token(f"Basic {basic(b'ann:x')}") != by_token(f"Basic {basic(b'bob:x')}")
    assert by_token(f"Basic {basic(b'ann:x')}") != by_token("Bearer ann")
    assert by_token(f"Basic {basic('ä:x'.encode())}") == by_token(f"Basic {basic('ä:x'.encode('latin-1'))}")


@pytest.mark.parametrize(
    "authorization",
    [
        f"Bearer {JWT}!",
        f"Bearer {JWT}\xff",
        f"Bearer {JWT},",
        f"Bearer {SECRET} again",
        f"Bearer {SECRET}=x",
        f"Token {SECRET},Token {SECRET}",
        "Bearer =",
        f'Digest username="ann", nonce="{SECRET}"',
        f"Basic {basic(b'ann')}",
        f"Basic {basic(b':secret')}",
        f"Basic {basic(b'ann:secret')}~",
        "Basic YW5uOg",
        "Basic a",
    ],
)
def test_what_is_not_written_as_a_credential_counts_by_address(authorization):
    """A library may ignore such characters, and a client could add as many as it likes."""
    assert by_token(authorization) == f"ip={ADDRESS}"


def test_a_token_that_looks_like_an_address_is_not_that_address():
    token = identity_of("token", headers={"Authorization": f"Bearer {ADDRESS}"})
    assert token != identity_of("ip")
    assert token.startswith("token=")


@pytest.mark.parametrize("kind", ["ip", "user", "get:q", "token"])
def test_no_long_name_stays_in_memory(kind):
    """The service takes names of up to a megabyte."""
    policy = Policy("long", "9/m", key=kind)
    networks.publish([overrides.Override("192.0.2.0/24", "*", "block", 2**52, None, False)])
    check({kind: "x" * 500}, policy)
    tracemalloc.start()
    try:
        for n in range(40):
            assert check({kind: f"{n:0100000}"}, policy).allowed
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
