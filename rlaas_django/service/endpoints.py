"""The endpoints: what each asks of the limiter, and how it answers. No I/O; the views do it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

from django.apps import apps
from django.http import HttpRequest, HttpResponse
from django.utils.module_loading import import_string

from .. import backend, conf, limiter
from ..core.callers import Caller
from ..core.decision import Decision
from ..core.keys import EncodedIdentity
from ..http import responses
from ..http.identity import RequestIdentity
from ..limiter import Check
from ..runtime.observers import observe
from . import answers, receipts
from .answers import decision_json, decision_response, json_response, with_headers
from .parsing import (
    FIELDS,
    Subject,
    parse_subject,
    read_json,
    read_subject,
    require_fields,
    require_policy,
    subject_of,
)
from .problems import ProblemError

MAX_BATCH = 1_000
METRICS = (
    "rlaas_django.integrations.prometheus"  # not imported where it is not installed
)


class Operation(NamedTuple):
    """A call of the limiter, as a sync and as an async function, and what makes the response of its result."""

    call: Callable[[], Any]
    acall: Callable[[], Awaitable[Any]]
    respond: Callable[[Any], HttpResponse]


def check(request: HttpRequest, caller: Caller) -> Operation:
    """Decide, and charge when allowed."""
    as_text = request.method != "POST" and answers.wants_text(request)
    subject = read_subject(request, caller)

    def respond(decision: Decision) -> HttpResponse:
        response = decision_response(decision, caller, as_text=as_text)
        response.headers["Vary"] = "Accept"
        responses.suppress_log(
            request, response
        )  # a refusal is a result here, not an error that Django logs
        return response

    return _check(subject, caller, respond)


def check_batch(request: HttpRequest, caller: Caller) -> Operation:
    """Decide independent checks in one round trip; a bad one is an error in its place."""
    body = read_json(request)
    require_fields(body, ("checks",))
    items = body.get("checks")
    if not isinstance(items, list) or len(items) > MAX_BATCH:
        raise ProblemError(
            400, f'"checks" should be a list of at most {MAX_BATCH:,} checks.'
        )
    planned: list[Check | ProblemError] = []
    for item in items:
        try:
            planned.append(parse_subject(item, caller).plan())
        except ProblemError as problem:
            planned.append(problem)
    checks = [each for each in planned if isinstance(each, Check)]

    def respond(decisions: list[Decision]) -> HttpResponse:
        results, decided, is_enabled = [], iter(decisions), conf.config().enabled
        for each in planned:
            if isinstance(each, ProblemError):
                results.append({"error": each.members()})
                continue
            decision = next(decided)
            if is_enabled:
                observe(decision, caller.source)
            results.append(decision_json(decision, caller, in_batch=True))
        return json_response({"results": results})

    return Operation(
        partial(limiter.check_each, checks),
        partial(limiter.acheck_each, checks),
        respond,
    )


def usage(request: HttpRequest, caller: Caller) -> Operation:
    """Decide without charging."""
    subject = read_subject(request, caller)

    def respond(decision: Decision) -> HttpResponse:
        if decision.unavailable:
            return decision_response(decision, caller, as_text=False)
        return with_headers(json_response(decision_json(decision)), decision)

    arguments: Any = subject.identity, subject.policy_set
    peek, apeek = partial(limiter.peek, *arguments), partial(limiter.apeek, *arguments)
    return Operation(
        partial(peek, cost=subject.cost), partial(apeek, cost=subject.cost), respond
    )


def refund(request: HttpRequest, caller: Caller) -> Operation:
    """Refund the receipt of a check, once."""
    body = read_json(request)
    require_fields(body, ("receipt",))
    try:
        receipt = (
            receipts.read(body["receipt"])
            if isinstance(body.get("receipt"), str)
            else None
        )
    except ValueError as error:
        raise ProblemError(400, str(error)) from None
    if receipt is None:
        raise ProblemError(400, '"receipt" should be the receipt of a check.')
    for policy in receipt.policies:
        require_policy(policy, caller)
    calls = partial(receipts.refund, receipt), partial(receipts.arefund, receipt)
    return Operation(*calls, lambda refunded: json_response({"refunded": refunded}))


def reset(request: HttpRequest, caller: Caller) -> Operation:
    """Delete what an identity used."""
    subject = read_subject(
        request, caller, [field for field in FIELDS if field != "cost"]
    )
    arguments: Any = subject.identity, subject.policy_set.policies
    calls = partial(limiter.reset, *arguments), partial(limiter.areset, *arguments)
    return Operation(*calls, lambda deleted: json_response({"deleted": deleted}))


def policies(_: HttpRequest, caller: Caller) -> HttpResponse:
    return json_response(answers.policies_json(caller))


def info(*_: Any) -> HttpResponse:
    return json_response(answers.info_json())


def openapi(request: HttpRequest, _: Caller) -> HttpResponse:
    return json_response(
        {**_openapi(), "servers": [{"url": request.path.removesuffix("/openapi.json")}]}
    )


@cache
def _openapi() -> dict[str, Any]:
    return json.loads(files(__package__).joinpath("openapi.json").read_bytes())  # type: ignore[no-any-return]


def metrics(*_: Any) -> Operation:
    """Return the metrics as Prometheus reads them."""
    if not apps.is_installed(METRICS):
        raise ProblemError(
            404, f"There are no metrics: add '{METRICS}.Metrics' to INSTALLED_APPS."
        )
    exposition = import_string(f"{METRICS}.exposition")

    def respond(metrics: tuple[bytes, str]) -> HttpResponse:
        return HttpResponse(metrics[0], content_type=metrics[1])

    return Operation(exposition, responses.in_thread(exposition), respond)


def health(*_: Any) -> Operation:
    """Say whether Redis decides, for a load balancer; without addresses, as anybody may ask."""
    identity = EncodedIdentity("health")

    def respond(decision: Decision) -> HttpResponse:
        servers = backend.topology().servers()
        failing = sum(server.breaker.error is not None for server in servers)
        reasons = ["Redis is unavailable."] if decision.degraded and not failing else []
        if failing:
            reasons = [f"{failing} of {len(servers)} Redis servers are unavailable."]
        return json_response(
            {"status": "DOWN" if reasons else "UP", "reasons": reasons},
            503 if reasons else 200,
        )

    return Operation(
        partial(limiter.peek, identity), partial(limiter.apeek, identity), respond
    )


class ProxyIdentity(RequestIdentity):
    """Whom a reverse proxy names in the headers X-RLaaS-User, X-RLaaS-IP and X-RLaaS-Token of its own request.

    Not the request's own user and credential, which are the proxy's.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        if key in ("user", "ip", "token"):
            named = self.request.headers.get(f"X-RLaaS-{key}") or None
            return (
                super().get(key)
                if named is None and key == "ip" and conf.config().proxies
                else named
            )
        return super().get(key, default)


def forward_auth(
    request: HttpRequest,
    caller: Caller,
    policies: str = "default",
    path: str | None = None,
) -> Operation:
    """Decide a request that a reverse proxy asks about: 204 or 429, with headers and without a body.

    Envoy appends the path of the original request, and takes only a 200 for allowed.
    """
    subject = subject_of(ProxyIdentity(request), policies.split(","), caller)

    def respond(decision: Decision) -> HttpResponse:
        if not decision.allowed:
            response = decision_response(decision, caller, as_text=True)
            responses.suppress_log(request, response)
            return response
        return with_headers(HttpResponse(status=204 if path is None else 200), decision)

    return _check(subject, caller, respond)


def _check(
    subject: Subject, caller: Caller, respond: Callable[[Decision], HttpResponse]
) -> Operation:
    arguments: Any = subject.identity, subject.policy_set
    options: Any = {"cost": subject.cost, "source": caller.source}
    return Operation(
        partial(limiter.check, *arguments, **options),
        partial(limiter.acheck, *arguments, **options),
        respond,
    )
