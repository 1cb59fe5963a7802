"""The endpoints: what each reads, calls and responds.

`call` awaits the first of two functions in a sync view, and the second in an async one.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from django.apps import apps
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.module_loading import import_string

from .. import backend, conf, limiter
from ..core.callers import Caller
from ..core.decision import Decision
from ..core.keys import EncodedIdentity
from ..http.identity import RequestIdentity, client_address
from ..http.responses import in_thread
from ..limiter.policy_set import Check, CompiledPolicySet
from ..runtime.observers import observe
from . import answers, receipts
from .answers import (
    ProblemError,
    decision_json,
    decision_response,
    fails_closed,
    with_headers,
)
from .parsing import (
    FIELDS,
    Subject,
    compile_names,
    parse_subject,
    read_object,
    read_subject,
    require_policy,
)
from .views import Call

MAX_BATCH = 1_000
# Not imported where it is not installed.
METRICS = "rlaas_django.integrations.prometheus"


async def check(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide, and charge when allowed."""
    as_text = request.method != "POST" and answers.wants_text(request)
    decision = await _check(read_subject(request, caller), caller, call)
    response = decision_response(request, decision, caller, as_text=as_text)
    response.headers["Vary"] = "Accept"
    return response


async def check_batch(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide independent checks in one round trip.

    One that is not valid is an error in its place.
    """
    items = read_object(request, ["checks"]).get("checks")
    if not isinstance(items, list) or len(items) > MAX_BATCH:
        detail = f'"checks" should be a list of at most {MAX_BATCH:,} checks.'
        raise ProblemError(400, detail)

    plans = [_plan_or_problem(item, caller) for item in items]
    checks = [plan for plan in plans if isinstance(plan, Check)]
    decisions = await call(limiter.check_each, limiter.acheck_each, checks)

    undelivered = iter(decisions)
    results = []
    for plan in plans:
        if isinstance(plan, ProblemError):
            results.append({"error": plan.members()})
        else:
            results.append(_batch_result(next(undelivered), caller))
    return JsonResponse({"results": results})


async def usage(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide without charging."""
    identity, policy_set, cost = read_subject(request, caller)
    peek = (limiter.peek, limiter.apeek)
    decision = await call(*peek, identity, policy_set, cost=cost)
    if decision.unavailable:
        raise fails_closed(decision)
    return with_headers(JsonResponse(decision_json(decision, caller)), decision)


async def refund(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Refund the receipt of a check, once."""
    text = read_object(request, ["receipt"]).get("receipt")
    if not isinstance(text, str):
        raise ProblemError(400, '"receipt" should be the receipt of a check.')
    try:
        receipt = receipts.read(text)
    except ValueError as error:
        raise ProblemError(400, str(error)) from None

    for policy in receipt.policies:
        require_policy(policy, caller)
    refunded = await call(receipts.refund, receipts.arefund, receipt)
    return JsonResponse({"refunded": refunded})


async def reset(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Delete what an identity used."""
    fields = [field for field in FIELDS if field != "cost"]
    identity, policy_set, _ = read_subject(request, caller, fields)
    policies = policy_set.policies
    deleted = await call(limiter.reset, limiter.areset, identity, policies)
    return JsonResponse({"deleted": deleted})


async def policies(_: HttpRequest, caller: Caller, __: Call) -> HttpResponse:
    """Return the policies that a caller may use."""
    return JsonResponse(answers.policies_json(caller))


async def info(*_: Any) -> HttpResponse:
    """Return what runs here."""
    return JsonResponse(answers.info_json())


async def openapi(request: HttpRequest, *_: Any) -> HttpResponse:
    """Return the description of the service, at its own path."""
    server = {"url": request.path.removesuffix("/openapi.json")}
    return JsonResponse({**_openapi(), "servers": [server]})


async def metrics(_: HttpRequest, __: Caller, call: Call) -> HttpResponse:
    """Return the metrics as Prometheus reads them."""
    if not apps.is_installed(METRICS):
        detail = f"There are no metrics: add '{METRICS}.Metrics' to INSTALLED_APPS."
        raise ProblemError(404, detail)

    exposition = import_string(f"{METRICS}.exposition")
    text, content_type = await call(exposition, in_thread(exposition))
    return HttpResponse(text, content_type)


async def health(_: HttpRequest, __: Caller, call: Call) -> HttpResponse:
    """Return whether Redis decides; without addresses, as anybody may call this."""
    identity = EncodedIdentity("health")
    decision = await call(limiter.peek, limiter.apeek, identity)

    servers = backend.topology().servers()
    failing = sum(server.breaker.error is not None for server in servers)
    reasons = []
    if failing:
        reasons = [f"{failing} of {len(servers)} Redis servers are unavailable."]
    elif decision.degraded:
        reasons = ["Redis is unavailable."]

    if reasons:
        return JsonResponse({"status": "DOWN", "reasons": reasons}, status=503)
    return JsonResponse({"status": "UP", "reasons": []})


async def forward_auth(
    request: HttpRequest,
    caller: Caller,
    call: Call,
    policies: str = "default",
    path: str | None = None,
) -> HttpResponse:
    """Decide a request of a reverse proxy's client: 204 or 429, with headers.

    Envoy appends the path of the original request, and takes only a 200 for allowed.
    """
    policy_set = compile_names(policies.split(","), caller)
    subject = Subject(_proxied_identity(request, policy_set), policy_set)
    subject.plan()  # raises what is wrong with it

    decision = await _check(subject, caller, call)
    if not decision.allowed:
        return decision_response(request, decision, caller, as_text=True)
    status = 204 if path is None else 200
    return with_headers(HttpResponse(status=status), decision)


async def _check(subject: Subject, caller: Caller, call: Call) -> Decision:
    identity, policy_set, cost = subject
    decision: Decision = await call(
        limiter.check,
        limiter.acheck,
        identity,
        policy_set,
        cost=cost,
        source=caller.source,
    )
    return decision


def _plan_or_problem(item: Any, caller: Caller) -> Check | ProblemError:
    try:
        return parse_subject(item, caller).plan()
    except ProblemError as problem:
        return problem


def _batch_result(decision: Decision, caller: Caller) -> dict[str, Any]:
    if conf.config().enabled:
        observe(decision, caller.source)
    return decision_json(decision, caller, in_batch=True)


@cache
def _openapi() -> Any:
    return json.loads(files(__package__).joinpath("openapi.json").read_bytes())


def _proxied_identity(
    request: HttpRequest, policy_set: CompiledPolicySet
) -> dict[Any, Any]:
    """Return whom a reverse proxy names in the headers of its own request.

    The request's own user, address and credential are the proxy's.
    """
    identity: dict[Any, Any] = {
        kind: request.headers.get(f"X-RLaaS-{kind}") for kind in ("user", "ip", "token")
    }
    if not identity["ip"] and conf.config().proxies:
        identity["ip"] = client_address(request)

    for policy in policy_set.policies:
        if policy.key not in identity:
            identity[policy.key] = RequestIdentity(request).get(policy.key)
    return identity
