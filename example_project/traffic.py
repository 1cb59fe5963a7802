"""A day of traffic for the admin panel: what the statistics would have recorded, written at once."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

from rlaas_django import Decision, Outcome, Policy, backend, conf
from rlaas_django.core.keys import EncodedIdentity, encode, key_kind
from rlaas_django.core.policy import Rate
from rlaas_django.runtime import registry
from rlaas_django.runtime.observers import REQUEST, Observation
from rlaas_django.stats import reader, recorder

MINUTES = 24 * 60
ADDRESSES = [f"203.0.113.{n}" for n in range(1, 40)]
ATTACKER = "198.51.100.23"
ATTACK = range(190, 215)  # minutes ago
BROWSER, PROGRAM = (
    "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0",
    "python-requests/2.32",
)


def generate(users: list[int]) -> None:
    """Write a day of traffic, unless there are statistics already."""
    try:
        if any(reader.totals()):
            return
        for moment in _moments(random.Random(7), users):
            recorder.pending.append(moment)
            if len(recorder.pending) >= recorder.MAX_PENDING // 2:
                recorder.flush()
        recorder.flush()
    except backend.UnavailableError:
        pass  # the panel opens empty


def _moments(
    chance: random.Random, users: list[int]
) -> Iterator[tuple[float, Observation]]:
    limited = [
        (view.name, policy)
        for view in registry.limited_views()
        for policy in map(_policy, view.policies)
        if isinstance(policy.rate, Rate) and not policy.shadow
    ]
    now = time.time()
    for ago in range(MINUTES, 0, -3):
        day = 0.55 + 0.45 * math.sin((now / 60 - ago) / MINUTES * 2 * math.pi)
        for name, policy in limited:
            for _ in range(round(day * chance.uniform(0, 3))):
                at = now - 60 * ago + chance.uniform(0, 60)
                yield (
                    at,
                    _observation(
                        chance, name, policy, users, refused=chance.random() < 0.06
                    ),
                )
    name, policy = next((each for each in limited if "log_in" in each[0]), limited[0])
    for ago in ATTACK:
        for _ in range(40):
            yield (
                now - 60 * ago,
                _observation(
                    chance, name, policy, users, refused=True, address=ATTACKER
                ),
            )


def _policy(policy: str | Policy) -> Policy:
    return conf.config().policy(policy) if isinstance(policy, str) else policy


def _observation(
    chance: random.Random,
    name: str,
    policy: Policy,
    users: list[int],
    *,
    refused: bool,
    address: str = "",
) -> Observation:
    address, agent = (
        address or chance.choice(ADDRESSES),
        PROGRAM if address else BROWSER,
    )
    by_user = key_kind(policy.key) in ("user", "user_or_ip") and chance.random() < 0.7
    identity = encode(str(chance.choice(users))) if by_user else f"ip={address}"
    limit = policy.capacity
    count = limit if refused else chance.randrange(limit)
    wait = chance.uniform(0.2, policy.window) if refused else 0.0
    figures = (
        limit,
        count,
        0 if refused else limit - count - 1,
        wait,
        policy.window * 0.8,
        policy.window,
    )
    outcome = Outcome(policy, EncodedIdentity(identity), not refused, *figures)
    decision = Decision(not refused, (outcome,))
    path = f"/try/{name.rpartition('.')[2]}/"
    return Observation(
        decision, decision if refused else None, REQUEST, "GET", path, address, agent
    )
