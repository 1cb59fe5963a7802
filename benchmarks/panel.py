"""What the admin's pages and the statistics cost."""

from __future__ import annotations

import statistics
import time
from functools import partial

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import reverse
from rlaas_django import Policy, check, rate_limit
from rlaas_django.runtime import background
from rlaas_django.runtime.observers import REQUEST, Observation
from rlaas_django.stats import recorder

from . import server
from .measure import Effort, Spread, progress, rounds, time_per_call
from .report import Findings, Table

SIZES = (100, 10_000, 1_000_000)
ROUNDS = 15
PAGES = {
    "overview": ("changelist", {}),
    "clients, watch list": ("clients", {}),
    "clients, all active": ("clients", {"tab": "active"}),
    "clients, search": ("clients", {"q": "admin"}),
    "one identity": ("identity", {"id": "17"}),
    "refusals": ("refusals", {}),
}
FILL = """
for i = ARGV[1], ARGV[2] do
  redis.call("SET", "rlaas:rate_limit:" .. i .. ":bucket-60", "60000:" .. ARGV[3], "EX", 3600)
end
"""


def panel(effort: Effort) -> Findings:
    """Time of a page of the admin by the number of active identities, as a multiple of the same page at 100"""
    call_command("migrate", verbosity=0)
    browser = Client()
    user, _ = get_user_model().objects.get_or_create(username="admin", is_staff=True, is_superuser=True)
    browser.force_login(user)
    times: dict[tuple[str, int], float] = {}
    sizes = effort(SIZES, SIZES[:-1])
    for size in sizes:
        fill(size)
        for name, (page, query) in PAGES.items():
            progress(f"panel: {name} at {size:,}")
            times[name, size] = page_time(browser, reverse(f"admin:rlaas_django_ratelimit_{page}", query=query or None))
    progress()
    server.client().flushdb()
    rows = [
        [
            name,
            f"{times[name, sizes[0]] * 1000:.1f}",
            *(f"{times[name, size] / times[name, sizes[0]]:.2f}" for size in sizes[1:]),
        ]
        for name in PAGES
    ]
    columns = ("page", f"ms at {sizes[0]}", *(f"{size:,} ÷ {sizes[0]}" for size in sizes[1:]))
    return Findings([Table("Pages of the admin", columns, rows)])


def fill(size: int) -> None:
    client = server.client()
    now = int(time.time() * 1000)
    for start in range(1, size + 1, 50_000):
        progress(f"panel: filling {start:,} of {size:,}")
        client.eval(FILL, 0, start, min(size, start + 49_999), now)


def page_time(browser: Client, url: str) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        if browser.get(url).status_code != 200:
            raise RuntimeError(url)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def notes(effort: Effort) -> Findings:
    """What statistics add to a decision: noting it, and writing it in the background"""
    policy = Policy("noted", "1000000/h", key="ip", algo="token-bucket-algo")

    def observations(number: int) -> list[Observation]:
        return [Observation(check("203.0.113.9", policy), None, REQUEST, "GET", "/") for _ in range(number)]

    @rate_limit(policy)
    def view(request):
        return HttpResponse()

    view(RequestFactory().get("/"))
    background.run()
    found = [
        (
            time_per_call(partial(next, map(recorder.record, observations(2_000))), 2_000) * 1e6,
            time_per_call(lambda: check("203.0.113.9", policy), 500) * 1e6,
            flush_time(observations(2_000)) * 1e6,
        )
        for _ in rounds(effort(ROUNDS, 5), "notes")
    ]
    server.client().flushdb()
    noting, deciding, writing = map(Spread.of, zip(*found, strict=True))
    rows = [
        ["the decision itself", deciding],
        ["noting it", noting],
        ["writing it, in the background", writing],
    ]
    note = f"The goal, under 3 µs added to a decision: {'met' if noting.median < 3 else 'MISSED'}."
    return Findings([Table("Statistics, µs per decision", ("", "µs"), rows, note)])


def flush_time(observations: list[Observation]) -> float:
    recorder.flush()
    for observation in observations:
        recorder.record(observation)
    return time_per_call(recorder.flush, 1) / len(observations)
