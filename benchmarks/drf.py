"""A view of Django REST framework with two throttles: ours, against its own on the same Redis."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from types import ModuleType

from rest_framework import throttling
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView
from rlaas_django.integrations import drf as integration

from . import ours, server
from .measure import Effort, Spread, ratios, rotated, rounds
from .report import Findings, Goal, Table

REQUESTS = 100  # per turn
# The rates of the two throttles, how many requests go before, and the status of those that are timed.
CASES = {
    "allowed": ("1000/hour", "1000/day", 0, 200),
    "refused by one": ("5/hour", "1000/day", 5, 429),
    "refused by both": ("5/hour", "5/day", 5, 429),
}
KINDS = {"ours": integration, "DRF's own": throttling}
factory = APIRequestFactory()
logging.getLogger("rlaas_django").addHandler(logging.NullHandler())
numbers = itertools.count()


def drf(effort: Effort) -> Findings:
    """Requests per second of a Django REST framework view with two throttles, called in the process: ours ÷ its own"""
    rows, goals = [], []
    with ours.local_refusals(on=True):
        for name, case in CASES.items():
            speeds = _measure(name, *case, number=effort(40, 8))
            ratio = ratios(speeds["ours"], speeds["DRF's own"])
            rows.append([name, *(Spread.of(speeds[kind]) for kind in KINDS), ratio])
            goals.append(Goal(f"two throttles of ours ÷ DRF's own, {name}", 1.5, False, ratio))
    columns = ("", *(f"{kind}, requests/s" for kind in KINDS), "ratio")
    note = "Without a web server and middleware, which would add the same to both."
    return Findings([Table("Two throttles of Django REST framework", columns, rows, note)], goals)


def _measure(name: str, first: str, second: str, before: int, status: int, *, number: int) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in rounds(number, f"drf: {name}"):
        for kind, module in rotated(KINDS.items(), i % len(KINDS)):
            server.client().flushdb()
            view = _view(module, first, second)
            _run(view, before, 200)
            _run(view, 5, status)
            speeds[kind].append(_run(view, REQUESTS, status))
    return speeds


def _view(module: ModuleType, first: str, second: str) -> Callable[..., Response]:
    """Return a view whose two throttles have counters of their own."""
    scope = next(numbers)
    classes = [
        type(f"Throttle{i}", (module.UserRateThrottle,), {"rate": rate, "scope": f"{scope}-{i}"})
        for i, rate in enumerate((first, second))
    ]

    class View(APIView):
        authentication_classes = ()
        throttle_classes = classes

        def get(self, request):
            return Response("hello")

    return View.as_view()


def _run(view: Callable[..., Response], times: int, status: int) -> float:
    """Call the view so often; return the requests per second."""
    requests = [factory.get("/") for _ in range(times)]
    began = time.perf_counter()
    found = [view(request).render().status_code for request in requests]
    taken = time.perf_counter() - began
    if found != [status] * times:
        raise RuntimeError(f"{sorted(set(found))} instead of {status}")
    return times / taken
