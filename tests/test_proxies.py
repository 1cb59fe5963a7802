"""Who is asking, as requests tell it: addresses behind proxies or not, networks, credentials, keys of one's own."""

from __future__ import annotations

import ipaddress
import json
import time
import uuid

import pytest
from django.http import HttpResponse

from rlaas_django import Policy, rate_limit
from rlaas_django.identity import identify
from rlaas_django.stats import background
from tests.http import BOTH_WAYS, EVERY_WAY, OURS, Site, assert_refusal, counters, ok

CLIENT, PROXY, OTHER_PROXY = "203.0.113.9", "10.0.0.1", "10.0.0.2"


@pytest.fixture(params=BOTH_WAYS)
def site(request, settings):
    site = Site(request.param, settings)
    site.address = PROXY
    site.serve(rate_limit("1000/m", key="ip")(site.view(identity_of)))
    return site


@pytest.fixture(params=EVERY_WAY)
def small(request, settings):
    """A site of 5 requests per minute and address."""
    site = Site(request.param, settings)
    site.serve(rate_limit("5/m", key="ip", group="g")(site.view(ok)))
    return site


def identity_of(request):
    return HttpResponse(request.rate_limit.outcomes[0].identity)


def counted_as(site, forwarded=None, **headers):
    """The identity that a request is counted by; `forwarded` is X-Forwarded-For."""
    if forwarded is not None:
        headers["X-Forwarded-For"] = forwarded
    response = site.get(headers=headers)
    assert response.status_code == 200
    return response.content.decode()


# Not believed, unless the settings say so


@pytest.mark.parametrize("proxies", [None, []])
def test_nobody_is_believed_unless_trusted(site, configure, proxies):
    configure(TRUSTED_PROXIES=proxies)
    assert counted_as(site) == f"ip={PROXY}"
    assert counted_as(site, CLIENT) == f"ip={PROXY}"
    assert counted_as(site, Forwarded=f"for={CLIENT}") == f"ip={PROXY}"
    headers = ("X-Real-Ip", "Client-Ip", "True-Client-Ip", "CF-Connecting-IP", "X-Client-Ip", "X-Forwarded")
    assert {counted_as(site, **{name: CLIENT}) for name in headers} == {f"ip={PROXY}"}


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
@pytest.mark.parametrize("proxied", [False, True])
def test_100_forged_headers_pass_5_times(small, configure, header, proxied):
    """What a client forges stands left of what the proxy adds."""
    forged = [f"198.51.100.{n}" for n in range(100)]
    if proxied:
        configure(TRUSTED_PROXIES=[f"{PROXY}/32"])
        small.address = PROXY
        forged = [f"{address}, {CLIENT}" for address in forged]
    if header == "Forwarded":
        forged = [", ".join(f"for={each}" for each in value.split(", ")) for value in forged]
    responses = [small.get(headers={header: value}) for value in forged]
    assert [response.status_code for response in responses] == [200] * 5 + [429] * 95
    for response in responses[5:]:
        assert_refusal(response, policies={"g": (5, 60)})


def test_100_forged_headers_through_the_middleware_pass_5_times(small, configure):
    small.serve(small.view(ok), middleware=[OURS])
    responses = [small.get(headers={"X-Forwarded-For": f"198.51.100.{n}"}) for n in range(100)]
    assert [response.status_code for response in responses] == [200] * 5 + [429] * 95


def test_a_trusted_proxy_s_clients_are_told_apart(small, configure):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    small.address = PROXY
    statuses = [small.get(headers={"X-Forwarded-For": f"198.51.100.{n}"}).status_code for n in range(20)]
    assert statuses == [200] * 20


# The chain


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (CLIENT, CLIENT),
        (f" {CLIENT} ", CLIENT),
        (f"198.51.100.1, {CLIENT}", CLIENT),
        (f"{CLIENT}, {OTHER_PROXY}", CLIENT),
        (f"198.51.100.1, {CLIENT}, 10.9.9.9, {OTHER_PROXY}", CLIENT),
        (f"10.0.0.7, 198.51.100.1, {CLIENT},{OTHER_PROXY}", CLIENT),
        (OTHER_PROXY, OTHER_PROXY),  # trusted to the end: the first of them
        (f"10.0.0.9, {OTHER_PROXY}", "10.0.0.9"),
        (f"{CLIENT}:4711", CLIENT),
        (f"::ffff:{CLIENT}", CLIENT),
        ("::ffff:cb00:7109", CLIENT),
        (f"[::ffff:{CLIENT}]:80", CLIENT),
        (f"{CLIENT}, ::ffff:{OTHER_PROXY}", CLIENT),
        ("2001:db8::1", "2001%3Adb8%3A%3A%2F64"),
        ("[2001:db8::1]", "2001%3Adb8%3A%3A%2F64"),
        ("[2001:db8::1]:4711", "2001%3Adb8%3A%3A%2F64"),
        ("2001:DB8:0:0:FFFF::1", "2001%3Adb8%3A%3A%2F64"),
        ("fe80::1%eth0", "fe80%3A%3A%2F64"),
    ],
)
def test_the_first_untrusted_address_from_the_right_counts(site, configure, forwarded, client):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted_as(site, forwarded) == f"ip={client}"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (f"for={CLIENT}", CLIENT),
        (f"For={CLIENT}", CLIENT),
        (f'for="{CLIENT}"', CLIENT),
        (f'for="{CLIENT}:4711"', CLIENT),
        (f"for={CLIENT};proto=https;by={OTHER_PROXY}", CLIENT),
        (f"proto=https; for={CLIENT} ;host=example.com", CLIENT),
        (f'host="a,b;for=198.51.100.1";for={CLIENT}', CLIENT),
        (f'host="a\\";for=198.51.100.1";for={CLIENT}', CLIENT),
        (f"for=198.51.100.1, for={CLIENT}", CLIENT),
        (f'for={CLIENT}, for="{OTHER_PROXY}:80"', CLIENT),
        (f"for=_hidden, for={CLIENT}", CLIENT),
        ('for="[2001:db8::1]"', "2001%3Adb8%3A%3A%2F64"),
        ('for="[2001:db8::1]:4711"', "2001%3Adb8%3A%3A%2F64"),
        (f'for="[::ffff:{CLIENT}]"', CLIENT),
    ],
)
def test_the_forwarded_header_is_understood(site, configure, forwarded, client):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted_as(site, Forwarded=forwarded) == f"ip={client}"


GARBAGE = [
    "",
    ",",
    ", ,",
    "unknown",
    "_hidden",
    f"{CLIENT}, unknown",
    f"{CLIENT}, ",
    "203.0.113",
    "203.0.113.999",
    "0203.0.0113.9",
    "203.0.113.9.9",
    "203.0.113.9/24",
    "\u0661.2.3.4".encode().decode("latin-1"),  # a digit, though not an ASCII one, as a server hands it on
    "[",
    "[]",
    "[]:80",
    "]",
    "::::",
    "2001:db8::g",
    "2001:db8::1/64",
    "'; DROP TABLE",
    "\x00",
    "\xff\xfe",
    "a" * 8000,
    "," * 8000,
    ":" * 8000,
    "[" * 8000,
]


@pytest.mark.parametrize("forwarded", GARBAGE, ids=lambda text: repr(text[:20]))
def test_garbage_falls_back_to_the_peer(site, configure, forwarded):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted_as(site, forwarded) == f"ip={PROXY}"


@pytest.mark.parametrize(
    "forwarded",
    [
        "for=unknown",
        "for=_hidden",
        'for="_SEVKISEK"',
        f"for={CLIENT}, for=_hidden",
        "for=",
        'for=""',
        'for="',
        "for",
        "=",
        ";;;",
        '"""',
        'for="203.0.113.9',
        f"xfor={CLIENT}",
        f"by={CLIENT}",
        f'"for={CLIENT}"',
        'for="[2001:db8::zz]"',
        "for=\\",
        "\x00",
        "\xff" * 100,
        "for=" * 2000,
        "for=;" * 1600,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_garbage_in_forwarded_falls_back_to_the_peer(site, configure, forwarded):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted_as(site, Forwarded=forwarded) == f"ip={PROXY}"


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
@pytest.mark.parametrize(
    "text",
    ['"' + '\\"' * 8_000, '"' * 16_000, '"\\' * 8_000, "for=" + " " * 16_000, "; " * 8_000, "10.0.0.2," * 1_700],
    ids=lambda text: repr(text[:8]),
)
def test_no_header_takes_long_to_read(site, configure, header, text):
    """16 kB; uvicorn lets 64 pass, for which a regular expression that starts again at every quote takes a minute."""
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    began = time.process_time()
    counted_as(site, **{header: text})
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("other", ["for=198.51.100.1", "for=_hidden", "nonsense"])
def test_a_client_that_adds_the_other_header_stays_who_it_is(site, configure, other):
    """Else it would leave its counter, or an operator's block, by writing a header."""
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    assert counted_as(site, CLIENT, Forwarded=other) == f"ip={CLIENT}"


@pytest.mark.parametrize(("header", "client"), [("Forwarded", CLIENT), ("X-Forwarded-For", "198.51.100.1")])
def test_the_one_header_that_a_proxy_writes_can_be_named(site, configure, header, client):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"], PROXY_HEADER=header)
    assert counted_as(site, "198.51.100.1", Forwarded=f"for={CLIENT}") == f"ip={client}"


@pytest.mark.parametrize(
    ("proxies", "address", "client"),
    [
        (["10.0.0.1"], "10.0.0.1", CLIENT),
        (["10.0.0.1"], "10.0.0.2", "10.0.0.2"),
        (["192.168.0.0/16", "10.0.0.0/30"], "10.0.0.3", CLIENT),
        (["192.168.0.0/16", "10.0.0.0/30"], "10.0.0.4", "10.0.0.4"),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", CLIENT),
        (["fd00::/8"], "fd00::1", CLIENT),
        (["fd00::/8"], "fe00::1", "fe00%3A%3A%2F64"),
        (["unix"], "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_networks_of_the_setting_are_trusted_and_no_others(site, configure, proxies, address, client):
    configure(TRUSTED_PROXIES=proxies)
    site.address = address
    assert counted_as(site, CLIENT) == f"ip={client}"


# Unix sockets


def test_behind_a_unix_socket_the_proxy_is_believed_if_the_setting_says_so(site, configure):
    configure(TRUSTED_PROXIES=["unix"])
    site.address = None
    assert counted_as(site, CLIENT) == f"ip={CLIENT}"
    assert counted_as(site, f"198.51.100.1, {CLIENT}") == f"ip={CLIENT}"
    assert counted_as(site, Forwarded=f"for={CLIENT}") == f"ip={CLIENT}"


@pytest.mark.parametrize("proxies", [None, ["10.0.0.0/8"]])
def test_behind_a_unix_socket_nobody_is_believed_otherwise_and_the_log_tells_what_to_do(
    site, configure, caplog, proxies
):
    configure(TRUSTED_PROXIES=proxies, LOG_LINES_PER_SECOND=1000)
    site.address = None
    assert counted_as(site, CLIENT) == "ip=unknown"
    assert "add 'unix' to RATE_LIMITER['TRUSTED_PROXIES']" in caplog.text


def test_a_proxy_that_forwards_nothing_through_a_unix_socket_breaks_nothing(site, configure):
    configure(TRUSTED_PROXIES=["unix"])
    site.address = None
    assert counted_as(site) == counted_as(site, "garbage") == "ip=unknown"


@pytest.mark.parametrize("address", ["", "unix:", "/run/gunicorn.sock", "garbage", "\xff"])
def test_whatever_a_server_says_for_an_address_breaks_nothing(settings, address):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit("1000/m", key="ip")(identity_of))
    assert site.get(REMOTE_ADDR=address).content == b"ip=unknown"


# IPv6


def test_the_2_to_the_16_addresses_of_a_64_are_one_identity():
    policy = Policy("p", "5/m", key="ip")
    first = int(ipaddress.ip_address("2001:db8:0:1::"))
    step = (1 << 64) // (1 << 16)
    identities = {identify(str(ipaddress.ip_address(first + n * step)), policy) for n in range(1 << 16)}
    assert identities == {"ip=2001%3Adb8%3A0%3A1%3A%3A%2F64"}


def test_hundreds_of_addresses_of_a_64_share_one_counter(small, client):
    statuses = [small.get(address=f"2001:db8:0:1:{n:x}::{n:x}").status_code for n in range(300)]
    assert statuses == [200] * 5 + [429] * 295
    assert len(counters(client)) == 1


def test_hundreds_of_addresses_of_a_64_behind_a_proxy_share_one_counter(small, configure, client):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    small.address = PROXY
    statuses = [small.get(headers={"X-Forwarded-For": f"2001:db8:0:1:{n:x}::1"}).status_code for n in range(100)]
    assert statuses == [200] * 5 + [429] * 95


def test_another_64_has_another_counter(small):
    assert [small.get(address=f"2001:db8:0:{n:x}::1").status_code for n in range(20)] == [200] * 20


@pytest.mark.parametrize(("prefix", "admitted"), [(48, 5), (56, 5), (64, 20), (128, 20)])
def test_the_length_of_the_network_can_be_set(small, configure, prefix, admitted):
    configure(IPV6_PREFIX=prefix)
    statuses = [small.get(address=f"2001:db8:0:{n:x}::1").status_code for n in range(20)]
    assert statuses.count(200) == admitted


def test_an_ipv4_address_in_ipv6_s_clothes_is_that_address(small, client):
    addresses = [CLIENT, f"::ffff:{CLIENT}", "::ffff:cb00:7109", "::FFFF:CB00:7109", "0:0:0:0:0:ffff:cb00:7109"]
    assert [small.get(address=address).status_code for address in addresses] == [200] * 5
    assert small.get(address=CLIENT).status_code == 429
    assert counters(client) == [f"rlaas:rate_limit:g/ip={CLIENT}"]


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
def test_a_credential_is_nowhere_in_clear(settings, configure, caplog, client, key, headers):
    configure(LOG_LINES_PER_SECOND=1000)
    caplog.set_level("DEBUG", logger="rlaas_django")
    for way in EVERY_WAY:
        client.flushdb()
        site = Site(way, settings)
        site.serve(rate_limit("1/m", key=key, group="g")(site.view(ok)))
        responses = [site.get(headers=headers) for _ in range(2)]
        assert_refusal(responses[1], policies=["g"])
        background.run(20)
        stored = b"".join(client.dump(each) + each for each in client.keys())
        told = json.dumps([dict(response.headers) for response in responses]) + str([r.content for r in responses])
        (counter,) = counters(client)
        assert SECRET.encode() not in stored
        assert SECRET not in told + caplog.text
        assert len(counter.rpartition("=")[2]) == 32


def test_the_scheme_is_not_part_of_a_token(settings):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit("1/m", key="token")(ok))
    spellings = (f"Bearer {SECRET}", f"bearer   {SECRET} ", SECRET)
    statuses = [site.get(headers={"Authorization": each}).status_code for each in spellings]
    assert statuses == [200, 429, 429]


def test_what_looks_like_an_address_in_a_token_is_no_address(site, client):
    site.serve(
        {
            "token": rate_limit("1/m", key="token", group="g")(site.view(ok)),
            "ip": rate_limit("1/m", key="ip", group="g")(site.view(ok)),
        }
    )
    site.address = CLIENT
    assert site.get("/token", headers={"Authorization": f"Bearer {CLIENT}"}).status_code == 200
    assert site.get("/ip").status_code == 200


# Whoever lacks what the key asks for counts by address


@pytest.mark.parametrize(
    ("key", "empty"),
    [
        ("token", [{}, {"headers": {"Authorization": ""}}, {"headers": {"Authorization": "  "}}]),
        ("header:X-Api-Key", [{}, {"headers": {"X-Api-Key": ""}}]),
        ("get:q", [{}, {"query_params": {"q": ""}}, {"query_params": {"other": "x"}}]),
        ("post:q", [{}]),
        ("user", [{}]),
        ("user_or_ip", [{}]),
        (lambda request: None, [{}]),
        (lambda request: "", [{}]),
        ("tests.test_proxies.nobody", [{}]),
    ],
)
def test_who_lacks_what_the_key_asks_for_counts_by_address(site, key, empty):
    site.serve(rate_limit("1000/m", key=key)(site.view(identity_of)))
    site.address = CLIENT
    assert {site.get(**each).content for each in empty} == {b"ip=203.0.113.9"}


def nobody(request):
    return None


def test_a_form_that_lacks_the_field_counts_by_address(site):
    site.serve(rate_limit("1000/m", key="post:name")(site.view(identity_of)))
    site.address = CLIENT
    assert site.post(data={"other": "x"}).content == b"ip=203.0.113.9"
    assert site.post(data={"name": "ann"}).content == b"post=ann"


@pytest.mark.parametrize(
    ("answer", "identity"),
    [
        ("acme", "key=acme"),
        (42, "key=42"),
        (0, "key=0"),
        (uuid.UUID(int=7), "key=00000000-0000-0000-0000-000000000007"),
        ("a:b/c=d", "key=a%3Ab%2Fc%3Dd"),
        ("ip=203.0.113.9", "key=ip%3D203.0.113.9"),
    ],
)
def test_a_key_of_one_s_own_counts_by_its_answer(site, answer, identity):
    site.serve(rate_limit("1000/m", key=lambda request: answer)(site.view(identity_of)))
    assert site.get().content.decode() == identity


@pytest.mark.parametrize(
    "answer", [True, 4.2, b"acme", ["acme"], {}, object()], ids=lambda answer: type(answer).__name__
)
def test_an_answer_that_is_no_identity_is_logged_and_the_address_counts(site, configure, caplog, answer):
    configure(LOG_LINES_PER_SECOND=1000)
    site.address = CLIENT
    site.serve(rate_limit("1000/m", key=lambda request: answer)(site.view(identity_of)))
    assert site.get().content == b"ip=203.0.113.9"
    assert "no identity" in caplog.text


def test_a_key_that_raises_is_the_site_s_error_and_not_an_address(site):
    """Also a KeyError: it must not be taken for `there is none`."""
    site.serve(rate_limit("1000/m", key=lambda request: request.META["NOT_THERE"])(site.view(identity_of)))
    with pytest.raises(KeyError):
        site.get()
