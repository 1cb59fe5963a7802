"""`post:username` counts the name that the view reads from a form or from JSON, by itself or through a framework."""

from __future__ import annotations

import contextlib
import itertools
import json
from io import BytesIO
from typing import Any, NamedTuple

import ninja
import pytest
from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse, RawPostDataException
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from hypothesis import example, given
from hypothesis import strategies as st
from rest_framework.authtoken.views import ObtainAuthToken
from rest_framework.decorators import api_view, authentication_classes, parser_classes, permission_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.settings import api_settings
from rest_framework.views import APIView
from rlaas_django import rate_limit

from tests.support.http import KINDS, as_kind, call, ok
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


# Views that read the body in their own way

MAX_SIZE = 300  # bytes
TOO_LARGE = 400
file_part = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'


def multipart(*parts: str) -> bytes:
    return f"{''.join(parts)}--b--\r\n".encode()


BODIES = {
    "nothing": Body(b"", FORM),
    "form": Body(b"username=alice&x=1", FORM),
    "form, large": Body(b"username=alice&x=" + b"1" * TOO_LARGE, FORM),
    "form, too many fields": Body(b"username=alice" + b"&x=1" * 20, FORM),
    "form in UTF-16": Body("username=alice".encode("utf-16"), f"{FORM}; charset=utf-16"),
    "multipart": Body(multipart(part.format("alice"), file_part.format("content")), MULTIPART),
    "multipart, large": Body(multipart(part.format("alice"), file_part.format("1" * TOO_LARGE)), MULTIPART),
    "multipart, large field": Body(multipart(part.format("1" * TOO_LARGE)), MULTIPART),
    "multipart, too many fields": Body(multipart(*[part.format("alice")] * 20), MULTIPART),
    "multipart, cut off": Body(multipart(part.format("alice"))[:50], MULTIPART),
    "multipart, another boundary": Body(multipart(part.format("alice")), "multipart/form-data; boundary=c"),
    "multipart, no boundary": Body(multipart(part.format("alice")), "multipart/form-data"),
    "multipart, no base64": Body(
        multipart(part.format("%").replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n")), MULTIPART
    ),
    "JSON": Body(b'{"username": "alice"}', JSON),
    "JSON, large": Body(b'{"username": "alice", "x": "' + b"1" * TOO_LARGE + b'"}', JSON),
    "JSON, cut off": Body(b'{"username": ', JSON),
    "of no type": Body(b'{"username": "alice"}', ""),
    "of a type that nothing parses": Body(b"<username>alice</username>", "text/xml"),
}
BODIES |= {f"{name}, by PUT": body._replace(method="PUT") for name, body in BODIES.items()}


def no_body(request):
    return "nothing read"


def whole_body(request):
    return request.body


def stream(request):
    return request.read()


def stream_in_parts(request):
    return b"|".join(iter(lambda: request.read(7), b""))


def lines(request):
    return [*request]


def a_form(request):
    return sorted(request.POST.lists())


def files(request):
    return sorted((name, file.read()) for name, file in request.FILES.items())


def body_then_form(request):
    return request.body, a_form(request)


def form_then_body(request):
    return a_form(request), request.body


def body_twice(request):
    return request.body, request.body


def own_upload_handler(request):
    request.upload_handlers = [MemoryFileUploadHandler(request)]
    return a_form(request), files(request)


def another_upload_handler(request):
    request.upload_handlers.insert(0, MemoryFileUploadHandler(request))
    return files(request)


def in_another_encoding(request):
    request.encoding = "latin-1"
    return a_form(request)


def body_or_413(request):
    try:
        return request.body
    except RequestDataTooBig:
        return HttpResponse(status=413)


READINGS = (
    no_body, whole_body, stream, stream_in_parts, lines, a_form, files, body_then_form, form_then_body, body_twice,
    own_upload_handler, another_upload_handler, in_another_encoding, body_or_413,
)  # fmt: skip


def data(request):
    return request.data


def data_then_body(request):
    return request.data, request.body


def body_then_data(request):
    return request.body, request.data


FRAMEWORK_READINGS = (no_body, whole_body, stream, data, data_then_body, body_then_data, a_form, files)


class Form(FormParser):
    """A parser that leaves nothing of the stream, as those of older versions of the framework."""

    def parse(self, stream, media_type=None, parser_context=None):
        return super().parse(BytesIO(stream.read()), media_type, parser_context)


def answer(read):
    """Return a view that answers with what it reads."""

    def view(request):
        found = read(request)
        return found if isinstance(found, HttpResponse) else HttpResponse(repr(found))

    return view


def outcome(view, request) -> tuple:
    """Return what a view answers, or the error that it fails with."""
    try:
        response = call(view, request)
        if hasattr(response, "render"):
            response.render()
    except Exception as error:
        return type(error), str(error)
    return response.status_code, response.content


def reads_alike(limited, plain) -> bool:
    """Return whether a limited view reads a body as without the limit, or can read it where it could not."""
    return limited == plain or (plain[0] is RawPostDataException and limited[0] == 200)


def over_asgi(body: Body) -> ASGIRequest:
    """Return the request of a client that does not say how long its body is."""
    headers = [(b"content-type", body.content_type.encode())]
    scope = {"type": "http", "method": body.method, "path": "/", "headers": headers, "client": ["127.0.0.1", 0]}
    return ASGIRequest(scope, BytesIO(body.content))


@pytest.fixture
def small_bodies(settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_SIZE
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 10


BY_NAME = rate_limit("9999/m", key="post:username", group="g")


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", [Body.request, over_asgi], ids=["wsgi", "asgi, chunked"])
def test_a_view_reads_the_body_as_without_the_limit(body, kind, made):
    """Whatever it reads, and however: the same answer, or the same error, which is the view's."""
    if made is over_asgi and len(BODIES[body].content) > MAX_SIZE:
        pytest.skip("Django itself leaves such a stream at its end when `request.body` refuses it")
    for read in READINGS:
        view = as_kind(kind, answer(read))
        wanted = outcome(view, made(BODIES[body]))
        assert reads_alike(outcome(BY_NAME(view), made(BODIES[body])), wanted), read.__name__


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunked_body_that_is_too_large_is_too_large_for_the_view(kind):
    for name in ("form, large", "multipart, large", "JSON, large"):
        for read in (no_body, whole_body, body_or_413, a_form):
            view = as_kind(kind, answer(read))
            wanted = outcome(view, over_asgi(BODIES[name]))
            assert outcome(BY_NAME(view), over_asgi(BODIES[name])) == wanted, read.__name__


def before_it(request):
    """Read the form, as the middleware against CSRF does before any view."""
    with contextlib.suppress(Exception):
        return request.POST


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("body", BODIES)
def test_a_view_whose_form_was_read_before_reads_it_as_without_the_limit(body):
    for read in set(READINGS) - {own_upload_handler}:  # which is too late
        before_it(one := BODIES[body].request())
        before_it(other := BODIES[body].request())
        assert reads_alike(outcome(BY_NAME(answer(read)), other), outcome(answer(read), one)), read.__name__


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("place", ["class", "method", "around"])
def test_a_view_of_rest_framework_reads_the_body_as_without_the_limit(body, place):
    """Its handler; where it does not read the body, a body that it cannot parse is an error all the same."""

    def view_of(read, limited):
        def handle(self, request):
            return answer(read)(request)

        if limited and place == "method":
            handle = method_decorator(BY_NAME)(handle)
        options = {"authentication_classes": [], "permission_classes": [], "post": handle, "put": handle}
        parsers = [JSONParser, Form, MultiPartParser]
        view_class = type("View", (APIView,), {**options, "parser_classes": parsers})
        if limited and place == "class":
            view_class = BY_NAME(view_class)
        view = view_class.as_view()
        return BY_NAME(view) if limited and place == "around" else view

    for read in FRAMEWORK_READINGS:
        wanted = outcome(view_of(read, limited=False), BODIES[body].request())
        found = outcome(view_of(read, limited=True), BODIES[body].request())
        cannot_parse = outcome(view_of(data, limited=False), BODIES[body].request())
        assert reads_alike(found, wanted) or (place != "around" and found == cannot_parse and found[0] != 200), (
            read.__name__
        )


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("name", ["multipart, large", "multipart, large, by PUT"])
def test_large_forms_with_files_share_one_counter(name):
    """The view can read their fields, and nobody has a further counter for a name by adding a file."""
    assert identity_of(BODIES[name]) == AMBIGUOUS


@pytest.mark.usefixtures("small_bodies")
def test_a_large_form_that_was_read_before_is_counted_by_its_name():
    request = BODIES["multipart, large"].request()
    before_it(request)
    call(BY_NAME(ok), request)
    assert request.rate_limit.outcomes[0].identity == "post=alice"


@pytest.mark.usefixtures("small_bodies")
@pytest.mark.parametrize("name", ["multipart, large", "JSON, large", "form, large"])
def test_no_large_body_gives_a_further_counter(name):
    names: list[Any] = []
    for number, (label, view) in enumerate(views(names).items()):
        names.clear()
        limited = rate_limit(f"{LIMIT}/h", key="post:username", group=f"large-{number}")(view)
        for n in range(LIMIT + 5):
            send(limited, BODIES[name], f"203.0.113.{n}")
        assert names.count("alice") <= LIMIT, label


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
    identity = identity_of(body)
    names_read.clear()
    for view in READERS:
        send(view, body)
    names = {fold(str(name)) for name in names_read if isinstance(name, (str, int))} - {"", "ambiguous"}
    assert identity == AMBIGUOUS or {f"post={encode(name)}" for name in names} <= {identity}
