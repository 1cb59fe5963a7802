"""The OpenAPI document, and the service held to it by schemathesis: no 500, no undocumented answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema_rs
import pytest
import rlaas_django
import schemathesis
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from schemathesis import GenerationMode

from tests.support.internals import FIELDS, service_urls
from tests.support.service import TOKEN, TOKENS, Service, urlconf

pytestmark = pytest.mark.django_db  # Django's handlers close connections at the end of a request
DOCUMENT = json.loads((Path(__file__).parents[2] / "docs/openapi.json").read_text("utf-8"))
POLICIES = {
    "search": {"rate": "3/m"},
    "login": {"rate": "20/m", "key": "ip"},
    "key": {"rate": "20/m", "key": "token"},
    "strict": {"rate": "5/m", "on_failure": "closed"},
}
# A valid body may be refused all the same: there is no such policy, or it counts by another kind of identity. And what
# is generated as invalid may be valid as it is sent, such as a parameter without a value.
EXCLUDED = ["positive_data_acceptance", "negative_data_rejection"]


@pytest.fixture(params=["wsgi", "asgi"])
def handler(request, settings, configure) -> str:
    settings.ROOT_URLCONF = urlconf(request.param)
    configure(POLICIES=POLICIES, SERVICE={"TOKENS": TOKENS})
    return request.param


def test_the_document_is_served_at_the_path_of_the_service(handler):
    served = Service(handler, None).get("openapi.json").json()
    assert served == {**DOCUMENT, "servers": [{"url": "/rlaas"}]}
    assert served["info"]["version"] == rlaas_django.__version__


def test_the_document_has_every_endpoint_and_field():
    routes = {str(route.pattern) for route in service_urls.urlpatterns if route.name not in ("auth", "unknown")}
    assert {path.removeprefix("/") for path in DOCUMENT["paths"]} == routes | {"auth/{policies}"}
    assert set(DOCUMENT["components"]["schemas"]["Check"]["properties"]) == {*FIELDS}


@pytest.mark.parametrize("name", ["Check", "Reset"])
@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"userId": "alice"}, True),
        ({"userId": 42, "policy": "search"}, True),
        ({"identity": {"ip": "203.0.113.9"}}, True),
        ({"userId": "alice", "identity": {"ip": "203.0.113.9"}}, True),
        ({"identity": {}, "policy": "site"}, True),
        ({}, False),
        ({"policy": "search"}, False),
        ({"userId": ""}, False),
        ({"userId": "alice", "policy": "search", "policies": ["search"]}, False),
        ({"userId": "alice", "user": "bob"}, False),
    ],
)
def test_the_schema_demands_an_identity_and_no_cost(name, body, valid):
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    assert jsonschema_rs.Draft202012Validator(schema).is_valid(body) == valid


def test_no_member_has_a_default_which_generated_clients_would_demand():
    """Of openapi-typescript, a member with a default is one that has to be given."""
    properties = [schema.get("properties", {}) for schema in DOCUMENT["components"]["schemas"].values()]
    assert "default" not in [word for members in properties for member in members.values() for word in member]


@pytest.mark.parametrize("handler", ["wsgi"], indirect=True)
def test_a_policy_for_everybody_takes_an_empty_identity(handler, configure):
    configure(POLICIES={**POLICIES, "site": {"rate": "3/m", "key": "global"}})
    assert Service(handler).post("check", {"identity": {}, "policy": "site"}).status_code == 200


def known_policies(document):
    """Return the document with the names of policies, so that more than one answer is given for valid requests."""
    named = json.loads(json.dumps(document))
    for schema in ("Check", "Reset"):
        properties = named["components"]["schemas"][schema]["properties"]
        properties["policy"]["enum"] = properties["policies"]["items"]["enum"] = [*POLICIES, "default"]
    named["components"]["parameters"]["policy"]["schema"]["items"]["enum"] = [*POLICIES, "default"]
    return named


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("policies", ["known", pytest.param("any", marks=pytest.mark.slow)])
def test_every_answer_is_documented(handler, mode, policies, scale):
    document = known_policies(DOCUMENT) if policies == "known" else DOCUMENT
    assert answered(document, handler, mode, scale(100))[400]


@pytest.mark.slow
@pytest.mark.usefixtures("redis_unavailable")
def test_every_answer_without_redis_is_documented(handler):
    statuses = answered(known_policies(DOCUMENT), handler, GenerationMode.POSITIVE, 50, "not_a_server_error")
    assert statuses[503]
    assert not statuses[500]


def answered(document, handler, mode, examples, *excluded_checks):
    """Have schemathesis call every endpoint; return how often each status was answered."""
    schema = schemathesis.openapi.from_dict(document)
    schema.app = ASGIHandler() if handler == "asgi" else WSGIHandler()
    schemathesis.checks.load_all_checks()
    excluded = [schemathesis.checks.CHECKS.get_one(name) for name in (*EXCLUDED, *excluded_checks)]
    answers = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and operation.label in ("GET /health", "GET /openapi.json"):
            continue  # they take nothing that could be wrong

        @hypothesis_settings(max_examples=examples, database=None, suppress_health_check=[*HealthCheck])
        @given(case=operation.as_strategy(generation_mode=mode))
        def answer(case):
            response = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, excluded_checks=excluded)
            answers[response.status_code] += 1

        answer()
    return answers
