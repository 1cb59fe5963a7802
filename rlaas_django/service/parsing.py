"""HTTP in: from a query or a JSON body to what the limiter checks. No I/O."""

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
from ..limiter.policy_set import Check, CompiledPolicySet, compile_policies, plan
from .answers import MAX_ECHO, ProblemError, unknown

MAX_BODY = 1_000_000  # bytes
TOO_LARGE = f"The body has more than {MAX_BODY:,} bytes."
QUERY = ("userId", "ip", "policy", "cost")
FIELDS = ("userId", "identity", "policy", "policies", "cost")

_is_kind = re.compile(r"user|ip|token|key|(header|get|post):.+", re.DOTALL).fullmatch


class Subject(NamedTuple):
    """Who is checked, under which policies, at which cost."""

    identity: Identity
    policy_set: CompiledPolicySet
    cost: int = 1

    def plan(self) -> Check:
        """Return the check; ProblemError when the policies cannot decide it."""
        try:
            self.policy_set.check_cost(self.cost)
        except ValueError as error:
            raise ProblemError(400, str(error)) from None
        try:
            return plan(self.identity, self.policy_set, self.cost)
        except ValueError:
            # Its text has the identity, which may be a credential.
            raise ProblemError(400, self._missing_identity()) from None

    def _missing_identity(self) -> str:
        keys = {policy.key for policy in self.policy_set.policies}
        kinds = ", ".join(sorted(key for key in keys if isinstance(key, str)))
        return (
            'Name who is checked: give a "userId", or an identity of the kind that is '
            f"counted ({kinds})."
        )


def read_subject(
    request: HttpRequest, caller: Caller, fields: Collection[str] = FIELDS
) -> Subject:
    """Return what a request names: in its query (GET), or in its JSON body."""
    if request.method == "POST":
        source = read_object(request, fields)
    else:
        source = _read_query(request)
    subject = parse_subject(source, caller)
    subject.plan()  # raises what is wrong with it
    return subject


def parse_subject(source: Any, caller: Caller) -> Subject:
    """Return what a JSON object names."""
    _require_fields(source, FIELDS)
    policy_set = compile_names(_parse_policies(source), caller)
    cost = _parse_cost(source.get("cost", 1))
    return Subject(_parse_identity(source), policy_set, cost)


def compile_names(names: list[str], caller: Caller) -> CompiledPolicySet:
    """Return the policies of these names, if the caller may use them."""
    known = conf.config().policies
    for name in names:
        if name not in known:
            usable = filter(caller.may_use, known)
            raise ProblemError(404, unknown("policy", name, usable))
        require_policy(name, caller)
    try:
        return compile_policies([*dict.fromkeys(names)])
    except PolicyError as error:  # the rate is a function of a request
        raise ProblemError(400, str(error)) from None


def require_policy(name: str, caller: Caller) -> None:
    """Raise a ProblemError unless the caller may use this policy."""
    if not caller.may_use(name):
        raise ProblemError(403, f"{caller.name!r} may not use policy {name!r}.")


def read_object(request: HttpRequest, fields: Collection[str]) -> dict[str, Any]:
    """Return the JSON object in the body of a request, which may have these fields."""
    try:
        length = int(request.META.get("CONTENT_LENGTH") or 0)
        if length > MAX_BODY or len(request.body) > MAX_BODY:
            raise RequestDataTooBig
    except RequestDataTooBig:
        raise ProblemError(413, TOO_LARGE) from None
    except (UnreadablePostError, RawPostDataException, ValueError):
        raise ProblemError(400, "The body could not be read.") from None

    try:
        source = json.loads(request.body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"The body is not JSON: {str(error)[:200]}") from None
    return _require_fields(source, fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _require_fields(source: Any, fields: Collection[str]) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise ProblemError(400, "Send a JSON object.")
    for field in source:
        if field not in fields:
            raise ProblemError(400, unknown("field", field, fields))
    return source


def _read_query(request: HttpRequest) -> dict[str, Any]:
    """Return the query as a JSON body would name the same."""
    source: dict[str, Any] = {}
    for name, values in request.GET.lists():
        if name not in (*QUERY, "format"):
            raise ProblemError(400, unknown("parameter", name, QUERY))
        if len(values) > 1 and name != "policy":
            raise ProblemError(400, f"The parameter {name!r} is given more than once.")

        if name == "userId":
            source["userId"] = values[0]
        elif name == "ip":
            source["identity"] = {"ip": values[0]}
        elif name == "policy":
            source["policies"] = values
        elif name == "cost":
            source["cost"] = _parse_number(values[0])
    return source


def _parse_number(text: str) -> int | str:
    if text.isdecimal() and len(text) <= 20:
        return int(text)
    return text


def _parse_identity(source: dict[str, Any]) -> Identity:
    identity = source.get("identity", {})
    if not isinstance(identity, dict):
        example = '{"user": "42", "ip": "203.0.113.9"}'
        detail = f'The field "identity" should be an object: {example}.'
        raise ProblemError(400, detail)

    if "userId" in source:
        if "user" in identity:
            raise ProblemError(400, 'Give "userId" or "user" in "identity", not both.')
        _require_name("userId", source["userId"])
        identity = {"user": source["userId"], **identity}

    for kind, name in identity.items():
        if not _is_kind(kind):
            kinds = ("user", "ip", "token")
            raise ProblemError(400, unknown("kind of identity", kind, kinds))
        _require_name(kind, name)
    return identity


def _require_name(field: str, name: Any) -> None:
    if type(name) not in (str, int) or name == "":
        a_name = "text of at least one character, or a whole number"
        raise ProblemError(400, f"{field[:MAX_ECHO]!r} should be {a_name}.")


def _parse_policies(source: dict[str, Any]) -> list[str]:
    if "policy" in source and "policies" in source:
        raise ProblemError(400, 'Give "policy" or "policies", not both.')

    names = source.get("policies", [source.get("policy", DEFAULT)])
    is_list = isinstance(names, list) and names
    if is_list and all(isinstance(name, str) for name in names):
        return names  # type: ignore[no-any-return]
    detail = '"policy" should be the name of a policy, "policies" a list of names.'
    raise ProblemError(400, detail)


def _parse_cost(cost: Any) -> int:
    if type(cost) is float and cost.is_integer():
        cost = int(cost)  # to JSON, 2.0 is a whole number
    if type(cost) is not int or cost < 0:
        raise ProblemError(400, '"cost" should be a whole number of at least 0.')
    return cost
