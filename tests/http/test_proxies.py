"""The address of a client: the peer's, or behind a trusted proxy the one that the proxy forwards."""

from __future__ import annotations

import time

import pytest
from django.test import AsyncRequestFactory, RequestFactory
from rlaas_django import rate_limit

from tests.support.http import BOTH_WAYS, OURS, Site, assert_refusal, both_ways, counters, ok
from tests.support.internals import client_address

CLIENT, PROXY, OTHER_PROXY = "203.0.113.9", "10.0.0.1", "10.0.0.2"


def address(forwarded: str | None = None, *, peer: str | None = PROXY, **headers: str) -> str:
    """Return the client's address of a request with these headers; `forwarded` is X-Forwarded-For."""
    if forwarded is not None:
        headers["X-Forwarded-For"] = forwarded
    return client_address(RequestFactory().get("/", headers=headers, REMOTE_ADDR=peer or ""))


@pytest.fixture
def trusted(configure):
    """The proxies of 10.0.0.0/8 are trusted."""
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])


# Without a trusted proxy


@pytest.mark.parametrize("proxies", [None, []])
def test_no_header_is_read_unless_the_peer_is_trusted(configure, proxies):
    configure(TRUSTED_PROXIES=proxies)
    assert address() == PROXY
    assert address(CLIENT) == PROXY
    assert address(Forwarded=f"for={CLIENT}") == PROXY
    headers = ("X-Real-Ip", "Client-Ip", "True-Client-Ip", "CF-Connecting-IP", "X-Client-Ip", "X-Forwarded")
    assert {address(**{name: CLIENT}) for name in headers} == {PROXY}


@pytest.mark.parametrize(
    ("proxies", "peer", "client"),
    [
        (["10.0.0.1"], "10.0.0.1", CLIENT),
        (["10.0.0.1"], "10.0.0.2", "10.0.0.2"),
        (["192.168.0.0/16", "10.0.0.0/30"], "10.0.0.3", CLIENT),
        (["192.168.0.0/16", "10.0.0.0/30"], "10.0.0.4", "10.0.0.4"),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", CLIENT),
        (["::ffff:10.0.0.0/104"], "10.0.0.1", CLIENT),
        (["fd00::/8"], "fd00::1", CLIENT),
        (["fd00::/8"], "fe00::1", "fe00::1"),
        (["unix"], "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_networks_of_the_setting_are_trusted_and_no_others(configure, proxies, peer, client):
    configure(TRUSTED_PROXIES=proxies)
    assert address(CLIENT, peer=peer) == client


# The chain of addresses


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (CLIENT, CLIENT),
        (f" {CLIENT} ", CLIENT),
        (f"198.51.100.1, {CLIENT}", CLIENT),
        (f"{CLIENT}, {OTHER_PROXY}", CLIENT),
        (f"198.51.100.1, {CLIENT}, 10.9.9.9, {OTHER_PROXY}", CLIENT),
        (f"10.0.0.7, 198.51.100.1, {CLIENT},{OTHER_PROXY}", CLIENT),
        (OTHER_PROXY, OTHER_PROXY),  # all trusted: the first
        (f"10.0.0.9, {OTHER_PROXY}", "10.0.0.9"),
        (f"{CLIENT}:4711", CLIENT),
        (f"::ffff:{CLIENT}", CLIENT),
        ("::ffff:cb00:7109", CLIENT),
        (f"[::ffff:{CLIENT}]:80", CLIENT),
        (f"{CLIENT}, ::ffff:{OTHER_PROXY}", CLIENT),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("2001:DB8:0:0:FFFF::1", "2001:db8::ffff:0:0:1"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
@pytest.mark.usefixtures("trusted")
def test_the_client_is_the_first_untrusted_address_from_the_right(forwarded, client):
    assert address(forwarded) == client


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
        ('for="[2001:db8::1]"', "2001:db8::1"),
        ('for="[2001:db8::1]:4711"', "2001:db8::1"),
        (f'for="[::ffff:{CLIENT}]"', CLIENT),
    ],
)
@pytest.mark.usefixtures("trusted")
def test_the_forwarded_header_of_rfc_7239(forwarded, client):
    assert address(Forwarded=forwarded) == client


@pytest.mark.parametrize(
    "forged",
    [
        '"',
        'for="',
        'for="198.51.100.1',
        '"""',
        'for=\\"',
        '\\"',
        "for=\\",
        'for=a"b',
        "=",
        "a b c",
        "for",
        "\xff",
        'x="a,b',
        'x=",',
    ],
)
@pytest.mark.parametrize(
    "added",
    [
        f"for={CLIENT}",
        f'for="{CLIENT}:4711";by="a,b"',
        f'host="a,\\"b,for=198.51.100.1";for={CLIENT}',
        f'for={CLIENT}, for="{OTHER_PROXY}:80"',
        f'for={CLIENT};by="_a,b",for={OTHER_PROXY}',
    ],
)
@pytest.mark.usefixtures("trusted")
def test_what_a_client_forges_does_not_hide_what_the_proxies_add(forged, added):
    """Else a stray quote would move the client to the proxy's counter."""
    assert address(Forwarded=f"{forged}, {added}") == CLIENT
    assert address(Forwarded=f"{forged},{added}") == CLIENT


@pytest.mark.parametrize(
    "forwarded",
    [
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
    ],
    ids=lambda text: repr(text[:20]),
)
@pytest.mark.usefixtures("trusted")
def test_an_invalid_x_forwarded_for_falls_back_to_the_peer(forwarded):
    assert address(forwarded) == PROXY


@pytest.mark.parametrize(
    "forwarded",
    [
        "for=unknown",
        "for=_hidden",
        'for="_SEVKISEK"',
        f"for={CLIENT}, for=_hidden",
        f'for={CLIENT}, for="198.51.100.1',
        f'for={CLIENT}, for=198.51.100.1"',
        f'for={CLIENT}, "", for=198.51.100.1 x="',
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
@pytest.mark.usefixtures("trusted")
def test_an_invalid_forwarded_falls_back_to_the_peer(forwarded):
    assert address(Forwarded=forwarded) == PROXY


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 8_000,
        '"' * 16_000,
        '"\\' * 8_000,
        "for=" + " " * 16_000,
        "; " * 8_000,
        "10.0.0.2," * 1_700,
        'for=10.0.0.2,",' * 1_100,
    ],
    ids=lambda text: repr(text[:8]),
)
@pytest.mark.usefixtures("trusted")
def test_no_header_takes_quadratic_time(header, text):
    """16 kB; uvicorn lets 64 pass, for which a regular expression that starts again at every quote takes a minute."""
    began = time.thread_time()  # of this thread alone, whatever else the machine does
    address(**{header: text})
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("other", ["for=198.51.100.1", "for=_hidden", "garbage"])
@pytest.mark.usefixtures("trusted")
def test_a_client_cannot_change_its_address_with_the_header_that_the_proxy_does_not_write(other):
    """Else it would leave its counter, or an operator's block, by sending a header."""
    assert address(CLIENT, Forwarded=other) == CLIENT


@pytest.mark.parametrize(("header", "client"), [("Forwarded", CLIENT), ("X-Forwarded-For", "198.51.100.1")])
def test_the_setting_proxy_header_names_the_one_to_read(configure, header, client):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"], PROXY_HEADER=header)
    assert address("198.51.100.1", Forwarded=f"for={CLIENT}") == client


# Unix sockets, behind which a request has no address


def test_behind_a_unix_socket_the_proxy_is_trusted_if_the_setting_says_so(configure):
    configure(TRUSTED_PROXIES=["unix"])
    assert address(CLIENT, peer=None) == CLIENT
    assert address(f"198.51.100.1, {CLIENT}", peer=None) == CLIENT
    assert address(Forwarded=f"for={CLIENT}", peer=None) == CLIENT


@pytest.mark.parametrize("proxies", [None, ["10.0.0.0/8"]])
def test_behind_a_unix_socket_no_header_is_read_otherwise_and_the_log_says_what_to_set(configure, caplog, proxies):
    configure(TRUSTED_PROXIES=proxies, LOG_LINES_PER_SECOND=1000)
    assert address(CLIENT, peer=None) == "unknown"
    assert "add 'unix' to RATE_LIMITER['TRUSTED_PROXIES']" in caplog.text


def test_a_proxy_behind_a_unix_socket_that_forwards_no_address(configure):
    configure(TRUSTED_PROXIES=["unix"])
    assert address(peer=None) == address("garbage", peer=None) == "unknown"


@pytest.mark.parametrize("peer", ["", "unix:", "/run/gunicorn.sock", "garbage", "\xff"])
def test_a_peer_that_is_no_address_is_unknown(peer):
    assert address(peer=peer) == "unknown"


def test_an_asgi_request_without_a_client_is_unknown():
    request = AsyncRequestFactory().get("/")
    request.META.pop("REMOTE_ADDR", None)
    assert client_address(request) == "unknown"


# Through a handler


@pytest.fixture
def limited(site):
    """A site of 5 requests a minute and address."""
    site.serve(rate_limit("5/m", key="ip", group="g")(site.view(ok)))
    return site


@both_ways
@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
@pytest.mark.parametrize("proxied", [False, True])
def test_forged_headers_do_not_evade_the_limit(limited, configure, header, proxied):
    """What a client forges is left of what the proxy adds."""
    forged = [f"198.51.100.{n}" for n in range(10)]
    if proxied:
        configure(TRUSTED_PROXIES=[f"{PROXY}/32"])
        limited.address = PROXY
        forged = [f"{each}, {CLIENT}" for each in forged]
    if header == "Forwarded":
        forged = [", ".join(f"for={each}" for each in value.split(", ")) for value in forged]
    responses = [limited.get(headers={header: value}) for value in forged]
    assert [response.status_code for response in responses] == [200] * 5 + [429] * 5
    assert_refusal(responses[5], policies={"g": (5, 60)})


def test_forged_headers_do_not_evade_the_middleware(site):
    site.serve(site.view(ok), middleware=[OURS])
    statuses = [site.get(headers={"X-Forwarded-For": f"198.51.100.{n}"}).status_code for n in range(7)]
    assert statuses == [200] * 5 + [429] * 2


def test_clients_of_a_trusted_proxy_have_counters_of_their_own(limited, configure):
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    limited.address = PROXY
    statuses = [limited.get(headers={"X-Forwarded-For": f"198.51.100.{n}"}).status_code for n in range(7)]
    assert statuses == [200] * 7


def test_the_addresses_of_an_ipv6_network_share_one_counter(limited, configure, client):
    assert [limited.get(address=f"2001:db8:0:1:{n:x}::{n:x}").status_code for n in range(7)] == [200] * 5 + [429] * 2
    assert counters(client) == ["rlaas:rate_limit:g/ip=2001%3Adb8%3A0%3A1%3A%3A%2F64"]
    configure(TRUSTED_PROXIES=["10.0.0.0/8"])
    limited.address = PROXY
    assert limited.get(headers={"X-Forwarded-For": "2001:db8:0:1::7"}).status_code == 429
    assert limited.get(address="2001:db8:0:2::1").status_code == 200


def test_an_ipv4_mapped_address_has_the_ipv4_address_s_counter(limited, client):
    addresses = [CLIENT, f"::ffff:{CLIENT}", "::ffff:cb00:7109", "::FFFF:CB00:7109", "0:0:0:0:0:ffff:cb00:7109"]
    assert [limited.get(address=address).status_code for address in addresses] == [200] * 5
    assert limited.get(address=CLIENT).status_code == 429
    assert counters(client) == [f"rlaas:rate_limit:g/ip={CLIENT}"]


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_a_request_without_an_address_is_served(settings, way):
    site = Site(way, settings)
    site.address = None
    site.serve(rate_limit("1/m", key="ip")(site.view(ok)))
    assert site.statuses(2) == [200, 429]
