"""The endpoints: what each reads, calls and responds.

An endpoint gets the request, who calls it, and `call`, by which it calls the limiter
(see views.py).
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from django.apps import apps
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.module_loading import import_string

from .. import __version__, backend, conf, limiter
from ..backend.scripts import SCRIPTS
from ..core.algorithms import ALGORITHMS
from ..core.callers import Caller
from ..core.decision import Decision
from ..core.keys import EncodedIdentity
from ..http.identity import read_name
from ..http.proxies import client_address
from ..http.site_functions import in_thread
from ..limiter import Check, PolicySet
from ..runtime.observers import observe
from . import receipts
from .answers import (
    ProblemError,
    decision_json,
    decision_response,
    policy_json,
    require_available,
    wants_text,
    with_headers,
)
from .parsing import (
    FIELDS,
    compile_names,
    parse_subject,
    plan_check,
    read_object,
    read_subject,
    require_policy,
)
from .views import Call

MAX_BATCH = 1_000
# Not imported where it is not installed.
METRICS = "rlaas_django.integrations.prometheus"


async def check(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide, and charge when allowed.

    GET check?userId=alice&policy=search, or POST {"userId": "alice"}.
    """
    as_text = request.method != "POST" and wants_text(request)
    subject = read_subject(request, caller)

    [decision] = await _decide([subject.check], caller, call)

    response = decision_response(request, decision, caller, as_text=as_text)
    response.headers["Vary"] = "Accept"
    return response


async def check_batch(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide independent checks in one round trip.

    One that is not valid is an error in its place. POST {"checks": [...]}.
    """
    items = _read_batch(request)

    results: list[Any] = [None] * len(items)
    checks: dict[int, Check] = {}  # by index
    for index, item in enumerate(items):
        try:
            checks[index] = parse_subject(item, caller).check
        except ProblemError as problem:
            results[index] = {"error": problem.members()}

    decisions = await _decide([*checks.values()], caller, call)
    for index, decision in zip(checks, decisions, strict=True):
        results[index] = decision_json(decision, caller, in_batch=True)

    return JsonResponse({"results": results})


def batch_cost(request: HttpRequest) -> int:
    """Return what a batch costs its caller: a unit per check, valid or not."""
    try:
        return max(1, len(_read_batch(request)))
    except ProblemError:
        return 1


async def usage(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Decide without charging.

    GET usage?userId=alice&policy=search, or POST {"userId": "alice"}.
    """
    identity, planned = read_subject(request, caller)

    decision = await call(
        limiter.peek,
        limiter.apeek,
        identity,
        planned.policy_set,
        cost=planned.cost,
    )
    require_available(decision)

    response = JsonResponse(decision_json(decision, caller))
    return with_headers(response, decision)


async def refund(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Refund the receipt of a check, once.

    POST {"receipt": "..."}.
    """
    body = read_object(request, ["receipt"])
    try:
        receipt = receipts.read(body.get("receipt"))
    except ValueError as error:
        raise ProblemError(str(error)) from None

    for policy in receipt.policies:
        require_policy(policy, caller)

    refunded = await receipts.refund(receipt, call)
    return JsonResponse({"refunded": refunded})


async def reset(request: HttpRequest, caller: Caller, call: Call) -> HttpResponse:
    """Delete what an identity used.

    POST {"userId": "alice", "policy": "search"}.
    """
    fields = [field for field in FIELDS if field != "cost"]
    identity, planned = read_subject(request, caller, fields)
    policies = planned.policy_set.policies

    deleted = await call(limiter.reset, limiter.areset, identity, policies)
    return JsonResponse({"deleted": deleted})


async def policies(_: HttpRequest, caller: Caller, __: Call) -> HttpResponse:
    """Return the policies that a caller may use."""
    known = conf.config().policies.values()
    usable = [policy_json(policy) for policy in known if caller.may_use(policy.name)]

    return JsonResponse({"policies": usable})


async def info(*_: Any) -> HttpResponse:
    """Return what runs here."""
    scripts = [
        {"name": script.name, "version": script.version, "sha1": script.sha}
        for script in SCRIPTS
    ]
    return JsonResponse(
        {
            "name": "rlaas_django",
            "version": __version__,
            "defaultAlgorithm": conf.config().algo,
            "algorithms": [*ALGORITHMS],
            "scripts": scripts,
        }
    )


async def openapi(request: HttpRequest, *_: Any) -> HttpResponse:
    """Return the description of the service, at its own path."""
    document = json.loads(files(__package__).joinpath("openapi.json").read_bytes())
    document["servers"] = [{"url": request.path.removesuffix("/openapi.json")}]
    return JsonResponse(document)


async def unknown_path(*_: Any) -> HttpResponse:
    """Respond where there is no endpoint."""
    raise ProblemError("There is no such endpoint; see openapi.json.", 404)


async def metrics(_: HttpRequest, __: Caller, call: Call) -> HttpResponse:
    """Return the metrics as Prometheus reads them.

    404 where they are not installed.
    """
    if not apps.is_installed(METRICS):
        detail = f"There are no metrics: add '{METRICS}.Metrics' to INSTALLED_APPS."
        raise ProblemError(detail, 404)

    exposition = import_string(f"{METRICS}.exposition")

    text, content_type = await call(exposition, in_thread(exposition))
    return HttpResponse(text, content_type)


async def health(_: HttpRequest, __: Caller, call: Call) -> HttpResponse:
    """Return whether Redis decides, for load balancers.

    Without addresses, as anybody may call this.
    """
    identity = EncodedIdentity("health")  # of nobody
    decision = await call(limiter.peek, limiter.apeek, identity)

    servers = backend.topology().servers()
    is_failing = any(server.breaker.error is not None for server in servers)
    if decision.degraded or is_failing:
        reasons = ["Redis, or one of its servers, is unavailable."]
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

    The path names the policies: auth/search,login. Envoy appends that of the original
    request, and takes only a 200 for allowed.
    """
    policy_set = compile_names(policies.split(","), caller)
    planned = plan_check(_proxied_identity(request, policy_set), policy_set)

    [decision] = await _decide([planned], caller, call)

    if not decision.allowed:
        return decision_response(request, decision, caller, as_text=True)

    status = 204 if path is None else 200
    return with_headers(HttpResponse(status=status), decision)


def _read_batch(request: HttpRequest) -> list[Any]:
    """Return the checks of a batch, which may not be valid."""
    checks = read_object(request, ["checks"]).get("checks")
    if not isinstance(checks, list) or len(checks) > MAX_BATCH:
        detail = f'"checks" should be a list of at most {MAX_BATCH:,} checks.'
        raise ProblemError(detail)
    return checks


async def _decide(checks: list[Check], caller: Caller, call: Call) -> list[Decision]:
    """Decide checks, each as by itself, and have them observed."""
    decisions: list[Decision] = await call(
        limiter.check_each, limiter.acheck_each, checks
    )

    if conf.config().enabled:
        for decision in decisions:
            observe(decision, caller.source)

    return decisions


def _proxied_identity(request: HttpRequest, policy_set: PolicySet) -> dict[Any, Any]:
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
            identity[policy.key] = read_name(request, policy.key)

    return identity
