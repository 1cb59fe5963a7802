"""`post:username` counts the name that the view reads from a form or from JSON, by itself or through a framework."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any, NamedTuple

import ninja
import pytest
from django.core.exceptions import SuspiciousOperation
from django.http import HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.test import RequestFactory
from hypothesis import example, given
from hypothesis import strategies as st
from rest_framework.authtoken.views import ObtainAuthToken
from rest_framework.decorators import api_view, authentication_classes, parser_classes, permission_classes
from rest_framework.settings import api_settings
from rlaas_django import rate_limit

from tests.support.http import as_kind, call, ok
from tests.support.internals import encode, fold

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b"
JSON = "application/json"
LIMIT = 5
AMBIGUOUS = "post=ambiguous"


class Body(NamedTuple):
    content: bytes
    content_type: str
    method: str = "POST"

    def request(self, address: str = "127.0.0.1") -> Any:
        return RequestFactory().generic(self.method, "/", self.content, self.content_type, REMOTE_ADDR=address)


# What views read


def of_form(request):
    return request.POST.get("username")


def first_of_form(request):
    return request.POST.getlist("username")[0]


def of_json(request):
    return json.loads(request.body)["username"]


def of_json_in_its_charset(request):
    return json.loads(request.body.decode(request.encoding or "utf-8"))["username"]


def first_of_json(request):
    return json.loads(request.body, object_pairs_hook=lambda pairs: dict(reversed(pairs)))["username"]


def of_lax_json(request):
    return json.loads(request.body, strict=False)["username"]


PLAIN = (of_form, first_of_form, of_json, of_json_in_its_charset, first_of_json, of_lax_json)
namespaces = itertools.count()


def plain_view(read, kind, names):
    def view(request):
        names.append(read(request))
        return HttpResponse("ok")

    return as_kind(kind, view)


def rest_framework_view(parsers, names):
    @api_view(["POST", "PUT"])
    @authentication_classes([])
    @permission_classes([])
    @parser_classes(parsers)
    def view(request):
        names.append(request.data.get("username"))
        return HttpResponse("ok")

    return view


class Credentials(ninja.Schema):
    username: str


def ninja_view(source, kind, names):
    """Return a view of ninja; `source` says where it takes the credentials from."""

    def operation(request, credentials: Credentials):
        names.append(credentials.username)
        return "ok"

    operation.__annotations__["credentials"] = source[Credentials]
    api = ninja.NinjaAPI(urls_namespace=f"posted-{next(namespaces)}", docs_url=None)
    api.api_operation(["POST", "PUT"], "/")(as_kind(kind, operation))
    return api.urls[0][-1].callback


def views(names):
    """Return every kind of view by its name; each adds what it reads to the names."""
    made = {}
    for kind in ("def", "async def"):
        for read in PLAIN:
            made[f"{read.__name__}, {kind}"] = plain_view(read, kind, names)
        made[f"ninja, JSON, {kind}"] = ninja_view(ninja.Body, kind, names)
        made[f"ninja, form, {kind}"] = ninja_view(ninja.Form, kind, names)
    made["REST framework"] = rest_framework_view(api_settings.DEFAULT_PARSER_CLASSES, names)
    made["REST framework, token"] = rest_framework_view(ObtainAuthToken.parser_classes, names)
    return made


def send(view, body: Body, address: str = "127.0.0.1") -> None:
    """Send a request, which the view may fail to read."""
    with contextlib.suppress(Exception):
        call(view, body.request(address))


# Attacks

part = '--b\r\nContent-Disposition: form-data; name="username"\r\n\r\n{}\r\n'
ATTACKS = {
    "JSON as a form": lambda n: Body(b'{"username": "alice", "x": "&username=decoy%d&"}' % n, FORM),
    "JSON and a form": lambda n: Body(b'{"x": "&username=alice&", "username": "decoy%d"}' % n, FORM),
    "UTF-7, as it stands": lambda n: Body(
        b'{"username": "alice", "x": "+ACIALAAi-username+ACIAOgAi-decoy%d"}' % n, f"{JSON}; charset=utf-7"
    ),
    "UTF-7, decoded": lambda n: Body(
        b'{"username": "decoy%d", "x": "+ACIALAAi-username+ACIAOgAi-alice"}' % n, f"{JSON}; charset=utf-7"
    ),
    "EBCDIC": lambda n: Body(json.dumps({"username": "alice", "x": n}).encode("cp037"), f"{JSON}; charset=cp037"),
    "JSON, first": lambda n: Body(b'{"username": "alice", "username": "decoy%d"}' % n, JSON),
    "JSON, last": lambda n: Body(b'{"username": "decoy%d", "username": "alice"}' % n, JSON),
    "form, first": lambda n: Body(b"username=alice&username=decoy%d" % n, FORM),
    "form, last": lambda n: Body(b"username=decoy%d&username=alice" % n, FORM),
    "multipart, first": lambda n: Body(f"{part.format('alice')}{part.format(f'decoy{n}')}--b--".encode(), MULTIPART),
    "multipart, last": lambda n: Body(f"{part.format(f'decoy{n}')}{part.format('alice')}--b--".encode(), MULTIPART),
    "JSON as multipart": lambda n: Body(b'{"username": "alice", "x": %d}' % n, MULTIPART),
    "multipart in JSON": lambda n: Body(
        b'{"username": "alice", "x": "\r\n%s--b--"}' % part.format(f"decoy{n}").replace('"', "").encode(), MULTIPART
    ),
    "form of any type": lambda n: Body(b"username=alice&x=%d" % n, "*/*"),
    "multipart of any type": lambda n: Body(f"{part.format('alice')}--b--".encode(), "multipart/*; boundary=b"),
    "form in UTF-16": lambda n: Body(f"username=alice&x={n}".encode("utf-16"), f"{FORM}; charset=utf-16"),
    "form with a BOM": lambda n: Body(b"\xef\xbb\xbfusername=alice&x=%d" % n, f"{FORM}; charset=utf-8-sig"),
    "form by PUT": lambda n: Body(b"username=alice&x=%d" % n, FORM, "PUT"),
    "multipart by PUT": lambda n: Body(f"{part.format('alice')}--b--".encode(), MULTIPART, "PUT"),
    "another case": lambda n: Body(json.dumps({"username": "alice\u034f" + "\u0345" * n}).encode(), JSON),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_spelling_of_the_body_gives_a_further_counter(attack):
    """50 of 50 guesses passed, each from an address of its own."""
    names: list[Any] = []
    passed = {}
    for number, (label, view) in enumerate(views(names).items()):
        names.clear()
        limited = rate_limit(f"{LIMIT}/h", key="post:username", group=f"view-{number}")(view)
        for n in range(LIMIT + 5):
            send(limited, ATTACKS[attack](n), f"203.0.113.{n}")
        passed[label] = [name and fold(name) for name in names].count("alice")
    assert set(passed.values()) <= {0, LIMIT}, passed
    assert LIMIT in passed.values()  # or this is not an attack


# Honest requests


def identity_of(body: Body) -> str:
    request = body.request()
    call(rate_limit("9999/m", key="post:username", group="g")(ok), request)
    return request.rate_limit.outcomes[0].identity


@pytest.mark.parametrize("name", ["Alice", "AMBIGUOUS", "LONG", "Zoë & co=1", "a\\u0062c", '"x"', "{}"])
@pytest.mark.parametrize(
    "content_type", [JSON, f"{JSON}; charset=UTF-8", "application/vnd.api+json", "text/plain", FORM]
)
def test_an_honest_json_body_is_counted_by_its_name(name, content_type):
    identity = identity_of(Body(json.dumps({"username": name, "password": "x"}).encode(), content_type))
    assert identity == identity_of(Body(json.dumps({"username": fold(name)}).encode(), JSON)) != AMBIGUOUS


@pytest.mark.parametrize("charset", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_json_in_unicode_is_read_with_and_without_its_charset(charset):
    content = '{"username": "alice"}'.encode(charset)
    assert identity_of(Body(content, JSON)) == identity_of(Body(content, f"{JSON}; charset={charset}")) == "post=alice"


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_an_honest_form_is_counted_by_its_name(method):
    assert identity_of(Body(b"username=Alice&password=%22", FORM, method)) == "post=alice"
    assert identity_of(Body(f"{part.format('Alice')}--b--".encode(), MULTIPART, method)) == "post=alice"
    assert identity_of(Body(b"username=alice", f"{FORM}; charset=UTF-8", method)) == "post=alice"


@pytest.mark.parametrize(
    ("name", "identity"),
    [("AMBIGUOUS", "ambiguous%20"), ("ambiguous ", "ambiguous%20"), ("LONG", "long"), ("long", "long")],
)
def test_no_name_is_counted_as_what_is_ambiguous_or_too_long(name, identity):
    assert identity_of(Body(json.dumps({"username": name}).encode(), JSON)) == f"post={identity}"


def test_what_is_ambiguous_shares_one_counter():
    identities = {identity_of(ATTACKS[attack](7)) for attack in ("JSON as a form", "EBCDIC", "form, first")}
    assert identities == {AMBIGUOUS}


@pytest.mark.parametrize("content_type", [JSON, "*/*", f"{JSON}; charset=utf-7"])
def test_an_empty_body_has_no_name(content_type):
    assert identity_of(Body(b"", content_type)) == "ip=127.0.0.1"


def test_the_view_reads_the_body_of_a_multipart_form_too():
    content = f"{part.format('alice')}--b--".encode()

    @rate_limit("9/m", key="post:username")
    def view(request):
        return request.body, request.POST["username"]

    assert view(Body(content, MULTIPART).request()) == (content, "alice")


@pytest.mark.parametrize("content_type", [FORM, MULTIPART])
def test_a_put_that_is_not_the_form_that_it_says_does_not_fail(content_type):
    assert identity_of(Body(b"&" * 3000 + b"\xff--b", content_type, "PUT")) == "ip=127.0.0.1"


# Whatever a client sends

some_names = st.sampled_from(
    ["alice", "Al\u0131ce", "bob", "", "&username=bob&", "+ACI-", 5, None, ["alice"], "\ud800"]
)
some_pairs = st.lists(st.tuples(st.sampled_from(["username", "x"]), some_names), max_size=3)


def as_json(pairs) -> bytes:
    return f"{{{', '.join(f'{json.dumps(key)}: {json.dumps(value)}' for key, value in pairs)}}}".encode()


def as_form(pairs) -> bytes:
    return "&".join(f"{key}={value}" for key, value in pairs).encode("utf-8", "replace")


def as_multipart(pairs) -> bytes:
    parts = (part.replace("username", key).format(value) for key, value in pairs)
    return f"{''.join(parts)}--b--".encode("utf-8", "replace")


charsets = st.sampled_from(["utf-8", "utf-7", "utf-16", "utf-16-be", "utf-8-sig", "latin-1", "cp037"])
contents = st.one_of(
    some_pairs.map(as_json),
    some_pairs.map(as_form),
    some_pairs.map(as_multipart),
    st.tuples(some_pairs.map(as_json), some_pairs.map(as_form)).map(b"&".join),
    st.tuples(some_pairs, charsets).map(lambda pair: as_json(pair[0]).decode().encode(pair[1], "replace")),
    st.binary(max_size=40),
)
content_types = st.tuples(
    st.sampled_from([JSON, FORM, MULTIPART, "text/plain", "*/*", "application/*", "multipart/*; boundary=b", ""]),
    st.one_of(st.just(""), charsets.map("; charset={}".format)),
).map("".join)
bodies = st.builds(Body, contents, content_types, st.sampled_from(["POST", "PUT"]))


names_read: list[Any] = []
READERS = [view for name, view in views(names_read).items() if "async" not in name]


@given(bodies)
@example(ATTACKS["JSON as a form"](1))
@example(ATTACKS["UTF-7, decoded"](1))
@example(ATTACKS["form of any type"](1))
@example(ATTACKS["multipart by PUT"](1))
def test_every_reading_of_a_body_is_its_identity_or_it_is_ambiguous(body):
    try:
        identity = identity_of(body)
    except (MultiPartParserError, SuspiciousOperation):
        return  # a 400 before the view

    names_read.clear()
    for view in READERS:
        send(view, body)
    names = {fold(str(name)) for name in names_read if isinstance(name, (str, int))} - {"", "ambiguous"}
    assert identity == AMBIGUOUS or {f"post={encode(name)}" for name in names} <= {identity}
