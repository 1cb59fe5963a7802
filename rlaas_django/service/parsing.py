"""HTTP in: from a query or a JSON body to what the limiter checks. No I/O.

These name the same:

    GET check?userId=alice&policy=search&cost=2
    POST check {"userId": "alice", "policy": "search", "cost": 2}
    POST check {"identity": {"user": "alice"}, "policies": ["search"], "cost": 2}
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from django.http.request import RawPostDataException, UnreadablePostError

from .. import conf
from ..core.callers import Caller
from ..core.keys import Identity
from ..core.policy import DEFAULT, PolicyError
from ..limiter import Check, PolicySet, compile_policies, plan
from .answers import MAX_ECHO, Json, ProblemError, unknown

MAX_BODY = 1_000_000  # bytes
TOO_LARGE = f"The body has more than {MAX_BODY:,} bytes."
WHO = (
    'Name who is checked: give a "userId", or an identity of the kind that is counted '
    "({})."
)
QUERY = ("userId", "ip", "policy", "cost", "format")
FIELDS = ("userId", "identity", "policy", "policies", "cost")

_is_kind = re.compile(r"user|ip|token|key|(header|get|post):.+", re.DOTALL).fullmatch


class Subject(NamedTuple):
    """Who is checked, and the check: under which policies, at which cost."""

    identity: Identity
    check: Check


def read_subject(
    request: HttpRequest, caller: Caller, fields: Collection[str] = FIELDS
) -> Subject:
    """Return what a request names: in its query (GET), or in its JSON body."""
    if request.method == "POST":
        source = read_object(request, fields)
    else:
        source = _read_query(request)

    return parse_subject(source, caller)


def parse_subject(source: Any, caller: Caller) -> Subject:
    """Return what a JSON object names."""
    _require_fields(source, FIELDS)

    policy_set = compile_names(_parse_policies(source), caller)
    cost = _parse_cost(source.get("cost", 1))
    try:
        policy_set.check_cost(cost)
    except ValueError as error:
        raise ProblemError(str(error)) from None

    identity = _parse_identity(source)
    return Subject(identity, plan_check(identity, policy_set, cost))


def plan_check(identity: Identity, policy_set: PolicySet, cost: int = 1) -> Check:
    """Return the check; ProblemError for an identity that the policies do not count."""
    try:
        return plan(identity, policy_set, cost)
    except ValueError:
        # Not its text, which has the identity: that may be a credential.
        keys = {policy.key for policy in policy_set.policies}
        kinds = sorted(key for key in keys if isinstance(key, str))
        raise ProblemError(WHO.format(", ".join(kinds))) from None


def compile_names(names: list[str], caller: Caller) -> PolicySet:
    """Return the policies of these names, if the caller may use them."""
    for name in names:
        require_policy(name, caller)

    try:
        return compile_policies([*dict.fromkeys(names)])
    except PolicyError as error:  # the rate is a function of a request
        raise ProblemError(str(error)) from None


def require_policy(name: str, caller: Caller) -> None:
    """Raise a ProblemError unless there is this policy, for this caller."""
    known = conf.config().policies
    if name not in known or not caller.may_use(name):
        usable = filter(caller.may_use, known)
        raise ProblemError(unknown("policy", name, usable), 404)


def read_object(request: HttpRequest, fields: Collection[str]) -> Json:
    """Return the JSON object in the body of a request, which may have these fields."""
    try:
        if len(request.body) > MAX_BODY:
            raise RequestDataTooBig
    except RequestDataTooBig:
        raise ProblemError(TOO_LARGE, 413) from None
    except (UnreadablePostError, RawPostDataException, ValueError):
        raise ProblemError("The body could not be read.") from None

    try:
        source = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"The body is not JSON: {str(error)[:200]}") from None

    return _require_fields(source, fields)


def _require_fields(source: Any, fields: Collection[str]) -> Json:
    """Return this; ProblemError unless it is a JSON object with no other fields."""
    if not isinstance(source, dict):
        raise ProblemError("Send a JSON object.")

    for field in source:
        if field not in fields:
            raise ProblemError(unknown("field", field, fields))

    return source


def _read_query(request: HttpRequest) -> Json:
    """Return the query as a JSON body would name the same."""
    source: Json = {}

    for name, values in request.GET.lists():
        if name not in QUERY:
            raise ProblemError(unknown("parameter", name, QUERY))

        if len(values) > 1 and name != "policy":
            raise ProblemError(f"The parameter {name!r} is given more than once.")

        if name == "userId":
            source["userId"] = values[0]
        elif name == "ip":
            source["identity"] = {"ip": values[0]}
        elif name == "policy":
            source["policies"] = values
        elif name == "cost":
            is_number = values[0].isdecimal() and len(values[0]) <= 20
            source["cost"] = int(values[0]) if is_number else values[0]

    return source


def _parse_identity(source: Json) -> Identity:
    """Return a name per kind of identity."""
    identity = source.get("identity", {})
    if not isinstance(identity, dict):
        example = '{"user": "42", "ip": "203.0.113.9"}'
        detail = f'The field "identity" should be an object: {example}.'
        raise ProblemError(detail)

    if "userId" in source:
        if "user" in identity:
            raise ProblemError('Give "userId" or "user" in "identity", not both.')

        _require_name("userId", source["userId"])
        identity = {"user": source["userId"], **identity}

    for kind, name in identity.items():
        if not _is_kind(kind):
            kinds = ("user", "ip", "token")
            raise ProblemError(unknown("kind of identity", kind, kinds))

        _require_name(kind, name)

    return identity


def _require_name(field: str, name: Any) -> None:
    """Raise a ProblemError unless this is a name: a bool, for one, is not."""
    if type(name) not in (str, int) or name == "":
        a_name = "text of at least one character, or a whole number"
        raise ProblemError(f"{field[:MAX_ECHO]!r} should be {a_name}.")


def _parse_policies(source: Json) -> list[str]:
    """Return the names of the policies to check."""
    if "policy" in source and "policies" in source:
        raise ProblemError('Give "policy" or "policies", not both.')

    policy = source.get("policy", DEFAULT)
    names = source.get("policies", [policy])
    is_list = isinstance(names, list) and names
    if is_list and all(isinstance(name, str) for name in names):
        return names  # type: ignore[no-any-return]

    detail = '"policy" should be the name of a policy, "policies" a list of names.'
    raise ProblemError(detail)


def _parse_cost(cost: Any) -> int:
    """Return the cost, which is a whole number."""
    if type(cost) is float and cost.is_integer():
        cost = int(cost)  # to JSON, 2.0 is a whole number

    if type(cost) is not int or cost < 0:
        raise ProblemError('"cost" should be a whole number of at least 0.')

    return cost
