"""The playground: one series of requests under every algorithm, decided by the real scripts at times of its own.

A run is decided from its beginning each time it changes, under an identity of its own. So the page can go back and
forth in time, and two people who play do not disturb each other.
"""

from __future__ import annotations

import heapq
import itertools
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from rlaas_django import Policy, PolicyError, backend
from rlaas_django.backend.commands import Call, pack
from rlaas_django.backend.scripts import for_algorithms
from rlaas_django.core.keys import counter_key, override_key
from rlaas_django.core.algorithms import ALGORITHMS, FIXED_WINDOW, TOKEN_BUCKET
from rlaas_django.core.policy import script_arguments

START = 1_700_006_400_000  # ms; a multiple of every window that divides an hour, so that fixed windows begin with it
MAX_REQUESTS = 400
MAX_RETRIES = 400
DURATION = 600_000  # ms


class Step(NamedTuple):
    """The settings in force from a time on."""

    at: int  # ms from the beginning
    limit: int
    window: int  # s
    burst: int
    cost: int


class Request(NamedTuple):
    """A request, ordered by its time."""

    at: int
    retry: bool = False


@dataclass(frozen=True)
class Run:
    """What the page asks for."""

    steps: list[Step]
    requests: list[Request]
    retries: bool  # a refused client sends its request again, once its wait is over

    @classmethod
    def parse(cls, body: bytes) -> Run:
        """Parse the JSON of a run; ValueError when it is none, PolicyError when its rate is invalid."""
        try:
            data = json.loads(body)
            steps = sorted(Step(*map(_whole_number, step)) for step in data["steps"])
            requests = sorted(Request(_whole_number(at)) for at in data["requests"])
            run = cls(steps, requests, data.get("retries") is True)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"A run has steps and requests: {error}") from error
        if not steps or steps[0].at > 0 or len(steps) > 50:
            raise ValueError("A run has 1 to 50 steps; the first begins at 0.")
        if len(requests) > MAX_REQUESTS or any(
            not 0 <= each.at <= DURATION for each in requests
        ):
            raise ValueError(
                f"A run has at most {MAX_REQUESTS} requests, within {DURATION // 60_000} minutes."
            )
        return run

    def step_at(self, at: int) -> Step:
        return next(step for step in reversed(self.steps) if step.at <= at)


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1_000_000:
        raise ValueError(f"{value!r} is not a whole number from 0 to 1,000,000.")
    return value


@require_GET
@ensure_csrf_cookie
def page(request: HttpRequest) -> HttpResponse:
    return render(
        request, "demo/playground.html", {"start": START, "algorithms": ALGORITHMS}
    )


@require_POST
def decide(request: HttpRequest) -> JsonResponse:
    """Decide a run under every algorithm."""
    try:
        run = Run.parse(request.body)
        return JsonResponse({algo: [*decisions(run, algo)] for algo in ALGORITHMS})
    except (ValueError, PolicyError) as error:
        return JsonResponse({"error": str(error)}, status=400)
    except backend.UnavailableError as error:
        return JsonResponse({"error": f"Redis is unavailable: {error}"}, status=503)


def decisions(run: Run, algo: str) -> Iterator[dict[str, Any]]:
    """Yield what the algorithm's script decides about each request, in the order of time."""
    identity, numbers = f"playground-{uuid.uuid4().hex}", itertools.count()
    # The order of calls is kept only where the server knows the script: have it loaded.
    backend.execute(
        backend.topology(), _call(run, algo, identity, Request(0), "peek", "")
    )
    waiting, retries = [*run.requests], 0
    while waiting:
        # Without retries all are sent at once; with them, the next request depends on the reply.
        sent = [heapq.heappop(waiting)] if run.retries else waiting
        calls = [
            call
            for each in sent
            for call in _calls(run, algo, identity, each, f"{next(numbers)}")
        ]
        replies = backend.execute_each(backend.topology(), calls)
        for each, reply, memory in zip(sent, replies[::2], replies[1::2], strict=True):
            for found in (reply, memory):
                if isinstance(found, backend.UnavailableError):
                    raise found
            found = _decision(each, reply, memory)
            yield found
            if (
                run.retries
                and not found["allowed"]
                and found["wait"] > 0
                and retries < MAX_RETRIES
            ):
                retries += 1
                heapq.heappush(waiting, Request(each.at + found["wait"], retry=True))
        if not run.retries:
            return


def _calls(
    run: Run, algo: str, identity: str, request: Request, unique: str
) -> tuple[Call, Call]:
    """Return the call that decides a request, and the one that measures the counter after it."""
    call = _call(run, algo, identity, request, "check", unique)
    window = run.step_at(request.at).window * 1000
    stored = (
        f"{call.key}:{(START + request.at) // window}"
        if algo == FIXED_WINDOW
        else call.key
    )
    return call, Call(None, call.key, pack(("MEMORY", "USAGE", stored)))


def _call(
    run: Run, algo: str, identity: str, request: Request, operation: str, unique: str
) -> Call:
    """Return a call of the algorithm's script at the time of a request."""
    step, clustered = run.step_at(request.at), backend.topology().clustered
    burst = step.burst if algo == TOKEN_BUCKET and step.burst else None
    policy = Policy("playground", (step.limit, step.window), algo=algo, burst=burst)
    key = counter_key(policy.name, algo, step.window, hash_tag=clustered).key(identity)
    keys = key, override_key(hash_tag=clustered).key(identity)
    words = (
        START + request.at,
        operation,
        unique,
        step.cost,
        *script_arguments(policy, algo),
        0,
        policy.name,
    )
    script = for_algorithms({algo})
    return Call(
        script,
        key,
        pack(("EVALSHA", script.sha, len(keys), *keys, *words)),
        reply_lengths=(8, 9),
    )


def _decision(request: Request, reply: list[int], memory: int | None) -> dict[str, Any]:
    _, allowed, count, remaining, wait, reset_after, limit, _ = reply
    return {
        "at": request.at,
        "retry": request.retry,
        "allowed": allowed == 1,
        "count": limit - remaining if allowed else count,  # after the request
        "limit": limit,
        "wait": wait,  # ms; -1: never
        "reset": reset_after,
        "memory": memory or 0,
    }
