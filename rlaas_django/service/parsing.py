"""HTTP in: from a query or a JSON body to what is asked of the limiter. No I/O."""

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
from .problems import MAX_ECHO, ProblemError, unknown

MAX_BODY = 1_000_000  # bytes
QUERY = ("userId", "ip", "policy", "cost")
FIELDS = ("userId", "identity", "policy", "policies", "cost")
_TOO_LARGE = f"The body has more than {MAX_BODY:,} bytes."
_is_kind = re.compile(r"user|ip|token|key|(header|get|post):.+", re.DOTALL).fullmatch
_A_NAME = "text of at least one character, or a whole number"


class Subject(NamedTuple):
    """Who is checked, under which policies, at which cost."""

    identity: Identity
    policy_set: PolicySet
    cost: int = 1

    def plan(self) -> Check:
        """Return the check; ProblemError when the policies cannot decide it."""
        try:
            return plan(self.identity, self.policy_set, self.cost)
        except ValueError as error:
            raise ProblemError(400, self._reason(error)) from None

    def _reason(self, error: ValueError) -> str:
        try:
            self.policy_set.check_cost(self.cost)
        except ValueError:
            return str(error)
        # Not its text: it has the identity, which may be a credential.
        keys = sorted(
            {
                str(policy.key)
                for policy in self.policy_set.policies
                if not callable(policy.key)
            }
        )
        return f'Name who is checked: give a "userId", or an identity of the kind that is counted ({", ".join(keys)}).'


def read_subject(
    request: HttpRequest, caller: Caller, fields: Collection[str] = FIELDS
) -> Subject:
    """Return what a request names: in its query (GET), or in its JSON body."""
    source = read_json(request) if request.method == "POST" else _read_query(request)
    subject = parse_subject(source, caller, fields)
    subject.plan()  # raises what is wrong with it
    return subject


def parse_subject(
    source: Any, caller: Caller, fields: Collection[str] = FIELDS
) -> Subject:
    """Return what a JSON object names."""
    require_fields(source, fields)
    policy_set, cost = (
        _compile(_parse_policies(source), caller),
        _parse_cost(source.get("cost", 1)),
    )
    user = source.get("userId")
    if (
        policy_set.all_by_user
        and type(user) is str
        and user
        and "identity" not in source
    ):
        return Subject(user, policy_set, cost)  # nearly every one
    return Subject(_parse_identity(source), policy_set, cost)


def subject_of(identity: Identity, names: list[str], caller: Caller) -> Subject:
    """Return an identity under some policies."""
    subject = Subject(identity, _compile(names, caller))
    subject.plan()
    return subject


def require_fields(source: Any, fields: Collection[str]) -> None:
    """Raise a ProblemError unless this is a JSON object with no other fields than these."""
    if not isinstance(source, dict):
        raise ProblemError(400, "Send a JSON object.")
    for field in source:
        if field not in fields:
            raise ProblemError(400, unknown("field", field, fields))


def read_json(request: HttpRequest) -> Any:
    """Return the body of a request."""
    try:
        if (
            int(request.META.get("CONTENT_LENGTH") or 0) > MAX_BODY
            or len(request.body) > MAX_BODY
        ):
            raise ProblemError(413, _TOO_LARGE)
    except RequestDataTooBig:
        raise ProblemError(413, _TOO_LARGE) from None
    except (UnreadablePostError, RawPostDataException, ValueError):
        raise ProblemError(400, "The body could not be read.") from None
    try:
        return json.loads(request.body, parse_constant=_refuse_constant)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: also of a number of thousands of digits
        raise ProblemError(400, f"The body is not JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_query(request: HttpRequest) -> dict[str, Any]:
    """Return the query as a JSON body would name the same."""
    query = request.GET
    source: dict[str, Any] = {}
    for name, values in query.lists():
        if name not in (*QUERY, "format"):
            raise ProblemError(400, unknown("parameter", name, QUERY))
        if len(values) > 1 and name != "policy":
            raise ProblemError(400, f"The parameter {name!r} is given more than once.")
    if "userId" in query:
        source["userId"] = query["userId"]
    if "ip" in query:
        source["identity"] = {"ip": query["ip"]}
    if "policy" in query:
        source["policies"] = query.getlist("policy")
    if "cost" in query:
        text = query["cost"]
        source["cost"] = int(text) if text.isdecimal() and len(text) <= 20 else text
    return source


def _parse_identity(source: dict[str, Any]) -> Identity:
    identity = source.get("identity", {})
    if not isinstance(identity, dict):
        raise ProblemError(
            400,
            'The field "identity" should be an object: {"user": "42", "ip": "203.0.113.9"}.',
        )
    if "userId" in source:
        if "user" in identity:
            raise ProblemError(400, 'Give "userId" or "user" in "identity", not both.')
        identity = {"user": source["userId"], **identity}
    for kind, name in identity.items():
        if not _is_kind(kind):
            raise ProblemError(
                400, unknown("kind of identity", kind, ("user", "ip", "token"))
            )
        if type(name) not in (str, int) or name == "":
            field = "userId" if kind == "user" and "userId" in source else kind
            raise ProblemError(400, f"{field[:MAX_ECHO]!r} should be {_A_NAME}.")
    return identity


def _parse_policies(source: dict[str, Any]) -> list[str]:
    if "policy" in source and "policies" in source:
        raise ProblemError(400, 'Give "policy" or "policies", not both.')
    names = (
        [source["policy"]] if "policy" in source else source.get("policies", [DEFAULT])
    )
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise ProblemError(
            400, '"policy" should be the name of a policy, "policies" a list of names.'
        )
    return names


def _compile(names: list[str], caller: Caller) -> PolicySet:
    known = conf.config().policies
    for name in names:
        if name not in known:
            raise ProblemError(
                404, unknown("policy", name, filter(caller.may_use, known))
            )
        require_policy(name, caller)
    try:
        return compile_policies(
            names[0] if len(names) == 1 else list(dict.fromkeys(names))
        )
    except PolicyError as error:  # its rate is a function of a request
        raise ProblemError(400, str(error)) from None


def require_policy(name: str, caller: Caller) -> None:
    if not caller.may_use(name):
        raise ProblemError(403, f"{caller.name!r} may not use policy {name!r}.")


def _parse_cost(cost: Any) -> int:
    if type(cost) is float and cost.is_integer():
        cost = int(cost)  # to JSON, 2.0 is a whole number
    if type(cost) is not int or cost < 0:
        raise ProblemError(400, '"cost" should be a whole number of at least 0.')
    return cost
