"""The programs whose instructions `instructions.py` counts; each runs in a process of its own.

`rlaas_django` comes from PYTHONPATH, so that another checkout can be counted, and only its public API is used.

    counted.py client <url> [peers]   make the decisions of each case, under callgrind
    counted.py words <url>            print the EVALSHA that a decision sends, per algorithm, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

import django
import redis
from django.conf import settings
from django.test import override_settings

ALGORITHMS = ("sliding-window-algo", "sliding-window-compact-algo", "sliding-window-counter-algo")
ALGORITHMS += ("fixed-window-algo", "token-bucket-algo")
DECISIONS = 200  # of the shorter phase of a case; the longer one has twice as many
DAY = 86_400
PLENTY = 1_000_000
SOMEONE = "someone-to-be-replaced"
IDENTITIES = ("alice", "alice@example.com", "0b7f4f6a-3f0c-4c53-9d5f-2a4a1be3f5c1", "José Müller")

# The names of the client's cases, in the order in which they run.
OURS = (
    *(f"one policy, identity {identity!r}" for identity in IDENTITIES),
    "one policy, another identity each time",
    "three policies",
    "refused by Redis",
    "refused from memory",
)
PEERS = ("throttled-py, GCRA", "limits, moving window", "limits, moving window, with figures", "redis-py ping()")


def configure(url: str, **options: object) -> None:
    """Set Django up with a Redis cache and nothing else. Under callgrind a reply takes longer than by default."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": {"SOCKET_TIMEOUT": 20}}
    settings.configure(
        SECRET_KEY="counted", USE_TZ=True, CACHES={"default": cache}, RATE_LIMITER={"TIMEOUT": 20, **options}
    )
    django.setup()


def client(url: str, with_peers: bool) -> None:
    os.environ["BENCHMARKS_REDIS_URL"] = url  # where the peers find it
    configure(url, LOCAL_REFUSALS=False)
    for case in cases():
        count(case)
    with override_settings(RATE_LIMITER={**settings.RATE_LIMITER, "LOCAL_REFUSALS": True}):
        count(refusal())
    for peer in peers() if with_peers else ():
        count(peer)


def count(case: Callable[[], object]) -> None:
    """Run a case in two phases. callgrind is told to dump its counts at each call of libc's getloadavg()."""
    for _ in range(DECISIONS // 4):
        case()
    for decisions in (DECISIONS, 2 * DECISIONS):
        os.getloadavg()
        for _ in range(decisions):
            case()
    os.getloadavg()


def decide(check: Callable, identity: str, policy: object) -> tuple:
    """One decision, with the figures that headers need."""
    made = check(identity, policy)
    return made.allowed, made.limit, made.remaining, made.retry_after, made.reset_after


def cases() -> list[Callable[[], object]]:
    from rlaas_django import Policy, check

    one = Policy("one", (PLENTY, DAY))
    three = [Policy(f"three-{seconds}", (PLENTY, seconds)) for seconds in (DAY, DAY // 2, DAY // 4)]
    names = iter([f"{n}@example.com" for n in range(10_000, 10_000 + 4 * DECISIONS)])  # made before, not counted
    return [
        *(partial(decide, check, identity, one) for identity in IDENTITIES),
        lambda: decide(check, next(names), one),
        partial(decide, check, "alice", three),
        refusal(),
    ]


def refusal() -> Callable[[], object]:
    from rlaas_django import Policy, check

    return partial(decide, check, "alice", Policy("refused", (5, DAY)))


def peers() -> list[Callable[[], object]]:
    from benchmarks import peers, server
    from benchmarks.contender import Rate

    rate = Rate(PLENTY, DAY)
    asks = (
        peers.throttled("gcra", rate),
        peers.limits("moving-window", rate, figures=False),
        peers.limits("moving-window", rate),
    )
    return [*(partial(ask, "alice") for ask in asks), server.client().ping]


def words(url: str) -> None:
    configure(url)
    from rlaas_django import Policy, check

    commands = {}
    for algorithm in ALGORITHMS:
        for limit in (PLENTY, 5):
            policy = Policy(f"p{limit}", (limit, DAY), algo=algorithm)
            decision = partial(decide, check, SOMEONE, policy)
            decision()  # loads the script
            commands[f"{algorithm} {limit}"] = [sent(url, decision) for _ in range(2)]
    print(json.dumps(commands))


def sent(url: str, action: Callable[[], object]) -> list[str]:
    """Return the words of the EVALSHA that an action sends, as MONITOR shows them."""
    with redis.Redis.from_url(url, socket_timeout=20) as watcher, watcher.monitor() as monitor:
        action()
        for seen in monitor.listen():
            if seen["client_type"] != "lua" and seen["command"].startswith("EVALSHA "):
                return seen["command"].split(" ")
    raise RuntimeError("no EVALSHA")


if __name__ == "__main__":
    program, url, *rest = sys.argv[1:]
    if program == "client":
        client(url, "peers" in rest)
    else:
        words(url)
