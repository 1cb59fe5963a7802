"""What the admin's pages and the statistics cost."""

from __future__ import annotations

import statistics
import time

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import reverse

from rlaas_django import Policy, backend, background, check, rate_limit, stats

from .cpu import progress

SIZES = (100, 10_000, 1_000_000)
ROUNDS = 15
PAGES = {
    "overview": ("changelist", {}),
    "users, watch list": ("users", {}),
    "users, all active": ("users", {"tab": "active"}),
    "users, search": ("users", {"q": "admin"}),
    "one identity": ("identity", {"id": "17"}),
    "refusals": ("refusals", {}),
}
FILL = """
for i = ARGV[1], ARGV[2] do
  redis.call("SET", "rlaas:rate_limit:" .. i .. ":bucket-60", "60000:" .. ARGV[3], "EX", 3600)
end
"""


def panel() -> None:
    """Time of a page of the admin by the number of active identities, as a multiple of the same page at 100"""
    call_command("migrate", verbosity=0)
    browser = Client()
    user, _ = get_user_model().objects.get_or_create(username="admin", is_staff=True, is_superuser=True)
    browser.force_login(user)
    times: dict[tuple[str, int], float] = {}
    for size in SIZES:
        fill(size)
        for name, (page, query) in PAGES.items():
            progress(f"panel: {name} at {size:,}")
            times[name, size] = page_time(browser, reverse(f"admin:rlaas_django_ratelimit_{page}", query=query or None))
    progress("")
    print(f"  {'page':<22}{'ms at 100':>12}" + "".join(f"{f'{size:,} ÷ 100':>18}" for size in SIZES[1:]))
    for name in PAGES:
        ratios = "".join(f"{times[name, size] / times[name, SIZES[0]]:>18.2f}" for size in SIZES[1:])
        print(f"  {name:<22}{times[name, SIZES[0]] * 1000:>12.1f}{ratios}")
    print()


def fill(size: int) -> None:
    client = backend.client("default")
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


def notes() -> None:
    """What statistics add to a decision: noting it, and writing it in the background"""
    policy = Policy("noted", "1000000/h", key="ip", algo="token-bucket-algo")
    decision = check("203.0.113.9", policy)

    @rate_limit(policy)
    def view(request):
        return HttpResponse()

    request = RequestFactory().get("/")
    view(request)
    background.run()
    rounds = []
    for i in range(ROUNDS):
        progress(f"notes: round {i + 1}/{ROUNDS}")
        rounds.append(
            (
                per_call(lambda: stats.note(decision, "GET", "/"), 2_000),
                per_call(lambda: check("203.0.113.9", policy), 500),
                flush_time(decision, 2_000),
            )
        )
    progress("")
    noting, deciding, writing = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
    share = statistics.median(note / decide for note, decide, _ in rounds)
    print(f"  noting a decision      {noting:8.2f} us, {share:.3f} of the decision itself ({deciding:.0f} us)")
    print(f"  writing it, in the background {writing:.2f} us")
    print(f"  goal: under 3 us added to a decision: {'met' if noting < 3 else 'MISSED'}\n")


def per_call(function, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - began) / times


def flush_time(decision, times: int) -> float:
    stats.flush()
    for _ in range(times):
        stats.note(decision, "GET", "/")
    began = time.perf_counter()
    stats.flush()
    return (time.perf_counter() - began) / times
