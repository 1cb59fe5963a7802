"""Any bytes that a client can send, and any value that a site's functions can return, are a decision or a clean 4xx."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from asgiref.sync import iscoroutinefunction
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.client import FakePayload
from django.utils.decorators import sync_and_async_middleware
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from rlaas_django import Policy, rate_limit

from tests.settings import REDIS
from tests.support.http import (
    OURS,
    AsgiClient,
    Site,
    assert_clean_headers,
    assert_refusal,
    both_ways,
    counters,
    ok,
    rate_limit_fields,
)
from tests.support.internals import client_address, encode, escape_for_log, identify

PROXY = "10.0.0.1"
ROOT = Path(__file__).parents[2]
KINDS = ("rate_limit", "stats", "refused", "refusals", "paths", "watch", "limit", "override")
PREFIXES = (*(f"rlaas:{kind}:" for kind in KINDS), "rlaas:policies")

# Bytes

NASTY = [
    *(b"\r\n", b"a\r\nSet-Cookie: x=1", b"\n", b"\0", b"\x7f", b"\xff\xfe", b"\xed\xa0\x80", b"%0d%0a", b"%00", b"%"),
    *(b'"', b'\\"', b"{}", b"a:b/c=d", b"*", b"../..", b"<script>", b"' OR 1=1", b"A" * 9000, b"%s%n", b"${jndi:x}"),
    *(b"203.0.113.9", b"2001:db8::1", b"[::1]:80", b"::ffff:1.2.3.4", b"for=203.0.113.9", b'for="[::1]", for=_x'),
    *(b"Bearer x", b"Basic eDp5", b"text/html", b"*/*;q=0", b"text/html;q*=x''%20", b"a/b;c*0*=x''%ff;c*1=2", b"/;="),
]
some_bytes = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(NASTY),
    st.lists(st.sampled_from(NASTY[:-1]), max_size=4).map(b", ".join),
    st.tuples(st.sampled_from(NASTY), st.binary(max_size=20)).map(b"".join),
)
HEADERS = ("Authorization", "X-Forwarded-For", "Forwarded", "Accept", "X-Api-Key")

# What a site's functions return. Whole numbers of more digits than Python writes are below.

some_numbers = st.one_of(st.integers(-2, 9), st.integers(), st.sampled_from([2**53, 10**30, 10**4000, -(10**4000)]))
anything = st.one_of(
    st.none(),
    st.booleans(),
    some_numbers,
    st.floats(),
    st.text(max_size=200),
    st.binary(max_size=20),
    st.uuids(),
    st.lists(st.integers(), max_size=3),
    st.builds(object),
    st.just(NotImplemented),
)
some_rates = st.one_of(
    st.sampled_from(["1/m", "5/10s", "1/60", (1, 60), (3, 1), None]),
    st.tuples(some_numbers, some_numbers),
    st.from_regex(r"[0-9]{0,20}/[0-9]{0,20}[smhdw]?", fullmatch=True),
    anything,
)
some_names = st.one_of(
    st.text(min_size=1, max_size=60),
    st.text(min_size=1, max_size=5).map(lambda text: text * 500),
    st.integers(),
    st.uuids(),
)


class Example(NamedTuple):
    """A request, and what the site's functions return for it."""

    path: bytes
    query: bytes
    body: bytes
    headers: dict[str, bytes]
    user: Any  # None: anonymous
    rate: Any
    key: Any
    cost: Any


examples = st.builds(
    Example,
    path=some_bytes,
    query=st.one_of(some_bytes, some_bytes.map(lambda value: b"q=" + value)),
    body=st.one_of(st.just(b""), some_bytes.map(lambda value: b"name=" + value)),
    headers=st.fixed_dictionaries({}, optional=dict.fromkeys(HEADERS, some_bytes)),
    user=st.one_of(st.none(), some_names),
    rate=some_rates,
    key=anything,
    cost=st.one_of(st.sampled_from([0, 1, 1, 2]), some_numbers, anything),
)
current: Example


@sync_and_async_middleware
def log_in_the_user(get_response):
    """Log in the user of the example."""

    def log_in(request):
        user = SimpleNamespace(pk=current.user, is_authenticated=current.user is not None)

        async def auser():
            return user

        request.user, request.auser = user, auser

    if iscoroutinefunction(get_response):

        async def middleware(request):
            log_in(request)
            return await get_response(request)
    else:

        def middleware(request):
            log_in(request)
            return get_response(request)

    return middleware


POLICIES = {
    "ip": {"rate": "3/m", "key": "ip"},
    "user": {"rate": "3/m", "key": "user", "algo": "fixed-window-algo"},
    "token": {"rate": "3/m", "key": "token", "algo": "token-bucket-algo"},
    "header": {"rate": "3/m", "key": "header:X-Api-Key", "algo": "sliding-window-counter-algo"},
    "get": {"rate": "3/m", "key": "get:q", "algo": "sliding-window-compact-algo"},
    "post": {"rate": "2/m", "key": "post:name", "shadow": True},
}
own_limit = rate_limit(
    rate=lambda request: current.rate, key=lambda request: current.key, cost=lambda request: current.cost, group="own"
)


@pytest.fixture
def serve(settings, configure):
    """Serve a site with every kind of key in a rule, and functions for rate, key and cost on the view."""
    configure(POLICIES=POLICIES, MIDDLEWARE=[{"policies": [*POLICIES]}], TRUSTED_PROXIES=["10.0.0.0/8"])

    def serve_one(way):
        site = Site(way, settings)
        view = own_limit(site.view(ok))
        site.serve({"": view, "<path:rest>": view}, middleware=["tests.http.test_fuzz.log_in_the_user", OURS])

    return serve_one


def assert_clean(response: Any) -> None:
    assert response.status_code < 500
    assert_clean_headers(response)
    if response.status_code == 429:
        wait = int if "Retry-After" in response.headers else None
        assert_refusal(response, policies=rate_limit_fields(response)[0], wait=wait)
    else:
        assert "Retry-After" not in response.headers


def assert_clean_keys(client: Any) -> None:
    keys = client.keys()
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.pttl(key)
    for key, ttl in zip(keys, pipeline.execute(), strict=True):
        assert key.decode("ascii").startswith(PREFIXES)
        assert len(key) <= 300
        assert ttl != -1, key


def test_any_request_through_wsgi(serve, client, scale):
    serve("wsgi, def")
    sender = Client()

    @profile(max_examples=scale(1000))
    @given(examples)
    def any_request(example):
        global current
        current = example
        client.flushdb()
        environ = {
            "PATH_INFO": "/" + example.path.decode("latin-1"),
            "QUERY_STRING": example.query.decode("latin-1"),
            "REQUEST_METHOD": "POST" if example.body else "GET",
            "CONTENT_TYPE": "application/x-www-form-urlencoded",
            "CONTENT_LENGTH": str(len(example.body)),
            "REMOTE_ADDR": PROXY,
        }
        for name, value in example.headers.items():
            environ["HTTP_" + name.upper().replace("-", "_")] = value.decode("latin-1")
        for _ in range(2):
            assert_clean(sender.request(**environ, **{"wsgi.input": FakePayload(example.body)}))
        assert_clean_keys(client)

    any_request()


def test_any_request_through_asgi(serve, client, scale):
    serve("asgi, async def")
    sender = AsgiClient(PROXY)

    @profile(max_examples=scale(600))
    @given(examples)
    def any_request(example):
        global current
        current = example
        client.flushdb()
        headers = [(name.lower().encode(), value) for name, value in example.headers.items()]
        headers.append((b"content-type", b"application/x-www-form-urlencoded"))
        headers.append((b"content-length", str(len(example.body)).encode()))
        scope = {
            "path": "/" + example.path.decode("utf-8", "replace"),
            "query_string": example.query.decode("utf-8", "ignore").encode(),  # a server's own business
            "method": "POST" if example.body else "GET",
        }
        for _ in range(2):
            request = sender.request(**scope, headers=[*headers], _body_file=FakePayload(example.body))
            assert_clean(runner.run(request))
        assert_clean_keys(client)

    with asyncio.Runner() as runner:
        any_request()


def test_any_address_is_an_address_or_unknown(scale):
    """And no header of a client's, when there is no proxy, changes its address."""

    @profile(max_examples=scale(2000))
    @given(st.dictionaries(st.sampled_from(["HTTP_X_FORWARDED_FOR", "HTTP_FORWARDED", "REMOTE_ADDR"]), some_bytes))
    def any_address(headers):
        request = RequestFactory().get("/", **{name: value.decode("latin-1") for name, value in headers.items()})
        assert encode(client_address(request)).isascii()
        request.META["REMOTE_ADDR"] = "203.0.113.77"
        assert client_address(request) == "203.0.113.77"

    any_address()


def test_any_value_is_an_identity_of_bounded_length(scale):
    @profile(max_examples=scale(1500))
    @given(some_names, st.sampled_from(["user", "ip", "token", "header:X", "get:q", "post:q", len]))
    def any_name(name, key):
        identity = identify({"user": name, "ip": "203.0.113.9", key: name}, Policy("p", "5/m", key=key))
        assert identity.isascii()
        assert identity.isprintable()
        assert len(identity) <= 150
        assert not set(identity) & set(":/{} ")

    any_name()


def test_any_text_is_one_printable_line_of_the_log(scale):
    @profile(max_examples=scale(1000))
    @given(st.text())
    def any_text(text):
        assert escape_for_log(text).isascii()
        assert escape_for_log(text).isprintable()

    any_text()


# Forms that Django itself rejects


@both_ways
@pytest.mark.parametrize("middleware", [[], [OURS]])
@pytest.mark.parametrize(
    ("where", "body", "content_type"),
    [
        ("/?" + "&".join(f"n{n}" for n in range(2000)), b"x=1", "application/x-www-form-urlencoded"),
        ("/", b"x" * 3_000_000, "application/x-www-form-urlencoded"),
        ("/", b"&".join(b"n%d=1" % n for n in range(2000)), "application/x-www-form-urlencoded"),
        ("/", b"garbage", "multipart/form-data"),
        ("/", b"garbage", "multipart/form-data; boundary=" + "x" * 300),
    ],
    ids=["fields in the query", "bytes", "fields", "no boundary", "a long boundary"],
)
def test_a_form_that_django_rejects_is_a_400(site, configure, middleware, where, body, content_type):
    configure(
        POLICIES={"get": {"rate": "9/m", "key": "get:q"}, "post": {"rate": "9/m", "key": "post:q"}},
        MIDDLEWARE=[{"policies": ["get", "post"]}],
    )
    site.serve(rate_limit("get", "post")(site.view(lambda request: HttpResponse(request.POST))), middleware=middleware)
    assert site.post(where, body, content_type=content_type).status_code in (400, 413)


# Whole numbers of more digits than Python writes


@pytest.mark.parametrize("key", [10**5000, -(10**5000)], ids=["plus", "minus"])
def test_a_key_of_5000_digits_is_counted(settings, client, key):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit("1/m", key=lambda request: key)(ok))
    assert site.statuses(2) == [200, 429]
    assert_clean_keys(client)
    assert len(counters(client)) == 1


@pytest.mark.parametrize(
    "rate",
    [10**5000, (10**5000, 60), (5, 10**5000), "1" * 5000 + "/m"],
    ids=["number", "limit", "window", "text"],
)
def test_a_rate_of_5000_digits_is_replaced_by_the_default(settings, rate):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit(rate=lambda request: rate, key="ip")(ok))
    assert site.statuses(6) == [200] * 5 + [429]


def test_a_cost_of_5000_digits_is_refused(tmp_path):
    """In a process of its own: hiredis has died of it."""
    program = """
import django; django.setup()
from rlaas_django import check
decision = check("alice", cost=10**5000)
print(decision.allowed, decision.retry_after)
"""
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "RLAAS_TEST_REDIS": REDIS}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "False inf\n"), done.stderr


@pytest.mark.parametrize("name", [uuid.UUID(int=0), "x" * 10**6], ids=["uuid", "a million letters"])
def test_a_user_of_any_size_is_a_key_of_bounded_size(settings, client, name):
    site = Site("wsgi, def", settings)
    site.serve(rate_limit("1/m", key=lambda request: name)(lambda request: HttpResponse()))
    assert site.statuses(2) == [200, 429]
    assert_clean_keys(client)
