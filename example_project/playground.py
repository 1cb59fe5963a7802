"""The playground: one series of requests under every algorithm, at times of its own.

The real scripts decide it. A run is decided from its beginning each time it changes,
under an identity of its own. So the page can go back and forth in time, and two people
who play do not disturb each other.
"""

from __future__ import annotations

import heapq
import json
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from rlaas_django import Policy, PolicyError, backend
from rlaas_django.backend.commands import Call, pack
from rlaas_django.backend.scripts import for_algorithms
from rlaas_django.core.algorithms import ALGORITHMS, FIXED_WINDOW, TOKEN_BUCKET
from rlaas_django.core.keys import counter_key, override_key
from rlaas_django.core.policy import script_arguments

# In ms: a multiple of every window that divides an hour, so that fixed windows begin
# with it.
START = 1_700_006_400_000
MAX_STEPS = 50
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
        """Parse the JSON of a run; ValueError when it is invalid."""
        try:
            data = json.loads(body)
            steps = sorted(Step(*map(_whole_number, step)) for step in data["steps"])
            requests = sorted(Request(_whole_number(at)) for at in data["requests"])
            run = cls(steps, requests, data.get("retries") is True)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"A run has steps and requests: {error}") from error

        if not steps or steps[0].at > 0 or len(steps) > MAX_STEPS:
            raise ValueError(
                f"A run has 1 to {MAX_STEPS} steps; the first begins at 0."
            )
        is_too_long = any(request.at > DURATION for request in requests)
        if is_too_long or len(requests) > MAX_REQUESTS:
            raise ValueError(
                f"A run has at most {MAX_REQUESTS} requests, "
                f"within {DURATION // 60_000} minutes."
            )
        return run

    def step_at(self, at: int) -> Step:
        """Return the settings that are in force at a time."""
        return next(step for step in reversed(self.steps) if step.at <= at)


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1_000_000:
        raise ValueError(f"{value!r} is not a whole number from 0 to 1,000,000.")
    return value


@require_GET
@ensure_csrf_cookie
def page(request: HttpRequest) -> HttpResponse:
    context = {"start": START, "algorithms": ALGORITHMS}
    return render(request, "demo/playground.html", context)


@require_POST
def decide(request: HttpRequest) -> JsonResponse:
    """Decide a run under every algorithm."""
    try:
        run = Run.parse(request.body)
        decisions = {algo: Player(run, algo).decide() for algo in ALGORITHMS}
    except (ValueError, PolicyError) as error:
        return JsonResponse({"error": str(error)}, status=400)
    except backend.UnavailableError as error:
        return JsonResponse({"error": f"Redis is unavailable: {error}"}, status=503)
    return JsonResponse(decisions)


class Player:
    """Sends the requests of a run to the script of an algorithm."""

    def __init__(self, run: Run, algo: str) -> None:
        self.run = run
        self.algo = algo
        self.script = for_algorithms({algo})
        self.topology = backend.topology()
        self.identity = f"playground-{uuid.uuid4().hex}"
        self.sent = 0  # requests, by which they are told apart

    def decide(self) -> list[dict[str, Any]]:
        """Return what is decided about each request, in the order of time."""
        # The order of calls is kept only where the server knows the script: load it.
        backend.execute(self.topology, self._call(Request(0), "peek"))
        if self.run.retries:
            return self._decide_with_retries()
        return self._send(self.run.requests)

    def _decide_with_retries(self) -> list[dict[str, Any]]:
        """Send one request after another, since a refused one is sent again."""
        decisions = []
        retries = 0
        waiting = [*self.run.requests]
        while waiting:
            request = heapq.heappop(waiting)
            (decision,) = self._send([request])
            decisions.append(decision)

            can_retry = not decision["allowed"] and decision["wait"] > 0
            if can_retry and retries < MAX_RETRIES:
                retries += 1
                retry = Request(request.at + decision["wait"], retry=True)
                heapq.heappush(waiting, retry)
        return decisions

    def _send(self, requests: list[Request]) -> list[dict[str, Any]]:
        """Send some requests at once, and measure the counter after each."""
        calls = []
        for request in requests:
            calls += [self._call(request, "check"), self._memory_call(request)]

        replies = backend.execute_each(self.topology, calls)
        for reply in replies:
            if isinstance(reply, backend.UnavailableError):
                raise reply
        return [
            _decision(request, reply, memory)
            for request, reply, memory in zip(
                requests, replies[::2], replies[1::2], strict=True
            )
        ]

    def _call(self, request: Request, operation: str) -> Call:
        """Return a call of the script at the time of a request."""
        step = self.run.step_at(request.at)
        burst = None
        if self.algo == TOKEN_BUCKET and step.burst:
            burst = step.burst
        rate = (step.limit, step.window)
        policy = Policy("playground", rate, algo=self.algo, burst=burst)

        hash_tag = self.topology.clustered
        keys = (self._key(request), override_key(hash_tag=hash_tag).key(self.identity))
        self.sent += 1
        words = (START + request.at, operation, self.sent, step.cost)
        policy_words = (*script_arguments(policy, self.algo), 0, policy.name)
        command = ("EVALSHA", self.script.sha, len(keys), *keys, *words, *policy_words)
        return Call(self.script, keys[0], pack(command))

    def _memory_call(self, request: Request) -> Call:
        """Return a call that measures the counter of a request."""
        key = self._key(request)
        stored = key
        if self.algo == FIXED_WINDOW:
            window = self.run.step_at(request.at).window * 1000
            stored = f"{key}:{(START + request.at) // window}"
        return Call(None, key, pack(("MEMORY", "USAGE", stored)))

    def _key(self, request: Request) -> str:
        window = self.run.step_at(request.at).window
        hash_tag = self.topology.clustered
        counter = counter_key("playground", self.algo, window, hash_tag=hash_tag)
        return counter.key(self.identity)


def _decision(request: Request, reply: list[int], memory: int | None) -> dict[str, Any]:
    _, allowed, count, remaining, wait, reset_after, limit, _ = reply
    if allowed:
        count = limit - remaining  # with the request
        wait = 0
    return {
        "at": request.at,
        "retry": request.retry,
        "allowed": allowed == 1,
        "count": count,
        "limit": limit,
        "wait": wait,  # ms; -1: never
        "reset": reset_after,
        "memory": memory or 0,
    }
